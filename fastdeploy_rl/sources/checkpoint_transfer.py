"""Load strategy `rsync` through FastDeploy's closed package `checkpoint_transfer`, which knows steps and no manifests.

Rank 0 receives what every rank is sent, sums it up, and writes a manifest into `{channel}/checkpoint_transfer/`; the
others find it there. Then each rank receives its own, as with any other transport. Owns the manifests, and how a
segment looks: what rank r is sent is segment r, its tensors in the order of their names, each at a multiple of 512.
Refuses to know the package (transport/checkpoint_transfer.py has it). Invariant: a manifest was made from bytes that
were received for it; what is received later is held to its checksums, as everywhere.

There is no "latest": a step is named, or `version.yaml` of the model's directory names it.
"""

import contextlib
import dataclasses
import logging
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from math import prod
from typing import NamedTuple

import msgspec

from fastdeploy_rl._native import Mapping, Place, Region, transfer
from fastdeploy_rl.checksum import ZERO, Fletcher4, add
from fastdeploy_rl.coverage import Coverage, ParameterSpec
from fastdeploy_rl.dtypes import itemsize
from fastdeploy_rl.errors import DeadlineExceededError, NoPublicationError, TrainerError
from fastdeploy_rl.manifest import (
    Manifest,
    Segment,
    Tensor,
    aligned,
    build_manifest,
    encode,
    file_digest,
    layout_ranks,
)
from fastdeploy_rl.memory.private_directory import check_private_directory, open_private_directory
from fastdeploy_rl.plan.byte_range import ByteRange
from fastdeploy_rl.plan.part_rows import rows_of
from fastdeploy_rl.publish.channel import Channel, order_of
from fastdeploy_rl.sources.base import SourceConfig
from fastdeploy_rl.sources.fetching import FetchingSource
from fastdeploy_rl.sources.rank_slices import Slice, join, join_slices
from fastdeploy_rl.sources.rsync_config import CheckpointTransferConfig
from fastdeploy_rl.sources.version_file import UNCOUNTED_EPOCH, wanted_version
from fastdeploy_rl.transport.base import Offer
from fastdeploy_rl.transport.checkpoint_transfer import (
    PACKAGE,
    PartClient,
    ReceivedTensor,
    Reception,
    check_installed,
)
from fastdeploy_rl.version import WeightVersion

_log = logging.getLogger(__name__)
_DIRECTORY = "checkpoint_transfer"
_KEPT_MANIFESTS = 4


class CheckpointTransferSource(FetchingSource):
    """One engine rank. ConfigurationError where the package is not installed; nothing is received before it is used."""

    def __init__(self, config: SourceConfig, options: CheckpointTransferConfig) -> None:
        check_installed()
        # The transport reads the version file: nobody else can say which step is the latest.
        super().__init__(CheckpointTransport(config, options), dataclasses.replace(config, model_dir=None))

    def current_epoch(self, *, deadline_ns: int) -> int:
        """Nobody counts the epochs of that package's steps."""
        return UNCOUNTED_EPOCH

    def newest_version(self, *, deadline_ns: int) -> WeightVersion | None:
        """To ask that package for a version is to receive it."""
        return None


