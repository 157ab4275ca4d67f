"""The doctor on FastDeploy: what is selected, what runs, and that nothing but our board proves our runner."""

import sys
from pathlib import Path

import pytest

from fastdeploy_rl.observe.doctor import fastdeploy
from fastdeploy_rl.observe.doctor.check import Status
from fastdeploy_rl.observe.doctor.fastdeploy import BoardState, FastDeployProcess
from fastdeploy_rl.observe.doctor.kernel import Kernel
from fastdeploy_rl.observe.doctor.plugin_probe import Entry, PluginAnswer

OURS = Entry("fastdeploy_rl", "fastdeploy_rl.engines.fastdeploy.plugin:model_runner", "fastdeploy_rl")
OTHER = Entry("other", "other:runner", "other-dist")
NO_BOARD, DEAD_BOARD, LIVE_BOARD = (
    BoardState(False, False, True),
    BoardState(True, False, True),
    BoardState(True, True, True),
)


def worker(environ: dict[str, str], *options: str, python: str = sys.executable) -> FastDeployProcess:
    return FastDeployProcess(12, True, fastdeploy.parse_options(options), frozenset({8182}), python, environ)


# --- what is selected --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "entries", "word"),
    [
        ("fastdeploy_rl", [OURS], ""),
        ("fastdeploy_rl,unknown", [OURS, OTHER], ""),
        (None, [OURS], "not set"),
        ("", [OURS], "selects none of the group"),
        ("other", [OURS, OTHER], "selects other"),
        ("fastdeploy_rl,other", [OURS, OTHER], "takes one of the group, or none"),
        ("other, fastdeploy_rl", [OURS], "blanks around the name"),
        ("fastdeploy_rl", [OTHER], "selects none of the group"),
    ],
)
def test_exactly_our_plugin_must_be_selected(value: str | None, entries: list[Entry], word: str) -> None:
    problem = fastdeploy.why_not_selected(entries, value)
    assert word in problem
    assert bool(problem) is bool(word)
    status = Status.FAIL if word else Status.OK
    assert fastdeploy.judge_selection(entries, value, is_running=False).status is status
    assert fastdeploy.judge_selection(entries, value, is_running=True).status is Status.OK


def test_the_entry_point_must_be_there_once() -> None:
    assert fastdeploy.judge_entry_points([OURS, OTHER]).status is Status.OK
    missing = fastdeploy.judge_entry_points([OTHER])
    assert (missing.status, "other of other-dist" in missing.found) == (Status.FAIL, True)
    assert "pip install" in missing.mend
    twice = fastdeploy.judge_entry_points([OURS, Entry("fastdeploy_rl", "x:y", "fork")])
    assert (twice.status, "fork" in twice.found) == (Status.FAIL, True)


def test_a_class_with_an_error_and_an_entry_point_that_raises_are_told_apart() -> None:
    good = PluginAnswer(version="2.6", place="/fd", runner="a.Runner")
    assert fastdeploy.judge_runner_class(good).status is Status.OK
    refusing = fastdeploy.judge_runner_class(PluginAnswer(runner="a.Refused", plugin_error="no paddle"))
    assert (refusing.status, "refuses to start: no paddle" in refusing.found) == (Status.FAIL, True)
    raising = fastdeploy.judge_runner_class(PluginAnswer(plugin_error="ImportError: x", raised=True))
    assert (raising.status, "its own runner" in raising.found) == (Status.FAIL, True)
    assert fastdeploy.judge_runner_class(PluginAnswer(import_error="died")).status is Status.FAIL
    assert fastdeploy.judge_import(good).found == "2.6 at /fd"
    assert fastdeploy.judge_import(PluginAnswer(import_error="died")).status is Status.FAIL


# --- which runner ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("has_word", "board", "status", "word"),
    [
        (True, LIVE_BOARD, Status.OK, "ours"),
        (True, NO_BOARD, Status.FAIL, "FastDeploy's own: its words are here"),
        (False, NO_BOARD, Status.FAIL, "none: neither"),
        (True, DEAD_BOARD, Status.FAIL, "owner is dead"),
        (False, LIVE_BOARD, Status.FAIL, "nobody can ask it"),
        (True, BoardState(True, False, False), Status.WARN, "cannot be seen from here"),
    ],
)
def test_only_a_live_board_proves_our_runner(has_word: bool, board: BoardState, status: Status, word: str) -> None:
    check = fastdeploy.judge_runner(8182, has_word=has_word, board=board, who="pid 3", processes=[])
    assert check.status is status
    assert word in check.found
    assert check.mend or status is Status.OK


def test_a_dead_board_that_nobody_asked_for_is_a_leftover() -> None:
    def judge(processes: list[FastDeployProcess]) -> Status:
        check = fastdeploy.judge_runner(
            8182, has_word=True, board=DEAD_BOARD, who="pid 3", processes=processes, must_live=False
        )
        return check.status

    assert judge([]) is Status.WARN
    assert judge([worker({})]) is Status.FAIL


def test_processes_of_other_users_are_left_out(tmp_path: Path) -> None:
    for pid, user in ((5, 1000), (6, 1001)):
        start(tmp_path, pid, "/bin/python", "/fd/worker/worker_process.py")
        (tmp_path / "proc" / str(pid) / "status").write_text(f"Uid:\t{user}\t{user}\t{user}\t{user}\n")
    (tmp_path / "proc" / "self").symlink_to("5")
    assert [process.pid for process in fastdeploy.find_processes(Kernel(tmp_path))] == [5]


