"""scripts/gpu_check on FakeCuda, numpy in the place of what computes on a device; and what its exit code stands for."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fastdeploy_rl import config
from fastdeploy_rl.testing.fake_cuda import FakeCuda

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

import gpu_check_process
from gpu_check_process import Check, PartSettings, run_part
from gpu_check_run import exit_code

SCRIPTS = Path(__file__).parents[2] / "scripts"
PARTS = {"device", "ipc", "copies", "checksum", "addresses"}
SETTINGS = PartSettings("ipc", "", "0", 1 << 20, "numpy")


def run(file: Path, environ: dict[str, str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    command = [sys.executable, str(SCRIPTS / "gpu_check_run.py"), "--json", str(file), *arguments]
    done = subprocess.run(command, env=config.child_environ(environ), capture_output=True, text=True, timeout=100)
    return done.returncode, json.loads(file.read_text()), done.stdout


def test_all_parts_pass_on_a_driver_that_keeps_the_rules_and_what_it_lacks_is_told(tmp_path: Path) -> None:
    with FakeCuda() as cuda:
        code, told, printed = run(tmp_path / "told.json", cuda.environ, "--arrays", "numpy", "--megabytes", "5")
        counters = cuda.counters()
    outcomes = {f"{check['part']}/{check['name']}": check["outcome"] for check in told["checks"]}
    skipped = {name for name, outcome in outcomes.items() if outcome == "skipped"}
    assert (code, told["outcome"], told["failed"]) == (0, "passed", 0)
    assert skipped >= {"copies/host_to_device_pinned", "copies/device_to_host_pinned"}
    assert told["passed"] == len(outcomes) - len(skipped)
    assert {name.partition("/")[0] for name in outcomes.keys() - skipped} == PARTS
    for name in skipped:
        assert f"gpu_check skipped {name}: " in printed
    assert (counters.frees_while_open, counters.live_allocations, counters.live_openings) == (0, 0, 0)


def test_the_command_explains_itself_and_refuses_a_python_that_lacks_something(tmp_path: Path) -> None:
    command = [str(SCRIPTS / "gpu_check"), "--help"]
    environ = {"PYTHON": sys.executable}
    done = subprocess.run(command, env=config.child_environ(environ), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "scripts/gpu_check --only ipc" in done.stdout
    environ["PYTHONPATH"] = str(tmp_path)
    (tmp_path / "msgspec.py").write_text("raise ImportError")
    done = subprocess.run(command, env=config.child_environ(environ), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert "pip install 'numpy>=1.26' 'msgspec>=0.18'" in done.stderr


def test_a_machine_without_a_device_has_an_exit_code_of_its_own(tmp_path: Path) -> None:
    code, told, printed = run(tmp_path / "told.json", {"FASTDEPLOY_RL_LIBCUDA": "/nonexistent/libcuda.so"})
    assert (code, told["outcome"], told["passed"], told["skipped"]) == (3, "no_device", 0, 1)
    assert "gpu_check skipped device/driver: there is no device: no CUDA driver" in printed


def test_a_device_that_is_not_there_is_a_failure_and_not_a_machine_without_one(tmp_path: Path) -> None:
    with FakeCuda() as cuda:
        code, told, _ = run(tmp_path / "told.json", cuda.environ, "--only", "device", "--device", "9")
    assert (code, told["outcome"], told["failed"]) == (1, "failed", 1)


def check(outcome: str, part: str = "ipc") -> Check:
    return Check(part, "one", outcome, 0.0, "", {})


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [(["passed"], 0), (["passed", "skipped"], 0), (["passed", "failed", "passed"], 1), (["skipped"], 1), ([], 1)],
)
def test_what_was_skipped_counts_for_nothing(outcomes: list[str], code: int) -> None:
    assert exit_code([check(outcome) for outcome in outcomes]) == code


def test_a_part_that_hangs_is_ended_with_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = (
        "import signal, subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)\n"
    )
    checks = list(run_script(tmp_path, monkeypatch, hanging + "signal.pause()\n", limit_s=1.0))
    assert [(found.outcome, found.reason) for found in checks] == [("failed", "not done after 1 s")]


def test_a_part_that_dies_is_a_failure_beside_what_it_had_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying = (
        f"import os, sys\nsys.path.append({str(SCRIPTS)!r})\nfrom gpu_check_process import Recorder\n"
        "recorder = Recorder('ipc')\nprint('noise')\nos.write(1, b'more noise')\n"
        "with recorder.check('first'): pass\n"
        "with recorder.check('second'): raise ValueError('wrong')\n"
        "os.kill(os.getpid(), 9)\n"
    )
    checks = list(run_script(tmp_path, monkeypatch, dying, limit_s=60.0))
    assert [(found.name, found.outcome, found.reason) for found in checks] == [
        ("first", "passed", ""),
        ("second", "failed", "ValueError: wrong"),
        ("whole", "failed", "its process ended with code -9"),
    ]


def test_a_part_without_time_left_is_not_started_and_not_counted_as_skipped() -> None:
    (found,) = run_part(SETTINGS, 0.0)
    assert (found.outcome, found.reason) == ("failed", "no time was left for it")


def run_script(folder: Path, monkeypatch: pytest.MonkeyPatch, source: str, limit_s: float) -> Any:
    script = folder / "part.py"
    script.write_text(source)
    monkeypatch.setattr(gpu_check_process, "PARTS", script)
    return run_part(SETTINGS, limit_s)