class CheckpointTransport:
    """The package as a transport of segments that it does not have: bytes of segment r are found in what rank r is
    sent."""

    def __init__(self, config: SourceConfig, options: CheckpointTransferConfig) -> None:
        self._config = config
        self._options = options
        self._idle: deque[PartClient] = deque(maxlen=1)
        self._store = Channel(config.channel / _DIRECTORY)
        self._described: Offer | None = None
        self._kept: list[ReceivedTensor] | None = None
        self._fetched_digest = ""
        self._lock = threading.Lock()
        self._describing = threading.Lock()

    # --- which versions there are ------------------------------------------------------------------

    def offer(self, version: WeightVersion | None, *, deadline_ns: int) -> Offer:
        """On rank 0 it receives everything, unless that was done and not fetched yet: the same step may have other
        bytes by now. On the others it blocks for nobody."""
        wanted = version or self._named()
        if self._config.rank:
            return self._offer_of(wanted)
        if not self._describing.acquire(timeout=max(deadline_ns - time.monotonic_ns(), 0) / 1e9):
            raise DeadlineExceededError(f"no time left to ask for version {wanted}: another one is being described")
        try:
            described = self._described
            if described is None or described.version != wanted:
                self.trim()  # so that there is room
                described = self._describe(wanted, deadline_ns)
            return described
        finally:
            self._describing.release()

    def _named(self) -> WeightVersion:
        directory = self._config.model_dir
        wanted = wanted_version(directory)
        if wanted is not None:
            return wanted.in_epoch(UNCOUNTED_EPOCH)
        place = f", or write it to {directory / 'version.yaml'}" if directory is not None else ""
        raise NoPublicationError(
            f"nothing is published whose version is known: {PACKAGE} cannot tell its latest; name a version "
            f"({UNCOUNTED_EPOCH}.STEP){place}"
        )

    def _offer_of(self, version: WeightVersion) -> Offer:
        try:
            check_private_directory(self._store.path)
            manifest = self._store.read_version(version)
        except FileNotFoundError:
            manifest = None
        if manifest is None or layout_ranks(manifest.layout) != self._config.num_ranks:
            raise NoPublicationError(
                f"rank 0 has not described version {version} for {self._config.num_ranks} ranks in {self._store.path} "
                "(yet); update again"
            )
        return _offer(version, manifest)

    # --- describing: rank 0 ------------------------------------------------------------------------

    def _describe(self, version: WeightVersion, deadline_ns: int) -> Offer:
        begun = time.monotonic()
        summed = [SummedPart({}, {}) for _ in range(self._config.num_ranks)]
        kept: list[ReceivedTensor] = []
        specs = {spec.name: spec for spec in self._config.parameters}

        def take(sent: _Sent) -> None:
            summed[sent.part].add(sent, specs.get(sent.tensor.name), self._config)
            if not sent.part:
                kept.append(_lasting(sent.tensor))

        # Its own last: that is kept, since it is fetched next.
        order = [*range(1, self._config.num_ranks), 0]
        reception = Reception(
            f"step {version.step} from {PACKAGE}", lambda: self._receive(order, version.step, is_verified=True), take
        )
        try:
            for _ in reception.results(deadline_ns):
                pass
        except NoPublicationError as error:
            wanted = wanted_version(self._config.model_dir)
            hint = f"; {wanted.path} names {wanted.in_epoch(UNCOUNTED_EPOCH)}" if wanted is not None else ""
            raise NoPublicationError(f"version {version} is not to be had: {error}{hint}") from error
        finally:
            reception.close()
        manifest = describe(version, self._config.parameters, summed)
        _log.info(
            "event=described version=%s ranks=%d bytes=%d seconds=%.3f",
            *(version, len(summed), sum(segment.num_bytes for segment in manifest.segments), time.monotonic() - begun),
        )
        self._write(manifest)
        offer = _offer(version, manifest)
        with self._lock:
            # What was fetched last and is the same is live, as a rule: nobody will fetch it again.
            self._kept = kept if manifest.content_digest != self._fetched_digest else None
            self._described = offer
        return offer

    def _receive(self, parts: Sequence[int], step: int, *, is_verified: bool) -> "Iterator[_Sent]":
        """In a reception's thread. A client that did not come to its end may be in any state: it is not used again."""
        for part in parts:
            client = self._client(part)
            for tensor in client.receive(step, is_verified=is_verified):
                yield _Sent(part, tensor)
            if part == self._config.rank:
                self._idle.append(client)

    def _client(self, part: int) -> PartClient:
        """This rank's own is kept from one version to the next, and used by one thread at a time."""
        if part == self._config.rank:
            with contextlib.suppress(IndexError):
                return self._idle.pop()
        return PartClient(self._options.api, self._options.config, part, self._config.num_ranks)

    def _write(self, manifest: Manifest) -> None:
        open_private_directory(self._store.path)
        # Another manifest of the same version would be found in its place.
        own = manifest.weight_version
        files = sorted(self._store.manifest_files(), key=order_of)
        others = [file for file in files if order_of(file) != (own.epoch, own.step)]
        written = self._store.write_manifest(manifest)
        self._store.remove_superseded({written.file, *others[1 - _KEPT_MANIFESTS :]})

    # --- fetching ----------------------------------------------------------------------------------

    def fetch(self, offer: Offer, ranges: Sequence[ByteRange], target: Mapping, *, deadline_ns: int) -> "PartFetch":
        """Begins to receive this rank's part, and those of other ranks where a range lies in one."""
        with self._lock:
            is_described = self._described is not None and self._described.file_digest == offer.file_digest
            kept = self._kept if is_described else None
            self._described = self._kept = None
            self._fetched_digest = offer.manifest.content_digest
        wanted = WantedRanges(offer, self._config, ranges)
        step = offer.version.step

        def receive() -> Iterator[_Sent]:
            others = [part for part in wanted.parts if kept is None or part]
            while kept:
                yield _Sent(0, kept.pop())
            yield from self._receive(others, step, is_verified=False)

        return PartFetch(wanted, receive, target, self._config.num_threads, deadline_ns)

    def trim(self) -> None:
        """Gives back what was received to be fetched next."""
        with self._lock:
            self._described = self._kept = None

    def close(self) -> None:
        self.trim()


