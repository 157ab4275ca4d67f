"""One version published by several trainer processes: complete or not at all, and every process learns which."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from part_peer import NAMES, SHAPE, whole

from fastdeploy_rl import checksum
from fastdeploy_rl.coverage import Coverage, ParameterSpec
from fastdeploy_rl.engines.numpy.runner import NumpyModel
from fastdeploy_rl.errors import ChannelBusyError, ConfigurationError
from fastdeploy_rl.memory.tensor_view import TensorView
from fastdeploy_rl.plan.planner import make_plan
from fastdeploy_rl.publish.channel import Channel, Latest
from fastdeploy_rl.publish.contribution import Contribution, unite
from fastdeploy_rl.publish.leases import LeaseTable
from fastdeploy_rl.publish.meeting import Meeting
from fastdeploy_rl.publish.meeting import Part as TrainerPart
from fastdeploy_rl.publish.publisher import WeightPublisher, retire
from fastdeploy_rl.sources.base import SourceConfig
from fastdeploy_rl.sources.ipc import IpcSource
from fastdeploy_rl.update.client import BoardClient
from fastdeploy_rl.version import WeightVersion
from tests.process.numpy_engine import NumpyEngine

HALVES = ({"whole": ["norm"], "shards": {"w": [0, 0, 4]}}, {"whole": ["norm", "v"], "shards": {"w": [0, 4, 8]}})


class Part:
    """A process of `part_peer`."""

    def __init__(self, channel: Path, index: int, count: int) -> None:
        command = [sys.executable, str(Path(__file__).with_name("part_peer.py")), str(channel), str(index), str(count)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, step: int, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"step": step, **command}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, str]:
        assert self.process.stdout is not None
        answer: dict[str, str] = json.loads(self.process.stdout.readline())
        return answer

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def end(self) -> None:
        self.process.communicate(timeout=60)


class World:
    """All parts on one channel; what still runs at the end is killed, and what it left is removed."""

    def __init__(self, channel: Path, stack: ExitStack) -> None:
        self.channel = channel
        self._stack = stack

    def start(self, index: int, count: int) -> Part:
        part = Part(self.channel, index, count)
        self._stack.enter_context(part.process)
        self._stack.callback(part.process.kill)
        part.answer()
        return part

    def retire(self) -> None:
        if self.channel.exists():
            retire(self.channel)

    def latest(self) -> str:
        path = self.channel / "LATEST"
        return path.read_text() if path.exists() else ""

    def segments(self) -> list[str]:
        return sorted(name for name in os.listdir("/dev/shm") if Channel(self.channel).key in name)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    channel = tmp_path / "channel"
    with ExitStack() as stack:
        yield World(channel, stack)
    if channel.exists():
        retire(channel)  # what the killed ones left


def _read(channel: Path) -> tuple[str, dict[str, np.ndarray]]:
    """The latest version as an engine sees it: leased, then read part by part; checksums are those of whole tensors."""
    deadline_ns = time.monotonic_ns() + 10**10
    source = IpcSource(SourceConfig(channel))
    resolved = source.resolve(None, deadline_ns=deadline_ns)
    manifest = resolved.manifest
    specs = [ParameterSpec(tensor.name, tensor.dtype, tensor.shape, None) for tensor in manifest.tensors]
    shapes = {spec.name: (spec.dtype, spec.shape) for spec in specs}
    specs += [ParameterSpec(n, *shapes[to], None, Coverage.TIED, to) for n, to in manifest.aliases.items()]
    staged = source.stage(resolved, make_plan(manifest, specs, 0, 1), deadline_ns=deadline_ns)
    found = {}
    for tensor in manifest.tensors:
        pieces = []
        for part in tensor.parts:
            shape = list(tensor.shape)
            if tensor.shard_axis is not None:
                shape[tensor.shard_axis] = part.stop - part.start
            view = TensorView(staged.segments[part.segment], part.offset, tensor.dtype, tuple(shape))
            pieces.append(view.numpy().copy())
            del view
        found[tensor.name] = np.concatenate(pieces, tensor.shard_axis or 0)
        assert checksum.of_bytes(found[tensor.name].tobytes()).hex() == tensor.checksum
    staged.release()
    source.close()
    return str(resolved.version), found | {name: found[target] for name, target in manifest.aliases.items()}


def _assert_holds(channel: Path, step: int, names: tuple[str, ...], epoch: int = 1) -> None:
    version, found = _read(channel)
    assert version == f"{epoch}.{step}"
    assert set(found) == set(names)
    for name in names:
        assert found[name].tobytes() == whole(name, step).tobytes()


# --- together --------------------------------------------------------------------------------------


def test_shards_of_two_processes_are_one_version_and_both_learn_it(world: World) -> None:
    parts = [world.start(index, 2) for index in (0, 1)]
    for step in (1, 2, 3, 4):
        for part, tensors in zip(parts, HALVES, strict=True):
            part.ask(step, **tensors)
        first, second = (part.answer() for part in parts)
        assert first == second
        assert first["version"] == f"1.{step}"
        _assert_holds(world.channel, step, ("norm", "w", "v"))
    assert len(world.segments()) == 4
    parts[0].end()
    parts[1].end()
    assert world.segments() == []
    assert world.latest() == ""


def test_three_processes_shard_along_either_axis_for_an_engine_of_two_ranks(world: World) -> None:
    parts = [world.start(index, 3) for index in (0, 1, 2)]
    for part, (start, stop) in zip(parts, [(0, 5), (5, 6), (6, 12)], strict=True):
        part.ask(1, layout="tp:2", shards={"w": [1, start, stop]}, whole=["v"])
    assert len({json.dumps(part.answer()) for part in parts}) == 1
    _assert_holds(world.channel, 1, ("w", "v"))


def test_disjoint_names_and_tied_ones_are_published_together(world: World) -> None:
    parts = [world.start(index, 2) for index in (0, 1)]
    parts[1].ask(1, whole=["v"])
    parts[0].ask(1, whole=["embed"], tied={"head": "embed"})
    assert [part.answer()["version"] for part in parts] == ["1.1", "1.1"]
    _, found = _read(world.channel)
    assert found["head"].tobytes() == whole("embed", 1).tobytes()
    assert set(found) == {"embed", "head", "v"}


def test_the_version_before_stands_until_the_last_part_is_there(world: World) -> None:
    parts = [world.start(index, 2) for index in (0, 1)]
    for part, tensors in zip(parts, HALVES, strict=True):
        part.ask(1, **tensors)
    assert [part.answer()["version"] for part in parts] == ["1.1", "1.1"]
    before = world.latest()
    parts[1].ask(2, **HALVES[1])
    _await_file(world.channel / "OFFER.1")
    assert world.latest() == before
    _assert_holds(world.channel, 1, ("norm", "w", "v"))
    parts[0].ask(2, **HALVES[0])
    assert [part.answer()["version"] for part in parts] == ["1.2", "1.2"]


def _await_file(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)  # the other process writes the file; the loop is bounded by the deadline above


def test_an_engine_serves_from_the_memory_of_two_trainers(world: World) -> None:
    model = NumpyModel((ParameterSpec("w", "F32", SHAPE, 0), ParameterSpec("v", "F32", SHAPE, None)))
    parts = [world.start(index, 2) for index in (0, 1)]
    with NumpyEngine(model, channel=world.channel, num_ranks=2) as engine, BoardClient(engine.port) as client:
        for step in (1, 2, 3):
            parts[0].ask(step, shards={"w": [0, 0, 4]})
            parts[1].ask(step, shards={"w": [0, 4, 8]}, whole=["v"])
            digests = {part.answer()["digest"] for part in parts}
            report = client.update()
            assert {report.receipt.content_digest} == digests
            assert [rank.copied_bytes for rank in report.ranks] == [0, 0]
            assert engine.holds({name: whole(name, step) for name in ("w", "v")})
        parts[1].kill()
        assert client.receipt(recompute=True) == report.receipt
    parts[0].end()


# --- who is missing --------------------------------------------------------------------------------


def test_a_part_that_does_not_come_is_named_and_the_others_learn_it(world: World) -> None:
    parts = [world.start(index, 3) for index in (0, 1)]
    idle = world.start(2, 3)
    parts[1].ask(1, whole=["v"])
    parts[0].ask(1, whole=["w"], deadline_s=0.4)
    for answer in (parts[0].answer(), parts[1].answer()):
        assert answer["error"] == "DeadlineExceededError"
        assert f"part 2 (pid {idle.process.pid}) has not published it" in answer["text"]
    assert world.latest() == ""
    for part, names in zip((*parts, idle), (["w"], ["v"], ["norm"]), strict=True):
        part.ask(1, whole=names)
    assert [part.answer()["version"] for part in (*parts, idle)] == ["1.1"] * 3


def test_a_part_that_is_not_running_is_named(world: World) -> None:
    leader = world.start(0, 2)
    leader.ask(1, whole=["w"], deadline_s=0.2)
    assert "part 1 is not running" in leader.answer()["text"]
    assert world.latest() == ""


def test_a_part_waits_for_part_0_and_names_it(world: World) -> None:
    part = world.start(1, 2)
    part.ask(1, whole=["w"], deadline_s=0.2)
    assert "part 0 is not running" in part.answer()["text"]
    assert not (world.channel / "OFFER.1").exists()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_part_that_dies_while_the_other_waits_is_named_at_once_and_may_come_back(world: World, victim: int) -> None:
    parts = [world.start(index, 3) for index in (0, 1, 2)]
    for part, names in zip(parts, (["w"], ["v"], ["norm"]), strict=True):
        part.ask(1, whole=names)
    assert [part.answer()["version"] for part in parts] == ["1.1"] * 3
    before = world.latest()
    waiting = 1 - victim
    parts[waiting].ask(2, whole=["v"], deadline_s=60)
    parts[victim].process.send_signal(signal.SIGKILL)
    parts[victim].process.wait(10)
    answer = parts[waiting].answer()
    assert answer["error"] == "PeerLostError"
    assert f"part {victim} (pid {parts[victim].process.pid}) died" in answer["text"]
    assert world.latest() == before
    parts[victim] = world.start(victim, 3)
    for part, names in zip(parts, (["w"], ["v"], ["norm"]), strict=True):
        part.ask(2, whole=names)
    answers = [part.answer() for part in parts]
    assert [answer.get("version") for answer in answers] == [f"{1 if victim else 2}.2"] * 3


def test_an_offer_of_a_dead_part_does_not_count(world: World) -> None:
    dead = world.start(1, 2)
    dead.ask(1, whole=["v"])
    _await_file(world.channel / "OFFER.1")
    dead.kill()
    leader = world.start(0, 2)
    leader.ask(1, whole=["w"], deadline_s=0.2)
    assert "part 1 (pid" in (text := leader.answer()["text"])
    assert "is not running" in text
    assert world.latest() == ""
    again = world.start(1, 2)
    again.ask(1, whole=["norm"])
    leader.ask(1, whole=["w"])
    assert [part.answer()["version"] for part in (leader, again)] == ["1.1", "1.1"]
    _assert_holds(world.channel, 1, ("w", "norm"))


def test_a_part_that_publishes_another_step_is_named_to_both(world: World) -> None:
    parts = [world.start(index, 2) for index in (0, 1)]
    parts[1].ask(8, whole=["v"])
    _await_file(world.channel / "OFFER.1")
    parts[0].ask(7, whole=["w"])
    for part in parts:
        answer = part.answer()
        assert answer["error"] == "TrainerError"
        assert f"part 1 (pid {parts[1].process.pid}) publishes step 8, part 0 step 7" in answer["text"]
    assert world.latest() == ""


def test_a_part_started_for_another_count_is_named(world: World) -> None:
    parts = [world.start(0, 2), world.start(1, 3)]
    parts[1].ask(1, whole=["v"])
    parts[0].ask(1, whole=["w"])
    assert all("is one of 3 parts, part 0 one of 2" in part.answer()["text"] for part in parts)
    assert world.latest() == ""


# --- what does not fit together --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        ({"whole": ["v"]}, {"whole": ["v"], "changed": ["v"]}, "'v' has different values on part 0 and on part 1"),
        ({"shards": {"w": [0, 0, 4]}}, {"shards": {"w": [0, 4, 7]}}, r"'w': nobody has \[7, 8\) of axis 0"),
    ],
)
def test_what_does_not_fit_together_is_named_to_both_and_changes_nothing(
    world: World, first: dict[str, Any], second: dict[str, Any], text: str
) -> None:
    parts = [world.start(index, 2) for index in (0, 1)]
    for part, tensors in zip(parts, HALVES, strict=True):
        part.ask(1, **tensors)
    assert [part.answer()["version"] for part in parts] == ["1.1", "1.1"]
    before = world.latest()
    parts[0].ask(2, **first)
    parts[1].ask(2, **second)
    for answer in (parts[0].answer(), parts[1].answer()):
        assert answer["error"] == "TrainerError"
        assert re.search(text, answer["text"]), answer["text"]
    assert world.latest() == before
    _assert_holds(world.channel, 1, ("norm", "w", "v"))


def test_a_part_whose_own_tensors_are_bad_stops_the_others_at_once(world: World) -> None:
    parts = [world.start(index, 2) for index in (0, 1)]
    parts[1].ask(1)
    assert "empty" in parts[1].answer()["text"]
    parts[0].ask(1, whole=["w"], deadline_s=60)
    answer = parts[0].answer()
    assert answer["error"] == "TrainerError"
    assert "part 1" in answer["text"]
    assert "could not publish step 1: nothing to publish" in answer["text"]
    for part, tensors in zip(parts, HALVES, strict=True):
        part.ask(1, **tensors)
    assert [part.answer()["version"] for part in parts] == ["1.1", "1.1"]


# --- life ------------------------------------------------------------------------------------------


def test_a_second_process_of_one_part_is_refused_by_pid(world: World) -> None:
    part = world.start(1, 2)
    with pytest.raises(ChannelBusyError, match=f"part 1 .*pid {part.process.pid}"):
        WeightPublisher(world.channel, part=(1, 2)).start()
    part.end()


def test_parts_that_were_killed_leave_a_version_that_stands_and_retire_takes_all_of_it(world: World) -> None:
    parts = [world.start(index, 2) for index in (0, 1)]
    for part, tensors in zip(parts, HALVES, strict=True):
        part.ask(1, **tensors)
    assert [part.answer()["version"] for part in parts] == ["1.1", "1.1"]
    for part in parts:
        part.kill()
    _assert_holds(world.channel, 1, ("norm", "w", "v"))
    assert retire(world.channel).version == "1.1"
    assert world.segments() == []


def test_retiring_while_another_part_lives_changes_nothing(world: World) -> None:
    parts = [world.start(index, 2) for index in (0, 1)]
    for part, tensors in zip(parts, HALVES, strict=True):
        part.ask(1, **tensors)
    assert [part.answer()["version"] for part in parts] == ["1.1", "1.1"]
    parts[0].kill()
    before = world.latest()
    with pytest.raises(ChannelBusyError, match="part 1"):
        retire(world.channel)
    assert world.latest() == before
    _assert_holds(world.channel, 1, ("norm", "w", "v"))
    parts[1].end()
    assert world.latest() == ""
    retire(world.channel)


def test_retiring_takes_nothing_of_the_dead_either_while_the_last_part_lives(world: World) -> None:
    parts = [world.start(index, 3) for index in range(3)]
    for part, name in zip(parts, ("w", "v", "norm"), strict=True):
        part.ask(1, whole=[name])
    assert [part.answer()["version"] for part in parts] == ["1.1"] * 3
    for part in parts[:2]:
        part.kill()
    with pytest.raises(ChannelBusyError, match="part 2"):
        retire(world.channel)
    _assert_holds(world.channel, 1, ("w", "v", "norm"))
    parts[2].end()


def test_a_surplus_part_that_lives_keeps_nobody_from_publishing(tmp_path: Path) -> None:
    channel = tmp_path / "channel"
    with WeightPublisher(channel) as alone, WeightPublisher(channel, part=(1, 2)):
        assert alone.publish({"w": whole("w", 1)}, step=1).version.step == 1
        assert alone.publish({"w": whole("w", 2)}, step=2).version.step == 2
        _assert_holds(channel, 2, ("w",))


def test_an_offer_that_cannot_be_read_is_said_to_all_parts(world: World) -> None:
    parts = [world.start(index, 3) for index in (0, 1)]
    unread = world.start(2, 3)
    (world.channel / "OFFER.2").write_text('{"later": 1}')
    parts[1].ask(1, whole=["v"], deadline_s=60)
    _await_file(world.channel / "OFFER.1")
    parts[0].ask(1, whole=["w"], deadline_s=60)
    for part in parts:
        answer = part.answer()
        assert (answer["error"], "OFFER.2 of the channel cannot be read" in answer["text"]) == ("ManifestError", True)
    assert world.latest() == ""
    unread.end()


def test_a_part_whose_offer_was_published_hears_nothing_of_what_befell_part_0_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Part 0 writes LATEST and then breaks off, all of it between two looks of the waiting part."""
    channel = Channel(tmp_path / "channel")
    read_latest = Channel.read_latest
    waiting = iter([False, False, True])  # refreshed, before the offer, and the first look at what became of it

    def read_and_be_overtaken(self: Channel) -> Latest | None:
        latest = read_latest(self)
        if next(waiting):
            monkeypatch.setattr(Channel, "read_latest", read_latest)
            leader = Meeting(channel, TrainerPart(0, 2))
            leader.open()
            table = LeaseTable(channel.leases_path, channel.holders_dir)
            table.create()
            table.close()
            offers = leader.gather(1, time.monotonic_ns() + 10**10)
            shares = [Contribution(0, "full", (), (), {}), *(offer.contribution for offer in offers)]
            with leader.deciding_about(offers, time.monotonic_ns() + 10**10):
                channel.write_latest(channel.write_manifest(unite(WeightVersion(1, 1), shares)))
            leader.refuse(OSError("broke off when all was done"))
            leader.close()
        return latest

    with WeightPublisher(channel.path, part=(1, 2)) as publisher:
        monkeypatch.setattr(Channel, "read_latest", read_and_be_overtaken)
        assert publisher.publish({"w": whole("w", 1)}, step=1).version == WeightVersion(1, 1)
        _assert_holds(channel.path, 1, ("w",))


