"""Sleeping and waking on one rank, whatever fails at whatever call: before the commit of a sleep all is as it served,
before that of a wake all is as it slept. Judged by raw bytes, leases, descriptors and mapped memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from time import monotonic_ns
from typing import Any, NamedTuple

import pytest

from fastdeploy_rl._native import Mapping
from fastdeploy_rl.command_options import CommandOptions
from fastdeploy_rl.config import ABORT, IN_FLIGHT, KEEP, WAIT
from fastdeploy_rl.engines.numpy.runner import NumpyRunner
from fastdeploy_rl.errors import (
    ChecksumMismatchError,
    NoSpaceError,
    NotServingError,
    SegmentError,
    StepFailedError,
)
from fastdeploy_rl.lifecycle import Tag
from fastdeploy_rl.memory import host_copy
from fastdeploy_rl.memory.arena import ArenaPair
from fastdeploy_rl.testing.faulty_source import Fail
from fastdeploy_rl.update.standby_commands import PauseCommand, SleepCommand, WakeCommand
from fastdeploy_rl.update.transaction import ClearCommand, RankCommand
from tests.unit.test_host_copy import descriptors, is_mapped
from tests.unit.test_undo import MAX_ARENAS, MODEL, NUM_RANKS, RANK, Fault, Rig, flip, live_bytes_of, places, rig, run

ALL = frozenset(Tag)
WEIGHT, KV, GRAPH = frozenset({Tag.WEIGHT}), frozenset({Tag.KV_CACHE}), frozenset({Tag.GRAPH})
CALLS = (
    *("drain", "bind", "unbind", "drop_kv_cache", "rebuild_kv_cache", "drop_graphs", "recapture_graphs"),
    *("set_version", "abort_requests"),
)


class Sleeper(NumpyRunner):
    """Call number `breaks_at` from now on raises, before it does anything or (`is_late`) when it has."""

    breaks_at = 0
    is_late = False
    num_running = 0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.aborted: list[tuple[str, bool]] = []

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        return self._broken(found) if name in CALLS else found

    def _broken(self, call: Any) -> Any:
        def maybe(*arguments: Any, **named: Any) -> Any:
            self.breaks_at -= 1
            if self.breaks_at == 0 and not self.is_late:
                raise MemoryError
            result = call(*arguments, **named)
            if self.breaks_at == 0:
                raise MemoryError
            return result

        return maybe

    def num_requests(self, *, begun: bool = False) -> int:
        return self.num_running

    def abort_requests(self, reason: str, *, is_fault: bool = True, begun: bool = False) -> None:
        self.aborted.append((reason, is_fault))


class Standing(NamedTuple):
    """All that must be as it was."""

    live_bytes: dict[str, bytes]
    places: dict[str, int]
    version: str
    kv_digest: str | None
    graphs: list[Any]
    num_leases: int
    arena_bytes: int
    num_free_arenas: int
    offloaded: str
    num_descriptors: int


def standing(rank: Rig) -> Standing:
    runner, state = rank.runner, rank.state
    assert not is_mapped()
    return Standing(
        rank.live_bytes(),
        places(runner),
        str(state.live.version) if state.live else "",
        runner._kv_digest,
        list(runner._captured),
        sum(len(rank.table.holders(arena)) for arena in range(MAX_ARENAS)),
        rank.arenas.num_bytes,
        sum(not arena.is_acquired for arena in rank.arenas._arenas),
        str(state.offloaded.version) if state.offloaded else "",
        len(descriptors()),
    )


NOTHING = Standing({}, {}, "", None, [], 0, 0, 2, "", 0)


@contextmanager
def bed(place: Path, mode: str = "alias") -> Iterator[Rig]:
    """A rank with version 1 live: `norm` in an arena of the engine's own, the rest as the mode has it."""
    with rig(place, mode) as rank:
        rank.runner = rank.state.runner = Sleeper(MODEL, RANK, NUM_RANKS)  # type: ignore[assignment]
        rank.update()
        try:
            yield rank
        finally:
            rank.runner.breaks_at = 0
    assert descriptors() == set()


def deadline_ns() -> int:
    return monotonic_ns() + 20_000_000_000


def sleeping(rank: Rig, tags: frozenset[Tag] = ALL, level: int = 1, **options: Any) -> SleepCommand:
    return SleepCommand(rank.state, CommandOptions(tags=tags, level=level, **options), deadline_ns())


def waking(rank: Rig, tags: frozenset[Tag] = ALL) -> WakeCommand:
    return WakeCommand(rank.state, CommandOptions(tags=tags), deadline_ns())


def carry_out(command: RankCommand) -> None:
    command.stage()
    command.stall()
    command.commit()
    command.retire()


def fence(rank: Rig, command: RankCommand) -> None:
    """What the participant does with a rank that cannot follow."""
    rank.runner.drop_graphs()
    rank.fence(command)
    rank.state.release_offloaded()


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("mode", ["alias", "copy"])
def test_all_memory_returns_and_what_sleeps_in_host_memory_wakes_to_the_byte(
    tmp_path: Path, mode: str, level: int
) -> None:
    with bed(tmp_path, mode) as rank:
        live = rank.state.live
        assert live is not None
        assert live.arena is not None
        expected, digest, arena = live_bytes_of(1), live.content_digest, live.arena
        sleep = sleeping(rank, level=level)
        carry_out(sleep)
        assert arena.is_closed
        away = NOTHING if level == 2 else NOTHING._replace(offloaded="1.1", num_descriptors=1)
        assert standing(rank) == away._replace(version="")
        assert [step.step for step in sleep.report().steps] == ["offload"] * (level == 1) + ["drain", "sleep"]
        assert sleep.report().steps[-1].num_bytes == sum(map(len, expected.values()))
        for _ in range(3):  # all published memory is used anew
            rank.publish()
        if level == 2:
            rank.update()
            return
        wake = waking(rank)
        carry_out(wake)
        awake = standing(rank)
        assert (awake.live_bytes, awake.version, awake.kv_digest) == (expected, "1.1", digest)
        assert (len(awake.graphs), awake.num_leases, awake.offloaded, awake.num_descriptors) == (1, 0, "", 0)
        assert (rank.runner.version, rank.runner.token() != 0) == ("1.1", True)
        assert [step.step for step in wake.report().steps] == ["load", "drain", "rebuild_kv_cache", "recapture_graphs"]
        assert wake.report().graphs_captured > 0
        receipt = wake.receipt()
        assert receipt is not None
        assert (receipt.version, set(receipt.live)) == ("1.1", set(expected))
        rank.update()


def test_each_tag_sleeps_and_wakes_alone_in_any_order_and_again(tmp_path: Path) -> None:
    with bed(tmp_path) as rank:
        digest = rank.state.live.content_digest
        carry_out(sleeping(rank, KV))
        only_kv = standing(rank)
        assert (only_kv.kv_digest, only_kv.graphs, only_kv.version, only_kv.offloaded) == (None, [], "1.1", "")
        carry_out(sleeping(rank, KV | GRAPH))
        carry_out(waking(rank, KV | GRAPH))
        assert (standing(rank).kv_digest, len(standing(rank).graphs), rank.state.live.content_digest) == (
            digest,
            1,
            digest,
        )
        for _ in range(2):  # the second finds them away
            carry_out(sleeping(rank, WEIGHT))
            assert (standing(rank).kv_digest, standing(rank).offloaded, standing(rank).arena_bytes) == (
                digest,
                "1.1",
                0,
            )
        carry_out(sleeping(rank, KV))
        carry_out(waking(rank, KV))
        assert (standing(rank).kv_digest, standing(rank).live_bytes) == (digest, {})
        carry_out(waking(rank, WEIGHT | GRAPH))
        assert (standing(rank).live_bytes, len(standing(rank).graphs)) == (live_bytes_of(1), 1)
        carry_out(waking(rank, WEIGHT))
        assert standing(rank).live_bytes == live_bytes_of(1)


def test_sleeping_deeper_gives_up_what_slept_in_host_memory(tmp_path: Path) -> None:
    with bed(tmp_path) as rank:
        carry_out(sleeping(rank))
        deeper = sleeping(rank, level=2)
        carry_out(deeper)
        assert standing(rank) == NOTHING
        wake = waking(rank)
        with pytest.raises(NotServingError, match="an update brings them"):
            wake.stage()
        wake.undo()
        assert standing(rank) == NOTHING
        rank.update()


def out_of_memory(*arguments: Any) -> None:
    raise MemoryError


