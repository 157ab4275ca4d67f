"""WeightPublisher: a trainer's way to hand out a new version of the weights.

Tells the whole publication from top to bottom: check, find a free arena, copy and checksum
in one pass, write the manifest, name it in `LATEST`. Refuses to know the model: a wrong
shape or a missing name is the engine's to reject. Invariant: until `LATEST` names the new
version, the one before stands untouched; and whatever fails, the arena is free again.
"""

import logging
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from fastdeploy_rl import _native, config
from fastdeploy_rl.checksum import Fletcher4, add
from fastdeploy_rl.errors import (
    ChannelBusyError,
    ConfigurationError,
    LifecycleError,
    TrainerError,
    VersionRegressError,
)
from fastdeploy_rl.manifest import Manifest, Segment
from fastdeploy_rl.memory.host_tensor import HostTensor, borrow
from fastdeploy_rl.memory.owner_lock import OwnerLock, owner_of
from fastdeploy_rl.plan import llama
from fastdeploy_rl.publish.arena_shelf import ArenaShelf
from fastdeploy_rl.publish.arrangement import Arrangement, ShardAxis, arrange
from fastdeploy_rl.publish.channel import Channel, Latest
from fastdeploy_rl.publish.leases import NUM_ARENAS, LeaseTable
from fastdeploy_rl.version import WeightVersion

_log = logging.getLogger(__name__)


class Published(NamedTuple):
    """One version that engines can now take: `num_bytes` of weights, copied and announced within `seconds`."""

    version: WeightVersion
    manifest: Manifest
    num_bytes: int
    seconds: float


class Retired(NamedTuple):
    """What `retire` removed: text of the version (empty: none was published) and bytes of shared memory."""

    version: str
    num_bytes: int


