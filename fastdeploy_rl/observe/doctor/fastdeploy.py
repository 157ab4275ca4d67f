"""FastDeploy and the plugin: is it there, was it chosen, and which runner is at work at a port?

Owns the judgement. FastDeploy swallows whatever goes wrong with a plugin and takes its own runner, so that nothing of
its own says which one runs; our board does: the plugin's first rank makes it, and holds its lock while it lives.
Invariant: a port with FastDeploy's words and without a live board is a failure, never a silence. Imports no FastDeploy:
`plugin_probe` does, in a child.
"""

import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from fastdeploy_rl.board.board import board_name
from fastdeploy_rl.board.legacy import WEIGHTS_WORD, word_name
from fastdeploy_rl.lifecycle import LegacyStatus
from fastdeploy_rl.memory.owner_lock import owner_of
from fastdeploy_rl.memory.shared_segment import SHM_DIR
from fastdeploy_rl.observe.doctor.check import Check, fail, ok, warn
from fastdeploy_rl.observe.doctor.kernel import Kernel
from fastdeploy_rl.observe.doctor.leftovers import EngineAtPort, own_names
from fastdeploy_rl.observe.doctor.plugin_probe import GROUP, PLUGIN, Entry, PluginAnswer
from fastdeploy_rl.observe.doctor.text import quoted

_START = f"FD_PLUGINS={PLUGIN} python -m fastdeploy.entrypoints.openai.api_server ..."
_DYNAMIC = "--dynamic-load-weight"
_STRATEGY = "--load-strategy"
_OURS = ("ipc", "ipc_snapshot", "rsync")
_SHUTDOWN = "--shutdown-comm-group-if-worker-idle"
_V1 = "FD_ENABLE_V1_UPDATE_WEIGHTS"
_PORT = "--engine-worker-queue-port"
_WORKER = "worker_process.py"
_FRONT_ENDS = ("fastdeploy.entrypoints.openai.api_server", "fastdeploy.entrypoints.openai.multi_api_server")
_DEFAULT_PORT = "9923"
"""Of FastDeploy's worker, where its command line names none."""


class FastDeployProcess(NamedTuple):
    """A process of FastDeploy: a worker, or the front end that started it."""

    pid: int
    is_worker: bool
    options: Mapping[str, str]
    ports: frozenset[int]
    python: str
    environ: Mapping[str, str]

    @property
    def who(self) -> str:
        return f"{'worker' if self.is_worker else 'front end'} {self.pid}"


# --- what is installed -----------------------------------------------------------------------------------------------


def check_plugin(
    entries: Sequence[Entry], answer: PluginAnswer, environ: Mapping[str, str], *, is_running: bool
) -> list[Check]:
    """`answer`: of the child that tried it; `environ`: of this process. `is_running`: workers are seen, whose own
    environment says what they chose."""
    return [
        judge_import(answer),
        judge_entry_points(entries),
        judge_selection(entries, environ.get("FD_PLUGINS"), is_running=is_running),
        judge_runner_class(answer),
    ]


def judge_import(answer: PluginAnswer) -> Check:
    if answer.import_error:
        mend = f"install FastDeploy 2.x for {sys.executable}, or put its source tree on PYTHONPATH"
        return fail("fastdeploy", f"cannot be imported: {quoted(answer.import_error)}", mend)
    return ok("fastdeploy", f"{quoted(answer.version)} at {quoted(answer.place)}")


def judge_entry_points(entries: Sequence[Entry]) -> Check:
    ours = [entry for entry in entries if entry.name == PLUGIN]
    others = [f"{quoted(entry.name)} of {quoted(entry.distribution)}" for entry in entries if entry.name != PLUGIN]
    mend = f"{sys.executable} -m pip install --force-reinstall --no-deps fastdeploy_rl"
    if not ours:
        return fail("entry point", f"no {PLUGIN} in {GROUP}; there is {', '.join(others) or 'none'}", mend)
    if len(ours) > 1:
        found = (
            f"{PLUGIN} stands {len(ours)} times in {GROUP}: {', '.join(quoted(entry.distribution) for entry in ours)}"
        )
        return fail("entry point", found, "uninstall all but one of these distributions")
    found = f"{quoted(ours[0].value)} of {quoted(ours[0].distribution)}"
    return ok("entry point", found + (f"; beside it {', '.join(others)}" if others else ""))


def judge_selection(entries: Sequence[Entry], value: str | None, *, is_running: bool) -> Check:
    """`value`: of FD_PLUGINS, None where it is not set. FastDeploy takes a plugin only where exactly one of the group
    is named, letter by letter between commas."""
    problem = why_not_selected(entries, value)
    if not problem:
        return ok("FD_PLUGINS", f"{quoted(value or '')}: selects {PLUGIN}")
    if is_running:
        return ok("FD_PLUGINS", f"{problem}; workers that run have their own")
    return fail(
        "FD_PLUGINS", f"{problem}: FastDeploy would take its own runner and not say so", f"start it as {_START}"
    )


