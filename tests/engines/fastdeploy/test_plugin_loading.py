"""FastDeploy finds the plugin as any other: by the entry point of an installed distribution that FD_PLUGINS names."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).parents[3]

_PLUGIN = """
import json, os, sys
from tests.engines.fastdeploy.standin import modules, plugins
modules.install()
group = "fastdeploy.model_runner_plugins"
unnamed = os.environ.pop("FD_PLUGINS")
not_listed = sorted(plugins.load_plugins_by_group(group))
os.environ["FD_PLUGINS"] = "another"
not_named = sorted(plugins.load_plugins_by_group(group))
os.environ["FD_PLUGINS"] = unnamed
named = plugins.load_plugins_by_group(group)
is_cheap = "paddle" not in sys.modules and "fastdeploy.worker.gpu_model_runner" not in sys.modules
first = named["fastdeploy_rl"]()
second = plugins.load_model_runner_plugins()
"""
_FACTS = """
from tests.engines.fastdeploy.standin.gpu_worker import ModelRunner
import fastdeploy_rl
print(json.dumps({
    "not_listed": not_listed, "not_named": not_named, "named": sorted(named), "is_cheap": is_cheap,
    "is_same": first is second is ModelRunner, "origin": fastdeploy_rl.__file__,
    "mro": [kind.__name__ for kind in ModelRunner.__mro__], "module": ModelRunner.__module__,
}))
"""
_REFUSAL = """
from tests.engines.fastdeploy.standin.gpu_worker import ModelRunner
refusals = []
for _ in range(2):
    try:
        ModelRunner(fd_config=None, device="cpu", device_id=0, rank=1, local_rank=0)
    except Exception as error:
        refusals.append(f"{type(error).__name__}: {error}")
print(json.dumps({
    "named": sorted(named), "refusals": refusals,
    "is_stock": any(kind.__name__ == "GPUModelRunner" for kind in ModelRunner.__mro__),
}))
"""


def _run(script: str, *site: Path) -> dict[str, Any]:
    paths = os.pathsep.join(map(str, [*site, _ROOT]))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        env=os.environ | {"PYTHONPATH": paths, "FD_PLUGINS": "fastdeploy_rl", "FD_LOG_DIR": str(site[0] / "log")},
        cwd=site[0],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_plugin_is_the_runner_when_it_is_named_and_only_then(installed: Path):
    facts = _run(_PLUGIN + _FACTS, installed)
    assert Path(facts["origin"]).is_relative_to(installed)
    assert (facts["not_listed"], facts["not_named"], facts["named"]) == ([], [], ["fastdeploy_rl"])
    assert facts["is_cheap"], "FastDeploy runs entry points in every process"
    assert facts["is_same"], "asked again it gives the same class"
    assert facts["module"].startswith("fastdeploy_rl.")
    assert facts["mro"].index("GPUModelRunner") > 0


@pytest.mark.parametrize("missing", ["fastdeploy.worker.gpu_model_runner", "fastdeploy_rl._native"])
def test_where_something_is_missing_the_start_is_refused_with_the_reason(installed: Path, missing: str):
    """Of theirs or of ours. FastDeploy would fall back to its own runner, silently, if the entry point raised."""
    facts = _run(f"import sys\nsys.modules[{missing!r}] = None\n" + _PLUGIN + _REFUSAL, installed)
    assert (facts["named"], facts["is_stock"]) == (["fastdeploy_rl"], False)
    assert len(facts["refusals"]) == 2
    assert all(missing.rpartition(".")[2] in refusal for refusal in facts["refusals"])
