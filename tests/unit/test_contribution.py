"""What several processes contribute to one version: united where it fits together, else refused by name."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy_rl import checksum
from fastdeploy_rl.errors import ConfigurationError, TrainerError
from fastdeploy_rl.manifest import Manifest, Segment
from fastdeploy_rl.memory.host_tensor import borrow
from fastdeploy_rl.plan.conventions import Convention, TensorRule, hugging_face
from fastdeploy_rl.publish.arrangement import Shard, arrange, in_arena
from fastdeploy_rl.publish.contribution import Contribution, unite
from fastdeploy_rl.version import WeightVersion

VERSION = WeightVersion(1, 1)
Shards = dict[str, Shard]


def _along(axis: int | None) -> Convention:
    return lambda name, shape: TensorRule(name, axis)


def _contribute(
    publisher: int,
    tensors: dict[str, np.ndarray],
    shards: Shards | None = None,
    layout: str = "full",
    convention: Convention = hugging_face,
) -> tuple[Contribution, np.ndarray]:
    """As a publisher does it, with numpy for the native copy; also the arena's bytes."""
    hosts = {name: borrow(tensor, name) for name, tensor in tensors.items()}
    arrangement = arrange(hosts, layout, convention, shards or {})
    arrangement.check(VERSION)
    arena = np.zeros(arrangement.num_bytes, np.uint8)
    sums = []
    for tensor in arrangement.tensors:
        source = np.frombuffer(tensor.host.buffer, np.uint8)
        sums.append([_copy(source, arena, tensor.num_bytes, piece) for piece in tensor.pieces])
    segment = Segment("shm", f"arena{publisher}", arena.nbytes, 0, 2, publisher)
    return arrangement.contribution(publisher, [segment], in_arena, sums), arena


def _copy(source: np.ndarray, arena: np.ndarray, total: int, piece: Any) -> checksum.Fletcher4:
    share = checksum.ZERO
    for row in range(piece.rows):
        start = piece.source_offset + row * piece.source_stride
        data = source[start : start + piece.row_bytes]
        target = piece.target_offset + row * piece.row_bytes
        arena[target : target + piece.row_bytes] = data
        place = piece.place_offset + row * piece.place_stride
        share = checksum.add(share, checksum.contribution(data.tobytes(), place, total))
    return share


def _whole(manifest: Manifest, arenas: list[np.ndarray], name: str, dtype: np.dtype[Any]) -> np.ndarray:
    tensor = next(tensor for tensor in manifest.tensors if tensor.name == name)
    pieces = []
    for part in tensor.parts:
        shape = list(tensor.shape)
        if tensor.shard_axis is not None:
            shape[tensor.shard_axis] = part.stop - part.start
        data = arenas[part.segment][part.offset : part.offset + tensor.part_bytes(part)]
        pieces.append(data.view(dtype).reshape(shape))
    return np.concatenate(pieces, tensor.shard_axis or 0) if tensor.shard_axis is not None else pieces[0]


@given(
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    axis=st.integers(0, 2),
    num_ranks=st.integers(0, 3),
    cuts=st.lists(st.floats(0, 1), max_size=3),
    dtype=st.sampled_from([np.uint8, np.float16, np.float32, np.int64]),
    is_turned=st.booleans(),
)
def test_shards_of_any_cut_give_the_whole_tensor_and_its_checksum(
    shape: list[int], axis: int, num_ranks: int, cuts: list[float], dtype: type, is_turned: bool
) -> None:
    axis %= len(shape)
    shape[axis] *= max(num_ranks, 1)
    size = shape[axis]
    array = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
    bounds = [0, *sorted(round(cut * size) for cut in cuts), size]
    rule = TensorRule("w", axis, is_transposed=is_turned and len(shape) > 1)
    found = [
        _contribute(
            index,
            {"w": np.ascontiguousarray(array.take(range(start, stop), axis))},
            {"w": Shard(axis, start, stop, size)},
            f"tp:{num_ranks}" if num_ranks else "full",
            lambda name, shape: rule,
        )
        for index, (start, stop) in enumerate(itertools.pairwise(bounds))
    ]
    manifest = unite(VERSION, [contribution for contribution, _ in found])
    (tensor,) = manifest.tensors
    assert (tensor.shape, tensor.shard_axis, tensor.is_transposed) == (tuple(shape), axis, rule.is_transposed)
    assert tensor.checksum == checksum.of_bytes(array.tobytes()).hex()
    assert _whole(manifest, [arena for _, arena in found], "w", array.dtype).tobytes() == array.tobytes()


W = np.arange(96, dtype=np.float32).reshape(8, 12)


def _rows(start: int, stop: int, size: int = 8) -> tuple[dict[str, np.ndarray], Shards]:
    return {"w": W[start:stop]}, {"w": Shard(0, start, stop, size)}


