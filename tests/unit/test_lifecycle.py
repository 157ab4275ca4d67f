"""The three tables and the whole product of their states."""

import subprocess
import sys
from enum import Enum
from itertools import product

import pytest

from fastdeploy_rl import lifecycle as module
from fastdeploy_rl.errors import LifecycleError
from fastdeploy_rl.lifecycle import (
    ADMISSION_TRANSITIONS,
    RESIDENCY_TRANSITIONS,
    RULES,
    STALLED_PHASES,
    TRANSITIONS,
    UPDATE_TRANSITIONS,
    Admission,
    AdmissionEvent,
    LegacyCommand,
    LegacyStatus,
    Lifecycle,
    Residency,
    ResidencyEvent,
    Tag,
    TagEvent,
    UpdateEvent,
    UpdatePhase,
    answer_at_admission,
    broken_rule,
    legacy_word,
    step,
)

TABLES = {
    "admission": (Admission, AdmissionEvent, ADMISSION_TRANSITIONS),
    "update": (UpdatePhase, UpdateEvent, UPDATE_TRANSITIONS),
    "residency": (Residency, ResidencyEvent, RESIDENCY_TRANSITIONS),
}
RESIDENT, OFFLOADED, DROPPED = Residency
PRODUCT = [Lifecycle(*states) for states in product(Admission, UpdatePhase, Residency, Residency, Residency)]
LEGAL = [lifecycle for lifecycle in PRODUCT if broken_rule(lifecycle) is None]
EVENTS: list[AdmissionEvent | UpdateEvent | TagEvent] = [
    *AdmissionEvent,
    *UpdateEvent,
    *(TagEvent(tag, event) for tag, event in product(Tag, ResidencyEvent)),
]
SERVING = Lifecycle(Admission.SERVING, UpdatePhase.IDLE, RESIDENT, RESIDENT, RESIDENT)
CLEARED = Lifecycle(Admission.PAUSED, UpdatePhase.IDLE, DROPPED, DROPPED, DROPPED)
FORWARD = [event for event in UpdateEvent if event not in (UpdateEvent.UNDO, UpdateEvent.UNDONE)]


def walk(lifecycle: Lifecycle, *events: AdmissionEvent | UpdateEvent | TagEvent) -> Lifecycle:
    for event in events:
        lifecycle = lifecycle.after(event)
    return lifecycle


def loads(*tags: Tag) -> list[TagEvent]:
    return [TagEvent(tag, ResidencyEvent.LOAD) for tag in tags]


def drops(*tags: Tag) -> list[TagEvent]:
    return [TagEvent(tag, ResidencyEvent.DROP) for tag in tags]


# --- the tables


@pytest.mark.parametrize("name", TABLES)
def test_every_state_has_a_row_and_every_event_a_use(name: str) -> None:
    states, events, table = TABLES[name]
    assert set(table) == set(states)
    assert {event for row in table.values() for event in row} == set(events)
    assert {after for row in table.values() for after in row.values()} <= set(states)


def test_every_state_can_be_reached_from_the_first() -> None:
    for states, _, table in TABLES.values():
        reached, frontier = set(), [next(iter(states))]
        while frontier:
            state = frontier.pop()
            if state not in reached:
                reached.add(state)
                frontier += table[state].values()
        assert reached == set(states)


def test_tables_do_not_share_states_or_events() -> None:
    assert len(TRANSITIONS) == sum(len(states) for states, _, _ in TABLES.values())


@pytest.mark.parametrize("name", TABLES)
def test_an_event_steps_as_its_table_says_or_is_refused(name: str) -> None:
    states, events, table = TABLES[name]
    for state, event in product(states, events):
        if event in table[state]:
            assert step(state, event) is table[state][event]
        else:
            with pytest.raises(LifecycleError, match=f"{event.value} is illegal while {state.value}; legal: "):
                step(state, event)


