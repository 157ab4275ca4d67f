"""A sample of `scripts/fuzz` over all targets, and that it finds what is planted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_ENV = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}


def _fuzz(program: Path, *arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(program), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=_ENV | variables, cwd=ROOT)


def test_a_sample_of_hostile_input_gives_errors_of_the_tree_only(tmp_path: Path):
    done = _fuzz(ROOT / "scripts" / "fuzz_run.py", "8", "--seed", "1", "--out", str(tmp_path / "fuzz"))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    told = json.loads((tmp_path / "fuzz.json").read_text())
    listed = _fuzz(ROOT / "scripts" / "fuzz_run.py", "--list").stdout.split()
    assert [target["name"] for target in told["targets"]] == listed
    assert all(target["inputs"] > 0 for target in told["targets"]), told["targets"]
    assert {"name", "inputs", "errors", "slowest_s"} <= told["targets"][0].keys()
    assert told["failures"] == []


@pytest.mark.parametrize(("fault", "kind"), [("wrong", "ValueError"), ("crash", "crash"), ("slow", "TooSlowError")])
def test_what_is_planted_in_a_reader_is_found_with_the_input_that_shows_it(tmp_path: Path, fault: str, kind: str):
    program = Path(__file__).with_name("fuzz_planted.py")
    done = _fuzz(program, "3", "--only", "epoch", "--out", str(tmp_path / "fuzz"), PLANTED=fault)
    assert done.returncode == 1, done.stdout[-4000:] + done.stderr[-2000:]
    failures = json.loads((tmp_path / "fuzz.json").read_text())["failures"]
    assert {(failure["target"], failure["kind"]) for failure in failures} == {("epoch", kind)}
    assert all(Path(failure["input"]).is_file() for failure in failures)