@pytest.mark.parametrize("fault", ["no room", "broken copy", "corrupt", "drain"])
def test_a_sleep_that_is_rejected_leaves_the_rank_as_it_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    with bed(tmp_path) as rank, monkeypatch.context() as patched:
        if fault == "corrupt":
            flip(rank.state.live.views["norm"])
        rank.state.live.is_read_back = True
        before = standing(rank)
        sleep = sleeping(rank, in_flight=WAIT)
        if fault == "no room":
            patched.setattr(host_copy, "free_memory", lambda: 0)
        elif fault == "broken copy":
            patched.setattr(host_copy, "transfer", out_of_memory)
        rank.runner.breaks_at = 1 if fault == "drain" else 0
        error = {"no room": NoSpaceError, "corrupt": ChecksumMismatchError}.get(fault, MemoryError)
        with pytest.raises(error):
            carry_out(sleep)
        for _ in range(2):
            sleep.undo()
            assert standing(rank) == before
        assert rank.runner.aborted == []
        assert rank.state.live.is_read_back == (fault != "corrupt")  # to be looked at, by whoever fences


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("level", [1, 2])
def test_a_commit_of_a_sleep_that_breaks_half_way_is_finished_by_a_second_call(
    tmp_path: Path, level: int, is_late: bool
) -> None:
    away = NOTHING if level == 2 else NOTHING._replace(num_descriptors=1)
    with bed(tmp_path) as rank:
        for number in count(1):
            live_version = str(rank.state.live.version)
            sleep = sleeping(rank, level=level, in_flight=ABORT)
            sleep.stage()
            sleep.stall()
            rank.runner.breaks_at, rank.runner.is_late = number, is_late
            try:
                sleep.commit()
            except MemoryError:
                sleep.commit()
            else:
                break
            sleep.retire()
            assert (number, standing(rank)) == (number, away._replace(offloaded=live_version if level == 1 else ""))
            rank.update()
        assert number == 5  # abort, graphs, cache, unbind
        rank.runner.breaks_at = 0


@pytest.mark.parametrize("method", ["release", "trim"])
def test_a_sleep_that_cannot_let_memory_go_at_first_does_so_by_a_second_commit(tmp_path: Path, method: str) -> None:
    """And where it never can the rank is fenced, and holds nothing."""
    with bed(tmp_path) as rank:
        for num_failures in (1, 2):
            sleep = sleeping(rank)
            sleep.stage()
            sleep.stall()
            for _ in range(num_failures):
                rank.source.then(method, Fail(SegmentError("still in use")))
            with pytest.raises(SegmentError, match="still in use"):
                sleep.commit()
            if num_failures == 1:
                sleep.commit()
                sleep.retire()
                assert standing(rank) == NOTHING._replace(offloaded="1.1", num_descriptors=1)
                rank.update()
        with pytest.raises(SegmentError, match="still in use"):
            sleep.commit()
        fence(rank, sleep)
        assert standing(rank)._replace(arena_bytes=0) == NOTHING
        rank.update()


def woken_undone(rank: Rig, wake: WakeCommand, asleep: Standing, case: object) -> None:
    for _ in range(2):
        wake.undo()
        assert (case, standing(rank)) == (case, asleep)


@pytest.mark.parametrize("is_late", [False, True])
def test_a_wake_that_breaks_at_any_call_is_undone_and_so_is_an_undo_that_breaks(tmp_path: Path, is_late: bool) -> None:
    with bed(tmp_path) as rank:
        carry_out(sleeping(rank))
        asleep = standing(rank)
        rank.runner.is_late = is_late
        for number in count(1):
            wake = waking(rank)
            wake.stage()
            rank.runner.breaks_at = number
            try:
                wake.stall()
            except MemoryError:
                woken_undone(rank, wake, asleep, number)
                continue
            for undo_number in count(1):
                rank.runner.breaks_at = undo_number
                try:
                    wake.undo()
                except MemoryError:
                    woken_undone(rank, wake, asleep, (number, undo_number))
                    wake = waking(rank)
                    wake.stage()
                    rank.runner.breaks_at = 0
                    wake.stall()
                else:
                    break
            break
        assert (number, undo_number) == (5, 4)
        rank.runner.breaks_at = 0
        assert standing(rank) == asleep
        carry_out(waking(rank))
        assert rank.live_bytes() == live_bytes_of(1)


def flip_host_copy(rank: Rig) -> None:
    copy = rank.state.offloaded.copy
    mapping = Mapping.map_fd(copy._descriptor, copy.num_bytes, True)
    with memoryview(mapping) as memory:
        memory[copy._tensors["down"].offset + 3] ^= 16
    mapping.close()


