"""What FastDeploy would make of the plugin: `python -m fastdeploy_rl.observe.doctor.plugin_probe`, a child.

Owns the question and the child: Paddle, FastDeploy and the plugin are imported there, so that the doctor imports none
of them, and what they print or raise stays there. Asks the entry point exactly as FastDeploy does: load it, call it,
look at the class. Never starts a runner.
"""

import contextlib
import importlib
import os
import subprocess
import sys
from importlib import metadata

import msgspec

from fastdeploy_rl.config import Deadlines, child_environ

GROUP = "fastdeploy.model_runner_plugins"
PLUGIN = "fastdeploy_rl"
_MAX_ANSWER_BYTES = 1 << 20


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry point of the group: its name, the object that it names, and the distribution that brings it."""

    name: str
    value: str
    distribution: str


class PluginAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`version` and `place` of fastdeploy, or `import_error`; `runner`: the class that our entry point gives, or
    `plugin_error`: what it raised, which FastDeploy would swallow, or the error that the class carries."""

    version: str = ""
    place: str = ""
    import_error: str = ""
    runner: str = ""
    plugin_error: str = ""
    raised: bool = False


def entries() -> list[Entry]:
    """All of the group that this Python has, as FastDeploy finds them."""
    found = metadata.entry_points(group=GROUP)
    return [Entry(each.name, each.value, each.dist.name if each.dist else "unknown") for each in found]


def try_plugin() -> PluginAnswer:
    """Blocks for Paddle's and FastDeploy's import, some seconds; bounded by Deadlines.probe_s."""
    command = [sys.executable, "-m", "fastdeploy_rl.observe.doctor.plugin_probe"]
    try:
        done = subprocess.run(
            command, env=child_environ({}), capture_output=True, timeout=Deadlines.probe_s, check=False
        )
    except subprocess.TimeoutExpired:
        return PluginAnswer(import_error=f"no end of its import within {Deadlines.probe_s:.0f} s")
    try:
        return msgspec.json.decode(done.stdout[-_MAX_ANSWER_BYTES:].splitlines()[-1], type=PluginAnswer)
    except (msgspec.DecodeError, IndexError):
        said = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return PluginAnswer(import_error=f"Python ended with {done.returncode}: {''.join(said)[:300]}")


# --- in the child ----------------------------------------------------------------------------------------------------


def _look() -> PluginAnswer:
    version, place, import_error = _import_fastdeploy()
    runner, plugin_error, raised = _load_runner()
    return PluginAnswer(version, place, import_error, runner, plugin_error, raised)


def _import_fastdeploy() -> tuple[str, str, str]:
    try:
        module = importlib.import_module("fastdeploy")
    except Exception as error:  # whatever somebody else's package raises is the finding
        return "", "", f"{type(error).__name__}: {error}"
    return str(getattr(module, "__version__", "unknown")), str(getattr(module, "__file__", "")), ""


def _load_runner() -> tuple[str, str, bool]:
    """The class's name, its recorded error, and whether something was raised instead."""
    found = [each for each in metadata.entry_points(group=GROUP) if each.name == PLUGIN]
    if not found:
        return "", f"no entry point {PLUGIN} in {GROUP}", True
    try:
        runner = found[0].load()()
    except Exception as error:  # FastDeploy swallows it and takes its own runner; here it is told
        return "", f"{type(error).__name__}: {error}", True
    return f"{runner.__module__}.{runner.__qualname__}", str(getattr(runner, "recorded_error", "")), False


def main() -> int:
    # What is imported may write to standard output, also from C: the answer goes to a descriptor of its own.
    answer_fd = os.dup(1)
    os.dup2(2, 1)
    with contextlib.redirect_stdout(sys.stderr):
        answer = _look()
    os.write(answer_fd, msgspec.json.encode(answer) + b"\n")
    sys.stdout.flush()
    # Without atexit handlers: some frameworks wait in theirs.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
