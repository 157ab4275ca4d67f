"""WeightPublisher: a trainer's way to hand out a new version of the weights.

The door to this folder: takes tensors of any framework and answers with what was published. Refuses to know the model:
a wrong shape or a missing name is the engine's to reject. Invariant: until `LATEST` names the new version, the one
before stands untouched; and whatever fails, nothing is held.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from fastdeploy_rl import config
from fastdeploy_rl.errors import ConfigurationError, LifecycleError, TrainerError
from fastdeploy_rl.manifest import Manifest
from fastdeploy_rl.memory.host_tensor import HostTensor
from fastdeploy_rl.memory.host_tensor import borrow as borrow_tensor
from fastdeploy_rl.plan.conventions import Convention, paddle_llama
from fastdeploy_rl.publish.arrangement import NO_SHARDS, Shards, arrange
from fastdeploy_rl.publish.arrangement import Shard as Shard
from fastdeploy_rl.publish.channel import Channel
from fastdeploy_rl.publish.copying import OnProgress
from fastdeploy_rl.publish.fastdeploy_compat import CompatPublisher, CompatState, FastDeployFiles, check_compat
from fastdeploy_rl.publish.leases import NUM_ARENAS
from fastdeploy_rl.publish.meeting import Part, checked_part
from fastdeploy_rl.publish.open_channel import OpenChannel, remove_unreadable
from fastdeploy_rl.publish.publication import PublishObserver, Wish
from fastdeploy_rl.publish.trainer_memory import TrainerMemory, Wanted
from fastdeploy_rl.version import WeightVersion

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Published:
    """One version that engines can now take: `num_bytes` of weights, of all parts together, announced within
    `seconds`."""

    version: WeightVersion
    manifest: Manifest = field(repr=False)
    num_bytes: int
    seconds: float
    _opened: OpenChannel = field(repr=False, compare=False)

    def wait_released(self, deadline_s: float = config.Deadlines.publish_s) -> None:
        """Takes borrowed memory back: returns when no live process holds a lease on this publication's tensors of this
        process, and nobody can get one any more. Then they may change, and be published again.

        DeadlineExceededError names the engines that still hold it; then nothing changed, and the version can still be
        taken. LifecycleError once the publisher is closed. A second call does nothing. A copied publication has nothing
        to wait for: its tensors may change at any time."""
        contents = {
            segment.arena: segment.generation
            for segment in self.manifest.segments
            if segment.is_borrowed and segment.publisher == self._opened.part.index
        }
        self._opened.memory.take_back(contents, _deadline_ns(deadline_s))


class Retired(NamedTuple):
    """What `retire` removed: text of the version (empty: none was published) and bytes of shared memory."""

    version: str
    num_bytes: int


class WeightPublisher:
    """A live publisher of a channel; use it in a `with`, from one thread.

    `channel`: a directory, made if missing; None for the default one. `deadline_s`: how long `publish` waits for
    engines to let go of old versions. `max_arenas` (2 to 16): how many versions may lie in shared memory at once.
    Arenas are made when needed. Two take turns at least; from the third on, engines that roll back can have the version
    before the latest as well, and one that does not follow keeps nobody waiting. Where /dev/shm has no room for one
    more, those that are there are used. `part`: (index, count) where `count` trainer processes publish each version
    together; every one has a publisher of its own, and number 0 decides. `observer` is told the steps of each
    publication (publish/publication.py)."""

    def __init__(
        self,
        channel: str | Path | None = None,
        *,
        part: tuple[int, int] = (0, 1),
        deadline_s: float = config.Deadlines.publish_s,
        max_arenas: int = 3,
        observer: PublishObserver | None = None,
    ) -> None:
        if not 2 <= max_arenas <= NUM_ARENAS:
            # One holds the latest version, which stands until the next is complete in another.
            raise ConfigurationError(f"max_arenas must be 2 to {NUM_ARENAS}, got {max_arenas!r}")
        self.channel = Channel(config.default_channel() if channel is None else channel)
        self._part = checked_part(part)
        self._deadline_s = config.checked_deadline(deadline_s)
        self._max_arenas = max_arenas
        self._observer = observer
        self._opened: OpenChannel | None = None
        self._compat = CompatPublisher(self._part)

    def start(self) -> None:
        """Takes the channel, and as part 0 a new epoch. ChannelBusyError, with its pid, where another is alive."""
        if self._opened is not None:
            raise LifecycleError(f"publisher of {self.channel.path} is already started")
        self._opened = OpenChannel.open(self.channel, self._part, self._max_arenas)

    def close(self, keep: bool = False) -> None:
        """Gives the channel up. The publication goes with it, unless `keep`: then the latest version stays for later
        engines until `retire`. Engines that hold a lease keep their memory either way. A second close does nothing."""
        opened, self._opened = self._opened, None
        self._compat.close()
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
        """Of the versions to come; as another part than 0, the one that part 0 took last (0: none yet)."""
        return self._started().epoch

    def allocate(self, tensors: Wanted) -> TrainerMemory:
        """Memory to compute in that engines can map: name -> (safetensors dtype, shape) gives name -> writable zeroed
        numpy array. Tensors over it are published with `borrow=True`. Lives until the publisher closes, and for as
        long as its arrays do. NoSpaceError where /dev/shm is full or 16 rows are taken."""
        return self._started().memory.allocate(tensors)

    def publish(
        self,
        state_dict: Mapping[str, Any],
        *,
        step: int,
        layout: str = "full",
        convention: Convention = paddle_llama,
        shards: Shards = NO_SHARDS,
        borrow: bool = False,
        on_progress: OnProgress | None = None,
        deadline_s: float | None = None,
        compat: str | None = None,
        fastdeploy: FastDeployFiles | None = None,
    ) -> Published:
        """Makes the tensors the latest version, (epoch, `step`): copies them out, so that they may change as soon as
        this returns, or with `borrow` exports them where they lie, so that they must not until `wait_released`.

        `state_dict`: name -> contiguous CPU tensor (numpy, Paddle, torch); two names of the same memory become an
        alias. `convention`: what each is to the engine (plan/conventions.py). `layout`: "full", or "tp:N" to store them
        cut into N equal shards along the convention's axes, so that N ranks can use them in place. `shards`: which of
        the tensors are slices of larger ones, the other parts having the rest. `borrow`: every tensor lies in memory
        from `allocate`, which is the trainer's now; one read pass, no copy, layout "full". `on_progress(done, total)`
        is told how many of this process's bytes are done. Blocks while every arena is leased and until the other parts
        are there, `deadline_s` at most; returns the same on every part.

        `compat` "fastdeploy", with `fastdeploy` for where: besides, the files that stock FastDeploy reads, in place
        when this returns, whose writing no deadline bounds (publish/fastdeploy_compat.py). Tensors may be in CUDA
        memory then, where each rank has a process (`part`): FastDeploy is told where they lie, so that they must not
        change while it updates, and stay alive until the next publication; our own is a copy in host memory.

        On any error LATEST is what it was and nothing is held, except where stock's files cannot be put in place
        (NoSpaceError, SegmentError, naming the file): the version is announced by then, and stays. VersionRegressError:
        `step` is not above the last one. TrainerError, ConfigurationError: a tensor, a name or the layout cannot be
        published, or parts do not fit together. LifecycleError: borrowed memory was not taken back.
        DeadlineExceededError: engines keep all arenas, or parts are missing; they are named. PeerLostError: another
        part died. NoSpaceError: no room in /dev/shm.
        """
        opened = self._started()
        check_compat(compat, fastdeploy)
        began = time.monotonic()
        wait_s = config.checked_deadline(self._deadline_s if deadline_s is None else deadline_s)
        with opened.telling_others(step):
            if borrow and layout != "full":
                raise ConfigurationError(
                    f"borrowed tensors are published as they lie: layout 'full', got {layout!r:.80}"
                )
            _check_state_dict(state_dict)
            state = CompatState.of(state_dict) if fastdeploy is not None else CompatState(_borrow_all(state_dict), None)
            arrangement = arrange(state.hosts, layout, convention, shards)
            pending = (
                self._compat.prepare(
                    arrangement, state, fastdeploy, step, is_cut_as_told=convention is not paddle_llama
                )
                if fastdeploy is not None
                else None
            )
            try:
                wish = Wish(arrangement, step, borrow, _deadline_ns(wait_s), on_progress)
                manifest = opened.publish(wish, self._observer)
            except BaseException:
                if pending is not None:
                    pending.discard()
                raise
        if pending is not None:
            self._compat.finish(pending, step, _deadline_ns(wait_s))
        seconds = time.monotonic() - began
        num_bytes = sum(tensor.num_bytes for tensor in manifest.tensors)
        _log.info(
            "published=%s part=%d/%d layout=%s borrow=%s bytes=%d own_bytes=%d seconds=%.4f",
            manifest.version,
            self._part.index,
            self._part.count,
            layout,
            borrow,
            num_bytes,
            arrangement.payload_bytes,
            seconds,
        )
        return Published(manifest.weight_version, manifest, num_bytes, seconds, opened)

    def _started(self) -> OpenChannel:
        if self._opened is None:
            raise LifecycleError(f"publisher of {self.channel.path} is not started: use it in a with statement")
        return self._opened


def retire(channel: str | Path | None = None) -> Retired:
    """Removes what publishers left on a channel: the latest version (also one that cannot be read), manifests, shared
    memory. Engines that hold leases keep theirs. ChannelBusyError while a publisher is alive; NoPublicationError where
    there is no such channel."""
    place = Channel(config.default_channel() if channel is None else channel)
    place.check()
    remove_unreadable(place)
    opened = OpenChannel.open(place, Part(0, 1), NUM_ARENAS)
    version = opened.latest.version if opened.latest else ""
    num_bytes = opened.shelf.num_bytes
    try:
        num_bytes += opened.sweep_all_parts()
    except BaseException:
        opened.close(keep=True)
        raise
    opened.close(keep=False)
    return Retired(version, num_bytes)


def _deadline_ns(deadline_s: float) -> int:
    """From now on, as an absolute CLOCK_MONOTONIC time. ConfigurationError for what is no deadline."""
    return time.monotonic_ns() + int(config.checked_deadline(deadline_s) * 1e9)


def _check_state_dict(state_dict: Mapping[str, Any]) -> None:
    if not isinstance(state_dict, Mapping):
        got = type(state_dict).__name__
        raise TrainerError(f"expected a mapping of names to tensors, such as model.state_dict(); got {got}")
    if not state_dict:
        raise TrainerError("nothing to publish: the state dict is empty")
    for name in state_dict:
        if not isinstance(name, str):
            raise TrainerError(f"tensor names are text, got {name!r:.80} ({type(name).__name__})")


def _borrow_all(state_dict: Mapping[str, Any]) -> dict[str, HostTensor]:
    return {name: borrow_tensor(tensor, name) for name, tensor in state_dict.items()}
