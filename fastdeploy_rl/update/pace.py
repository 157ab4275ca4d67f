"""How staging leaves memory to decoding: it works in pieces, and rests between them while requests are computed.

A decode step reads all weights once, and so does staging: both are bound by the same memory, whatever their threads.
Owns how long the rests are. Refuses to know what the work is. Invariant: nobody rests where nothing is computed, nor
in the second half of the time that a command has.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

PIECE_BYTES = 16 << 20
"""Some milliseconds of work."""
_REST = 2.0
"""Seconds of rest for one of work: of what decoding does alone it then does three quarters, as measured where both
cores and the memory are shared."""

_LEAST_S = 0.005
"""Less work than this is not worth a rest."""

_Item = TypeVar("_Item")


class Pace:
    """Of one command on one rank; used by the manager's thread. `is_computing` tells of requests."""

    def __init__(self, is_computing: Callable[[], bool], deadline_ns: int) -> None:
        self._is_computing = is_computing
        now_ns = time.monotonic_ns()
        self._last_ns = now_ns + max(0, deadline_ns - now_ns) // 2
        self._worked_s = 0.0
        self.rested_s = 0.0

    def rest(self, worked_s: float) -> None:
        """After a piece of work that took so long."""
        if not self._is_computing() or time.monotonic_ns() >= self._last_ns:
            self._worked_s = 0.0
            return
        self._worked_s += worked_s
        if self._worked_s < _LEAST_S:
            return
        left_s = max(0, self._last_ns - time.monotonic_ns()) / 1e9
        begun = time.monotonic()
        time.sleep(min(self._worked_s * _REST, left_s))
        self._worked_s = 0.0
        self.rested_s += time.monotonic() - begun


def in_pieces(items: Iterable[_Item], num_bytes: Callable[[_Item], int]) -> Iterator[Sequence[_Item]]:
    """The items in their order, in runs of about PIECE_BYTES."""
    piece: list[_Item] = []
    size = 0
    for item in items:
        piece.append(item)
        size += num_bytes(item)
        if size >= PIECE_BYTES:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece
