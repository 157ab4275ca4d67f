"""Ranks as threads, each with a loop that is not ours: they come to commands together, and leave them together; numpy
runners stand in for FastDeploy's, and the status words for those that FastDeploy makes."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from fastdeploy_rl import WeightPublisher
from fastdeploy_rl.board.legacy import WEIGHTS_WORD, WORDS, StatusWord, create_words, unlink_words, word_name
from fastdeploy_rl.config import ABORT, KEEP
from fastdeploy_rl.control.controller import EngineController
from fastdeploy_rl.coverage import ParameterSpec
from fastdeploy_rl.engines.fastdeploy import attendance
from fastdeploy_rl.engines.fastdeploy import seat as seat_module
from fastdeploy_rl.engines.fastdeploy.seat import Seat
from fastdeploy_rl.engines.fastdeploy.settings import EngineSettings, PluginOptions
from fastdeploy_rl.engines.numpy.runner import NumpyModel, NumpyRunner, random_weights
from fastdeploy_rl.errors import CoverageError, EngineNotFoundError, LifecycleError, NoPublicationError
from fastdeploy_rl.lifecycle import LegacyStatus
from fastdeploy_rl.memory.shared_segment import SHM_DIR
from fastdeploy_rl.update.client import BoardClient
from tests.process.numpy_engine import free_port, held_bytes

NUM_RANKS = 2
Weights = dict[str, np.ndarray]
MODEL = NumpyModel((ParameterSpec("cut", "F32", (8, 6), 0), ParameterSpec("whole", "BF16", (5,), None)))


class Ranks:
    """Seats of one engine, each called from a thread of its own, as workers would be."""

    def __init__(self, channel: Path) -> None:
        self.port = free_port()
        self.model = MODEL
        self.channel = channel
        self.runners = [NumpyRunner(self.model, rank, NUM_RANKS) for rank in range(NUM_RANKS)]
        self.seats: list[Seat] = []
        self._options: dict[str, float] = {}
        self._pool = ThreadPoolExecutor(NUM_RANKS)

    def settings(self, rank: int) -> EngineSettings:
        return EngineSettings(
            port=self.port,
            own_port=self.port,
            rank=rank,
            num_ranks=NUM_RANKS,
            tp_rank=rank,
            load_strategy="ipc",
            model_dir=self.channel,
            channel=self.channel,
            metas_dir=None,
            options=PluginOptions(**{"update_s": 10.0, "clear_s": 10.0, "attach_s": 10.0} | self._options),
            rsync_config="",
            is_expert_parallel=False,
        )

    def on_each(self, call: Callable[[int], object]) -> list[object]:
        running = [self._pool.submit(call, rank) for rank in range(NUM_RANKS)]
        return [each.result(20) for each in running]

    def open(self, **options: float) -> None:
        self._options = options
        self.seats = [None] * NUM_RANKS  # type: ignore[list-item]

        def take(rank: int) -> None:
            self.seats[rank] = Seat(self.settings(rank))
            self.seats[rank].take(self.runners[rank])

        self.on_each(take)

    def close(self) -> None:
        for seat in reversed(self.seats):
            if seat is not None:
                seat.close()
        self.seats = []
        self._pool.shutdown()

    def holds(self, weights: Weights) -> bool:
        return all(
            runner.bound()[spec.name].numpy().tobytes() == held_bytes(spec, weights, rank, NUM_RANKS)
            for rank, runner in enumerate(self.runners)
            for spec in self.model.specs
            if spec.name in runner.bound()
        ) and all(runner.bound() for runner in self.runners)

    def loop(self, is_over: threading.Event) -> None:
        """Turns of a loop in which the ranks meet, as FastDeploy's do."""
        is_last = False

        def look() -> None:
            """While all of them are at the meeting: they go on alike."""
            nonlocal is_last
            is_last = is_over.is_set()

        meeting = threading.Barrier(NUM_RANKS, look)

        def turns(rank: int) -> None:
            while meeting.wait(20) >= 0 and not is_last:
                self.seats[rank].look_for_command()
                time.sleep(0.001)  # a forward pass

        self.on_each(turns)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path / "channel")
    create_words(ranks.port)
    try:
        yield ranks
    finally:
        ranks.close()
        unlink_words(ranks.port)


@pytest.fixture
def publisher(ranks: Ranks) -> Iterator[WeightPublisher]:
    with WeightPublisher(ranks.channel) as publisher:
        yield publisher


def publish(publisher: WeightPublisher, step: int) -> Weights:
    weights = random_weights(MODEL, step)
    publisher.publish(weights, step=step, layout=f"tp:{NUM_RANKS}")
    return weights


def write_word(port: int, value: LegacyStatus) -> None:
    """As a trainer does."""
    word = StatusWord(WEIGHTS_WORD, port)
    word.store(value)
    word.close()


def read_word(port: int) -> int:
    word = StatusWord(WEIGHTS_WORD, port)
    try:
        return word.load()
    finally:
        word.close()


def await_word(port: int, value: LegacyStatus, within_s: float = 10.0) -> None:
    word = StatusWord(WEIGHTS_WORD, port)
    deadline_ns = time.monotonic_ns() + int(within_s * 1e9)
    while (found := word.load()) != value:
        assert word.wait_change(found, deadline_ns), f"the word reads {found}, not {value}"
    word.close()


def attend(ranks: Ranks, wanted: LegacyStatus) -> None:
    ranks.on_each(lambda rank: ranks.seats[rank].attend_word(wanted))


def test_a_seat_begins_with_the_newest_version_on_every_rank(ranks: Ranks, publisher: WeightPublisher) -> None:
    weights = publish(publisher, 1)
    ranks.open()
    assert ranks.holds(weights)
    assert [seat.live_version for seat in ranks.seats] == ["1.1", "1.1"]
    assert read_word(ranks.port) == LegacyStatus.NORMAL


def test_without_weights_no_rank_starts_and_all_say_why(ranks: Ranks, publisher: WeightPublisher) -> None:
    errors = []

    def refused(rank: int) -> None:
        with Seat(ranks.settings(rank)) as seat, pytest.raises(NoPublicationError) as caught:
            seat.take(ranks.runners[rank])
        errors.append(str(caught.value))

    ranks.on_each(refused)
    assert len(errors) == NUM_RANKS
    assert all(str(ranks.channel) in error for error in errors)
    assert not any(runner.bound() for runner in ranks.runners)


def test_the_word_of_a_trainer_is_attended_to(ranks: Ranks, publisher: WeightPublisher) -> None:
    publish(publisher, 1)
    ranks.open()
    weights = publish(publisher, 2)
    write_word(ranks.port, LegacyStatus.UPDATING)
    attend(ranks, LegacyStatus.NORMAL)
    assert ranks.holds(weights)
    write_word(ranks.port, LegacyStatus.CLEARING)
    attend(ranks, LegacyStatus.CLEARED)
    assert not any(runner.bound() for runner in ranks.runners)
    assert not any(runner.has_kv_cache for runner in ranks.runners)


def test_a_version_that_is_refused_leaves_the_old_one_and_a_normal_word(
    ranks: Ranks, publisher: WeightPublisher
) -> None:
    weights = publish(publisher, 1)
    ranks.open()
    publisher.publish({"cut": weights["cut"]}, step=2, layout=f"tp:{NUM_RANKS}")
    write_word(ranks.port, LegacyStatus.UPDATING)
    attend(ranks, LegacyStatus.NORMAL)
    assert ranks.holds(weights)
    with BoardClient(ranks.port) as client:
        report = client.last_report()
        assert (report.outcome, report.error) == ("rejected", CoverageError.__name__)
        assert "whole: missing" in report.reason


def test_a_cleared_engine_that_refuses_a_version_waits_for_the_next_signal(
    ranks: Ranks, publisher: WeightPublisher
) -> None:
    weights = publish(publisher, 1)
    ranks.open()
    write_word(ranks.port, LegacyStatus.CLEARING)
    attend(ranks, LegacyStatus.CLEARED)
    publisher.publish({"cut": weights["cut"]}, step=2, layout=f"tp:{NUM_RANKS}")
    write_word(ranks.port, LegacyStatus.UPDATING)
    with ThreadPoolExecutor(1) as pool:
        attending = pool.submit(attend, ranks, LegacyStatus.NORMAL)
        await_word(ranks.port, LegacyStatus.CLEARED)
        assert not attending.done()
        assert not any(runner.bound() for runner in ranks.runners)
        good = publish(publisher, 3)
        write_word(ranks.port, LegacyStatus.UPDATING)
        attending.result(20)
    assert ranks.holds(good)


def test_what_is_asked_for_fails_alike_on_every_rank(ranks: Ranks, publisher: WeightPublisher) -> None:
    weights = publish(publisher, 1)
    ranks.open()
    publisher.publish({"cut": weights["cut"]}, step=2, layout=f"tp:{NUM_RANKS}")

    def ask(rank: int) -> str:
        with pytest.raises(CoverageError, match="whole: missing") as caught:
            ranks.seats[rank].ask(lambda client: client.update())
        return str(caught.value)[:200]

    first, second = ranks.on_each(ask)
    assert first == second
    assert ranks.holds(weights)


def test_sleep_and_wake_are_asked_for_on_every_rank(ranks: Ranks, publisher: WeightPublisher) -> None:
    weights = publish(publisher, 1)
    ranks.open()
    ranks.on_each(lambda rank: ranks.seats[rank].ask(lambda client: client.sleep("weight,kv_cache", mode=ABORT)))
    assert not any(seat.is_serving or runner.bound() for seat, runner in zip(ranks.seats, ranks.runners, strict=True))
    ranks.on_each(lambda rank: ranks.seats[rank].ask(lambda client: client.wake()))
    assert ranks.holds(weights)
    assert all(runner.has_kv_cache for runner in ranks.runners)


def test_a_command_over_the_board_finds_its_boundary_in_the_loop(ranks: Ranks, publisher: WeightPublisher) -> None:
    publish(publisher, 1)
    ranks.open()
    is_over = threading.Event()
    with ThreadPoolExecutor(1) as pool, EngineController(ranks.port) as engine:
        looping = pool.submit(ranks.loop, is_over)
        try:
            for step in range(2, 6):
                weights = publish(publisher, step)
                assert engine.update(in_flight=KEEP).version == f"1.{step}"
                assert ranks.holds(weights)
                assert read_word(ranks.port) == LegacyStatus.NORMAL
        finally:
            is_over.set()
            looping.result(20)


def test_words_that_fastdeploy_made_are_its_own(ranks: Ranks, publisher: WeightPublisher) -> None:
    publish(publisher, 1)
    kept = [StatusWord(word, ranks.port) for word in WORDS]
    for word in kept[1:]:
        word.store(LegacyStatus.CLEARED)
    ranks.open()
    assert [word.load() for word in kept[1:]] == [LegacyStatus.CLEARED] * 2
    write_word(ranks.port, LegacyStatus.CLEARING)
    attend(ranks, LegacyStatus.CLEARED)
    assert kept[0].load() == LegacyStatus.CLEARED  # the segment that FastDeploy made, not another one
    ranks.close()
    assert all(Path(SHM_DIR, word_name(word, ranks.port)).exists() for word in WORDS)
    for word in kept:
        word.close()


def test_without_words_there_is_no_engine(ranks: Ranks) -> None:
    unlink_words(ranks.port)
    with pytest.raises(EngineNotFoundError, match="model_weights_status"):
        Seat(ranks.settings(0))
    create_words(ranks.port)


