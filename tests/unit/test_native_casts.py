"""Casts among F32, F16 and BF16, for all halves and for floats at every tie, with every set of kernels.

The references are numpy's float16 and, for BF16, integer arithmetic on the bits of a float32."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fastdeploy_rl._native import Region, transfer
from tests.unit.native_levels import kernels as kernels

HALVES = np.arange(2**16, dtype=np.uint16)
Halves = npt.NDArray[np.uint16]
Words = npt.NDArray[np.uint32]


def cast(source: npt.NDArray[Any], how: str) -> npt.NDArray[Any]:
    """The bits of all values after the cast."""
    target = np.zeros(source.size, np.uint32 if how.endswith("_F32") else np.uint16)
    geometry: dict[str, Any] = {"source_offset": 0, "source_stride": 0, "rows": 1, "row_bytes": source.nbytes}
    transfer([Region(source=source, target=target, cast=how, **geometry)], 1)
    return target


def is_nan_f16(halves: Halves) -> npt.NDArray[np.bool_]:
    return (halves & 0x7FFF) > 0x7C00


def is_nan_f32(bits: Words) -> npt.NDArray[np.bool_]:
    return (bits & 0x7FFFFFFF) > 0x7F800000


def f32_of_f16(halves: Halves) -> Words:
    """numpy's value; a NaN keeps sign and payload and is quiet."""
    nan = (halves.astype(np.uint32) & 0x8000) << 16 | 0x7FC00000 | (halves.astype(np.uint32) & 0x3FF) << 13
    return np.where(is_nan_f16(halves), nan, halves.view(np.float16).astype(np.float32).view(np.uint32))


def f16_of_f32(bits: Words) -> Halves:
    nan = (bits >> 16 & 0x8000) | 0x7E00 | (bits >> 13 & 0x3FF)
    finite = np.where(is_nan_f32(bits), 0, bits).astype(np.uint32)
    with np.errstate(over="ignore", under="ignore"):
        rounded = finite.view(np.float32).astype(np.float16).view(np.uint16)
    return np.where(is_nan_f32(bits), nan, rounded).astype(np.uint16)


def bf16_of_f32(bits: Words) -> Halves:
    below, rest = bits >> 16, bits & 0xFFFF
    rounded = below + ((rest > 0x8000) | ((rest == 0x8000) & (below & 1 == 1)))
    return np.where(is_nan_f32(bits), below | 0x40, rounded).astype(np.uint16)


def f32_of_bf16(halves: Halves) -> Words:
    return halves.astype(np.uint32) << 16


def floats() -> Words:
    """Random bits, and around each F16: the value, the tie above it, and the floats beside both."""
    noise = np.random.default_rng(3).integers(0, 2**32, 100_003, dtype=np.uint32)
    values = f32_of_f16(HALVES[:0x7C01]).view(np.float32).astype(np.float64)
    values[-1] = 65536.0  # where the next F16 would stand
    ties = ((values[1:] + values[:-1]) / 2).astype(np.float32).view(np.uint32)
    near = np.concatenate([values.astype(np.float32).view(np.uint32), ties])
    around = np.concatenate([near, near + 1, near[near > 0] - 1])
    return np.concatenate([noise, around, around | 0x80000000]).astype(np.uint32)


def test_every_f16_widens_as_numpy_widens_it() -> None:
    np.testing.assert_array_equal(cast(HALVES, "F16_F32"), f32_of_f16(HALVES))


def test_every_f16_survives_the_way_to_float32_and_back() -> None:
    back = cast(cast(HALVES, "F16_F32"), "F32_F16")
    np.testing.assert_array_equal(back, np.where(is_nan_f16(HALVES), HALVES | 0x200, HALVES))


def test_floats_round_to_the_nearest_f16_ties_to_even() -> None:
    bits = floats()
    np.testing.assert_array_equal(cast(bits, "F32_F16"), f16_of_f32(bits))


def test_floats_round_to_the_nearest_bf16_ties_to_even() -> None:
    bits = np.concatenate([floats(), HALVES.astype(np.uint32) << 16 | 0x8000])
    np.testing.assert_array_equal(cast(bits, "F32_BF16"), bf16_of_f32(bits))


def test_every_f16_becomes_the_nearest_bf16() -> None:
    np.testing.assert_array_equal(cast(HALVES, "F16_BF16"), bf16_of_f32(f32_of_f16(HALVES)))


def test_every_bf16_becomes_the_nearest_f16_or_infinity() -> None:
    np.testing.assert_array_equal(cast(HALVES, "BF16_F16"), f16_of_f32(f32_of_bf16(HALVES)))


@pytest.mark.parametrize(
    ("bits", "half"),
    [
        (0x477FEFFF, 0x7BFF),  # just below the tie with 2^16: the largest F16
        (0x477FF000, 0x7C00),  # 65520, the tie itself: infinity
        (0xFF800000, 0xFC00),  # -infinity
        (0x33000000, 0x0000),  # 2^-25, half of the least F16: the tie goes to zero
        (0x33000001, 0x0001),
        (0xB3000001, 0x8001),
        (0x38800000, 0x0400),  # 2^-14, the least normal F16
        (0x387FFFFF, 0x0400),  # the largest float below it rounds up to it
        (0x00000001, 0x0000),  # a subnormal float32
        (0x80000000, 0x8000),  # -0
        (0x7F800001, 0x7E00),  # signalling NaN whose payload lies in the lost bits
        (0xFFFFFFFF, 0xFFFF),
    ],
)
def test_special_floats_become_the_f16_that_ieee_says(bits: int, half: int) -> None:
    assert int(cast(np.full(1, bits, np.uint32), "F32_F16")[0]) == half
    assert set(cast(np.full(40, bits, np.uint32), "F32_F16").tolist()) == {half}


@pytest.mark.parametrize("how", ["F16_F32", "F32_F16", "F16_BF16", "BF16_F16"])
def test_any_count_of_values_is_cast_as_one_by_one(how: str) -> None:
    """Vectors take many values at once, what is left over goes another way."""
    kind = np.uint32 if how.startswith("F32") else np.uint16
    values = np.frombuffer(np.random.default_rng(5).bytes(70 * np.dtype(kind).itemsize), kind)
    single = np.concatenate([cast(values[i : i + 1].copy(), how) for i in range(values.size)])
    for count in range(values.size + 1):
        np.testing.assert_array_equal(cast(values[:count].copy(), how), single[:count])
