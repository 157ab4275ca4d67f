"""Builds the native core; everything else about the package stands in pyproject.toml."""

from glob import glob

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup

ParallelCompile(default=0).install()  # as many compilers as cores

setup(
    ext_modules=[
        Pybind11Extension(
            "fastdeploy_rl._native",
            sorted(glob("csrc/*.cpp")),
            depends=sorted(glob("csrc/*.h")),
            cxx_std=17,
            # Vector code is chosen at run time, per function: no -march here.
            extra_compile_args=["-O3", "-g0", "-Wall", "-Wextra", "-ffp-contract=off"],
            extra_link_args=["-pthread"],
        )
    ]
)