def why_not_selected(entries: Sequence[Entry], value: str | None) -> str:
    """Empty where our plugin, and no other of the group, is selected."""
    if value is None:
        return "not set"
    names = value.split(",")
    selected = sorted({entry.name for entry in entries} & set(names))
    if selected == [PLUGIN]:
        return ""
    if PLUGIN not in names and PLUGIN in [name.strip() for name in names]:
        return f"{value!r:.80} has blanks around the name, which FastDeploy keeps"
    if len(selected) > 1:
        return f"{value!r:.80} selects {', '.join(map(quoted, selected))}: FastDeploy takes one of the group, or none"
    return f"{value!r:.80} selects {quoted(selected[0]) if selected else 'none of the group'}"


def judge_runner_class(answer: PluginAnswer) -> Check:
    if answer.raised:
        found = f"the entry point fails, and FastDeploy would take its own runner: {quoted(answer.plugin_error)}"
        return fail("plugin", found, f"{sys.executable} -m pip install --force-reinstall fastdeploy_rl")
    if answer.plugin_error:
        found = f"{answer.runner} refuses to start: {quoted(answer.plugin_error)}"
        return fail("plugin", found, "mend what the message says; FastDeploy will not start with this class")
    if not answer.runner:
        return fail("plugin", "was not tried: see the lines above", "mend these first")
    return ok("plugin", f"gives {quoted(answer.runner)}")


# --- what runs -------------------------------------------------------------------------------------------------------


def find_processes(kernel: Kernel) -> list[FastDeployProcess]:
    """Workers and front ends of FastDeploy that this /proc shows, of this user; root sees everybody's."""
    own = kernel.user()
    found = (_recognise(kernel, pid) for pid in kernel.processes() if own in (0, kernel.user(str(pid))))
    return [process for process in found if process is not None]


def _recognise(kernel: Kernel, pid: int) -> FastDeployProcess | None:
    arguments = kernel.arguments(str(pid))
    is_worker = any(argument.endswith(f"/{_WORKER}") or argument == _WORKER for argument in arguments[:8])
    # The launcher's command line has the worker's file in it too, further on than its own module.
    if "paddle.distributed.launch" in arguments or not (is_worker or any(name in arguments for name in _FRONT_ENDS)):
        return None
    options = parse_options(arguments)
    ports = frozenset(int(port) for port in options.get(_PORT, _DEFAULT_PORT).split(",") if _is_port(port))
    return FastDeployProcess(pid, is_worker, options, ports, arguments[0], kernel.environ(str(pid)))


def parse_options(arguments: Sequence[str]) -> dict[str, str]:
    """`--a_b c` and `--a-b=c` both as {"--a-b": "c"}; a switch has an empty value."""
    options = {}
    for argument, following in pairwise([*arguments, "--"]):
        if argument.startswith("--"):
            name, is_given, value = argument.partition("=")
            taken = value if is_given else "" if following.startswith("--") else following
            options[name.replace("_", "-")] = taken
    return options


def _is_port(text: str) -> bool:
    return text.isdecimal() and len(text) <= 5


def known_engines(processes: Sequence[FastDeployProcess]) -> list[int]:
    """Ports with a process of FastDeploy, or with its word of this user."""
    prefix = f"{WEIGHTS_WORD}."
    names = own_names(SHM_DIR)
    told = {int(port) for name in names if name.startswith(prefix) and _is_port(port := name.removeprefix(prefix))}
    return sorted(told.union(*(process.ports for process in processes)))


def check_port(
    port: int, processes: Sequence[FastDeployProcess], entries: Sequence[Entry], *, must_live: bool = True
) -> list[Check]:
    """Which runner is at work at the port, and how its processes were started. `must_live`: somebody asked for this
    port, so that what a dead engine left is a failure."""
    here = [process for process in processes if port in process.ports]
    has_word = Path(SHM_DIR, word_name(WEIGHTS_WORD, port)).exists()
    engine = EngineAtPort(port)
    who = next((str(owner) for lock in engine.locks if (owner := owner_of(lock))), "pid unknown")
    checks = [
        judge_runner(port, has_word=has_word, board=_board_at(engine), who=who, processes=here, must_live=must_live)
    ]
    if has_word:
        checks.append(judge_word(port, _read_word(port)))
    for process in here:
        checks += check_process(process, entries)
    return checks


class BoardState(NamedTuple):
    """`is_there`: a board lies in /dev/shm; `is_alive`: its owner holds its lock; `is_known`: a lock tells."""

    is_there: bool
    is_alive: bool
    is_known: bool


def _board_at(engine: EngineAtPort) -> BoardState:
    is_there = Path(SHM_DIR, board_name(engine.port)).exists()
    return BoardState(is_there, engine.is_alive, engine.has_lock)


