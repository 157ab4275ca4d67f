"""A decode step as a CUDA graph of Paddle's. Has not run on a GPU: tests give it a stand-in for Paddle's class.

Owns the static buffers: a graph reads its inputs from, and writes its output to, the places that it was captured with.
Refuses to know what is computed. Invariant: of parameters and KV cache it has addresses alone and keeps nothing of them
alive, so that parking it is nothing to do.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

Tensor: TypeAlias = Any
"""A paddle.Tensor on the device."""


class Recorder(Protocol):
    """What paddle.device.cuda.graphs.CUDAGraph offers."""

    def capture_begin(self) -> None: ...
    def capture_end(self) -> None: ...
    def replay(self) -> None: ...
    def reset(self) -> None: ...


def paddle_recorder() -> Recorder:
    """Of the current device. Paddle has the class only where it was compiled for CUDA, and fails otherwise."""
    from paddle.device.cuda.graphs import CUDAGraph

    recorder: Recorder = CUDAGraph()
    return recorder


class CudaGraph:
    """Satisfies `graph_pool.Graph` for sequences of tensors as inputs and a tensor as output."""

    def __init__(
        self,
        inputs: Sequence[Tensor],
        compute: Callable[[Sequence[Tensor]], Tensor],
        new_recorder: Callable[[], Recorder] = paddle_recorder,
    ) -> None:
        """`inputs` become the static buffers: those of the longest step of this batch size (page tables padded, as the
        mask says), and here naming only such places in the KV cache as hold nothing, since the step runs once before it
        is captured."""
        self._inputs = list(inputs)
        compute(self._inputs)  # cuBLAS and its like make their handles at the first use, which no capture allows
        self._recorder = new_recorder()
        self._recorder.capture_begin()
        try:
            self._output: Tensor = compute(self._inputs)
        finally:
            self._recorder.capture_end()  # also after a failure: the stream would go on recording

    def replay(self, inputs: Sequence[Tensor]) -> Tensor:
        """The static output: the next replay overwrites it."""
        for static, value in zip(self._inputs, inputs, strict=True):
            static.copy_(value, False)
        self._recorder.replay()
        return self._output

    def park(self) -> None:
        """Bare addresses keep nothing alive."""

    def attach(self) -> None:
        """The addresses are those that were captured."""

    def close(self) -> None:
        """The graph's memory pool returns to Paddle's allocator."""
        self._recorder.reset()
        self._inputs, self._output = [], None