class WeightPublisher:
    """The one live publisher of a channel; use it in a `with`, from one thread.

    `channel`: a directory, made if missing; None for the default one. `deadline_s`: how long `publish` waits for
    engines to let go of old versions. `max_arenas` (2 to 16): how many versions may lie in shared memory at once.
    Arenas are made when needed: two take turns while engines follow; the third is for when one does not, say because
    it rejected the latest version and still holds the one before."""

    def __init__(self, channel: str | Path | None = None, *, deadline_s: float = 30.0, max_arenas: int = 3) -> None:
        if not 2 <= max_arenas <= NUM_ARENAS:
            # One holds the latest version, which stands until the next is complete in another.
            raise ConfigurationError(f"max_arenas must be 2 to {NUM_ARENAS}, got {max_arenas!r}")
        self.channel = Channel(config.default_channel() if channel is None else channel)
        self._deadline_s = config.checked_deadline(deadline_s)
        self._max_arenas = max_arenas
        self._opened: _OpenChannel | None = None

    def start(self) -> None:
        """Takes the channel and a new epoch. ChannelBusyError, with its pid, where another publisher is alive."""
        if self._opened is not None:
            raise LifecycleError(f"publisher of {self.channel.path} is already started")
        self._opened = _OpenChannel.open(self.channel, self._max_arenas)

    def close(self, keep: bool = False) -> None:
        """Gives the channel up. The publication goes with it, unless `keep`: then the latest version stays for later
        engines until `retire`. Engines that hold a lease keep their memory either way. A second close does nothing."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close(keep)

    def __enter__(self) -> "WeightPublisher":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def epoch(self) -> int:
        return self._started().epoch

    def publish(
        self,
        state_dict: Mapping[str, Any],
        *,
        step: int,
        layout: str = "full",
        shard_axis: ShardAxis = llama.shard_axis,
        deadline_s: float | None = None,
    ) -> Published:
        """Copies the tensors out and makes them the latest version,
        (epoch, `step`); they may change as soon as this returns.

        `state_dict`: name -> contiguous CPU tensor (numpy, Paddle, torch); two names of the
        same memory become an alias. `layout`: "full", or "tp:N" to store them cut into N
        equal shards along the axis that `shard_axis(name)` gives (None: whole), so that N
        ranks can use them in place. Blocks while every arena is leased, `deadline_s` at most.

        On any error LATEST is what it was and nothing is held. VersionRegressError: `step` is not above the last one.
        TrainerError, ConfigurationError: a tensor, a name or the layout cannot be published. DeadlineExceededError:
        engines keep all arenas; they are named. NoSpaceError: no room in /dev/shm.
        """
        opened = self._started()
        began = time.monotonic()
        deadline_ns = _deadline_ns(self._deadline_s if deadline_s is None else config.checked_deadline(deadline_s))
        arrangement = arrange(_borrow_all(state_dict), layout, shard_axis)
        manifest = opened.publish(arrangement, step, deadline_ns)
        seconds = time.monotonic() - began
        num_bytes = sum(tensor.num_bytes for tensor in manifest.tensors)
        _log.info("published=%s layout=%s bytes=%d seconds=%.4f", manifest.version, layout, num_bytes, seconds)
        return Published(manifest.weight_version, manifest, num_bytes, seconds)

    def _started(self) -> "_OpenChannel":
        if self._opened is None:
            raise LifecycleError(f"publisher of {self.channel.path} is not started: use it in a with statement")
        return self._opened


def retire(channel: str | Path | None = None) -> Retired:
    """Removes what publishers left on a channel: the latest version, manifests, shared memory. Engines that hold leases
    keep theirs. ChannelBusyError while a publisher is alive; NoPublicationError where there is no such channel."""
    place = Channel(config.default_channel() if channel is None else channel)
    place.check()
    opened = _OpenChannel.open(place, NUM_ARENAS)
    retired = Retired(opened.latest.version if opened.latest else "", opened.shelf.num_bytes)
    opened.close(keep=False)
    return retired


class _OpenChannel:
    """A channel under its lock, between start and close. What was published last is always read from `LATEST` itself,
    so that an interruption at any point leaves nothing to be remembered wrongly."""

    def __init__(
        self, channel: Channel, table: LeaseTable, shelf: ArenaShelf, epoch: int, resources: ExitStack
    ) -> None:
        self.channel = channel
        self.shelf = shelf
        self.epoch = epoch
        self.latest: Latest | None = None
        self._table = table
        self._latest_rows: frozenset[int] = frozenset()
        self._checked: object = None
        self._resources = resources

    @classmethod
    def open(cls, channel: Channel, max_arenas: int) -> "_OpenChannel":
        channel.open()
        with ExitStack() as stack:
            lock = OwnerLock(channel.lock_path)
            if not lock.try_acquire():
                raise ChannelBusyError(
                    f"channel {channel.path} already has a live publisher "
                    f"({owner_of(channel.lock_path) or 'unknown'}): end that one first, or publish on another channel"
                )
            stack.callback(lock.release)
            table = LeaseTable(channel.leases_path, channel.holders_dir)
            stack.callback(table.close)
            table.create()
            epoch = channel.take_epoch()
            shelf = ArenaShelf(table, channel.key, epoch, max_arenas)
            stack.callback(shelf.close)
            opened = cls(channel, table, shelf, epoch, stack.pop_all())
        opened._begin()
        return opened

    def _begin(self) -> None:
        try:
            self.refresh()
            self.channel.remove_superseded(self.latest)
            self.shelf.trim(self._latest_rows)
        except BaseException:
            self._resources.close()
            raise

    def refresh(self) -> None:
        """Reads what stands now, and mends what an interruption left half done."""
        latest = self.channel.read_latest()
        if latest != self.latest:
            self.latest, self._latest_rows = latest, self._rows_of(latest)
        self.shelf.reconcile()

    def publish(self, arrangement: Arrangement, step: int, deadline_ns: int) -> Manifest:
        self.refresh()
        version = self._next_version(step)
        self._check(arrangement, version)
        with self.shelf.writing(arrangement.num_bytes, self._latest_rows, deadline_ns) as arena:
            self._table.set_version(arena.row, str(version))
            checksums = _copy_out(arrangement, arena.mapping)
        segment = Segment(
            kind="shm",
            locator=arena.segment,
            num_bytes=arena.mapping.num_bytes,
            arena=arena.row,
            generation=self._table.generation(arena.row),
        )
        manifest = arrangement.manifest(version, segment, checksums)
        self.latest, self._latest_rows = self.channel.write_publication(manifest), frozenset({arena.row})
        self.channel.remove_superseded(self.latest)
        return manifest

    def close(self, keep: bool) -> None:
        with self._resources:
            if not keep:
                self.channel.remove_latest()
                self.shelf.unlink()
                return
            self.refresh()
            self.shelf.unlink(kept=self._latest_rows)

    def _check(self, arrangement: Arrangement, version: WeightVersion) -> None:
        # A training loop publishes the same tensors again and again; checking them anew costs a twentieth of the copy.
        description = arrangement.description
        if description != self._checked:
            arrangement.check(version)
            self._checked = description

    def _next_version(self, step: int) -> WeightVersion:
        version = WeightVersion(self.epoch, step)
        last = WeightVersion.parse(self.latest.version) if self.latest else None
        if last is not None and version <= last:
            raise VersionRegressError(
                f"step {step} would publish {version}, but {self.channel.path} is at {last}: steps must go up"
            )
        return version

    def _rows_of(self, latest: Latest | None) -> frozenset[int]:
        if latest is None:
            return frozenset()
        try:
            manifest = self.channel.read_manifest(latest)
        except FileNotFoundError:
            # Somebody removed it by hand; no reader can follow LATEST, so there is nothing to protect.
            _log.warning("channel=%s version=%s missing=%s", self.channel.path, latest.version, latest.file)
            return frozenset()
        return frozenset(segment.arena for segment in manifest.segments)


def _borrow_all(state_dict: Mapping[str, Any]) -> dict[str, HostTensor]:
    if not state_dict:
        raise TrainerError("nothing to publish: the state dict is empty")
    for name in state_dict:
        if not isinstance(name, str):
            raise TrainerError(f"tensor names are text, got {name!r:.80} ({type(name).__name__})")
    return {name: borrow(tensor, name) for name, tensor in state_dict.items()}


def _copy_out(arrangement: Arrangement, target: _native.Mapping) -> dict[str, Fletcher4]:
    """Copies every piece to its place and returns each whole tensor's checksum; one pass over the bytes."""
    pieces = [(tensor, piece) for tensor in arrangement.tensors for piece in tensor.pieces if piece.num_bytes]
    regions = [
        _native.Region(
            source=tensor.host.buffer,
            source_offset=piece.source_offset,
            source_stride=piece.source_stride,
            rows=piece.rows,
            row_bytes=piece.row_bytes,
            target=target,
            target_offset=piece.target_offset,
            target_stride=piece.row_bytes,
            read_place=_native.Place(piece.source_offset, piece.source_stride, tensor.host.key.num_bytes),
        )
        for tensor, piece in pieces
    ]
    try:
        sums = _native.transfer(regions, config.num_copy_threads())
    finally:
        # Regions hold the arena mapped; a traceback that outlives this call must not.
        regions.clear()
    checksums = {tensor.name: Fletcher4(0, 0, 0, 0) for tensor in arrangement.tensors}
    for (tensor, _), (read, _) in zip(pieces, sums, strict=True):
        if read is not None:
            checksums[tensor.name] = add(checksums[tensor.name], Fletcher4(*read))
    return checksums


def _deadline_ns(seconds: float) -> int:
    return time.monotonic_ns() + int(seconds * 1e9)
