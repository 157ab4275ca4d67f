"""The plugin as an installed distribution, for whatever loads it by its entry point."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages that has this one with its metadata, as pip installs it: by setuptools, from our own
    pyproject.toml; the native core as it was built before."""
    site = tmp_path_factory.mktemp("site-packages")
    build = ["-W", "ignore", "setup.py", "-q", "build_py", "--build-lib", str(site), "dist_info"]
    subprocess.run([sys.executable, *build, "--output-dir", str(site)], cwd=_ROOT, check=True, timeout=60)
    for library in (_ROOT / "fastdeploy_rl").glob("_native*.so"):
        shutil.copy(library, site / "fastdeploy_rl")
    return site