@pytest.mark.parametrize("fault", ["arena", "broken copy", "corrupt"])
def test_weights_that_do_not_come_back_from_host_memory_go_on_sleeping_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    with bed(tmp_path) as rank, monkeypatch.context() as patched:
        carry_out(sleeping(rank))
        asleep = standing(rank)
        if fault == "arena":
            patched.setattr(ArenaPair, "acquire", out_of_memory)
        elif fault == "broken copy":
            patched.setattr(host_copy, "transfer", out_of_memory)
        else:
            flip_host_copy(rank)
        wake = waking(rank)
        named = r"rank 1, version 1\.1: 1 parameters .* first down"
        with pytest.raises(
            ChecksumMismatchError if fault == "corrupt" else MemoryError, match=named if fault == "corrupt" else None
        ):
            wake.stage()
        patched.undo()
        woken_undone(rank, wake, asleep, fault)
        if fault != "corrupt":
            carry_out(waking(rank))
            assert rank.live_bytes() == live_bytes_of(1)


def test_a_commit_of_a_wake_that_raises_has_changed_nothing_and_may_be_called_again(tmp_path: Path) -> None:
    with bed(tmp_path) as rank:
        carry_out(sleeping(rank))
        wake = waking(rank)
        wake.stage()
        wake.stall()
        rank.runner.breaks_at = 1
        with pytest.raises(MemoryError):
            wake.commit()
        assert (rank.state.live, rank.state.offloaded is not None) == (None, True)
        wake.commit()
        wake.retire()
        assert (rank.live_bytes(), standing(rank).offloaded) == (live_bytes_of(1), "")


def test_a_rank_that_is_fenced_while_it_wakes_holds_nothing(tmp_path: Path) -> None:
    with bed(tmp_path) as rank:
        carry_out(sleeping(rank))
        wake = waking(rank)
        wake.stage()
        wake.stall()
        fence(rank, wake)
        assert standing(rank)._replace(arena_bytes=0) == NOTHING
        rank.update()


def test_an_update_takes_the_place_of_what_sleeps_and_one_that_fails_leaves_it(tmp_path: Path) -> None:
    with bed(tmp_path) as rank:
        carry_out(sleeping(rank))
        asleep = standing(rank)
        failed = rank.command(rank.publish(), Fault("commit", "begin", MemoryError()))
        with pytest.raises(StepFailedError):
            run(failed)
        failed.undo()
        assert standing(rank)._replace(graphs=[]) == asleep
        rank.update()
        assert (standing(rank).offloaded, standing(rank).num_descriptors) == ("", 0)


def test_an_update_that_fails_leaves_the_cache_to_the_weights_that_sleep_and_filled_it(tmp_path: Path) -> None:
    with bed(tmp_path) as rank:
        carry_out(sleeping(rank, WEIGHT))
        asleep = standing(rank)
        assert asleep.kv_digest
        failed = rank.command(rank.publish(), Fault("commit", "begin", MemoryError()))
        with pytest.raises(StepFailedError):
            run(failed)
        failed.undo()
        assert standing(rank) == asleep


def test_a_clear_takes_what_sleeps_as_well(tmp_path: Path) -> None:
    with bed(tmp_path) as rank:
        carry_out(sleeping(rank, WEIGHT))
        carry_out(ClearCommand(rank.state, deadline_ns()))
        assert standing(rank) == NOTHING


@pytest.mark.parametrize("in_flight", IN_FLIGHT)
def test_requests_that_are_there_at_the_commit_are_kept_or_aborted_as_asked(tmp_path: Path, in_flight: str) -> None:
    with bed(tmp_path) as rank:
        before = standing(rank)
        pause = PauseCommand(rank.state, CommandOptions(in_flight=in_flight), deadline_ns())
        pause.stage()
        pause.stall()
        assert rank.runner.aborted == []
        pause.commit()
        assert rank.runner.aborted == ([] if in_flight == KEEP else [("the engine was paused", False)])
        assert standing(rank) == before


def test_checksums_that_are_off_keep_nobody_from_sleeping(tmp_path: Path) -> None:
    with bed(tmp_path) as rank:
        rank.state.live.live = {}
        carry_out(sleeping(rank))
        carry_out(waking(rank))
        assert (rank.live_bytes(), rank.state.live.is_read_back) == (live_bytes_of(1), True)
