"""Every layout, tensor and dtype through real publishers and engines: A -> B -> A, bitwise.

One model holds all kinds of tensors at once, so that few engines cover the matrix. The truth is what numpy makes of the
logical tensors: on one side what the trainer stores, on the other what each rank must hold.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import paddle
import pytest

from fastdeploy_rl.checksum import of_bytes
from fastdeploy_rl.coverage import Coverage, FusedPart, ParameterSpec
from fastdeploy_rl.dtypes import DTYPES
from fastdeploy_rl.engines.numpy.runner import NumpyModel, random_weights
from fastdeploy_rl.manifest import Fused, Run
from fastdeploy_rl.plan.conventions import TensorRule
from fastdeploy_rl.publish.publisher import WeightPublisher
from fastdeploy_rl.update.client import BoardClient
from tests.process.numpy_engine import NumpyEngine

Weights = dict[str, np.ndarray]
LONG = "n" * 511


@dataclass
class Matrix:
    """A model, what its trainer's tensors are to it, and how the trainer stores its weights."""

    specs: list[ParameterSpec] = field(default_factory=list)
    rules: dict[str, TensorRule] = field(default_factory=dict)
    stored: dict[str, Callable[[Weights], np.ndarray]] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)

    def hold(self, name: str, dtype: str, shape: tuple[int, ...], axis: int | None, **more: Any) -> None:
        self.specs.append(ParameterSpec(name, dtype, shape, axis, **more))

    def store(self, rule: TensorRule, dtype: str, values: Callable[[Weights], np.ndarray]) -> None:
        self.rules[rule.name], self.stored[rule.name], self.dtypes[rule.name] = rule, values, dtype

    def alike(self, name: str, dtype: str, shape: tuple[int, ...], axis: int | None) -> None:
        self.hold(name, dtype, shape, axis)
        self.store(TensorRule(name, axis), dtype, lambda weights: weights[name])

    @property
    def model(self) -> NumpyModel:
        return NumpyModel(tuple(self.specs))

    def tensors(self, weights: Weights, *, is_reversed: bool) -> dict[str, Any]:
        """As the trainer publishes them, perhaps in another order."""
        arrays = self.arrays(weights)
        names = list(reversed(arrays)) if is_reversed else list(arrays)
        return {name: NOT_OF_NUMPY.get(self.dtypes[name], np.asarray)(arrays[name]) for name in names}

    def arrays(self, weights: Weights) -> Weights:
        return {name: np.array(values(weights), order="C") for name, values in self.stored.items()}


def as_bf16(bits: np.ndarray) -> "paddle.Tensor":
    if not bits.size:
        return paddle.zeros(bits.shape, "bfloat16")
    return paddle.to_tensor(bits.reshape(-1).view(np.int16)).view("bfloat16").reshape(bits.shape)