def test_what_a_killed_part_left_half_written_goes_with_its_next_start(world: World) -> None:
    world.start(1, 2).kill()
    left = [world.channel / name for name in ("OFFER.1", ".OFFER.1.0a1b.tmp", ".LEASES.1.0a1b.tmp")]
    others = world.channel / ".OFFER.12.0a1b.tmp"
    for path in (*left, others):
        path.write_bytes(b"half")
    world.start(1, 2).end()
    assert [path.name for path in left if path.exists()] == []
    assert others.exists()


def test_parts_killed_at_any_moment_leave_all_of_a_version_or_nothing(world: World) -> None:
    names = (["w"], ["v"], ["norm"])
    parts = [world.start(index, 3) for index in range(3)]
    for step in range(1, 10):
        for part, own in zip(parts, names, strict=True):
            part.ask(step, whole=own, deadline_s=20)
        victim = step % 4  # 3: nobody
        if victim < 3:
            time.sleep(0.004 * step)  # a moment, so that the kill falls into copying, offering or deciding
            parts[victim].kill()
        answers = [part.answer() for index, part in enumerate(parts) if index != victim]
        is_published = "version" in answers[0]
        assert all(("version" in answer) == is_published for answer in answers)
        assert is_published or victim < 3
        if world.latest():
            version, found = _read(world.channel)
            assert set(found) == {"w", "v", "norm"}
            found_step = int(version.partition(".")[2])
            assert found_step == step or not is_published
            assert all(value.tobytes() == whole(name, found_step).tobytes() for name, value in found.items())
        if victim < 3:
            parts[victim] = world.start(victim, 3)


def test_a_publisher_alone_takes_over_what_several_left(world: World) -> None:
    parts = [world.start(index, 2) for index in (0, 1)]
    for part, tensors in zip(parts, HALVES, strict=True):
        part.ask(1, **tensors)
    assert [part.answer()["version"] for part in parts] == ["1.1", "1.1"]
    for part in parts:
        part.kill()
    with WeightPublisher(world.channel) as publisher:
        _assert_holds(world.channel, 1, ("norm", "w", "v"))
        publisher.publish({name: whole(name, 5) for name in NAMES}, step=5)
        _assert_holds(world.channel, 5, NAMES, epoch=2)
        assert not (world.channel / "LEASES.1").exists()
    assert world.segments() == []


@pytest.mark.parametrize("part", [(1, 1), (-1, 2), (0, 0), (2, 2), (0, 5000), (0.0, 2), "01", None])
def test_a_part_that_cannot_be_is_refused(tmp_path: Path, part: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"part must be \(index, count\)"):
        WeightPublisher(tmp_path / "channel", part=part)