def test_equal_shards_of_replicas_are_stored_once() -> None:
    found = [_contribute(index, *_rows(*span)) for index, span in enumerate([(0, 4), (4, 8), (0, 4), (4, 8)])]
    (tensor,) = unite(VERSION, [contribution for contribution, _ in found]).tensors
    assert [(part.segment, part.start, part.stop) for part in tensor.parts] == [(0, 0, 4), (1, 4, 8)]
    assert tensor.checksum == checksum.of_bytes(W.tobytes()).hex()


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (({"v": W}, {}), ({"v": W + 1}, {}), "'v' has different values on part 0 and on part 1"),
        (_rows(0, 4), ({"w": W[:4] + 1}, {"w": Shard(0, 0, 4, 8)}), r"'w' \[0, 4\) of axis 0 has different values"),
        (_rows(0, 4), _rows(5, 8), r"'w': nobody has \[4, 5\) of axis 0; part 1 publishes \[5, 8\)"),
        (_rows(0, 4), _rows(4, 7), r"'w': nobody has \[7, 8\) of axis 0"),
        (_rows(0, 5), _rows(4, 8), r"'w': there is more than one owner of \[4, 5\) of axis 0"),
        (_rows(0, 4), _rows(4, 8, 9), r"'w' is F32 \[8, 12\] cut along axis 0 on part 0 and F32 \[9, 12\]"),
        (_rows(0, 4), ({"w": W}, {}), "'w' is F32 .* cut along axis 0 on part 0 and F32 .* whole on part 1"),
        (({"w": W}, {}), ({"w": W.astype(np.float64)}, {}), "'w' is F32 .* on part 0 and F64"),
        (({"v": W, "w": W + 1}, {}), ({"w": (X := W + 1), "v": X}, {}), "'v' is the same tensor as 'w' on part 1"),
    ],
)
def test_what_does_not_fit_together_is_refused_by_name(first: Any, second: Any, text: str) -> None:
    contributions = [_contribute(index, *part)[0] for index, part in enumerate((first, second))]
    with pytest.raises(TrainerError, match=text):
        unite(VERSION, contributions)


def test_parts_of_different_layouts_are_refused() -> None:
    contributions = [
        _contribute(index, {name: W}, layout=layout)[0]
        for index, (name, layout) in enumerate([("v", "full"), ("w", "tp:2")])
    ]
    with pytest.raises(TrainerError, match="different layouts: full, tp:2"):
        unite(VERSION, contributions)


def test_a_tied_name_may_be_a_tensor_of_its_own_elsewhere_if_it_is_equal() -> None:
    contributions = [_contribute(0, {"v": W.copy()})[0], _contribute(1, {"w": W, "v": W})[0]]
    manifest = unite(VERSION, contributions)
    assert [tensor.name for tensor in manifest.tensors] == ["v", "w"]
    assert manifest.aliases == {}


@pytest.mark.parametrize(
    ("shard", "text"),
    [
        (Shard(2, 0, 8, 8), "no shard along axis 2"),
        (Shard(0, 0, 7, 8), r"is not \[0, 7\) of 8 along axis 0"),
        (Shard(0, 1, 9, 8), r"is not \[1, 9\) of 8"),
        (Shard(0, -8, 0, 8), r"is not \[-8, 0\) of 8"),
    ],
)
def test_a_shard_that_is_not_what_it_says_is_refused_by_name(shard: Shard, text: str) -> None:
    with pytest.raises(TrainerError, match=f"'w' .*{text}"):
        _contribute(0, {"w": W}, {"w": shard})


def test_shards_of_a_tensor_that_is_not_published_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="shards name 'v'"):
        _contribute(0, {"w": W}, {"v": Shard(0, 0, 8, 8)})


@pytest.mark.parametrize("shard", [(0, 0, 8, 8), Shard(0, 0.0, 8, 8), Shard(0, np.int64(0), 8, 8), None])  # type: ignore[arg-type]
def test_a_shard_that_is_none_is_refused_by_name(shard: Any) -> None:
    with pytest.raises(ConfigurationError, match="shard of 'w' must be a Shard of four integers"):
        _contribute(0, {"w": W}, {"w": shard})


def test_a_convention_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="must give a TensorRule with a name for 'w', got None"):
        _contribute(0, {"w": W}, convention=lambda name, shape: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(ConfigurationError, match="'b' cannot be transposed"):
        _contribute(0, {"b": W[0]}, convention=lambda name, shape: TensorRule(name, is_transposed=True))


def test_the_same_memory_turned_and_not_is_stored_twice() -> None:
    both = {"a": W, "b": W}
    contribution, _ = _contribute(0, both, convention=lambda name, shape: TensorRule(name, None, name == "a"))
    assert len(contribution.tensors) == 2
    contribution, _ = _contribute(0, both, convention=lambda name, shape: TensorRule(name, None, True))
    assert contribution.aliases == {"b": "a"}