def test_an_event_of_another_table_is_refused() -> None:
    with pytest.raises(LifecycleError, match="load is illegal while starting"):
        step(Admission.STARTING, ResidencyEvent.LOAD)


def test_an_update_is_a_line_that_can_be_left_before_commit_only() -> None:
    phase = UpdatePhase.IDLE
    for event in FORWARD:
        undoable = phase not in (UpdatePhase.IDLE, UpdatePhase.COMMITTING)
        assert (UpdateEvent.UNDO in UPDATE_TRANSITIONS[phase]) == undoable
        if undoable:
            assert step(step(phase, UpdateEvent.UNDO), UpdateEvent.UNDONE) is UpdatePhase.IDLE
        phase = step(phase, event)
    assert phase is UpdatePhase.IDLE


def test_nothing_follows_stopped() -> None:
    assert ADMISSION_TRANSITIONS[Admission.STOPPED] == {}


# --- the product


def test_the_product_is_complete() -> None:
    assert len(PRODUCT) == len(set(PRODUCT)) == 5 * 11 * 3**3


def test_every_illegal_combination_breaks_a_rule_that_has_a_name_and_a_text() -> None:
    broken = {rule.name: rule for rule in map(broken_rule, PRODUCT) if rule is not None}
    assert set(broken) == {rule.name for rule in RULES}, "a rule that nothing breaks says nothing"
    assert all(rule.text for rule in RULES)
    assert len(broken) == len(RULES)


def test_no_rule_follows_from_the_others() -> None:
    for rule in RULES:
        others = [other for other in RULES if other is not rule]
        assert any(not rule.is_kept(c) and all(o.is_kept(c) for o in others) for c in PRODUCT), rule.name


RULE_EXAMPLES = {
    "update_only_while_alive": Lifecycle(Admission.STOPPED, UpdatePhase.STAGING),
    "start_has_nothing_offloaded": Lifecycle(Admission.STARTING, UpdatePhase.IDLE, OFFLOADED),
    "graph_needs_its_memory": Lifecycle(Admission.PAUSED, UpdatePhase.IDLE, RESIDENT, DROPPED, RESIDENT),
    "verified_weights_are_resident": Lifecycle(Admission.PAUSED, UpdatePhase.COMMITTING),
    "serving_needs_memory": Lifecycle(Admission.SERVING, UpdatePhase.IDLE, RESIDENT, DROPPED, DROPPED),
}


def test_each_rule_forbids_its_example() -> None:
    assert {rule.name for rule in RULES} == set(RULE_EXAMPLES)
    for name, lifecycle in RULE_EXAMPLES.items():
        rule = broken_rule(lifecycle)
        assert rule is not None
        assert rule.name == name


def states_of(lifecycle: Lifecycle) -> list[Enum]:
    return [lifecycle.admission, lifecycle.update, *lifecycle.residencies]


def test_events_move_one_state_to_a_legal_combination_or_raise_and_change_nothing() -> None:
    for lifecycle, event in product(LEGAL, EVENTS):
        before = states_of(lifecycle)
        try:
            after = lifecycle.after(event)
        except LifecycleError:
            assert states_of(lifecycle) == before
        else:
            assert broken_rule(after) is None
            assert sum(x is not y for x, y in zip(before, states_of(after), strict=True)) == 1


def test_every_legal_combination_can_be_reached_from_a_start() -> None:
    """A combination that no events lead to would be legal for nothing."""
    reached, frontier = set(), [Lifecycle()]
    while frontier:
        lifecycle = frontier.pop()
        if lifecycle in reached:
            continue
        reached.add(lifecycle)
        for event in EVENTS:
            try:
                frontier.append(lifecycle.after(event))
            except LifecycleError:
                continue
    assert reached == set(LEGAL)


def test_a_broken_rule_is_named_in_the_error() -> None:
    with pytest.raises(LifecycleError, match=r"drop weight is illegal while serving .* graph_needs_its_memory"):
        SERVING.after(TagEvent(Tag.WEIGHT, ResidencyEvent.DROP))


