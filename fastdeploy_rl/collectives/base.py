"""What tensor-parallel ranks need of each other.

The seam between engine code and whatever carries the bytes. Every rank makes the same calls in the same order with the
same sizes. A call that a peer misses ends at its deadline with DeadlineExceededError naming the missing ranks, on every
rank; one of a group that was advanced to a higher generation, because a rank was lost, ends at once with PeerLostError.
Either way the group is unusable from then on, until every rank rejoins in a higher generation.
"""

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


class Collectives(Protocol):
    @property
    def rank(self) -> int: ...

    @property
    def num_ranks(self) -> int: ...

    @property
    def generation(self) -> int:
        """Of the group that this rank joined last."""
        ...

    def rejoin(self, generation: int) -> None:
        """Leaves what is left of the group and joins that of `generation`."""

    def all_reduce(self, values: npt.NDArray[np.float32]) -> None:
        """Sum over the ranks, in place; bitwise equal on every rank. `values` is C-contiguous and writable."""

    def all_gather(self, own: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """[num_ranks, *own.shape]: everybody's `own`, in rank order; a fresh array."""

    def broadcast_bytes(self, payload: bytes | None, root: int, *, timeout_s: float) -> bytes:
        """The root's payload on every rank; the others pass None."""

    def barrier(self) -> None: ...

    def close(self) -> None: ...
