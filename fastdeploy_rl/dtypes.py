"""The element types: safetensors names, their sizes, what numpy calls them, and which of them may become which.

A dtype is its safetensors name (a str) everywhere above the wire. numpy has no bfloat16, so BF16 arrays are uint16 that
hold the upper half of a float32; nor has it floats of eight bits: their arrays are uint8, as those of U8 are.
"""

from typing import Any, Final

import numpy as np

from fastdeploy_rl.errors import ConfigurationError

_NUMPY: Final[dict[str, np.dtype[Any]]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "F8_E4M3": np.dtype("u1"),
    "F8_E5M2": np.dtype("u1"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
DTYPES: Final = tuple(_NUMPY)
NAMES: Final = {dtype: name for name, dtype in _NUMPY.items()}
"""The name of an array that comes without one; uint8 is U8, which stands last of the three, and uint16 BF16."""

_FLOATS: Final = ("F32", "F16", "BF16")
"""These may become each other; the core names a cast by its two sides."""


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """The little-endian numpy dtype with the same bytes (BF16:
    uint16). Raises ConfigurationError for an unknown name."""
    try:
        return _NUMPY[dtype]
    except KeyError:
        raise ConfigurationError(f"unknown dtype {dtype!r:.80}; known are {' '.join(DTYPES)}") from None


def itemsize(dtype: str) -> int:
    """Bytes of one element. Raises ConfigurationError for an unknown name."""
    return numpy_dtype(dtype).itemsize


def cast_between(source: str, target: str) -> str | None:
    """How bytes of `source` become `target`, as the native core names it: "none" where equal, "F32_BF16" and so on
    among F32, F16 and BF16; None where nothing may turn the one into the other."""
    if source == target:
        return "none"
    return f"{source}_{target}" if source in _FLOATS and target in _FLOATS else None
