"""Runs of memory as buffers to be sent: long rows where they lie, short ones gathered first.

Python takes a microsecond for each buffer, whatever its size; the native core gathers a megabyte of short rows in the
time of a hundred of them, and lets other threads run meanwhile. Owns the memory that rows are gathered in. Refuses to
know sockets. Invariant: what was given is looked at by nobody once the next is asked for, or `batches` is closed.
"""

from collections.abc import Generator, Sequence

from fastdeploy_rl import _native
from fastdeploy_rl._native import Mapping, Region
from fastdeploy_rl.transport.base import Run

_SHORT_ROW_BYTES = 32 << 10
_GATHERED_BYTES = 1 << 20
_MAX_BUFFERS = 1024
"""Of one batch: a view costs more than a short row has bytes."""


class Outgoing:
    """One server thread's. Its memory is made when rows are first gathered, and kept."""

    def __init__(self) -> None:
        self._gathered: Mapping | None = None

    def batches(self, runs: Sequence[Run]) -> Generator[list[memoryview], None, None]:
        """The bytes of the runs in order; each batch is taken before the next is asked for."""
        rows: list[tuple[Mapping, int, int]] = []
        for run in runs:
            if run.rows > 1 and 0 < run.num_bytes < _SHORT_ROW_BYTES:
                yield from _views(rows)
                rows = []
                yield from self._gather(run)
            else:
                rows += [(run.mapping, run.offset + row * run.stride, run.num_bytes) for row in range(run.rows)]
        yield from _views(rows)

    def _gather(self, run: Run) -> Generator[list[memoryview], None, None]:
        target = self._gathered = self._gathered or Mapping.private(_GATHERED_BYTES)
        step = _GATHERED_BYTES // max(1, run.num_bytes)
        for first in range(0, run.rows, step):
            rows = min(step, run.rows - first)
            region = Region(
                source=run.mapping,
                source_offset=run.offset + first * run.stride,
                source_stride=run.stride,
                rows=rows,
                row_bytes=run.num_bytes,
                target=target,
                target_stride=run.num_bytes,
            )
            _native.transfer([region], 1)
            del region  # it holds the source
            with memoryview(target) as whole, whole[: rows * run.num_bytes] as view:
                yield [view]


def _views(rows: Sequence[tuple[Mapping, int, int]]) -> Generator[list[memoryview], None, None]:
    """Given back at the end, also where an error's traceback still knows them."""
    for first in range(0, len(rows), _MAX_BUFFERS):
        views: list[memoryview] = []
        try:
            for mapping, offset, num_bytes in rows[first : first + _MAX_BUFFERS]:
                with memoryview(mapping) as whole:
                    views.append(whole[offset : offset + num_bytes])
            yield views
        finally:
            for view in views:
                view.release()
