"""Parameters of a Paddle model on a device, filled in place from host memory as FastDeploy's are: addresses and graphs
stay, what is there is read back, and letting them go returns their memory.

Not run on a GPU so far."""

import math
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from fastdeploy_rl._native import Mapping
from fastdeploy_rl.coverage import Coverage
from fastdeploy_rl.dtypes import itemsize
from fastdeploy_rl.errors import ChecksumMismatchError
from fastdeploy_rl.memory.tensor_view import TensorView

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

from gpu_check_driver import PlainDriver
from gpu_check_process import SkippedError

pytestmark = pytest.mark.gpu

ALIGNMENT = 512
LARGE = 32 << 20
"""Values of each of two matrices that are large enough for memory of their own in Paddle's allocator."""

Views = dict[str, TensorView]


class Filled(NamedTuple):
    """A model on device 0 and the weights of it, with nothing bound."""

    model: Any
    weights: Any

    def contents(self) -> dict[str, bytes]:
        return {name: bytes(parameter.numpy().tobytes()) for name, parameter in self.model.state_dict().items()}


def filled_model(paddle: Any, num_values: int = 1 << 12) -> Filled:
    """In two dtypes, one parameter of a single value."""
    from fastdeploy_rl.engines.fastdeploy.model_weights import ModelWeights

    model = paddle.nn.Layer()
    shapes = {"embedding": [num_values // 64, 64], "head": [64, num_values // 64], "norm": [64], "scale": [1]}
    for name, shape in shapes.items():
        dtype = "bfloat16" if name in {"embedding", "head"} else "float32"
        model.add_parameter(name, model.create_parameter(shape, dtype=dtype))
    return Filled(model, ModelWeights(model, 0, 1))


def version(weights: Any, seed: int) -> Views:
    """Other values of every parameter, in host memory; small enough to be finite as BF16's bits too."""
    specs = [spec for spec in weights.specs if spec.coverage is Coverage.UPDATED]
    sizes = [-(-math.prod(spec.shape) * itemsize(spec.dtype) // ALIGNMENT) * ALIGNMENT for spec in specs]
    mapping, random = Mapping.private(sum(sizes)), np.random.default_rng(seed)
    views = {}
    for spec, offset in zip(specs, accumulate(sizes, initial=0), strict=False):
        view = views[spec.name] = TensorView(mapping, offset, spec.dtype, spec.shape)
        view.numpy()[...] = random.integers(0, 0x7F00, spec.shape, np.uint16)
    return views


def contents(views: Views) -> dict[str, bytes]:
    return {name: view.numpy().tobytes() for name, view in views.items()}


def test_every_fill_leaves_parameters_where_they_are(paddle: Any) -> None:
    filled = filled_model(paddle)
    before = dict(filled.weights.addresses())
    for seed in range(1, 5):
        views = version(filled.weights, seed)
        filled.weights.bind(views)
        filled.weights.verify_bound()
        assert filled.contents() == contents(views)
        assert dict(filled.weights.addresses()) == before
    assert len(set(before.values())) == len(before)


def test_a_value_that_changed_on_the_device_is_found_and_named(paddle: Any) -> None:
    filled = filled_model(paddle)
    filled.weights.bind(version(filled.weights, 1))
    with paddle.no_grad():
        norm = filled.model.state_dict()["norm"]
        norm.copy_(norm + 1, True)
    with pytest.raises(ChecksumMismatchError, match="norm"):
        filled.weights.verify_bound()
    filled.weights.bind(version(filled.weights, 2))
    filled.weights.verify_bound()


def test_a_graph_that_was_captured_before_a_fill_computes_with_what_was_filled_in(paddle: Any) -> None:
    from fastdeploy_rl.engines.embedded.cuda_graphs import CudaGraph

    filled = filled_model(paddle)
    filled.weights.bind(version(filled.weights, 1))
    norm, zeros = filled.model.state_dict()["norm"], paddle.zeros([64])
    with paddle.no_grad():
        graph = CudaGraph([paddle.zeros([64])], lambda inputs: inputs[0] + norm)
        for seed in (2, 3):
            views = version(filled.weights, seed)
            filled.weights.bind(views)
            np.testing.assert_array_equal(graph.replay([zeros]).numpy(), views["norm"].numpy())
        graph.close()


def test_parameters_that_are_let_go_return_their_memory_and_come_back(paddle: Any) -> None:
    """Sleep and wake up: the figures are the driver's, of the whole device."""
    filled = filled_model(paddle, LARGE)
    views = version(filled.weights, 1)
    filled.weights.bind(views)
    num_bytes = sum(view.num_bytes for view in views.values())
    with PlainDriver(0) as driver:
        awake = _free_bytes(paddle, driver)
        filled.weights.unbind()
        asleep = _free_bytes(paddle, driver)
        filled.weights.bind(views)
        awake_again = _free_bytes(paddle, driver)
    print(f"free bytes: {awake} awake, {asleep} asleep, {awake_again} awake again; weights {num_bytes}")
    assert asleep - awake >= num_bytes * 9 // 10
    assert asleep - awake_again >= num_bytes * 9 // 10
    filled.weights.verify_bound()
    assert filled.contents() == contents(views)


def _free_bytes(paddle: Any, driver: PlainDriver) -> int:
    paddle.device.synchronize()
    paddle.device.cuda.empty_cache()
    try:
        return driver.num_free_bytes()
    except SkippedError as error:
        pytest.skip(str(error))
