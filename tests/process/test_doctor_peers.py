"""`doctor --ipc` and `doctor --fastdeploy` among real processes: namespaces, a driver, child processes, boards."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from fastdeploy_rl.board.board import Board
from fastdeploy_rl.board.legacy import create_words, unlink_words
from fastdeploy_rl.config import Deadlines
from fastdeploy_rl.errors import CudaError
from fastdeploy_rl.observe.doctor import cuda_probe, ipc, plugin_probe
from fastdeploy_rl.observe.doctor.check import Check, Status
from fastdeploy_rl.observe.doctor.fastdeploy import check_port
from fastdeploy_rl.observe.doctor.kernel import Kernel
from fastdeploy_rl.observe.doctor.leftovers import dead_publishers
from fastdeploy_rl.observe.doctor.peers import Peer, Sight, find_peers, sight_of
from fastdeploy_rl.publish.channel import Channel
from fastdeploy_rl.testing.fake_cuda import FakeCuda
from tests.process.numpy_engine import free_port

CLI = (sys.executable, "-m", "fastdeploy_rl.cli")
PEER = Path(__file__).with_name("publication_peer.py")
DEADLINE_S = 60.0
MEANT = ipc.Meant(("a test says so",))


@contextmanager
def waiting(*prefix: str, **environ: str) -> Iterator["subprocess.Popen[str]"]:
    """A process that lives until the block ends, and is where `prefix` puts it when the block begins."""
    process = subprocess.Popen(
        [*prefix, "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | environ
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        print("here?", file=process.stdin, flush=True)
        if process.stdout.readline() != "here?\n":
            pytest.skip(f"this machine lets nobody run {' '.join(prefix)}")
        yield process
        process.stdin.close()


def compare(pid: int, meant: ipc.Meant = MEANT) -> dict[str, Check]:
    return {check.name: check for check in ipc.check_peer(Kernel(), Peer("peer", pid), meant)}


def child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


# --- namespaces --------------------------------------------------------------------------------------


def test_a_child_of_ours_has_everything_in_common_with_us() -> None:
    with waiting() as process:
        checks = compare(process.pid)
    assert {check.status for check in checks.values()} == {Status.OK}
    assert checks["descriptors"].found.startswith("may be taken")
    assert checks["process"].found == "cat"


def test_a_container_of_its_own_differs_in_what_it_does_not_share() -> None:
    """As docker makes one: PID and IPC namespace of its own, and a /dev/shm."""
    root = [] if os.getuid() == 0 else ["--map-root-user"]
    mount = ["sh", "-c", 'mount -t tmpfs -o size=65536k none /dev/shm && exec "$@"', "sh"]
    with waiting("unshare", *root, "--pid", "--ipc", "--mount", "--fork", *mount) as process:
        checks = compare(child_of(process.pid))
    assert (checks["PID namespace"].status, checks["IPC namespace"].status) == (Status.FAIL, Status.WARN)
    assert checks["/dev/shm"].status is Status.FAIL
    assert "tmpfs, size=65536k" in checks["/dev/shm"].found
    assert "--ipc=" in checks["/dev/shm"].mend


def test_a_container_that_shares_all_but_processes_lacks_only_these() -> None:
    root = [] if os.getuid() == 0 else ["--map-root-user"]
    with waiting("unshare", *root, "--pid", "--fork") as process:
        checks = compare(child_of(process.pid))
    assert checks["PID namespace"].status is Status.FAIL
    assert checks["/dev/shm"].status is Status.OK


def test_a_process_that_has_ended_is_not_here() -> None:
    with waiting() as process:
        pass
    (check,) = compare(process.pid).values()
    assert (check.name, check.status) == ("process", Status.FAIL)
    assert ipc.try_descriptor(process.pid) == "pidfd_open: No such process"


def test_the_publisher_of_a_channel_is_found_by_its_lock(tmp_path: Path) -> None:
    channel = tmp_path / "channel"
    command = [sys.executable, str(PEER), "publish", str(channel)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as publisher:
        try:
            assert publisher.stdout is not None
            publisher.stdout.readline()
            (peer,) = [peer for peer in find_peers(Channel(channel), ()) if peer.role == "publisher"]
            assert peer.pid == publisher.pid
            assert sight_of(Kernel(), peer) is Sight.OPEN
            assert sight_of(Kernel(), peer._replace(pid=os.getpid())) is Sight.ABSENT
            assert find_peers(Channel(channel), [7]) == [Peer("peer", 7)]
        finally:
            publisher.kill()
    assert [peer for peer in find_peers(Channel(channel), ()) if peer.role == "publisher"] == []
    for dead in dead_publishers(Channel(channel)):
        dead.remove()


# --- CUDA --------------------------------------------------------------------------------------------


def test_memory_goes_between_two_children_and_devices_are_compared_by_uuid(tmp_path: Path) -> None:
    with FakeCuda() as cuda, ExitStack() as stack:
        first, second, mig = (device.uuid for device in cuda.devices)
        same = stack.enter_context(waiting(CUDA_VISIBLE_DEVICES=f"{mig},{first}", FLAGS_selected_gpus="1"))
        other = stack.enter_context(waiting(CUDA_VISIBLE_DEVICES="1", PYTORCH_ALLOC_CONF="expandable_segments:True"))
        bare = stack.enter_context(waiting("env", "-u", "CUDA_VISIBLE_DEVICES"))
        peers = [text for peer in (same, other, bare) for text in ("--peer", str(peer.pid))]
        command = [*CLI, "doctor", *peers, "--ipc-dir", str(tmp_path / "channel"), "--json"]
        environ = os.environ | cuda.environ | {"CUDA_VISIBLE_DEVICES": "0"}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        counters = cuda.counters()
    here, with_same, with_other, with_bare = [found for title, found in sections(done.stdout).items() if "ipc" in title]
    assert done.returncode == 1
    assert here["CUDA memory"] == ("ok", f"shared between two processes of this container, on {first}")
    assert (counters.exports, counters.opens, counters.live_allocations, counters.live_openings) == (1, 1, 0, 0)
    assert {status for status, _ in with_same.values()} == {"ok"}
    assert with_same["same devices"][1] == f"both sides have {first}"
    assert with_other["same devices"] == (
        "fail",
        f"here {first}, there {second}: CUDA memory opens on its own device only",
    )
    assert with_other["allocator"][0] == "fail"
    assert with_bare["same devices"] == ("ok", f"both sides have {first}; one side only: {second}, {mig}")


def sections(text: str) -> dict[str, dict[str, tuple[str, str]]]:
    """Title -> name -> (status, found), of what `--json` prints."""
    document: dict[str, Any] = json.loads(text)
    return {
        section["title"]: {check["name"]: (check["status"], check["found"]) for check in section["checks"]}
        for section in document["sections"]
    }


def test_a_driver_without_that_device_says_so_and_nothing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeCuda() as cuda:
        for name, value in cuda.environ.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(CudaError, match="'9' may hide them"):
            cuda_probe.list_devices({"CUDA_VISIBLE_DEVICES": "9"})
        with pytest.raises(CudaError, match="no CUDA device is called '7'"):
            cuda_probe.share_memory({}, 7)
        assert cuda.counters().allocations == 0


def test_a_driver_that_never_answers_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = tmp_path / "python"
    silent.write_text("#!/bin/sh\nexec sleep 60\n")
    silent.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(silent))
    monkeypatch.setattr(Deadlines, "probe_s", 0.05)
    with pytest.raises(CudaError, match="no answer from the driver"):
        cuda_probe.share_memory({}, 0)
    assert "no end of its import" in plugin_probe.try_plugin().import_error


def test_a_child_that_dies_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(CudaError, match="the child process ended with 1"):
        cuda_probe.list_devices({})
    assert "Python ended with 1" in plugin_probe.try_plugin().import_error


# --- FastDeploy --------------------------------------------------------------------------------------


def install(place: Path, plugin: str) -> None:
    """A FastDeploy that says much when it is imported, and a distribution of our name with another entry point."""
    (place / "fastdeploy").mkdir()
    (place / "fastdeploy/__init__.py").write_text(
        "import os\nprint('hello')\nos.write(1, b'{}')\n__version__ = '2.9'\n"
    )
    (place / "some_plugin.py").write_text(plugin)
    (place / "fastdeploy_rl-9.dist-info").mkdir()
    (place / "fastdeploy_rl-9.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: fastdeploy_rl\nVersion: 9\n"
    )
    entry = "[fastdeploy.model_runner_plugins]\nfastdeploy_rl = some_plugin:runner\n"
    (place / "fastdeploy_rl-9.dist-info/entry_points.txt").write_text(entry)


@pytest.mark.parametrize(
    ("plugin", "runner", "error", "is_raised"),
    [
        ("class R:\n    recorded_error = ''\ndef runner():\n    return R\n", "some_plugin.R", "", False),
        (
            "class R:\n    recorded_error = 'no paddle'\ndef runner():\n    return R\n",
            "some_plugin.R",
            "no paddle",
            False,
        ),
        ("def runner():\n    raise OSError('no disk')\n", "", "OSError: no disk", True),
    ],
)
def test_the_entry_point_is_asked_as_fastdeploy_asks_it(
    plugin: str, runner: str, error: str, is_raised: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, plugin)
    package = Path(plugin_probe.__file__).parents[3]
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{package}")
    monkeypatch.chdir(tmp_path)  # -m looks there first, and may find another distribution of our name
    answer = plugin_probe.try_plugin()
    assert (answer.version, answer.import_error) == ("2.9", "")
    assert (answer.runner, answer.plugin_error, answer.raised) == (runner, error, is_raised)


def test_words_without_a_board_are_the_stock_runner_and_our_board_is_ours(tmp_path: Path) -> None:
    port = free_port()
    create_words(port)
    try:
        command = [*CLI, "doctor", "--fastdeploy", str(port), "--ipc-dir", str(tmp_path / "channel"), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        found = sections(done.stdout)[f"fastdeploy at port {port}"]
        assert (done.returncode, found["runner"][0]) == (1, "fail")
        assert found["runner"][1].startswith("FastDeploy's own")
        assert found["status word"] == ("ok", "NORMAL")
    finally:
        unlink_words(port)
    assert [check.status for check in check_port(port, [], [])] == [Status.FAIL]
    board = Board.create(port, num_ranks=1)
    try:
        runner, word = check_port(port, [], [])
        assert (runner.status, f"pid {os.getpid()}," in runner.found) == (Status.OK, True)
        assert word.found == "NORMAL"
    finally:
        board.close()
