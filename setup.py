"""Builds the native core; everything else about the package stands in pyproject.toml."""

from glob import glob

from pybind11.setup_helpers import Pybind11Extension
from setuptools import setup

setup(
    ext_modules=[
        Pybind11Extension(
            "fastdeploy_rl._native",
            sorted(glob("csrc/*.cpp")),
            cxx_std=17,
            extra_compile_args=["-O3", "-Wall", "-Wextra"],
            extra_link_args=["-lrt", "-pthread"],
        )
    ]
)
