"""Builds the native core, and the CUDA driver that tests use in place of a GPU; everything else about the package
stands in pyproject.toml."""

from glob import glob

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import Extension, setup

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
        ),
        # No Python module: a library that is loaded by its path, in the place of libcuda.
        Extension(
            "fastdeploy_rl.testing._fake_cuda",
            sorted(glob("csrc/fake_cuda/*.cpp")),
            depends=sorted(glob("csrc/fake_cuda/*.h")),
            language="c++",
            extra_compile_args=["-std=c++17", "-O2", "-g0", "-Wall", "-Wextra", "-fvisibility=default"],
            extra_link_args=["-pthread"],
        ),
    ]
)
