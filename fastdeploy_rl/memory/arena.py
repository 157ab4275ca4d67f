"""The engine's own two arenas, which take turns: one holds the live weights, the other the next ones (or the way back).

Owns two private mappings and reuses them, since fresh memory costs more than anything else in an update. Refuses to
know what lies inside. Invariant: a mapping that is handed out is not handed out again before it was released.
"""

from dataclasses import dataclass

from fastdeploy_rl._native import Mapping
from fastdeploy_rl.errors import SegmentError

_PAGE_BYTES = 4096


@dataclass
class _Arena:
    mapping: Mapping | None = None
    is_acquired: bool = False

    @property
    def num_bytes(self) -> int:
        return self.mapping.num_bytes if self.mapping else 0

    def unmap(self) -> None:
        """Gives the memory back now; SegmentError while somebody still looks at it."""
        if self.mapping is None:
            return
        try:
            self.mapping.close()
        except BufferError as error:
            raise SegmentError(
                f"an arena of {self.num_bytes} bytes is still in use: "
                f"{self.mapping.num_exports} arrays or tensors lie in it"
            ) from error
        self.mapping, self.is_acquired = None, False


class ArenaPair:
    """Two alternating arenas of private memory, made when first needed."""

    def __init__(self, num_threads: int = 1) -> None:
        self._num_threads = num_threads
        self._arenas = (_Arena(), _Arena())

    @property
    def num_bytes(self) -> int:
        """Memory mapped now, handed out or kept for reuse."""
        return sum(arena.num_bytes for arena in self._arenas)

    def next_mapping(self, num_bytes: int) -> Mapping | None:
        """What `acquire` would hand out now, if that is there already; None where it would take fresh memory, or
        raise. Takes nothing."""
        kept = self._next(num_bytes)
        return kept.mapping if kept is not None and kept.num_bytes >= num_bytes else None

    def _next(self, num_bytes: int) -> _Arena | None:
        free = [arena for arena in self._arenas if not arena.is_acquired]
        return min(free, key=lambda candidate: (candidate.num_bytes < num_bytes, candidate.num_bytes), default=None)

    def acquire(self, num_bytes: int) -> Mapping:
        """A mapping of at least `num_bytes` whose pages are all
        there, for the caller until `release`; contents are arbitrary.

        SegmentError when both are handed out, or when a view of the
        last contents is alive and a larger arena is needed.
        """
        arena = self._next(num_bytes)
        if arena is None:
            raise SegmentError("both arenas are in use: release the one of the previous weights first")
        if arena.mapping is None or arena.num_bytes < num_bytes:
            arena.unmap()
            arena.mapping = _touched_memory(num_bytes, self._num_threads)
        arena.is_acquired = True
        return arena.mapping

    def release(self, mapping: Mapping) -> None:
        """Takes a mapping back; it stays mapped for the next `acquire`. SegmentError when it is not one of ours."""
        for arena in self._arenas:
            if arena.mapping is mapping and arena.is_acquired:
                arena.is_acquired = False
                return
        raise SegmentError(f"no arena of {mapping.num_bytes} bytes at {mapping.address:#x} was handed out")

    def trim(self) -> None:
        """Returns the memory to the system that is not handed out. SegmentError while views of it are alive."""
        for arena in self._arenas:
            if not arena.is_acquired:
                arena.unmap()

    def drop(self) -> None:
        """Returns the memory of both to the system, handed out or not. SegmentError while views of one are alive; that
        one then stays, and a later call drops it."""
        errors = []
        for arena in self._arenas:
            try:
                arena.unmap()
            except SegmentError as error:
                errors.append(error)
        if errors:
            raise errors[0]


def _touched_memory(num_bytes: int, num_threads: int) -> Mapping:
    whole_pages = -(-max(num_bytes, 1) // _PAGE_BYTES) * _PAGE_BYTES
    mapping = Mapping.private(whole_pages)
    mapping.prefault(num_threads)
    return mapping