def _offer(version: WeightVersion, manifest: Manifest) -> Offer:
    return Offer(version, manifest, file_digest(encode(manifest)))


class _Sent(NamedTuple):
    """A tensor of what rank `part` is sent."""

    part: int
    tensor: ReceivedTensor


def _lasting(tensor: ReceivedTensor) -> ReceivedTensor:
    return tensor if tensor.is_lasting else tensor._replace(data=bytes(tensor.data), is_lasting=True)


# --- a manifest out of what was received ------------------------------------------------------------


class SummedPart(NamedTuple):
    """What a rank is sent, by name: where it would lie, and its share in the checksum of the whole tensor."""

    slices: dict[str, Slice]
    sums: dict[str, Fletcher4]

    def add(self, sent: _Sent, spec: ParameterSpec | None, config: SourceConfig) -> None:
        """Reads the tensor once. One that is no parameter, or of another shape, is for `describe` to refuse."""
        part, tensor = sent
        if tensor.name in self.slices:
            raise TrainerError(f"rank {part} is sent {tensor.name!r:.600} twice")
        own = self.slices[tensor.name] = Slice(tensor.dtype, tensor.shape, part, 0)
        self.sums[tensor.name] = ZERO
        if spec is not None and tensor.shape == spec.local_shape(config.num_ranks):
            whole, _ = join(spec, [own] * config.num_ranks)
            self.sums[tensor.name] = _share(tensor, whole, part, config.num_threads)


def _share(received: ReceivedTensor, whole: Tensor, part: int, num_threads: int) -> Fletcher4:
    rows = rows_of(whole, whole.parts[0 if whole.shard_axis is None else part])
    if not rows.rows:
        return ZERO
    region = Region(
        source=received.data,
        source_offset=received.offset,
        source_stride=rows.row_bytes,
        rows=rows.rows,
        row_bytes=rows.row_bytes,
        read_place=Place(rows.place_offset, rows.place_stride, whole.num_bytes),
    )
    ((read, _),) = transfer([region], num_threads)
    return Fletcher4(*(read or ZERO))


def describe(version: WeightVersion, specs: Sequence[ParameterSpec], parts: Sequence[SummedPart]) -> Manifest:
    """The manifest of what all ranks are sent. A tied parameter that is sent too becomes a further name, where it is
    the same. CoverageError where the ranks have not what the model's have; TrainerError where a tensor that is not cut
    differs between them."""
    joined = join_slices(specs, [_placed(part.slices) for part in parts])
    tensors = {tensor.name: _summed(tensor, parts) for tensor in joined.tensors}
    aliases = {spec.name: str(spec.tied_to) for spec in specs if _is_second_name(spec, tensors)}
    segments = [
        Segment("file", f"{PACKAGE}.{rank}", _end_of(part.slices), arena=0, generation=0)
        for rank, part in enumerate(parts)
    ]
    own = [tensor for name, tensor in tensors.items() if name not in aliases]
    return build_manifest(version, joined.layout, segments, own, aliases)


def _placed(slices: dict[str, Slice]) -> dict[str, Slice]:
    placed, end = {}, 0
    for name in sorted(slices):
        placed[name] = slices[name]._replace(offset=end)
        end = aligned(end + _num_bytes(slices[name]))
    return placed


def _end_of(slices: dict[str, Slice]) -> int:
    return max((each.offset + _num_bytes(each) for each in _placed(slices).values()), default=0)


def _num_bytes(each: Slice) -> int:
    return prod(each.shape) * itemsize(each.dtype)


def _summed(tensor: Tensor, parts: Sequence[SummedPart]) -> Tensor:
    sums = [part.sums[tensor.name] for part in parts]
    if tensor.shard_axis is not None:
        return msgspec.structs.replace(tensor, checksum=reduce(add, sums).hex())
    for rank, value in enumerate(sums):
        if value != sums[0]:
            raise TrainerError(
                f"{tensor.name!r} is not cut, and rank {rank} is sent other values than rank 0: they must be equal"
            )
    return msgspec.structs.replace(tensor, checksum=sums[0].hex())


def _is_second_name(spec: ParameterSpec, tensors: dict[str, Tensor]) -> bool:
    """Whether all that is sent under a tied name is sent under the name it is tied to."""
    if spec.coverage is not Coverage.TIED or spec.name not in tensors or spec.tied_to not in tensors:
        return False
    mine, other = tensors[spec.name], tensors[spec.tied_to]
    is_alike = (mine.dtype, mine.shape, mine.checksum) == (other.dtype, other.shape, other.checksum)
    return is_alike and mine.fused is None and other.fused is None


