"""Names, sizes and casts of element types."""

import numpy as np
import pytest

from fastdeploy_rl._native import Region, transfer
from fastdeploy_rl.dtypes import DTYPES, NAMES, cast_between, itemsize, numpy_dtype
from fastdeploy_rl.errors import ConfigurationError


def test_sizes_are_those_the_names_say() -> None:
    bits = {"BOOL": 8} | {name: int(name.partition("_")[0].lstrip("BFIU")) for name in DTYPES if name != "BOOL"}
    assert {name: 8 * itemsize(name) for name in DTYPES} == bits


def test_numpy_dtypes_have_the_same_size_and_little_endian_order() -> None:
    for name in DTYPES:
        assert numpy_dtype(name).itemsize == itemsize(name)
        assert np.dtype(numpy_dtype(name)).newbyteorder("<") == numpy_dtype(name)


def test_floats_that_numpy_has_not_are_held_as_integers() -> None:
    assert numpy_dtype("BF16") == np.uint16
    assert numpy_dtype("F8_E4M3") == numpy_dtype("F8_E5M2") == np.uint8
    assert (NAMES[np.dtype(np.uint16)], NAMES[np.dtype(np.uint8)]) == ("BF16", "U8")


@pytest.mark.parametrize("name", ["", "f32", "F8_E8M0", "float32", "U16"])
def test_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"unknown dtype '{name}'; known are F64 F32"):
        itemsize(name)


def test_only_equal_types_and_the_three_floats_may_become_each_other() -> None:
    allowed = {(x, y): cast_between(x, y) for x in DTYPES for y in DTYPES if cast_between(x, y) is not None}
    floats = {(x, y): f"{x}_{y}" for x in ("F32", "F16", "BF16") for y in ("F32", "F16", "BF16") if x != y}
    assert allowed == {(x, x): "none" for x in DTYPES} | floats


@pytest.mark.parametrize("pair", [("F32", "F16"), ("F32", "BF16"), ("F16", "BF16")])
def test_the_core_knows_every_cast_by_its_name(pair: tuple[str, str]) -> None:
    for source, target in (pair, pair[::-1]):
        cast = cast_between(source, target)
        assert cast is not None
        values, out = np.zeros(itemsize(source), np.uint8), np.ones(itemsize(target), np.uint8)
        region = Region(
            source=values, source_offset=0, source_stride=0, rows=1, row_bytes=values.size, target=out, cast=cast
        )
        transfer([region], 1)
        assert not out.any()