def test_a_stock_runner_fails_with_the_launch_line_and_names_its_processes() -> None:
    check = fastdeploy.judge_runner(8182, has_word=False, board=NO_BOARD, who="", processes=[worker({})])
    assert (check.status, "worker 12" in check.found) == (Status.FAIL, True)
    assert "FD_PLUGINS=fastdeploy_rl python -m fastdeploy.entrypoints" in check.mend


def test_a_word_that_means_nothing_to_fastdeploy_is_told() -> None:
    assert [fastdeploy.judge_word(8182, value).found for value in (0, 1, -1, -2)] == [
        "NORMAL",
        "UPDATING",
        "CLEARING",
        "CLEARED",
    ]
    assert fastdeploy.judge_word(8182, 7).status is Status.WARN
    assert fastdeploy.judge_word(8182, None).status is Status.WARN


# --- what runs ---------------------------------------------------------------------------------------


def start(root: Path, pid: int, *arguments: str, environ: str = "") -> None:
    proc = root / "proc" / str(pid)
    proc.mkdir(parents=True)
    (proc / "cmdline").write_text("\0".join(arguments) + "\0")
    (proc / "environ").write_text(environ)


def test_workers_and_front_ends_are_found_and_their_launchers_are_not(tmp_path: Path) -> None:
    file = "/fd/entrypoints/../worker/worker_process.py"
    options = ("--engine_worker_queue_port", "8182,8183", "--dynamic_load_weight", "--load_strategy", "ipc")
    start(tmp_path, 5, "/bin/python", "-u", file, *options, environ="FD_PLUGINS=fastdeploy_rl\0")
    start(tmp_path, 4, "/bin/python", "-m", "paddle.distributed.launch", "--devices", "0", file, *options)
    start(tmp_path, 3, "/bin/sh", "-c", f"A=1 python -m paddle.distributed.launch {file} --load_strategy ipc")
    start(
        tmp_path, 2, "/bin/python", "-m", "fastdeploy.entrypoints.openai.api_server", "--engine-worker-queue-port=8182"
    )
    start(tmp_path, 1, "vim", "notes about worker_process.py")
    (tmp_path / "proc" / "6").mkdir()
    found = fastdeploy.find_processes(Kernel(tmp_path))
    assert [(process.pid, process.is_worker, sorted(process.ports)) for process in found] == [
        (2, False, [8182]),
        (5, True, [8182, 8183]),
    ]
    assert fastdeploy.why_not_selected([OURS], found[1].environ.get("FD_PLUGINS")) == ""
    assert {8182, 8183} <= set(fastdeploy.known_engines(found))


def test_options_read_alike_in_every_spelling() -> None:
    parsed = fastdeploy.parse_options(
        ["--load_strategy", "ipc", "--model=/m", "--dynamic-load-weight", "--x", "1", "y"]
    )
    assert parsed == {"--load-strategy": "ipc", "--model": "/m", "--dynamic-load-weight": "", "--x": "1"}
    assert fastdeploy.parse_options([]) == {}


def test_a_worker_whose_environment_selects_another_runner_fails() -> None:
    check = fastdeploy.judge_chosen(worker({"PATH": "/bin"}), [OURS])
    assert (check.status, "FastDeploy's own runner" in check.found) == (Status.FAIL, True)
    assert fastdeploy.judge_chosen(worker({"FD_PLUGINS": "fastdeploy_rl"}), [OURS]).status is Status.OK
    assert fastdeploy.judge_chosen(worker({}), [OURS]).status is Status.WARN  # not for us to see


@pytest.mark.parametrize(
    ("options", "status"),
    [
        (("--dynamic_load_weight", "--load_strategy", "ipc_snapshot"), Status.OK),
        (("--load_strategy", "ipc"), Status.FAIL),
        (("--dynamic_load_weight", "--load_strategy", "normal"), Status.FAIL),
        (("--dynamic_load_weight",), Status.FAIL),
    ],
)
def test_both_flags_of_dynamic_weights_are_needed(options: tuple[str, ...], status: Status) -> None:
    check = fastdeploy.judge_strategy(worker({}, *options))
    assert check.status is status
    assert ("--dynamic-load-weight" in check.mend) is (status is Status.FAIL)


def test_v1_updates_and_groups_that_shut_down_exclude_each_other() -> None:
    shuts_down = ("--shutdown_comm_group_if_worker_idle",)
    assert fastdeploy.judge_v1(worker({}, *shuts_down)).status is Status.OK
    assert fastdeploy.judge_v1(worker({"FD_ENABLE_V1_UPDATE_WEIGHTS": "1"})).status is Status.OK
    check = fastdeploy.judge_v1(worker({"FD_ENABLE_V1_UPDATE_WEIGHTS": "1"}, *shuts_down))
    assert check.status is Status.FAIL
    assert "--no-shutdown-comm-group-if-worker-idle" in check.mend


def test_a_worker_of_another_python_was_not_looked_at() -> None:
    assert fastdeploy.judge_python(worker({})).status is Status.OK
    assert fastdeploy.judge_python(worker({}, python="python")).status is Status.OK
    check = fastdeploy.judge_python(worker({}, python="/opt/python"))
    assert (check.status, check.mend.startswith("/opt/python -m fastdeploy_rl.cli")) == (Status.WARN, True)
