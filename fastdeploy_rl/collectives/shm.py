"""Collectives of processes on one machine, through one shared-memory segment.

Owns the segment's mapping and the framing of byte payloads; the meeting itself is `_native.CollectiveGroup`. Refuses to
know tensors beyond numpy arrays. Invariant: after a missed deadline, or once the group was advanced to a higher
generation, every further call raises, on every rank, until the rank rejoins in the present generation.
"""

import time
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from fastdeploy_rl._native import CollectiveGroup, MissingRanksError
from fastdeploy_rl.errors import ConfigurationError, DeadlineExceededError, FastDeployRLError, PeerLostError
from fastdeploy_rl.memory.shared_segment import SharedSegment

MAX_PAYLOAD_BYTES = 64 << 20
_FRAME_BYTES = 4096
_LENGTH_BYTES = 8
_INLINE_BYTES = _FRAME_BYTES - _LENGTH_BYTES


class ShmCollectives:
    """One rank's place in the group. Attached from construction until `close()`; used by one thread at a time."""

    def __init__(
        self,
        segment_name: str,
        rank: int,
        num_ranks: int,
        *,
        create: bool,
        slot_bytes: int = 1 << 20,
        timeout_s: float,
        generation: int = 1,
    ) -> None:
        """`create`: makes the segment, and `close()` unlinks it; otherwise it is there, zeroed at first, and somebody
        else's. `timeout_s` bounds each call. `generation` 0: attached only, until `rejoin`. SegmentError as
        SharedSegment gives it; ValueError for sizes, a rank or a generation that cannot be."""
        num_bytes = CollectiveGroup.required_bytes(num_ranks, slot_bytes)
        self.rank = rank
        self.num_ranks = num_ranks
        self.generation = generation
        self._slot_bytes = slot_bytes
        self._timeout_s = timeout_s
        self._frame = np.zeros(_FRAME_BYTES, np.uint8)
        self._is_owner = create
        self._is_closed = False
        self._segment = (
            SharedSegment.create(segment_name, num_bytes)
            if create
            else SharedSegment.attach(segment_name, writable=True)
        )
        self._group: CollectiveGroup | None = None
        try:
            if generation:
                self.rejoin(generation)
        except BaseException:
            self._release_segment()
            raise

    def rejoin(self, generation: int) -> None:
        """This rank's place in the group of `generation`, whatever became of the one before. PeerLostError where there
        is a newer one by now, ValueError where it is not new to this rank."""
        self._group = None
        try:
            group = CollectiveGroup(self._segment.mapping, self.rank, self.num_ranks, self._slot_bytes, generation)
        except MissingRanksError as error:
            raise _broken(*error.args, begun_s=time.monotonic()) from error
        self._group = group
        self.generation = generation

    @staticmethod
    def advance(segment_name: str, num_ranks: int, slot_bytes: int, generation: int) -> None:
        """For whoever watches over the ranks: calls of older generations end with PeerLostError, at once."""
        with SharedSegment.attach(segment_name, writable=True) as segment:
            CollectiveGroup.advance(segment.mapping, num_ranks, slot_bytes, generation)

    def all_reduce(self, values: npt.NDArray[np.float32]) -> None:
        """Sum over the ranks, in place; bitwise equal on every rank."""
        if values.dtype != np.float32:
            raise ConfigurationError(f"all_reduce sums float32, got {values.dtype}")
        self._meet(CollectiveGroup.all_reduce_f32, self._timeout_s, values)

    def all_gather(self, own: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """[num_ranks, *own.shape], in rank order; a fresh array."""
        gathered = np.empty((self.num_ranks, *own.shape), own.dtype)
        self._meet(CollectiveGroup.all_gather, self._timeout_s, np.ascontiguousarray(own), gathered)
        return gathered

    def broadcast_bytes(self, payload: bytes | None, root: int, *, timeout_s: float) -> bytes:
        """The root's payload (at most MAX_PAYLOAD_BYTES) on every rank. One meeting for small ones, two for larger."""
        if self.rank == root:
            _write_frame(self._frame, payload)
        self._meet(CollectiveGroup.broadcast, timeout_s, self._frame, root)
        num_bytes = int.from_bytes(self._frame[:_LENGTH_BYTES].tobytes(), "little")
        if num_bytes <= _INLINE_BYTES:
            return self._frame[_LENGTH_BYTES : _LENGTH_BYTES + num_bytes].tobytes()
        if num_bytes > MAX_PAYLOAD_BYTES:
            raise ConfigurationError(f"rank {root} broadcasts {num_bytes} bytes, at most {MAX_PAYLOAD_BYTES} are taken")
        received = np.empty(num_bytes, np.uint8)
        if self.rank == root and payload is not None:
            received[:] = np.frombuffer(payload, np.uint8)
        self._meet(CollectiveGroup.broadcast, timeout_s, received, root)
        return received.tobytes()

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        self._meet(CollectiveGroup.barrier, self._timeout_s)

    def close(self) -> None:
        """Leaves the segment, and unlinks it where this object made it. A second close does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._group = None
        self._release_segment()

    def __enter__(self) -> "ShmCollectives":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _release_segment(self) -> None:
        self._segment.close()
        if self._is_owner:
            self._segment.unlink()

    def _meet(self, call: Any, timeout_s: float, *arguments: Any) -> None:
        if self._group is None:
            reason = "are closed" if self._is_closed else "have no group: rejoin in the present generation"
            raise ConfigurationError(f"the collectives {reason}")
        begun_s = time.monotonic()
        try:
            call(self._group, *arguments, int((begun_s + timeout_s) * 1e9))
        except MissingRanksError as error:
            raise _broken(*error.args, begun_s=begun_s) from error


def _write_frame(frame: npt.NDArray[np.uint8], payload: bytes | None) -> None:
    if payload is None:
        raise ConfigurationError("the root of a broadcast needs a payload")
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ConfigurationError(f"a payload of {len(payload)} bytes, at most {MAX_PAYLOAD_BYTES} can be broadcast")
    frame[:_LENGTH_BYTES] = np.frombuffer(len(payload).to_bytes(_LENGTH_BYTES, "little"), np.uint8)
    inline = payload[:_INLINE_BYTES]
    frame[_LENGTH_BYTES : _LENGTH_BYTES + len(inline)] = np.frombuffer(inline, np.uint8)


def _broken(what: str, missing: tuple[int, ...], generation: int, *, begun_s: float) -> FastDeployRLError:
    if not missing:
        return PeerLostError(f"{what}: a rank was lost; rejoin in the present generation")
    silent = DeadlineExceededError.waiting_for(
        f"{what} (generation {generation})",
        since_s=begun_s,
        missing=missing,
        hint="the ranks must form a group of a higher generation",
    )
    silent.missing = frozenset(missing)
    return silent
