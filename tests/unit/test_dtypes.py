"""Names, sizes and casts of element types."""

import numpy as np
import pytest

from fastdeploy_rl.dtypes import DTYPES, cast_between, itemsize, numpy_dtype
from fastdeploy_rl.errors import ConfigurationError


def test_sizes_are_those_the_names_say() -> None:
    bits = {"BOOL": 8} | {name: int(name.lstrip("BFIU")) for name in DTYPES if name != "BOOL"}
    assert {name: 8 * itemsize(name) for name in DTYPES} == bits


def test_numpy_dtypes_have_the_same_size_and_little_endian_order() -> None:
    for name in DTYPES:
        assert numpy_dtype(name).itemsize == itemsize(name)
        assert np.dtype(numpy_dtype(name)).newbyteorder("<") == numpy_dtype(name)


def test_bfloat16_is_held_as_uint16() -> None:
    assert numpy_dtype("BF16") == np.uint16


@pytest.mark.parametrize("name", ["", "f32", "F8_E4M3", "float32", "U16"])
def test_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"unknown dtype '{name}'; known are F64 F32"):
        itemsize(name)


def test_only_equal_types_and_f32_with_bf16_may_become_each_other() -> None:
    allowed = {(x, y): cast_between(x, y) for x in DTYPES for y in DTYPES if cast_between(x, y) is not None}
    assert allowed == {(x, x): "none" for x in DTYPES} | {("F32", "BF16"): "F32_BF16", ("BF16", "F32"): "BF16_F32"}
