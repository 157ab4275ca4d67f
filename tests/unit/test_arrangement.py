"""Where tensors go in an arena: every source byte has exactly one place."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy_rl.errors import ConfigurationError, ManifestError
from fastdeploy_rl.memory.host_tensor import borrow
from fastdeploy_rl.plan.conventions import Convention, TensorRule, paddle_llama
from fastdeploy_rl.publish.arrangement import Arrangement, arrange
from fastdeploy_rl.version import WeightVersion


def _arrange(arrays: dict[str, np.ndarray], layout: str = "full", convention: Convention = paddle_llama) -> Arrangement:
    return arrange({name: borrow(array, name) for name, array in arrays.items()}, layout, convention)


def _along(axes: dict[str, int]) -> Convention:
    """The trainer's names, each cut along its axis."""
    return lambda name, shape: TensorRule(name, axes.get(name))


def _places(arrangement: Arrangement) -> dict[str, list[int]]:
    return {tensor.name: [piece.target_offset for piece in tensor.pieces] for tensor in arrangement.tensors}


def test_full_tensors_follow_each_other_at_multiples_of_512() -> None:
    arrangement = _arrange({"a": np.zeros(200, np.uint8), "b": np.zeros(600, np.uint8), "c": np.zeros(1, np.uint8)})
    assert _places(arrangement) == {"a": [0], "b": [512], "c": [1536]}
    assert arrangement.num_bytes == 2048


def test_shards_come_after_whole_tensors_rank_after_rank() -> None:
    arrays = {"s": np.zeros((4, 128), np.float32), "w": np.zeros(128, np.float32), "t": np.zeros((8, 128), np.float32)}
    arrangement = _arrange(arrays, "tp:2", _along({"s": 0, "t": 0}))
    assert _places(arrangement) == {"w": [0], "s": [512, 512 + 3072], "t": [512 + 1024, 512 + 4096]}


def test_llama_names_are_cut_along_their_own_axes() -> None:
    layer = "model.layers.0."
    arrays = {
        layer + "self_attn.q_proj.weight": np.zeros((4, 6), np.float32),
        layer + "self_attn.o_proj.weight": np.zeros((6, 4), np.float32),
        layer + "input_layernorm.weight": np.zeros(4, np.float32),
    }
    arrangement = _arrange(arrays, "tp:3")
    assert [(tensor.shard_axis, len(tensor.pieces)) for tensor in arrangement.tensors] == [(1, 3), (0, 3), (None, 1)]


def test_the_same_memory_twice_is_stored_once() -> None:
    embedding = np.zeros((8, 4), np.float32)
    arrangement = _arrange({"embed": embedding, "head": embedding, "copy": embedding.copy()})
    assert arrangement.aliases == {"head": "embed"}
    assert [tensor.name for tensor in arrangement.tensors] == ["embed", "copy"]


def test_the_same_memory_with_another_shape_or_cut_is_stored_twice() -> None:
    weight = np.zeros((4, 4), np.float32)
    assert _arrange({"a": weight, "b": weight.reshape(2, 8)}).aliases == {}
    assert _arrange({"a": weight, "b": weight}, "tp:2", _along({"a": 0, "b": 1})).aliases == {}


def test_empty_tensors_are_never_aliases_of_each_other() -> None:
    arrangement = _arrange({"a": np.zeros((0, 4), np.float32), "b": np.zeros((0, 4), np.float32)})
    assert arrangement.aliases == {}
    assert arrangement.num_bytes == 512


@pytest.mark.parametrize("layout", ["", "tp", "tp:0", "tp:-1", "tp:02", "tp:99999", "TP:2", "full ", None, 2])
def test_an_unknown_layout_is_refused(layout: str) -> None:
    with pytest.raises(ConfigurationError, match="layout must be 'full' or 'tp:N'"):
        _arrange({"a": np.zeros(2, np.float32)}, layout)


def test_an_axis_that_does_not_divide_is_refused_with_name_shape_and_number() -> None:
    with pytest.raises(ConfigurationError, match=r"'lm_head\.weight'.*tp:3.*axis 0 of shape \[8, 4\]"):
        _arrange({"lm_head.weight": np.zeros((8, 4), np.float32)}, "tp:3")


@pytest.mark.parametrize("axis", [2, -1])
def test_an_axis_that_the_tensor_does_not_have_is_refused(axis: int) -> None:
    with pytest.raises(ConfigurationError, match=rf"'a' cannot be sharded along axis {axis}"):
        _arrange({"a": np.zeros((2, 2), np.float32)}, "tp:2", _along({"a": axis}))


@pytest.mark.parametrize("name", ["", "n" * 513, "\ud800"])
def test_a_name_that_no_manifest_may_have_is_refused(name: str) -> None:
    with pytest.raises(ManifestError, match="name"):
        _arrange({name: np.zeros(2, np.float32)}).check(WeightVersion(1, 1))


def test_a_tensor_with_too_many_dimensions_is_refused_by_name() -> None:
    with pytest.raises(ManifestError, match="deep"):
        _arrange({"deep": np.zeros((1,) * 9, np.float32)}).check(WeightVersion(1, 1))


@given(
    shape=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    num_ranks=st.integers(1, 3),
    axis=st.integers(0, 3),
    dtype=st.sampled_from([np.uint8, np.float16, np.float32, np.int64]),
)
def test_pieces_carry_every_byte_of_every_shard_in_order(
    shape: list[int], num_ranks: int, axis: int, dtype: type
) -> None:
    axis %= len(shape)
    shape[axis] *= num_ranks
    array = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
    arrangement = _arrange({"a": array, "b": np.zeros(3, np.uint8)}, f"tp:{num_ranks}", _along({"a": axis}))
    arrangement.check(WeightVersion(1, 1))
    arena = np.zeros(arrangement.num_bytes, np.uint8)
    source = array.reshape(-1).view(np.uint8)
    tensor = next(tensor for tensor in arrangement.tensors if tensor.name == "a")
    for piece, shard in zip(tensor.pieces, np.split(array, num_ranks, axis), strict=True):
        for row in range(piece.rows):
            start = piece.source_offset + row * piece.source_stride
            target = piece.target_offset + row * piece.row_bytes
            arena[target : target + piece.row_bytes] = source[start : start + piece.row_bytes]
        placed = arena[piece.target_offset : piece.target_offset + piece.num_bytes].tobytes()
        assert placed == np.ascontiguousarray(shard).tobytes()
