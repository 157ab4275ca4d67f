"""Files without a manifest, read once from end to end: out come the checksums of their tensors, as a manifest.

Owns the reading and the summing up. Refuses to know formats (who found the files says what lies in them) and where the
manifest is kept (sources/described.py). Invariant: a manifest that comes out was made from files that were, before and
after they were read, the ones named.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from fastdeploy_rl import _native
from fastdeploy_rl.checksum import ZERO, Fletcher4, add
from fastdeploy_rl.errors import DeadlineExceededError, NoPublicationError, TrainerError
from fastdeploy_rl.manifest import Manifest, Part, Segment, Tensor, aligned, build_manifest
from fastdeploy_rl.plan.byte_range import ByteRange
from fastdeploy_rl.plan.part_rows import PartRows, pieces_of
from fastdeploy_rl.transport.device_memory import DeviceReader
from fastdeploy_rl.transport.files import FileFetch, FileIdentity, OpenFetch, identity_of
from fastdeploy_rl.version import WeightVersion

_log = logging.getLogger(__name__)
_BATCH_BYTES = 32 << 20
"""Read, then summed up, before the next is read: what rank 0 needs beside its own weights."""


class FileLayout(NamedTuple):
    """What lies in a set of files: `layout` and `aliases` as in a manifest, `tensors` without checksums, whose parts
    count the files as segments. `twins`: other places where all the bytes of a tensor lie too."""

    layout: str
    tensors: Sequence[Tensor]
    twins: Sequence[tuple[str, Part]] = ()
    aliases: Mapping[str, str] = MappingProxyType({})


class FoundMemory(NamedTuple):
    """Memory of other processes, as some files describe it: the segments of a manifest in place of the files. It may
    hold other bytes while the files stay as they are. `reader`: reads from it as long as the files are those given."""

    segments: tuple[Segment, ...]
    reader: Callable[[Sequence[FileIdentity]], DeviceReader]


@dataclass(frozen=True)
class FoundFiles:
    """Files that together are one version, found and not read. `read_layout` reads their headers, until a deadline; it
    raises TrainerError or CheckpointError where they are not what they should be. `how`: what the layout depends on
    beside the files, as text. `memory`: where the bytes lie elsewhere. `read_steps`: which step each file says that it
    is; None where it says nothing."""

    directory: Path
    names: tuple[str, ...]
    read_layout: Callable[[int], FileLayout]
    how: str
    memory: FoundMemory | None = None
    read_steps: Callable[[], Mapping[str, int | None]] = lambda: MappingProxyType({})


def identities(found: FoundFiles) -> tuple[FileIdentity, ...]:
    """Of its files now, in order. NoPublicationError where one is gone."""
    return identities_in(found.directory, found.names)


def identities_in(directory: Path, names: Sequence[str]) -> tuple[FileIdentity, ...]:
    """As `identities`."""
    files = []
    for name in names:
        try:
            files.append(identity_of(directory / name))
        except OSError as error:
            raise NoPublicationError(f"{directory / name}: {error.strerror}; update again") from error
    return tuple(files)


def check_unchanged(found: FoundFiles, files: Sequence[FileIdentity]) -> None:
    """NoPublicationError where a file is another one, or has other contents, than when `files` were looked at."""
    if identities(found) != tuple(files):
        raise NoPublicationError(f"files in {found.directory} changed while they were read; update again")


class _Piece(NamedTuple):
    """Some rows of a part, or some bytes of one row, which is number `part` of all parts and twins; in a scratch
    memory they lie from `target_offset` on."""

    part: int
    segment: int
    rows: PartRows
    total_bytes: int
    target_offset: int = 0


def describe(
    found: FoundFiles, files: Sequence[FileIdentity], version: WeightVersion, num_threads: int, deadline_ns: int
) -> Manifest:
    """The manifest of `files`, which are those of `found`, as that version. Reads every byte. TrainerError where twins
    differ, NoPublicationError where a file is another one afterwards, DeadlineExceededError where not all was read."""
    begun = time.monotonic()
    layout = found.read_layout(deadline_ns)
    with _reading(found, files, num_threads) as open_fetch:
        totals = _totals(found, layout, open_fetch, num_threads, deadline_ns)
    check_unchanged(found, files)
    segments = found.memory.segments if found.memory is not None else [_segment(file) for file in files]
    summed = [msgspec.structs.replace(tensor, checksum=totals[tensor.name].hex()) for tensor in layout.tensors]
    manifest = build_manifest(version, layout.layout, segments, summed, layout.aliases)
    _log.info(
        "event=described version=%s directory=%s files=%d bytes=%d seconds=%.3f",
        *(version, found.directory, len(files), sum(each.num_bytes for each in segments), time.monotonic() - begun),
    )
    return manifest


def _segment(file: FileIdentity) -> Segment:
    return Segment(kind="file", locator=file.name, num_bytes=file.num_bytes, arena=0, generation=0)


@contextlib.contextmanager
def _reading(found: FoundFiles, files: Sequence[FileIdentity], num_threads: int) -> Iterator[OpenFetch]:
    """How its bytes are read, many times."""
    if found.memory is not None:
        with contextlib.closing(found.memory.reader(files)) as reader:
            yield reader.open_fetch
        return

    def open_fetch(ranges: Sequence[ByteRange], target: _native.Mapping, deadline_ns: int) -> FileFetch:
        return FileFetch(found.directory, files, ranges, target, num_threads, deadline_ns)

    yield open_fetch


def _totals(
    found: FoundFiles, layout: FileLayout, open_fetch: OpenFetch, num_threads: int, deadline_ns: int
) -> dict[str, Fletcher4]:
    """The checksum of each whole tensor."""
    tensors = {tensor.name: tensor for tensor in layout.tensors}
    parts = [(tensor, part) for tensor in layout.tensors for part in tensor.parts]
    twins = [(tensors[name], part) for name, part in layout.twins]
    sums = _sum_up([*parts, *twins], open_fetch, num_threads, deadline_ns)
    totals = dict.fromkeys(tensors, ZERO)
    for (tensor, _), value in zip(parts, sums, strict=False):
        totals[tensor.name] = add(totals[tensor.name], value)
    for (tensor, part), value in zip(twins, sums[len(parts) :], strict=True):
        if value != totals[tensor.name]:
            raise TrainerError(
                f"{tensor.name!r} has different values in {found.names[tensor.parts[0].segment]} and in "
                f"{found.names[part.segment]}: it is not split over ranks, so they must be equal; files of two "
                "versions may be mixed"
            )
    return totals


def _sum_up(
    parts: Sequence[tuple[Tensor, Part]], open_fetch: OpenFetch, num_threads: int, deadline_ns: int
) -> list[Fletcher4]:
    """Of each part: its share in the checksum of the whole tensor."""
    sums = [ZERO] * len(parts)
    pieces = [
        _Piece(number, part.segment, rows, tensor.num_bytes)
        for number, (tensor, part) in enumerate(parts)
        for rows in pieces_of(tensor, part, _BATCH_BYTES)
    ]
    scratch = _native.Mapping.private(max((end for _, end in _batches(pieces)), default=1))
    done, total = 0, sum(piece.rows.num_bytes for piece in pieces)
    for batch, _ in _batches(pieces):
        try:
            _fetch(open_fetch, [_wanted(piece) for piece in batch], scratch, deadline_ns)
        except DeadlineExceededError as late:
            raise DeadlineExceededError(
                f"{late}; to describe them takes reading all of their {total} bytes, of which {done} were: give the "
                "update a later deadline"
            ) from late
        for piece, value in zip(batch, _sums_of(batch, scratch, num_threads), strict=True):
            sums[piece.part] = add(sums[piece.part], value)
        done += sum(piece.rows.num_bytes for piece in batch)
    scratch.close()
    return sums


def _fetch(open_fetch: OpenFetch, ranges: Sequence[ByteRange], scratch: _native.Mapping, deadline_ns: int) -> None:
    with contextlib.closing(open_fetch(ranges, scratch, deadline_ns)) as fetch:
        for _ in fetch.arrivals():
            pass


def _sums_of(batch: Sequence[_Piece], scratch: _native.Mapping, num_threads: int) -> Iterator[Fletcher4]:
    regions = [
        _native.Region(
            source=scratch,
            source_offset=piece.target_offset,
            source_stride=piece.rows.row_bytes,
            rows=piece.rows.rows,
            row_bytes=piece.rows.row_bytes,
            read_place=_native.Place(piece.rows.place_offset, piece.rows.place_stride, piece.total_bytes),
        )
        for piece in batch
    ]
    try:
        return iter([Fletcher4(*(read or ZERO)) for read, _ in _native.transfer(regions, num_threads)])
    finally:
        regions.clear()


def _batches(pieces: Sequence[_Piece]) -> Iterator[tuple[list[_Piece], int]]:
    """Pieces with their places in a scratch memory that every batch uses anew, and how much of it they need."""
    batch: list[_Piece] = []
    end = 0
    for piece in pieces:
        if batch and end + piece.rows.num_bytes > _BATCH_BYTES:
            yield batch, end
            batch, end = [], 0
        batch.append(piece._replace(target_offset=end))
        end = aligned(end + piece.rows.num_bytes)
    if batch:
        yield batch, end


def _wanted(piece: _Piece) -> ByteRange:
    """Rows that follow each other in the file are one run for whoever reads it."""
    size = piece.rows.num_bytes
    return ByteRange(piece.segment, piece.rows.source_offset, size, 1, size, piece.target_offset)
