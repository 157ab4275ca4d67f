"""Decode steps as Paddle's CUDA graphs: filled memory needs no new graph, other memory does, old memory finds its own.

Not run on a GPU so far."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from fastdeploy_rl.engines.embedded.address_ledger import Address, AddressLedger
from fastdeploy_rl.engines.embedded.cuda_graphs import CudaGraph
from fastdeploy_rl.engines.embedded.graph_pool import GraphPool
from fastdeploy_rl.errors import StaleGraphError

pytestmark = pytest.mark.gpu

WIDTH = 64
BATCH = 4


class Model:
    """One weight, whose graphs are kept as an engine keeps them. Integers in float32, so that results are exact."""

    def __init__(self, paddle: Any) -> None:
        self.paddle = paddle
        self.weight = self.values(1)
        self.pool = GraphPool(self._capture, [BATCH])
        self.note_bound()
        assert self.pool.recapture() == 1

    def values(self, seed: int) -> Any:
        return self.paddle.to_tensor(np.random.default_rng(seed).integers(-8, 8, [WIDTH, WIDTH]).astype("float32"))

    def note_bound(self) -> None:
        pointer = int(self.weight.data_ptr())
        self.pool.note_bound(AddressLedger([Address("weight", pointer, WIDTH * WIDTH * 4, "F32")]))

    def step(self, seed: int) -> np.ndarray:
        return self._run(seed, lambda inputs: self.pool.replay(BATCH, inputs))

    def expected(self, seed: int) -> np.ndarray:
        return self._run(seed, self._compute)

    def _run(self, seed: int, compute: Callable[[list[Any]], Any]) -> np.ndarray:
        inputs = np.random.default_rng(seed).integers(-8, 8, [BATCH, WIDTH]).astype("float32")
        return np.array(compute([self.paddle.to_tensor(inputs)]).numpy())

    def _capture(self, batch_size: int) -> CudaGraph:
        return CudaGraph([self.paddle.zeros([batch_size, WIDTH])], self._compute)

    def _compute(self, inputs: Any) -> Any:
        return self.paddle.matmul(inputs[0], self.weight)


@pytest.fixture
def model(paddle: Any) -> Iterator[Model]:
    with paddle.no_grad():
        model = Model(paddle)
        yield model
        model.pool.drop()


def test_weights_that_are_filled_in_place_need_no_new_graph(model: Model) -> None:
    pointer = model.weight.data_ptr()
    for seed in range(2, 6):
        model.weight.copy_(model.values(seed), True)
        model.note_bound()
        assert model.pool.recapture() == 0
        np.testing.assert_array_equal(model.step(seed), model.expected(seed))
    assert model.weight.data_ptr() == pointer
    assert model.pool.num_captured == 1


def test_weights_elsewhere_make_graphs_stale_until_they_are_captured_again(model: Model) -> None:
    first, second = model.weight, model.values(2)
    model.weight = second
    model.note_bound()
    with pytest.raises(StaleGraphError, match="weight"):
        model.step(1)
    assert model.pool.recapture() == 1
    np.testing.assert_array_equal(model.step(1), model.expected(1))
    model.weight = first
    model.note_bound()
    assert model.pool.recapture() == 0
    np.testing.assert_array_equal(model.step(1), model.expected(1))
    assert model.pool.num_captured == 2


def test_a_capture_that_fails_leaves_a_stream_that_computes(model: Model) -> None:
    calls = 0

    def fails_when_captured(inputs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise ValueError("no such layer")
        return inputs[0] + 1

    with pytest.raises(ValueError, match="no such layer"):
        CudaGraph([model.paddle.zeros([1])], fails_when_captured)
    np.testing.assert_array_equal(model.step(3), model.expected(3))
