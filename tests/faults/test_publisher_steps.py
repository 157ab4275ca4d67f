"""A trainer is killed, stopped, or fails at each end of each of its own steps: engines never see the half.

The cases come from the product's list of steps. The judge compares the raw bytes of what every rank holds after the
next update with the two versions, which differ in every element; no checksum of the product has a say."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fastdeploy_rl.coverage import ParameterSpec
from fastdeploy_rl.engines.numpy.runner import NumpyModel
from fastdeploy_rl.errors import ChannelBusyError, NoPublicationError, VersionRegressError
from fastdeploy_rl.plan.planner import make_plan
from fastdeploy_rl.publish.channel import Channel
from fastdeploy_rl.publish.leases import NUM_ARENAS, LeaseTable
from fastdeploy_rl.publish.meeting import Part
from fastdeploy_rl.publish.publication import PublishStep, steps_of
from fastdeploy_rl.publish.publisher import WeightPublisher
from fastdeploy_rl.sources.base import SourceConfig
from fastdeploy_rl.sources.ipc import IpcSource
from fastdeploy_rl.update.client import BoardClient
from tests.conformance.source_suite import soon
from tests.faults.publisher_peer import SHAPES, Fault, Faults, Order, Trainer, weights
from tests.process.numpy_engine import NumpyEngine

_MODEL = NumpyModel(tuple(ParameterSpec(name, "F32", shape, None) for name, shape in SHAPES.items()))
_OLD, _NEW, _NEXT, _HALF = 1, 2, 3, 4


class Peer:
    """One trainer process."""

    def __init__(self, channel: Path, index: int = 0, count: int = 1) -> None:
        script = Path(__file__).with_name("publisher_peer.py")
        command = [sys.executable, str(script), str(channel), str(index), str(count)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def order(self, order: Order) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(order).decode() + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def ask(self, order: Order) -> Any:
        self.order(order)
        return self.answer()

    def await_stopped(self) -> None:
        _, status = os.waitpid(self.process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)

    def await_killed(self) -> None:
        assert self.process.wait(20) == -signal.SIGKILL

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(20) == 0

    def close(self) -> None:
        self.process.kill()
        self.process.wait(20)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


class Rig:
    """One engine for all cases; each case has trainers of its own."""

    def __init__(self, channel: Path, engine: NumpyEngine, client: BoardClient, peers: ExitStack) -> None:
        self.channel = channel
        self.client = client
        self._engine = engine
        self._peers = peers

    def start(self, index: int = 0, count: int = 1) -> Peer:
        peer = Peer(self.channel, index, count)
        self._peers.callback(peer.close)
        return peer

    def latest(self) -> str:
        return json.loads((self.channel / "LATEST").read_text())["version"]

    def holds(self, seed: int) -> bool:
        """Every byte of every tensor of every rank."""
        for worker in self._engine.workers:
            assert worker.stdin is not None
            worker.stdin.write("dump\n")
            worker.stdin.flush()
        self.client.receipt()  # wakes the ranks, which look at their input only now and then
        dumps = [self._engine.read(rank) for rank in range(self._engine.num_ranks)]
        expected = {name: array.tobytes().hex() for name, array in weights(seed).items()}
        return all(dump == expected for dump in dumps)

    def judge(self, seed: int, version: str) -> None:
        """The next update brings that version, whole, or there is nothing to update to and it is there already."""
        assert self.latest() == version
        assert self.client.update().version == version
        assert self.holds(seed)

    def judge_next_trainer(self, older: str) -> None:
        """A new publisher works, what came before it is refused, and what the dead left is gone when it has closed."""
        with WeightPublisher(self.channel) as publisher:
            published = publisher.publish(weights(_NEXT), step=1)
            assert published.version.epoch > int(older.split(".")[0])
            assert self.client.update().version == str(published.version)
            with pytest.raises((VersionRegressError, NoPublicationError)):
                self.client.update(older)
            assert self.holds(_NEXT)
            for step in (2, 3):
                publisher.publish(weights(_NEXT), step=step, deadline_s=5)
        self.assert_reclaimed()

    def assert_reclaimed(self) -> None:
        key = Channel(self.channel).key
        assert [name for name in os.listdir("/dev/shm") if key in name] == []
        left = {path.name for path in self.channel.iterdir() if path.is_file()}
        assert {name for name in left if not name.startswith(("EPOCH", "LEASES", "OUTCOME", "BELL"))} == set()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, NumpyEngine, BoardClient]]:
    channel = tmp_path_factory.mktemp("trainers") / "channel"
    with NumpyEngine(_MODEL, channel=channel, num_ranks=3) as engine, BoardClient(engine.port) as client:
        yield channel, engine, client


@pytest.fixture
def rig(world: tuple[Path, NumpyEngine, BoardClient]) -> Iterator[Rig]:
    with ExitStack() as peers:
        yield Rig(*world, peers)


def _ready(peer: Peer) -> None:
    assert peer.answer() == "ready"


# --- one trainer -----------------------------------------------------------------------------------


def _ends(steps: tuple[PublishStep, ...]) -> Iterator[tuple[str, str, bool]]:
    """Each end of each step, and whether the version is announced by then."""
    is_announced = False
    for step in steps:
        yield step.name, "begin", is_announced
        is_announced = is_announced or step.name in ("write_latest", "offer")
        yield step.name, "end", is_announced


_CASES = [
    pytest.param(is_borrowed, *end, id=f"{'borrow' if is_borrowed else 'copy'}-{end[0]}-{end[1]}")
    for is_borrowed in (False, True)
    for end in _ends(steps_of(Part(0, 1), is_borrowed))
]
every_end = pytest.mark.parametrize(("is_borrowed", "step", "when", "is_announced"), _CASES)


def _publish_old(peer: Peer, is_borrowed: bool) -> str:
    _ready(peer)
    version: str = peer.ask(Order(step=1, seed=_OLD, memory=0 if is_borrowed else None))["done"]
    return version


def _new_order(is_borrowed: bool, step: str, when: Any, kind: Any) -> Order:
    return Order(step=2, seed=_NEW, memory=1 if is_borrowed else None, fault=Fault(step, when, kind))


def _judged(is_announced: bool, old: str) -> tuple[int, str]:
    return (_NEW, f"{old.split('.')[0]}.2") if is_announced else (_OLD, old)


@every_end
def test_a_trainer_killed_at_any_step_leaves_the_old_version_or_the_new_one(
    rig: Rig, is_borrowed: bool, step: str, when: str, is_announced: bool
) -> None:
    peer = rig.start()
    old = _publish_old(peer, is_borrowed)
    peer.order(_new_order(is_borrowed, step, when, "kill"))
    peer.await_killed()
    rig.judge(*_judged(is_announced, old))
    rig.judge_next_trainer(old)


@every_end
def test_a_trainer_stopped_at_any_step_keeps_the_channel_and_goes_on_later(
    rig: Rig, is_borrowed: bool, step: str, when: str, is_announced: bool
) -> None:
    peer = rig.start()
    old = _publish_old(peer, is_borrowed)
    peer.order(_new_order(is_borrowed, step, when, "stop"))
    peer.await_stopped()
    rig.judge(*_judged(is_announced, old))
    with pytest.raises(ChannelBusyError):
        WeightPublisher(rig.channel).start()
    peer.process.send_signal(signal.SIGCONT)
    assert peer.answer()["done"] == f"{old.split('.')[0]}.2"
    rig.judge(_NEW, f"{old.split('.')[0]}.2")
    peer.end()
    rig.judge_next_trainer(old)


@every_end
def test_a_publication_that_fails_at_any_step_is_undone_or_stands_and_the_next_one_works(
    rig: Rig, is_borrowed: bool, step: str, when: str, is_announced: bool
) -> None:
    faults = Faults()
    with WeightPublisher(rig.channel, observer=faults) as publisher:
        trainer = Trainer(publisher, faults, 0, 1)
        old = trainer.obey(Order(step=1, seed=_OLD, memory=0 if is_borrowed else None))
        with pytest.raises(RuntimeError, match="as the test says"):
            trainer.obey(_new_order(is_borrowed, step, when, "raise"))
        assert len(_written_rows(rig.channel)) == _num_trainers_rows(is_borrowed, is_announced)
        files = Channel(rig.channel).manifest_files()
        assert sorted(int(name.split("-")[1].split(".")[1]) for name in files) == ([1, 2] if is_announced else [1])
        rig.judge(*_judged(is_announced, old))
        rig.client.clear()
        again = Order(step=3, seed=_NEXT)
        if is_borrowed:  # where it was not published, the very memory of the failed publication
            again = Order(step=3, seed=_NEXT, memory=0 if is_announced else 1, take_back=is_announced)
        rig.judge(_NEXT, trainer.obey(again))
    rig.assert_reclaimed()


def _written_rows(channel: Path) -> list[int]:
    """Those that no engine can lease."""
    table = LeaseTable(channel / "LEASES", channel / "holders")
    table.open()
    written = [row for row in range(NUM_ARENAS) if table.is_written(row)]
    table.close()
    return written


def _num_trainers_rows(is_borrowed: bool, is_announced: bool) -> int:
    """Of the two that it was lent: all that are not published now."""
    return 2 - is_borrowed - (is_borrowed and is_announced)


@pytest.mark.parametrize("is_borrowed", [False, True])
def test_a_publication_takes_the_steps_of_the_list_in_their_order(rig: Rig, is_borrowed: bool) -> None:
    peer = rig.start()
    _ready(peer)
    answer = peer.ask(Order(step=1, seed=_OLD, memory=0 if is_borrowed else None))
    assert answer["steps"] == [step.name for step in steps_of(Part(0, 1), is_borrowed)]
    peer.end()


# --- several trainers ------------------------------------------------------------------------------


_PART_CASES = [
    pytest.param(index, *end, id=f"part{index}-{end[0]}-{end[1]}")
    for index in (0, 1)
    for end in _ends(steps_of(Part(index, 2), False))
]


@pytest.mark.parametrize(("index", "step", "when", "is_announced"), _PART_CASES)
def test_one_of_two_trainers_killed_at_any_step_leaves_the_old_version_or_the_new_one(
    rig: Rig, index: int, step: str, when: str, is_announced: bool
) -> None:
    peers = [rig.start(number, 2) for number in (0, 1)]
    for peer in peers:
        _ready(peer)
        peer.order(Order(step=1, seed=_OLD))
    answers = [peer.answer() for peer in peers]
    assert [answer["steps"] for answer in answers] == [
        [step.name for step in steps_of(Part(number, 2), False)] for number in (0, 1)
    ]
    old = answers[0]["done"]
    for number, peer in enumerate(peers):
        peer.order(Order(step=2, seed=_NEW, fault=Fault(step, when, "kill") if number == index else None))
    peers[index].await_killed()
    other = peers[1 - index].answer()
    if is_announced:
        assert other["done"] == f"{old.split('.')[0]}.2"
    else:
        assert other["error"] == "PeerLostError"
    rig.judge(*_judged(is_announced, old))
    peers[1 - index].process.kill()
    peers[1 - index].await_killed()
    rig.judge_next_trainer(old)


# --- after the publication -------------------------------------------------------------------------


@pytest.fixture
def channel(tmp_path: Path) -> Path:
    return tmp_path / "channel"


@pytest.fixture
def start(channel: Path) -> Iterator[Callable[[], Peer]]:
    with ExitStack() as peers:

        def start() -> Peer:
            peer = Peer(channel)
            peers.callback(peer.close)
            _ready(peer)
            return peer

        yield start


@pytest.fixture
def source(channel: Path) -> Iterator[IpcSource]:
    source = IpcSource(SourceConfig(channel))
    yield source
    source.close()


def _stage(source: IpcSource) -> Any:
    resolved = source.resolve(None, deadline_ns=soon())
    plan = make_plan(resolved.manifest, _MODEL.specs, 0, 1)
    return resolved.manifest, source.stage(resolved, plan, deadline_ns=soon())


def _bytes(manifest: Any, staged: Any) -> dict[str, bytes]:
    found = {}
    for tensor in manifest.tensors:
        part = tensor.parts[0]
        with memoryview(staged.segments[part.segment]) as view:
            found[tensor.name] = bytes(view[part.offset : part.offset + tensor.num_bytes])
    return found


def _expected(seed: int) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in weights(seed).items()}


def test_memory_that_is_leased_stays_as_it_is_after_its_trainer_died_until_it_is_let_go(
    source: IpcSource, start: Callable[[], Peer], channel: Path
) -> None:
    peer = start()
    peer.ask(Order(step=1, seed=_OLD))
    manifest, staged = _stage(source)
    peer.process.kill()
    peer.await_killed()
    assert staged.is_vouched()
    with WeightPublisher(channel) as publisher:
        for step in (1, 2, 3):
            publisher.publish(weights(_NEW), step=step)
            assert _bytes(manifest, staged) == _expected(_OLD)
    assert _bytes(manifest, staged) == _expected(_OLD)
    staged.release()


def test_memory_of_a_trainer_that_died_is_readable_but_nobody_vouches_for_it(
    source: IpcSource, start: Callable[[], Peer], channel: Path
) -> None:
    peer = start()
    peer.ask(Order(step=1, seed=_OLD, memory=0))
    manifest, staged = _stage(source)
    assert staged.is_vouched()
    peer.process.kill()
    peer.await_killed()
    assert not staged.is_vouched()
    with WeightPublisher(channel) as publisher:
        for step in (1, 2, 3):
            publisher.publish(weights(_NEW), step=step, deadline_s=5)
            assert not staged.is_vouched()
            assert _bytes(manifest, staged) == _expected(_OLD)
        staged.release()


def test_a_trainer_that_dies_while_it_trains_in_memory_it_took_back_leaves_nothing_to_take(
    rig: Rig,
) -> None:
    """FastDeploy's cycle: update, clear, train - and killed there. What it had half trained is nobody's version."""
    peer = rig.start()
    old = _publish_old(peer, is_borrowed=True)
    rig.judge(_OLD, old)
    rig.client.clear()
    assert peer.ask(Order(step=2, seed=_HALF, memory=0, take_back=True, train=True))["done"] == "trained"
    for _ in range(2):
        with pytest.raises(NoPublicationError):
            rig.client.update()
        assert rig.client.status().legacy_status == "CLEARED"
        peer.process.kill()
        peer.await_killed()
    with WeightPublisher(rig.channel), pytest.raises(NoPublicationError):
        rig.client.update()
    with WeightPublisher(rig.channel) as publisher:
        published = publisher.publish(weights(_NEXT), step=1)
        rig.judge(_NEXT, str(published.version))
    rig.assert_reclaimed()
