"""`doctor` among real processes: what the dead left is named and taken away, what lives stays untouched."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fastdeploy_rl.board.board import Board, board_name
from fastdeploy_rl.memory.owner_lock import OwnerLock
from fastdeploy_rl.observe.doctor import leftovers
from fastdeploy_rl.observe.doctor.channel import check_engines
from fastdeploy_rl.observe.doctor.examination import examine
from fastdeploy_rl.observe.doctor.leftovers import (
    dead_holders,
    dead_publishers,
    find_remains,
    find_unclaimed,
    remove_unused,
)
from fastdeploy_rl.publish.channel import Channel
from fastdeploy_rl.publish.publisher import retire
from fastdeploy_rl.testing.fake_cuda import FakeCuda
from tests.process.numpy_engine import free_port
from tests.process.private_shm import private_shm

CLI = (sys.executable, "-m", "fastdeploy_rl.cli")
PEER = Path(__file__).with_name("publication_peer.py")
SCENE = Path(__file__).with_name("doctor_scene.py")
DEADLINE_S = 60.0


# --- the living beside the dead --------------------------------------------------------------------


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Played once, in a /dev/shm of its own, so that no other test's dead are taken away."""
    place = tmp_path_factory.mktemp("scene")
    (place / "runtime").mkdir(mode=0o700)
    prefix = private_shm(64 << 20) or []
    done = subprocess.run(
        [*prefix, sys.executable, str(SCENE), str(place)],
        env=os.environ | {"XDG_RUNTIME_DIR": str(place / "runtime"), "PYTHONPATH": str(SCENE.parents[2])},
        stdout=subprocess.PIPE,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def checks_of(looked: dict[str, Any], title: str) -> dict[str, list[dict[str, str]]]:
    """Name -> the checks of that name, in one section."""
    (section,) = [section for section in looked["out"]["sections"] if section["title"] == title]
    return {check["name"]: [c for c in section["checks"] if c["name"] == check["name"]] for check in section["checks"]}


def test_the_dead_are_named_with_what_they_left_and_nothing_is_touched(scene: dict[str, Any]) -> None:
    port = scene["dead_port"]
    found = " ".join(check["found"] for check in checks_of(scene["before"], "leftovers")["of the dead"])
    for who in (f"engine at port {port} (pid ", "publisher of ", "holder of leases"):
        assert who in found
    for name in (f"fastdeploy_rl_board.{port}", f"fastdeploy_rl_collectives.{port}", "LATEST", "LOCK"):
        assert name in found
    assert scene["before"]["out"]["removed"] == []
    assert scene["text"]["names"] == scene["before"]["names"]
    assert scene["before"]["code"] == 0  # leftovers are in nobody's way


def test_engines_are_told_alive_from_dead(scene: dict[str, Any]) -> None:
    engines = checks_of(scene["before"], "engines")
    (alive,), (dead,) = engines[f"port {scene['alive_port']}"], engines[f"port {scene['dead_port']}"]
    assert (alive["status"], dead["status"]) == ("ok", "warn")
    assert "2 ranks, serving, version 1.1" in alive["found"]
    assert dead["mend"].startswith("fastdeploy-rl doctor --clean")


def test_a_dead_engine_that_must_be_there_is_a_failure(scene: dict[str, Any]) -> None:
    (dead,) = checks_of(scene["wanted"], "engines")[f"port {scene['dead_port']}"]
    assert dead["status"] == "fail"
    assert dead["mend"].startswith(f"fastdeploy-rl serve --engine-worker-queue-port {scene['dead_port']}")
    assert scene["wanted"]["code"] == 1


def test_the_channel_of_a_killed_publisher_says_so_and_what_it_still_offers(scene: dict[str, Any]) -> None:
    channel = checks_of(scene["before"], "channel")
    assert "was killed (pid " in channel["publisher"][0]["found"]
    assert "version 1.1: 6 tensors" in channel["publication"][0]["found"]


def test_cleaning_takes_all_of_the_dead_and_says_each_name(scene: dict[str, Any]) -> None:
    removed = {Path(item["path"]).name: item["num_bytes"] for item in scene["cleaned"]["out"]["removed"]}
    port = scene["dead_port"]
    gone = set(scene["before"]["names"]) - set(scene["cleaned"]["names"])
    assert {name for name in scene["before"]["names"] if name.endswith(f".{port}") and "test" not in name} <= gone
    assert gone <= set(removed)
    assert {"LATEST", "LOCK", f"{port}.lock", str(port)} <= set(removed)
    assert removed[f"fastdeploy_rl_board.{port}"] > 0
    assert sum(name.endswith(".lock") for name in removed) == 3  # the engine's, and those of its two ranks
    assert scene["channel_files"] == ["EPOCH", "LEASES", "holders"]
    assert scene["again"]["out"]["removed"] == []


def test_the_living_keep_every_name_and_serve_on(scene: dict[str, Any]) -> None:
    assert set(scene["living"]) <= set(scene["cleaned"]["names"])
    assert scene["alive"]["out"]["removed"] == []
    assert "alive, pid " in checks_of(scene["alive"], "channel")["publisher"][0]["found"]
    assert "2 leases of live holders" in checks_of(scene["alive"], "channel")["arenas"][0]["found"]
    assert scene["holds"] is True


def test_for_people_it_is_a_line_a_check_and_a_mend_for_each_problem(scene: dict[str, Any]) -> None:
    lines = scene["text"]["out"].splitlines()
    assert "leftovers" in lines
    problems = [index for index, line in enumerate(lines) if line.startswith(("  warn", "  fail"))]
    assert problems != []
    assert all(lines[index + 1].startswith("        mend: ") for index in problems)
    assert lines[-1].endswith(" 0 fail")


# --- a publisher that was killed, and who still holds its version ----------------------------------


@contextmanager
def peer(verb: str, channel: Path) -> Iterator["subprocess.Popen[str]"]:
    """Until it has said its first line; killed at the end."""
    process = subprocess.Popen(
        [sys.executable, str(PEER), verb, str(channel)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        try:
            process.stdout.readline()
            yield process
        finally:
            process.kill()


def test_a_dead_publishers_version_stays_while_an_engine_leases_it(tmp_path: Path) -> None:
    path = tmp_path / "channel"
    channel = Channel(path)
    with peer("publish", path) as trainer, peer("hold", path) as reader:
        assert dead_publishers(channel) == []
        trainer.kill()
        trainer.wait(DEADLINE_S)
        latest = (path / "LATEST").read_bytes()
        (dead,) = dead_publishers(channel)
        assert f"pid {reader.pid}" in dead.in_use_by
        assert remove_unused(dead) == []
        assert (path / "LATEST").read_bytes() == latest
        assert dead_holders(channel) == []
    assert dead.in_use_by == ""
    removed = {item.path.name for item in remove_unused(dead)}
    assert {"LATEST", "LOCK"} < removed
    assert [item for item in find_unclaimed(channel) if channel.key in item.path.name] == []
    assert dead_publishers(channel) == []


@contextmanager
def part_of_two(channel: Path, index: int) -> Iterator["subprocess.Popen[str]"]:
    """One of two processes that publish together."""
    command = [sys.executable, str(PEER.with_name("part_peer.py")), str(channel), str(index), "2"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        try:
            process.stdout.readline()
            yield process
        finally:
            process.kill()


def publish_together(*parts: "subprocess.Popen[str]") -> None:
    for part in parts:
        part.stdin.write('{"step": 1, "whole": ["norm"]}\n')
        part.stdin.flush()
    assert ["version" in json.loads(part.stdout.readline()) for part in parts] == [True] * len(parts)


def test_what_several_published_together_goes_when_the_last_of_them_is_dead(tmp_path: Path) -> None:
    path = tmp_path / "channel"
    channel = Channel(path)
    with part_of_two(path, 0) as first, part_of_two(path, 1) as second:
        publish_together(first, second)
        second.kill()
        second.wait(DEADLINE_S)
        assert dead_publishers(channel) == []  # its part belongs to a version whose publisher lives
        (section,) = [section for section in examine(path).sections if section.title == "channel"]
        (check,) = [check for check in section.checks if check.name == "publisher"]
        assert check.status.value == "warn"
        assert f"pid {second.pid}," in check.found
        assert f"others live: pid {first.pid}" in check.found
        first.kill()
        first.wait(DEADLINE_S)
    (dead,) = dead_publishers(channel)
    names = {item.path.name for item in remove_unused(dead)}
    assert {"LATEST", "LOCK", "LOCK.1"} < names
    assert [name for name in os.listdir("/dev/shm") if channel.key in name] == []
    assert dead_publishers(channel) == []


def test_a_publication_that_was_left_on_purpose_is_no_leftover(tmp_path: Path) -> None:
    from fastdeploy_rl.publish.publisher import WeightPublisher
    from tests.process.publication_peer import weights

    publisher = WeightPublisher(tmp_path / "channel")
    publisher.start()
    publisher.publish(weights(1), step=1)
    publisher.close(keep=True)
    try:
        assert dead_publishers(publisher.channel) == []
    finally:
        retire(tmp_path / "channel")


def test_a_lock_that_came_alive_again_is_left_alone(tmp_path: Path) -> None:
    channel = Channel(tmp_path / "channel")
    channel.open()
    path = channel.holders_dir / f"{1:016x}.lock"
    path.touch(mode=0o600)
    (dead,) = dead_holders(channel)
    with OwnerLock(path):
        assert remove_unused(dead) == []
        assert path.exists()


# --- what fails ------------------------------------------------------------------------------------


def doctor(*options: str, prefix: list[str] | None = None) -> tuple[int, str]:
    done = subprocess.run(
        [*(prefix or []), *CLI, "doctor", *options], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_a_tiny_shm_fails_and_names_the_option(tmp_path: Path) -> None:
    prefix = private_shm(64 << 10)
    if prefix is None:
        pytest.skip("this machine lets nobody mount a /dev/shm of their own")
    code, text = doctor("--ipc-dir", str(tmp_path / "channel"), prefix=prefix)
    assert code == 1
    assert "fail  size" in text
    assert "--shm-size" in text


def test_a_channel_open_to_others_fails_and_stays_as_it_is(tmp_path: Path) -> None:
    channel = tmp_path / "channel"
    channel.mkdir()
    channel.chmod(0o777)
    code, text = doctor("--ipc-dir", str(channel), "--json")
    assert (code, json.loads(text)["status"]) == (1, "fail")
    assert f"chmod 700 {channel}" in text
    assert list(channel.iterdir()) == []


def test_an_engine_that_is_asked_for_and_missing_fails(tmp_path: Path) -> None:
    code, text = doctor("--engine", "1", "--ipc-dir", str(tmp_path / "channel"))
    assert code == 1
    assert "fail  port 1" in text
    assert "fastdeploy-rl serve" in text


def test_a_broken_publication_fails_and_the_rest_is_examined_all_the_same(tmp_path: Path) -> None:
    channel = Channel(tmp_path / "channel")
    channel.open()
    (channel.path / "LATEST").write_text("{")
    (channel.path / "EPOCH").write_text("soon")
    examination = examine(channel.path)
    (section,) = [section for section in examination.sections if section.title == "channel"]
    (publication,) = [check for check in section.checks if check.name == "publication"]
    assert publication.status.value == "fail"
    assert "fastdeploy-rl retire" in publication.mend
    assert (channel.path / "LATEST").read_text() == "{"
    assert [section.title for section in examination.sections][-1] == "leftovers"


def test_nothing_of_a_framework_is_imported(tmp_path: Path) -> None:
    """So it works, at once, where neither is installed."""
    probe = (
        "import sys; from fastdeploy_rl.cli import main\n"
        f"main(['doctor', '--ipc-dir', {str(tmp_path / 'channel')!r}, '--json'])\n"
        "heavy = [name for name in ('paddle', 'torch', 'transformers', 'fastapi') if name in sys.modules]\n"
        "print(heavy, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, check=True, timeout=DEADLINE_S, text=True)
    assert done.stderr.strip() == "[]"


def test_a_run_directory_without_its_engine_is_a_leftover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "engine_dir", lambda port: tmp_path / "engines" / str(port))
    (tmp_path / "engines" / "7").mkdir(parents=True)
    (tmp_path / "engines" / "7" / "report.1.json").write_text("{}")
    (dead,) = [dead for dead in find_remains(Channel(tmp_path / "channel")) if "port 7 " in dead.who]
    assert [(item.path.name, item.num_bytes) for item in remove_unused(dead)] == [("7", 2)]
    assert list((tmp_path / "engines").iterdir()) == []


def test_an_engine_whose_lock_lies_in_another_container_keeps_its_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its runtime directory is out of sight, /dev/shm is not."""
    runtime, out_of_sight = tmp_path / "runtime", tmp_path / "out-of-sight"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    board = Board.create(free_port(), num_ranks=1)
    try:
        runtime.rename(out_of_sight)
        assert [dead.who for dead in find_remains(Channel(tmp_path / "channel")) if f"{board.port} " in dead.who] == []
        (check,) = check_engines(board.port)
        assert (check.status.value, "cannot be seen from here" in check.found) == ("warn", True)
        unclaimed = {item.path.name for item in find_unclaimed(Channel(tmp_path / "channel"))}
        assert board_name(board.port) in unclaimed
    finally:
        out_of_sight.rename(runtime)
        board.close()


# --- GPUs ------------------------------------------------------------------------------------------


def test_devices_are_named_by_uuid_and_a_wrong_selection_is_explained(tmp_path: Path) -> None:
    with FakeCuda() as cuda:
        command = [*CLI, "doctor", "--ipc-dir", str(tmp_path / "channel"), "--json"]
        environ = os.environ | cuda.environ | {"CUDA_VISIBLE_DEVICES": "1,MIG-33333333,9"}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    # Not the exit code: an engine of another test, fenced just now, would be in it.
    sections = [section for section in json.loads(done.stdout)["sections"] if section["title"] != "engines"]
    assert "fail" not in {check["status"] for section in sections for check in section["checks"]}
    checks = checks_of({"out": {"sections": sections}}, "gpu")
    assert checks["driver"][0]["found"].startswith("CUDA ")
    assert cuda.devices[1].uuid in checks["devices"][0]["found"]
    (selection,) = checks["CUDA_VISIBLE_DEVICES"]
    assert selection["status"] == "warn"
    assert f"MIG-33333333: {cuda.devices[2].uuid}" in selection["found"]
    assert "9: names no device" in selection["found"]