NOT_OF_NUMPY: dict[str, Callable[[np.ndarray], Any]] = {
    "BF16": as_bf16,
    "F8_E4M3": lambda array: array.view(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": lambda array: array.view(ml_dtypes.float8_e5m2),
}
"""Types whose arrays are plain integers here."""


# --- the kinds of tensors, each in every dtype


def add_plain(matrix: Matrix, dtype: str) -> None:
    """Whole ones and slices of rows and columns. Rows of odd length: slices
    of small types begin inside a 32-bit word, and at odd bytes."""
    matrix.alike(f"{dtype}.rows", dtype, (6, 7), 0)
    matrix.alike(f"{dtype}.columns", dtype, (5, 18), 1)
    matrix.alike(f"{dtype}.middle", dtype, (3, 6, 5), 1)
    matrix.alike(f"{dtype}.vector", dtype, (6,), 0)
    matrix.alike(f"{dtype}.odd", dtype, (13,), None)
    matrix.alike(f"{dtype}.scalar", dtype, (), None)
    matrix.alike(f"{dtype}.empty", dtype, (0, 4), None)
    matrix.alike(f"{dtype}.empty rows", dtype, (0, 6), 0)
    matrix.alike(f"{dtype}.层.重み.🔥", dtype, (6, 3), 0)
    matrix.alike(LONG + dtype[0] if dtype in ("F32", "BF16") else f"{dtype}.short", dtype, (3, 12), 1)


TURNED = {"rectangle": (6, 18), "square": (12, 12), "tall": (18, 6)}


def add_transposed(matrix: Matrix, dtype: str) -> None:
    """[out, in] on the trainer's side, on the engine's, on both; a square one shows in nothing but its values."""
    for name, shape in TURNED.items():
        turned, held, both = (f"{dtype}.{name}.{kind}" for kind in ("turned", "held", "both"))
        matrix.hold(turned, dtype, shape, 1)
        matrix.store(TensorRule(turned, 0, is_transposed=True), dtype, lambda weights, name=turned: weights[name].T)
        matrix.hold(held, dtype, shape[::-1], 0, is_transposed=True)
        matrix.store(TensorRule(held, 1), dtype, lambda weights, name=held: weights[name])
        matrix.hold(both, dtype, shape[::-1], 1, is_transposed=True)
        matrix.store(TensorRule(both, 1, is_transposed=True), dtype, lambda weights, name=both: weights[name].T)


GROUPS, PER_GROUP, HEAD, HIDDEN = 6, 2, 3, 5
SIZES = {"q": GROUPS * PER_GROUP * HEAD, "k": GROUPS * HEAD, "v": GROUPS * HEAD}


def add_fused(matrix: Matrix, dtype: str) -> None:
    """q, k and v: fused by the trainer (in groups, or one after the other), by the engine, by both."""
    for kind in ("split", "blocks", "groups"):
        for is_held_fused in (False, True):
            add_attention(matrix, f"{dtype}.{kind}.{'fused' if is_held_fused else 'split'}", dtype, kind, is_held_fused)
    add_attention(matrix, f"{dtype}.turned groups", dtype, "groups", True, is_transposed=True)


def add_attention(
    matrix: Matrix, name: str, dtype: str, kind: str, is_held_fused: bool, *, is_transposed: bool = False
) -> None:
    names = {part: f"{name}.{part}" for part in SIZES}
    if is_held_fused:
        parts = tuple(FusedPart(names[part], size) for part, size in SIZES.items())
        matrix.hold(f"{name}.qkv", dtype, (HIDDEN, sum(SIZES.values())), 1, fused=parts, fused_axis=1)
    else:
        for part, size in SIZES.items():
            matrix.hold(names[part], dtype, (HIDDEN, size), 1)
    if kind == "split":
        for each in names.values():
            matrix.store(TensorRule(each, 1), dtype, lambda weights, each=each: weights[each])
        return
    order = [(part, 0, size) for part, size in SIZES.items()]
    if kind == "groups":
        width = {"q": PER_GROUP * HEAD, "k": HEAD, "v": HEAD}
        order = [(part, g * width[part], (g + 1) * width[part]) for g in range(GROUPS) for part in "qkv"]
    runs = tuple(Run(names[part], start, stop) for part, start, stop in order)

    def fused(weights: Weights) -> np.ndarray:
        whole = np.concatenate([weights[names[part]][:, start:stop] for part, start, stop in order], axis=1)
        return whole.T if is_transposed else whole

    axis = 0 if is_transposed else 1
    matrix.store(TensorRule(f"{name}.stored", axis, is_transposed, Fused(axis, runs)), dtype, fused)


TOKENS = 7


def add_vocabulary(matrix: Matrix, dtype: str) -> None:
    """Padded more by the engine, more by the trainer, and not at all by either; one of them with a tied head."""
    for name, stored_rows, held_rows in [("engine pads", 12, 18), ("trainer pads", 18, 12), ("none pads", TOKENS, 12)]:
        each = f"{dtype}.{name}"
        matrix.hold(each, dtype, (held_rows, 3), 0, vocab_rows=TOKENS)
        axis = None if stored_rows == TOKENS else 0
        matrix.store(
            TensorRule(each, axis), dtype, lambda weights, name=each, rows=stored_rows: filled(weights[name], rows)
        )
    tied_to = f"{dtype}.engine pads"
    matrix.hold(f"{dtype}.head", dtype, (18, 3), 0, coverage=Coverage.TIED, tied_to=tied_to, vocab_rows=TOKENS)


def filled(values: np.ndarray, rows: int) -> np.ndarray:
    """Rows that carry no token, with something in them that must go nowhere."""
    return np.concatenate([values, np.ones((rows - len(values), *values.shape[1:]), values.dtype)])


def everything() -> Matrix:
    matrix = Matrix()
    for dtype in DTYPES:
        for add in (add_plain, add_transposed, add_fused, add_vocabulary):
            add(matrix, dtype)
    return matrix


EVERYTHING = everything()


# --- the matrix


def check_there_and_back(
    matrix: Matrix, channel: Path, num_ranks: int, apply_mode: str, layouts: tuple[str, ...]
) -> dict[str, list[dict[str, str]]]:
    """Updates a, b, a for each layout; returns by layout what each rank could not alias."""
    a, b = random_weights(matrix.model, 1), random_weights(matrix.model, 2)
    not_aliased = {}
    step = 0
    with (
        NumpyEngine(matrix.model, channel=channel, num_ranks=num_ranks, apply_mode=apply_mode, update_s=20.0) as engine,
        WeightPublisher(channel) as publisher,
        BoardClient(engine.port) as client,
    ):
        for layout in layouts:
            for weights in (a, b, a):
                step += 1
                published = publisher.publish(
                    matrix.tensors(weights, is_reversed=weights is b),
                    step=step,
                    layout=layout,
                    convention=lambda name, shape: matrix.rules[name],
                )
                report = client.update(published.version)
                assert report.outcome == "done"
                for rank in range(num_ranks):
                    found, expected = engine.dump(rank), engine.expected(weights, rank)
                    assert [name for name in expected if found[name] != expected[name]] == []
                    assert found.keys() == expected.keys()
                sums = {name: of_bytes(array.tobytes()).hex() for name, array in matrix.arrays(weights).items()}
                assert report.receipt.read == sums
                assert report.receipt.content_digest == published.manifest.content_digest
                not_aliased[layout] = [rank.not_aliased for rank in report.ranks]
            assert client.receipt(recompute=True) == report.receipt
    return not_aliased


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("apply_mode", ["alias", "copy"])
def test_every_layout_tensor_and_dtype_there_and_back(tmp_path: Path, num_ranks: int, apply_mode: str):
    layouts = ("full", f"tp:{num_ranks}")
    not_aliased = check_there_and_back(EVERYTHING, tmp_path / "channel", num_ranks, apply_mode, layouts)
    if apply_mode == "copy":
        assert all(reasons == {} for ranks in not_aliased.values() for reasons in ranks)
        return
    for reasons in not_aliased[f"tp:{num_ranks}"]:
        assert {reasons.get(name, "") for name in KEPT_IN_PLACE} == {""}
        assert {reasons[f"I16.{kind}.{side}"] for kind in TURNED for side in ("turned", "held")} == {"transposed"}
    padded = [reasons.get("U8.engine pads", "") for reasons in not_aliased["full"]]
    assert padded[-1] == "padded with rows of zero"


KEPT_IN_PLACE = [f"{dtype}.{kind}.both" for dtype in DTYPES for kind in TURNED] + [
    f"{dtype}.{kind}"
    for dtype in DTYPES
    for kind in ("rows", "columns", "middle", "odd", "scalar", "empty", "层.重み.🔥")
]
"""What trainer and engine hold alike, once it is cut for the engine's ranks."""


@pytest.mark.parametrize("apply_mode", ["alias", "copy"])
def test_one_tensor_of_all_the_bytes(tmp_path: Path, apply_mode: str):
    matrix = Matrix()
    matrix.hold("w", "BF16", (511, 1536), 1)
    matrix.store(TensorRule("w", 0, is_transposed=True), "BF16", lambda weights: weights["w"].T)
    not_aliased = check_there_and_back(matrix, tmp_path / "channel", 3, apply_mode, ("full", "tp:3"))
    assert not_aliased["full"] == [{"w": "transposed"} if apply_mode == "alias" else {}] * 3


@pytest.mark.parametrize(("apply_mode", "num_ranks"), [("alias", 1), ("copy", 2)])
def test_five_thousand_small_tensors(tmp_path: Path, apply_mode: str, num_ranks: int):
    matrix = Matrix()
    kinds: list[tuple[tuple[int, ...], int | None]] = [((2, 3), 0), ((4,), None), ((3, 2, 1), 1), ((), None)]
    for index in range(5000):
        matrix.alike(f"layers.{index}.weight", ("F32", "F16", "U8")[index % 3], *kinds[index % 4])
    check_there_and_back(matrix, tmp_path / "channel", num_ranks, apply_mode, (f"tp:{num_ranks}",))