# --- byte ranges out of what is received -------------------------------------------------------------


class _Home(NamedTuple):
    """A tensor's bytes in the address space of a manifest, from `start` of a segment on; `part`: which rank's part they
    are taken from."""

    start: int
    name: str
    part: int


class WantedRanges:
    """Byte ranges of a manifest, by the tensor of a part in which they lie. What is not cut is taken from this rank's
    own part, whosever place the manifest names."""

    def __init__(self, offer: Offer, config: SourceConfig, ranges: Sequence[ByteRange]) -> None:
        self.version = offer.version
        self.ranges = ranges
        self._num_ranks = config.num_ranks
        self._specs = {spec.name: spec for spec in config.parameters}
        self._dtypes = {tensor.name: tensor.dtype for tensor in offer.manifest.tensors}
        self._aliases = offer.manifest.aliases
        homes = _homes(offer.manifest, config.rank)
        self._missing: dict[tuple[int, str], list[tuple[int, int]]] = {}
        for index, each in enumerate(ranges):
            of_segment = homes[each.segment]
            home = of_segment[bisect_right(of_segment, each.offset, key=lambda home: home.start) - 1]
            self._missing.setdefault((home.part, home.name), []).append((index, each.offset - home.start))
        self.parts = sorted({part for part, _ in self._missing})

    def take(self, sent: _Sent) -> list[tuple[int, int]]:
        """The numbers of the ranges that lie in it, each with where it begins there; once. TrainerError where the
        tensor is another one than rank 0 was sent."""
        part, tensor = sent
        self._check(part, tensor)
        return self._missing.pop((part, tensor.name), [])

    def check_complete(self) -> None:
        for part, name in self._missing:
            raise TrainerError(f"version {self.version}: rank {part} was not sent {name}; update again")

    def _check(self, part: int, tensor: ReceivedTensor) -> None:
        if tensor.name in self._aliases:
            return
        spec, dtype = self._specs.get(tensor.name), self._dtypes.get(tensor.name)
        if spec is None or (tensor.dtype, tensor.shape) != (dtype, spec.local_shape(self._num_ranks)):
            raise TrainerError(
                f"version {self.version}: rank {part} was sent {tensor.name!r:.600} as {tensor.dtype} "
                f"{list(tensor.shape)}, which is not what rank 0 was sent before; update again"
            )


def _homes(manifest: Manifest, rank: int) -> list[list[_Home]]:
    """By segment, in order."""
    homes: list[list[_Home]] = [[] for _ in manifest.segments]
    for tensor in manifest.tensors:
        for part in tensor.parts:
            if tensor.part_bytes(part):
                source = rank if tensor.shard_axis is None else part.segment
                homes[part.segment].append(_Home(part.offset, tensor.name, source))
    return [sorted(of_segment) for of_segment in homes]


class PartFetch:
    """Ranges on their way out of what the package sends, into `target`. As `Fetch`."""

    def __init__(
        self,
        wanted: WantedRanges,
        received: Callable[[], Iterator[_Sent]],
        target: Mapping,
        num_threads: int,
        deadline_ns: int,
    ) -> None:
        self.num_bytes = 0
        self._wanted = wanted
        self._target = target
        self._num_threads = num_threads
        self._deadline_ns = deadline_ns
        self._reception: Reception[_Sent, list[int]] | None = Reception(
            f"version {wanted.version} from {PACKAGE}", received, self._copy
        )

    def arrivals(self) -> Iterator[Sequence[int]]:
        reception = self._reception
        if reception is None:
            return
        for indices in reception.results(self._deadline_ns):
            if indices:
                self.num_bytes += sum(self._wanted.ranges[index].num_bytes for index in indices)
                yield indices
        self._wanted.check_complete()

    def close(self) -> None:
        reception, self._reception = self._reception, None
        if reception is not None:
            reception.close()

    def _copy(self, sent: _Sent) -> list[int]:
        """In the reception's thread, while the one who waits sums up what came before."""
        found = self._wanted.take(sent)
        regions = [self._region(sent.tensor, self._wanted.ranges[index], start) for index, start in found]
        try:
            transfer(regions, self._num_threads)
        finally:
            regions.clear()  # they hold the target mapped
        return [index for index, _ in found]

    def _region(self, tensor: ReceivedTensor, wanted: ByteRange, start: int) -> Region:
        return Region(
            source=tensor.data,
            source_offset=tensor.offset + start,
            source_stride=wanted.stride,
            rows=wanted.rows,
            row_bytes=wanted.row_bytes,
            target=self._target,
            target_offset=wanted.target_offset,
            target_stride=wanted.row_bytes,
        )