# --- the lives an engine leads


def test_start_serve_clear_update_serve() -> None:
    life = walk(Lifecycle(), *loads(*Tag), AdmissionEvent.LOAD)
    assert life == SERVING
    life = walk(life, AdmissionEvent.PAUSE, *drops(Tag.GRAPH, Tag.KV_CACHE, Tag.WEIGHT))
    assert life == CLEARED
    life = walk(life, *FORWARD[:5], *loads(Tag.WEIGHT), *FORWARD[5:7], *loads(Tag.KV_CACHE), FORWARD[7])
    life = walk(life, *loads(Tag.GRAPH), *FORWARD[8:], AdmissionEvent.RESUME)
    assert life == SERVING


def test_a_live_update_never_stops_serving() -> None:
    assert walk(SERVING, *FORWARD) == SERVING


@pytest.mark.parametrize("start", [SERVING, CLEARED], ids=str)
@pytest.mark.parametrize("num_steps", range(1, 5))
def test_a_rejected_update_ends_where_it_began(start: Lifecycle, num_steps: int) -> None:
    assert walk(start, *FORWARD[:num_steps], UpdateEvent.UNDO, UpdateEvent.UNDONE) == start


def test_a_committed_update_cannot_be_undone() -> None:
    committing = walk(SERVING, *FORWARD[:-1])
    assert committing.update is UpdatePhase.COMMITTING
    with pytest.raises(LifecycleError, match="undo is illegal while committing; legal: finish"):
        committing.after(UpdateEvent.UNDO)


def test_an_engine_cannot_resume_without_weights() -> None:
    with pytest.raises(LifecycleError, match="serving_needs_memory"):
        CLEARED.after(AdmissionEvent.RESUME)


def test_a_fenced_engine_cannot_resume_however_much_it_still_holds() -> None:
    """What is there may be of two versions."""
    fenced = walk(SERVING, AdmissionEvent.FENCE)
    with pytest.raises(LifecycleError, match="resume is illegal while fenced; legal: load, pause, stop"):
        fenced.after(AdmissionEvent.RESUME)


def test_a_fenced_engine_recovers_by_an_update() -> None:
    fenced = walk(SERVING, AdmissionEvent.FENCE, *drops(Tag.GRAPH, Tag.KV_CACHE, Tag.WEIGHT))
    with pytest.raises(LifecycleError, match="resume is illegal while fenced"):
        fenced.after(AdmissionEvent.RESUME)
    assert walk(fenced, *FORWARD[:5], *loads(*Tag), *FORWARD[5:], AdmissionEvent.LOAD) == SERVING


# --- the legacy word and the answer at admission


def expected_word(life: Lifecycle) -> str:
    """The table a reader of the docs sees, first match wins."""
    w, kv, graph = life.residencies
    rows = [
        (life.update in STALLED_PHASES, "UPDATING"),
        (life.admission is Admission.STARTING, "UPDATING"),
        (life.admission is Admission.FENCED and (w, kv, graph) != (DROPPED,) * 3, "UPDATING"),
        (w is DROPPED and kv is DROPPED, "CLEARED"),
        (True, "NORMAL"),
    ]
    return next(word for is_so, word in rows if is_so)


def test_every_legal_combination_has_a_word() -> None:
    for lifecycle in LEGAL:
        assert legacy_word(lifecycle, None).name == expected_word(lifecycle), lifecycle


def test_a_pending_command_keeps_the_requested_value_everywhere() -> None:
    for lifecycle, command in product(PRODUCT, LegacyCommand):
        assert legacy_word(lifecycle, command) == command.value


def test_cleared_means_that_weights_and_cache_are_freed() -> None:
    words = {lifecycle: legacy_word(lifecycle, None) for lifecycle in LEGAL}
    for lifecycle, word in words.items():
        if word is LegacyStatus.CLEARED:
            assert lifecycle.weight is lifecycle.kv_cache is DROPPED
    assert words[CLEARED] is LegacyStatus.CLEARED


