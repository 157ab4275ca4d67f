"""A captured decode step where there is no device that could capture one.

Owns the likeness: as a device's graph keeps the addresses it was captured with, this one keeps the very buffers, and
computes on them whatever is bound since. Refuses to know what is computed. Invariant: replayed under other addresses it
gives what the old memory gives, to the bit; parked it holds no buffer.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

from fastdeploy_rl.errors import LifecycleError

Buffers = TypeVar("Buffers")
Inputs = TypeVar("Inputs")
Outputs = TypeVar("Outputs")


class CpuGraph(Generic[Buffers, Inputs, Outputs]):
    """Satisfies `graph_pool.Graph`. A device's graph knows bare addresses and outlives what lies there; here buffers
    are objects that keep their memory, so that a parked graph lets go of them and takes those up again that lie at the
    same addresses."""

    def __init__(self, bound_buffers: Callable[[], Buffers], compute: Callable[[Inputs, Buffers], Outputs]) -> None:
        """`bound_buffers`: what is bound at the call; asked now and at each `attach`."""
        self._bound_buffers = bound_buffers
        self._compute = compute
        self._buffers: Buffers | None = bound_buffers()

    def replay(self, inputs: Inputs) -> Outputs:
        """LifecycleError while parked."""
        if self._buffers is None:
            raise LifecycleError("this graph is parked: it has no memory to compute on")
        return self._compute(inputs, self._buffers)

    def park(self) -> None:
        self._buffers = None

    def attach(self) -> None:
        self._buffers = self._bound_buffers()

    def close(self) -> None:
        self._buffers = None
