"""The one pass over a version's bytes: copied to their places and summed up, or only summed up where they lie.

Owns the translation of pieces into native jobs and their sums. Refuses to know arenas and leases. Invariant: a piece's
sums are its share of the whole tensor's checksum, each byte read once.
"""

from collections.abc import Callable, Iterator, Sequence

from fastdeploy_rl import _native, config
from fastdeploy_rl.checksum import ZERO, Fletcher4
from fastdeploy_rl.publish.arrangement import ArrangedTensor, Arrangement, Piece

OnProgress = Callable[[int, int], object]
"""Called with (bytes done, bytes in all) now and then, and at the end."""

_BATCH_BYTES = 64 << 20
"""Between two words of progress; smaller batches would leave the native threads idle in between."""


def copy_out(
    arrangement: Arrangement, target: _native.Mapping | None, on_progress: OnProgress | None = None
) -> list[list[Fletcher4]]:
    """The checksum of each piece of each tensor; copies every piece to its `target_offset`, or nothing (None)."""
    jobs = [(tensor, piece) for tensor in arrangement.tensors for piece in tensor.pieces if piece.num_bytes]
    sums: list[Fletcher4] = []
    done = 0
    for batch in _batches(jobs) if on_progress else [jobs]:
        sums.extend(_transfer(batch, target))
        if on_progress is not None:
            done += sum(piece.num_bytes for _, piece in batch)
            on_progress(done, arrangement.payload_bytes)
    found = iter(sums)
    return [[next(found) if piece.num_bytes else ZERO for piece in tensor.pieces] for tensor in arrangement.tensors]


def _batches(jobs: Sequence[tuple[ArrangedTensor, Piece]]) -> Iterator[list[tuple[ArrangedTensor, Piece]]]:
    batch: list[tuple[ArrangedTensor, Piece]] = []
    num_bytes = 0
    for job in jobs:
        batch.append(job)
        num_bytes += job[1].num_bytes
        if num_bytes >= _BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    yield batch


def _transfer(jobs: Sequence[tuple[ArrangedTensor, Piece]], target: _native.Mapping | None) -> list[Fletcher4]:
    regions = [_region(tensor, piece, target) for tensor, piece in jobs]
    try:
        return [Fletcher4(*(read or ZERO)) for read, _ in _native.transfer(regions, config.num_copy_threads())]
    finally:
        # Regions hold the arena mapped; a traceback that outlives this call must not.
        regions.clear()


def _region(tensor: ArrangedTensor, piece: Piece, target: _native.Mapping | None) -> _native.Region:
    return _native.Region(
        source=tensor.host.buffer,
        source_offset=piece.source_offset,
        source_stride=piece.source_stride,
        rows=piece.rows,
        row_bytes=piece.row_bytes,
        target=target,
        target_offset=piece.target_offset if target is not None else 0,
        target_stride=piece.row_bytes if target is not None else 0,
        read_place=_native.Place(piece.place_offset, piece.place_stride, tensor.num_bytes),
    )