def test_normal_means_that_nothing_stalls_and_that_not_all_memory_is_freed() -> None:
    for lifecycle in LEGAL:
        if legacy_word(lifecycle, None) is LegacyStatus.NORMAL:
            assert (lifecycle.weight, lifecycle.kv_cache) != (DROPPED, DROPPED)
            assert lifecycle.update not in STALLED_PHASES


def test_no_command_stands_in_the_word_of_an_engine_that_sleeps() -> None:
    """A trainer that writes it then would not be seen."""
    commands = {LegacyStatus(command.value) for command in LegacyCommand}
    for lifecycle in LEGAL:
        if lifecycle.admission is Admission.PAUSED and lifecycle.update is UpdatePhase.IDLE:
            assert legacy_word(lifecycle, None) not in commands


def test_a_fenced_engine_reads_updating_until_everything_is_dropped() -> None:
    life = SERVING.after(AdmissionEvent.FENCE)
    words = [legacy_word(life, None)]
    for event in drops(Tag.GRAPH, Tag.KV_CACHE, Tag.WEIGHT):
        life = life.after(event)
        words.append(legacy_word(life, None))
    assert [word.name for word in words] == ["UPDATING", "UPDATING", "UPDATING", "CLEARED"]


@pytest.mark.parametrize(("start", "word"), [(SERVING, "NORMAL"), (CLEARED, "CLEARED")], ids=["serving", "cleared"])
def test_a_command_without_legacy_shows_from_drain_on(start: Lifecycle, word: str) -> None:
    life, words = start, []
    for event in FORWARD[:4]:
        life = life.after(event)
        words.append(legacy_word(life, None).name)
    assert words == [word, word, word, "UPDATING"]


def test_the_words_are_those_of_fastdeploy() -> None:
    assert {status.name: status.value for status in LegacyStatus} == {
        "NORMAL": 0,
        "UPDATING": 1,
        "CLEARING": -1,
        "CLEARED": -2,
    }
    assert [command.value for command in LegacyCommand] == [1, -1]


def test_only_a_serving_engine_serves_and_every_other_says_why() -> None:
    for lifecycle in LEGAL:
        answer = answer_at_admission(lifecycle)
        assert answer.is_served == (lifecycle.admission is Admission.SERVING)
        assert (answer.http_status, bool(answer.reason)) == ((200, False) if answer.is_served else (503, True))


@pytest.mark.parametrize(
    ("lifecycle", "reason"),
    [
        (Lifecycle(), "starting"),
        (CLEARED, "cleared"),
        (SERVING.after(AdmissionEvent.PAUSE), "paused"),
        (Lifecycle(Admission.PAUSED, UpdatePhase.IDLE, OFFLOADED, DROPPED, DROPPED), "asleep"),
        (Lifecycle(Admission.FENCED), "fenced"),
        (Lifecycle(Admission.STOPPED), "stopped"),
    ],
)
def test_the_reason_says_what_the_engine_is(lifecycle: Lifecycle, reason: str) -> None:
    assert reason in answer_at_admission(lifecycle).reason


# --- the diagram


def test_the_diagram_has_one_arrow_for_each_transition() -> None:
    lines = [line.strip() for line in module.mermaid().split("\n")]
    assert lines[0] == "stateDiagram-v2"
    for _, _, table in TABLES.values():
        rows: list[tuple[Enum, Enum, Enum]] = [(s, e, a) for s, row in table.items() for e, a in row.items()]
        for state, event, after in rows:
            assert lines.count(f"{state.value} --> {after.value}: {event.value}") == 1


def test_the_diagram_is_printed_by_the_module() -> None:
    command = [sys.executable, "-m", "fastdeploy_rl.lifecycle"]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert (printed.stdout.strip(), printed.stderr) == (module.mermaid(), "")