def judge_runner(
    port: int,
    *,
    has_word: bool,
    board: BoardState,
    who: str,
    processes: Sequence[FastDeployProcess],
    must_live: bool = True,
) -> Check:
    if board.is_there and board.is_alive:
        if has_word:
            seen = "" if processes else "; no process of FastDeploy is seen: an engine of ours, or another container"
            return ok("runner", f"ours: the board's owner lives ({who}){seen}")
        mend = "end it and start it again; FastDeploy's processes must not clear /dev/shm of a live engine"
        return fail("runner", f"ours ({who}), but {word_name(WEIGHTS_WORD, port)} is gone: nobody can ask it", mend)
    if board.is_there and not board.is_known:
        mend = "if it is another container's: share its runtime directory (XDG_RUNTIME_DIR) too, and look again"
        return warn("runner", f"a board whose lock cannot be seen from here ({who})", mend)
    seen = ", ".join(process.who for process in processes) or "no process of it is visible here"
    if board.is_there:
        mend = f"fastdeploy-rl doctor --clean, then start it again: {_START}"
        judge = fail if must_live or processes else warn
        return judge("runner", f"the board's owner is dead ({who}); {seen}", mend)
    if has_word or processes:
        found = (
            f"FastDeploy's own: its {'words are' if has_word else 'processes are'} here and our board is not; {seen}"
        )
        mend = f"end it and start it as {_START}; the checks above say what keeps the plugin out"
        stale = f"; if it has ended already: rm {SHM_DIR}/{word_name(WEIGHTS_WORD, port)}"
        return fail("runner", found, mend if processes else mend + stale)
    return fail("runner", "none: neither FastDeploy's words nor our board", f"{_START}, or name the port it runs on")


def _read_word(port: int) -> int | None:
    try:
        data = Path(SHM_DIR, word_name(WEIGHTS_WORD, port)).read_bytes()[:4]
    except OSError:
        return None
    return int.from_bytes(data, sys.byteorder, signed=True) if len(data) == 4 else None


def judge_word(port: int, value: int | None) -> Check:
    names = {status.value: status.name for status in LegacyStatus}
    if value in names:
        return ok("status word", names[value])
    mend = f"fastdeploy-rl update --engine {port}; else start it again"
    return warn("status word", f"{value}: no value of FastDeploy's", mend)


# --- one process -----------------------------------------------------------------------------------------------------


def check_process(process: FastDeployProcess, entries: Sequence[Entry]) -> list[Check]:
    """How it was started. A front end's flags reach the workers, which have only those that are switched on."""
    if not process.is_worker:
        return [judge_v1(process)] if process.environ else []
    return [judge_python(process), judge_chosen(process, entries), judge_strategy(process), judge_v1(process)]


def judge_python(process: FastDeployProcess) -> Check:
    if process.python in ("", sys.executable) or not process.python.startswith("/"):
        return ok(process.who, f"runs {quoted(process.python) or 'an unknown Python'}")
    found = f"runs {quoted(process.python)}, this doctor {sys.executable}: what is installed there was not looked at"
    return warn(process.who, found, f"{quoted(process.python)} -m fastdeploy_rl.cli doctor --fastdeploy")


def judge_chosen(process: FastDeployProcess, entries: Sequence[Entry]) -> Check:
    if not process.environ:
        return warn(process.who, "its environment is not for us to see", "run the doctor as its user, or as root")
    problem = why_not_selected(entries, process.environ.get("FD_PLUGINS"))
    if problem:
        return fail(process.who, f"FD_PLUGINS {problem}: it runs FastDeploy's own runner", f"start it as {_START}")
    return ok(process.who, f"FD_PLUGINS={quoted(process.environ['FD_PLUGINS'])}")


def judge_strategy(process: FastDeployProcess) -> Check:
    strategy = process.options.get(_STRATEGY, "normal")
    if _DYNAMIC in process.options and strategy in _OURS:
        return ok(process.who, f"{_DYNAMIC} {_STRATEGY} {strategy}")
    given = f"{_STRATEGY} {quoted(strategy)}, {'with' if _DYNAMIC in process.options else 'without'} {_DYNAMIC}"
    return fail(
        process.who, f"{given}: nothing asks it for other weights", f"add {_DYNAMIC} {_STRATEGY} {'|'.join(_OURS)}"
    )


def judge_v1(process: FastDeployProcess) -> Check:
    value = process.environ.get(_V1, "0")
    if value.strip() in ("", "0"):
        return ok(process.who, f"{_V1} is off: GET /update_model_weight and /clear_load_weight; no /v1 routes")
    if _SHUTDOWN in process.options:
        mend = f"add --no{_SHUTDOWN[1:]} to the launch line"
        return fail(process.who, f"{_V1}={quoted(value)} with {_SHUTDOWN}: FastDeploy refuses the pair", mend)
    return ok(process.who, f"{_V1}={quoted(value)}, process groups stay")
