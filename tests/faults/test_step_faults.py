"""Something goes wrong at each step of an update, on each rank, in both modes: a sample in which every two of step,
rank, kind, mode and end meet. `scripts/faults` plays all of them.

An engine of real processes lives through all cases of its mode; raw bytes of every rank are the judge."""

from collections.abc import Callable
from pathlib import Path

import pytest

from fastdeploy_rl.config import KEEP
from tests.faults.fault_cases import (
    COMMIT,
    ENDS,
    KINDS,
    MODES,
    NUM_RANKS,
    SETTINGS,
    STEPS,
    Case,
    all_cases,
    covering_sample,
    promised,
)
from tests.faults.fault_judge import TORN, Reference, Seen, differ_everywhere, outcome_of
from tests.faults.fault_scene import play_all
from tests.faults.numpy_scene import NumpyScene

_SAMPLE = covering_sample(all_cases())


@pytest.mark.parametrize("setting", SETTINGS, ids="-".join)
def test_whatever_goes_wrong_at_a_step_leaves_one_version_on_all_ranks_or_none(
    tmp_path: Path, setting: tuple[str, str]
) -> None:
    """And the caller is told which, no wait is overdue, and the next update works."""
    rows = list(
        play_all([case for case in _SAMPLE if case.setting == setting], lambda setting: NumpyScene(setting, tmp_path))
    )
    assert [f"{row.case}: {failure}" for row in rows for failure in row.failures] == []


def test_the_cases_are_every_end_of_every_step_on_every_rank_of_every_kind_in_every_mode() -> None:
    hit = {(case.step, case.when, case.rank, case.kind, case.mode) for case in all_cases()}
    assert len(hit) == len(STEPS) * len(ENDS) * NUM_RANKS * len(KINDS) * len(MODES)


def test_the_sample_has_every_two_facts_together_that_a_case_has() -> None:
    for facts in (("step", "rank"), ("step", "kind"), ("step", "mode"), ("rank", "kind"), ("kind", "mode")):
        pairs = [{tuple(getattr(case, fact) for fact in facts) for case in cases} for cases in (_SAMPLE, all_cases())]
        assert pairs[0] == pairs[1]
    assert len(_SAMPLE) < len(all_cases()) / 5


# --- the page -------------------------------------------------------------------------------------

_PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
_ROWS: dict[str, Callable[[Case], bool]] = {
    "killed": lambda case: case.kind == "kill",
    "stopped until after the deadline": lambda case: case.kind == "stall",
    "a step fails once": lambda case: case.kind in ("raise", "no_memory") and not case.is_lasting,
    "a step fails and fails again: no memory, no room on the disk": lambda case: case.is_lasting,
    "its record on the board is overwritten, or the record's counter": lambda case: case.what in ("record", "counter"),
    "a published byte changes before it is read": lambda case: case.what == "source" and case.when == "begin",
    "a published byte changes after it was read, mode copy": lambda case: _is_late_source(case, "copy"),
    "a published byte changes after it was read, mode alias": lambda case: _is_late_source(case, "alias"),
    "a staged byte changes in the rank's own memory, mode alias": lambda case: case.what == "staged",
    "a live byte changes between install and verify, mode copy": lambda case: _is_live_byte(case, "copy"),
    "a live byte changes between install and verify, mode alias": lambda case: _is_live_byte(case, "alias"),
}


def _is_late_source(case: Case, mode: str) -> bool:
    return (case.what, case.when, case.mode) == ("source", "end", mode)


def _is_live_byte(case: Case, mode: str) -> bool:
    return (case.what, case.mode) == ("parameter", mode)


def test_the_table_of_the_page_is_what_is_expected_here() -> None:
    """Of a live engine that can go back. Every case is in exactly one row."""
    cases = [case for case in all_cases() if case.base == "live" and case.rollback == KEEP]
    assert all(sum(is_meant(case) for is_meant in _ROWS.values()) == 1 for case in cases)
    for name, is_meant in _ROWS.items():
        ours = [case for case in cases if is_meant(case)]
        early = {promised(case) for case in ours if case.step != COMMIT}
        late = {promised(case) for case in ours if case.step == COMMIT}
        cells = [name, *("".join(*outcomes) if outcomes else "-" for outcomes in (early, late))]
        assert f"| {' | '.join(cells)} |\n" in _PAGE.read_text()


# --- the judge can fail ----------------------------------------------------------------------------

_OLD = Reference.of([{"a": b"11", "b": b"2"}, {"a": b"33", "b": b"4"}])
_NEW = Reference.of([{"a": b"55", "b": b"6"}, {"a": b"77", "b": b"8"}])
_NOTHING = Seen(({}, {}), (None, None), False, "fenced")


def _seen(reference: Reference) -> Seen:
    return Seen(reference.held, reference.tokens, True, "serving")


def test_whole_versions_and_nothing_at_all_are_told_apart() -> None:
    assert outcome_of(_seen(_OLD), _OLD, _NEW) == "old"
    assert outcome_of(_seen(_NEW), _OLD, _NEW) == "new"
    assert outcome_of(_NOTHING, _OLD, _NEW) == "fenced"
    assert outcome_of(_NOTHING._replace(admission="paused"), _OLD, _NEW) == "cleared"


@pytest.mark.parametrize(
    "torn",
    [
        pytest.param(_seen(_NEW)._replace(held=(_NEW.held[0], _OLD.held[1])), id="one rank on the old version"),
        pytest.param(_seen(_NEW)._replace(held=(_NEW.held[0], {"a": b"77"})), id="a parameter missing"),
        pytest.param(_seen(_NEW)._replace(held=(_NEW.held[0], {"a": b"76", "b": b"8"})), id="a bit"),
        pytest.param(_seen(_NEW)._replace(tokens=_OLD.tokens), id="answers by another version"),
        pytest.param(_seen(_OLD)._replace(is_serving=False, admission="fenced"), id="whole and refused"),
        pytest.param(_NOTHING._replace(is_serving=True), id="nothing, and served"),
        pytest.param(_NOTHING._replace(held=({}, _OLD.held[1])), id="fenced, and a rank holds weights"),
        pytest.param(_NOTHING._replace(tokens=(None, 1)), id="fenced, and a rank answers"),
    ],
)
def test_anything_between_is_torn(torn: Seen) -> None:
    assert outcome_of(torn, _OLD, _NEW) == TORN


def test_versions_that_share_a_tensor_could_not_be_judged() -> None:
    assert differ_everywhere(_OLD, _NEW)
    assert not differ_everywhere(_OLD, Reference.of([_NEW.held[0], {"a": b"77", "b": b"4"}]))