class WordLoops:
    """Each rank's loop as FastDeploy's: it looks at the word, writes it back, lets its runner see to it, and then does
    nothing but look until the word reads what it expects. `late`: seconds that a rank takes before it looks again.
    `num_back`: how often each rank has seen what it expected."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._is_over = ranks, threading.Event()
        self.late = [0.0] * NUM_RANKS
        self.attended: list[tuple[int, str]] = []
        self.num_back = dict.fromkeys(range(NUM_RANKS), 0)
        self._back = threading.Condition()
        self._pool = ThreadPoolExecutor(1)

    def __enter__(self) -> "WordLoops":
        self._looping = self._pool.submit(self._ranks.on_each, self._loop)
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._pool.shutdown()
        self._looping.result(20)

    def _loop(self, rank: int) -> None:
        word = StatusWord(WEIGHTS_WORD, self._ranks.port)
        with closing(word):
            while not self._is_over.wait(0.002):
                asked = word.load()
                if asked not in (LegacyStatus.UPDATING, LegacyStatus.CLEARING):
                    continue
                time.sleep(self.late[rank])
                word.store(LegacyStatus(asked))
                while word.load() == asked and not self._is_over.is_set():
                    wanted = LegacyStatus.NORMAL if asked == LegacyStatus.UPDATING else LegacyStatus.CLEARED
                    self._ranks.seats[rank].attend_word(wanted)
                    self.attended.append((rank, wanted.name))
                    time.sleep(self.late[rank])
                    while word.load() != wanted and not self._is_over.is_set():
                        time.sleep(0.005)
                    with self._back:
                        self.num_back[rank] += 1
                        self._back.notify_all()

    def await_back(self, number: int) -> None:
        """Every rank has seen that often what it expected."""
        with self._back:
            assert self._back.wait_for(lambda: min(self.num_back.values()) >= number, 10.0), self.num_back


@pytest.mark.parametrize("late", range(NUM_RANKS))
def test_a_word_that_is_refused_at_once_waits_until_every_loop_has_seen_it(
    ranks: Ranks, publisher: WeightPublisher, late: int
) -> None:
    """Or one of the ranks would stand still for it alone."""
    weights = publish(publisher, 1)
    ranks.open()
    with WordLoops(ranks) as loops:
        loops.late[late] = 0.05
        for number in range(1, 4):
            write_word(ranks.port, LegacyStatus.UPDATING)  # version 1 is live already: no rank need do anything
            await_word(ranks.port, LegacyStatus.NORMAL)
            loops.await_back(number)
    assert Counter(rank for rank, _ in loops.attended) == dict.fromkeys(range(NUM_RANKS), 3)
    assert ranks.holds(weights)


def test_a_loop_that_missed_the_value_it_waits_for_is_shown_it_again(
    ranks: Ranks, publisher: WeightPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attendance, "_PATIENCE_S", 0.3)
    publish(publisher, 1)
    ranks.open()
    weights = publish(publisher, 2)
    with WordLoops(ranks) as loops:
        loops.late[1] = 0.2
        write_word(ranks.port, LegacyStatus.CLEARING)
        await_word(ranks.port, LegacyStatus.CLEARED)
        loops.late[1] = 0.0
        write_word(ranks.port, LegacyStatus.UPDATING)  # before rank 1 has seen CLEARED
        await_word(ranks.port, LegacyStatus.NORMAL, within_s=9.0)
    assert ranks.holds(weights)


def test_an_update_over_the_board_is_let_in_to_loops_that_wait_for_the_word(
    ranks: Ranks, publisher: WeightPublisher
) -> None:
    """And brings the version that was asked for, though there is a newer one."""
    publish(publisher, 1)
    ranks.open()
    with WordLoops(ranks) as loops, EngineController(ranks.port) as engine:
        write_word(ranks.port, LegacyStatus.CLEARING)
        await_word(ranks.port, LegacyStatus.CLEARED)
        loops.await_back(1)
        weights = publish(publisher, 2)
        assert engine.update("1.2").version == "1.2"
        await_word(ranks.port, LegacyStatus.NORMAL)
        assert engine.status().version == "1.2"
    assert ranks.holds(weights)


def test_a_clear_that_was_refused_is_asked_for_again(
    ranks: Ranks, publisher: WeightPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FastDeploy's loop waits for CLEARED, and for nothing else."""
    monkeypatch.setattr(seat_module, "_AGAIN_S", 0.1)
    publish(publisher, 1)
    ranks.open(clear_s=0.3)
    with WordLoops(ranks) as loops:
        loops.late[1] = 1.0
        write_word(ranks.port, LegacyStatus.CLEARING)
        with BoardClient(ranks.port) as client:
            while client.status().commands_done < 2:
                time.sleep(0.01)  # bounded by the test's own limit
            assert client.last_report().outcome == "rejected"
        loops.late[1] = 0.0
        await_word(ranks.port, LegacyStatus.CLEARED)
    assert not any(runner.bound() for runner in ranks.runners)


@pytest.mark.parametrize("command", ["pause", "resume"])
def test_what_only_fastdeploy_can_do_is_refused_over_the_board(
    ranks: Ranks, publisher: WeightPublisher, command: str
) -> None:
    publish(publisher, 1)
    ranks.open()
    with EngineController(ranks.port) as engine:
        with pytest.raises(LifecycleError, match=f"POST /v1/{command}"):
            getattr(engine, command)(deadline_s=5.0)
        assert engine.status().is_serving
        assert not engine.is_paused()
