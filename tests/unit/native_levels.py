"""Every set of kernels that this machine has: a test module that imports `kernels` runs once with each."""

from collections.abc import Iterator

import pytest

from fastdeploy_rl import _native

LEVELS = {"scalar": ["scalar"], "avx2": ["scalar", "avx2"], "avx512": ["scalar", "avx2", "avx512"]}[_native.CPU_LEVEL]


@pytest.fixture(scope="module", params=LEVELS, autouse=True)
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the module once with each set of kernels."""
    _native.use_kernels(request.param)
    yield request.param
    _native.use_kernels(_native.CPU_LEVEL)  # type: ignore[arg-type]
