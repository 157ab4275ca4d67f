"""Exact interleavings: named points that threads and processes pass in one fixed order, as trio's Sequencer does.

    with Sequencer.create(["a claims", "b claims", "a submits"]) as order:
        start_process(order.name)                  # there: Sequencer.attach(name)
        with order.at("a claims"):                 # waits for its turn; the next one comes when the block ends
            ...

Owns the shared word that says whose turn it is. Refuses to know what happens at a point. Invariant: at most one point
is passed at a time, each once, in the order given; a block that raises breaks the sequence, which everyone who waits is
told at once. Every wait has a deadline."""

import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

import msgspec

from fastdeploy_rl import _native
from fastdeploy_rl.config import checked_deadline
from fastdeploy_rl.errors import ConfigurationError, DeadlineExceededError, LifecycleError, SegmentError
from fastdeploy_rl.memory.shared_segment import SharedSegment

DEFAULT_DEADLINE_S = 20.0
MAX_POINTS_BYTES = 1 << 16
_TURN = 0
"""i32: twice the index of the point whose turn it is, and one more while its block runs; -1 - index of the one that
broke the sequence."""
_LENGTH = 8
_POINTS = 64


class Sequencer:
    """Made by `create` (which owns the segment; use it in a `with`) or by `attach` (elsewhere). Thread-safe."""

    def __init__(self, segment: SharedSegment, points: Sequence[str], deadline_s: float, *, is_owner: bool) -> None:
        self._segment = segment
        self._points = list(points)
        self._deadline_s = checked_deadline(deadline_s)
        self._is_owner = is_owner

    @classmethod
    def create(cls, points: Sequence[str], *, deadline_s: float = DEFAULT_DEADLINE_S) -> "Sequencer":
        """A new sequence of distinct points; each of its waits lasts `deadline_s` at most."""
        data = msgspec.json.encode(list(points))
        if not points or len(set(points)) != len(points) or len(data) > MAX_POINTS_BYTES:
            raise ConfigurationError(f"a sequence needs distinct points in at most {MAX_POINTS_BYTES} bytes of names")
        name = f"fastdeploy_rl_sequencer.{os.getpid()}.{secrets.token_hex(4)}"
        segment = SharedSegment.create(name, _POINTS + len(data))
        with memoryview(segment.mapping) as view:
            view[_POINTS:] = data
        _native.store_u64(segment.mapping, _LENGTH, len(data))
        return cls(segment, points, deadline_s, is_owner=True)

    @classmethod
    def attach(cls, name: str, *, deadline_s: float = DEFAULT_DEADLINE_S) -> "Sequencer":
        """The sequence of that `name`, in another process. SegmentError when there is none."""
        segment = SharedSegment.attach(name, writable=True)
        try:
            return cls(segment, _read_points(segment), deadline_s, is_owner=False)
        except BaseException:
            segment.close()
            raise

    @property
    def name(self) -> str:
        """For `attach`."""
        return self._segment.name

    @contextmanager
    def at(self, point: str) -> Iterator[None]:
        """Waits until every earlier point is passed, then runs the block, then lets the next one come.

        DeadlineExceededError names the point that the sequence stands at; LifecycleError when somebody came to this
        point already or an earlier block raised; ConfigurationError for an unknown one."""
        index = self._index_of(point)
        self._await(2 * index, point)
        if _native.compare_exchange_i32(self._segment.mapping, _TURN, 2 * index, 2 * index + 1) != 2 * index:
            raise _passed_already(point)
        try:
            yield
        except BaseException:
            self._set(-1 - index)
            raise
        self._set(2 * (index + 1))

    def reach(self, point: str) -> None:
        """As an empty block at `point`."""
        with self.at(point):
            pass

    def await_end(self) -> None:
        """Returns when every point is passed; errors as `at`."""
        self._await(2 * len(self._points), "the end")

    def close(self) -> None:
        self._segment.close()
        if self._is_owner:
            self._segment.unlink()

    def __enter__(self) -> "Sequencer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _index_of(self, point: str) -> int:
        try:
            return self._points.index(point)
        except ValueError as error:
            raise ConfigurationError(f"no point {point!r}; the sequence has {', '.join(self._points)}") from error

    def _await(self, turn: int, point: str) -> None:
        deadline_ns = time.monotonic_ns() + int(self._deadline_s * 1e9)
        while (now := _native.load_i32(self._segment.mapping, _TURN)) != turn:
            if now < 0:
                raise LifecycleError(f"{point!r} cannot be reached: the sequence broke at {self._points[-1 - now]!r}")
            if now > turn:
                raise _passed_already(point)
            if not _native.futex_wait_i32(self._segment.mapping, _TURN, now, deadline_ns):
                raise DeadlineExceededError(
                    f"{point!r} was not reached within {self._deadline_s} s: nobody passed {self._points[now // 2]!r}"
                )

    def _set(self, turn: int) -> None:
        _native.store_i32(self._segment.mapping, _TURN, turn)
        _native.futex_wake_i32(self._segment.mapping, _TURN)


def _passed_already(point: str) -> LifecycleError:
    return LifecycleError(f"{point!r} was passed already, or is just being passed")


def _read_points(segment: SharedSegment) -> list[str]:
    length = _native.load_u64(segment.mapping, _LENGTH)
    with memoryview(segment.mapping) as view:
        data = bytes(view[_POINTS : _POINTS + min(length, MAX_POINTS_BYTES)])
    try:
        return msgspec.json.decode(data, type=list[str])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise SegmentError(f"segment {segment.name!r} is no sequence: {error}") from error
