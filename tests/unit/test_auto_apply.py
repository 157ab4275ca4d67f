"""Apply mode auto on one rank with real memory: it copies in place where graphs are slow to capture, uses published
memory where its graphs are there already, and undoes either."""

from pathlib import Path

import pytest

from fastdeploy_rl.engines.numpy.runner import NUM_GRAPHS
from fastdeploy_rl.errors import StepFailedError
from fastdeploy_rl.update import apply_facts
from tests.unit.test_undo import RANK, STEPS, Fault, Rig, check_undone, live_bytes_of, rig, run


def took(rank: Rig) -> tuple[str, str, int]:
    """One good update: what was taken, why, and how many graphs it cost."""
    captured = rank.runner.num_captured
    report = rank.update().report()
    assert (report.apply_mode, report.rank) == ("auto", RANK)
    return report.applied, report.applied_reason, rank.runner.num_captured - captured


def test_slow_graphs_make_a_copy_in_place_the_choice_until_the_rank_lies_in_published_memory(tmp_path: Path) -> None:
    with rig(tmp_path, "auto") as rank:
        rank.go_to("cold")
        rank.runner.capture_seconds = 5.0
        for _ in range(4):
            applied, reason, captured = took(rank)
            assert (applied, captured) == ("copy", 0)
            assert "nothing recaptured; alias would stall about 5000 ms; arena would stall about 5000 ms" in reason
        rank.runner.capture_seconds = 0.0
        assert took(rank)[0] == "alias"
        rank.runner.capture_seconds = 5.0
        applied, reason, captured = took(rank)
        assert (applied, captured) == ("alias", NUM_GRAPHS)
        assert "recapture 5000 ms" in reason
        assert "no copy: no memory of the engine's own is live" in reason


def test_published_arenas_that_take_turns_cost_graphs_in_the_first_rounds_alone(tmp_path: Path) -> None:
    with rig(tmp_path, "auto") as rank:
        rank.go_to("cleared")
        rank.runner.capture_seconds = 5.0
        rounds = [took(rank) for _ in range(16)]
        assert {applied for applied, _, _ in rounds} == {"alias"}
        assert [captured for _, _, captured in rounds[-6:]] == [0] * 6
        assert all("recapture 0 ms, nothing copied" in reason for _, reason, _ in rounds[-6:])


@pytest.mark.parametrize("step", STEPS)
def test_a_copy_that_auto_chose_is_undone_to_the_byte(tmp_path: Path, step: str) -> None:
    with rig(tmp_path, "auto") as rank:
        rank.go_to("cold")
        rank.runner.capture_seconds = 5.0
        before = rank.standing()
        command = rank.command(rank.publish(), Fault(step, "end", RuntimeError("told to")))
        with pytest.raises(StepFailedError):
            run(command)
        assert command.report().applied == ("" if step == "resolve" else "copy")
        check_undone(rank, command, before, step)
        assert command.report().applied == ""
        assert took(rank)[0] == "copy"


def test_a_rank_without_memory_or_checksums_does_not_copy_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rig(tmp_path, "auto") as rank:
        rank.go_to("cold")
        rank.runner.capture_seconds = 5.0
        command = rank.command(rank.publish())
        command._update.has_checksums = False
        run(command)
        command.retire()
        assert command.report().applied == "alias"
        rank.go_to("cold")
        monkeypatch.setattr(apply_facts, "free_memory", lambda: 100)
        applied, reason, _ = took(rank)
        assert applied == "alias"  # nothing fits, and this needs least
        assert "bytes needed, 100 free; no arena: it needs " in reason
        assert "no copy: it needs " in reason


def test_copies_onto_nothing_and_modes_that_were_asked_for_say_what_was_done(tmp_path: Path) -> None:
    expected = {
        ("alias", "cold"): ("alias", "as asked"),
        ("copy", "cold"): ("copy", "as asked"),
        ("copy", "cleared"): ("arena", "nothing was live that could be overwritten"),
    }
    for (mode, old), said in expected.items():
        with rig(tmp_path / f"{mode}-{old}", mode) as rank:
            rank.go_to(old)
            report = rank.update().report()
            assert ((mode, old), (report.applied, report.applied_reason)) == ((mode, old), said)
            assert rank.live_bytes() == live_bytes_of(1)
