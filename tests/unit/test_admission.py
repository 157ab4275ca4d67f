"""The door of the engine: who may join now, who waits for a version and until when, and who is told why not."""

from dataclasses import dataclass, field

import pytest

from fastdeploy_rl.control.generation import GenerationRequest, SamplingOptions
from fastdeploy_rl.engines.embedded.admission import CLOSED, AdmissionQueue, Refusal
from fastdeploy_rl.engines.embedded.messages import Start


@dataclass
class Engine:
    """What the weight manager and the scheduler would say; and the time."""

    is_admitting: bool = True
    is_settling: bool = False
    live_version: str = "2.7"
    newest_version: str = "2.9"
    now_s: float = 100.0
    waiting: set[str] = field(default_factory=set)

    def has_yet_to_begin(self, request_id: str) -> bool:
        return request_id in self.waiting

    def recall(self, request_id: str) -> None:
        self.waiting.remove(request_id)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def admission(engine: Engine) -> AdmissionQueue:
    return AdmissionQueue(engine, engine, clock=lambda: engine.now_s)


def start(name: str = "a", **wants: object) -> Start:
    return Start(name, GenerationRequest([1], 1, SamplingOptions(), **wants))


def admitted(admission: AdmissionQueue) -> list[str]:
    verdicts = admission.look()
    assert not verdicts.refused
    return [each.request_id for each in verdicts.admitted]


def refused(admission: AdmissionQueue) -> list[Refusal]:
    verdicts = admission.look()
    assert not verdicts.admitted
    return verdicts.refused


def test_whoever_wants_nothing_special_joins_at_once_in_order(admission: AdmissionQueue) -> None:
    for name in "cab":
        admission.arrive(start(name))
    assert admitted(admission) == ["c", "a", "b"]
    assert (admitted(admission), admission.seconds_to_expiry(), admission.is_looking_out) == ([], None, False)


def test_whoever_arrives_while_the_door_is_closed_is_refused_also_where_it_would_wait(
    engine: Engine, admission: AdmissionQueue
) -> None:
    engine.is_admitting = False
    admission.arrive(start("a"))
    admission.arrive(start("b", min_version="2.8", version_wait_s=9.0))
    assert refused(admission) == [("a", CLOSED), ("b", CLOSED)]
    assert refused(admission) == []


def test_nothing_is_decided_before_it_is_known_whether_the_engine_serves(
    engine: Engine, admission: AdmissionQueue
) -> None:
    engine.is_settling, engine.is_admitting = True, False
    admission.arrive(start("a"))
    assert admission.look() == ([], [])
    assert admission.is_looking_out
    engine.is_settling, engine.is_admitting = False, True
    assert admitted(admission) == ["a"]


@pytest.mark.parametrize("wants", [{"min_version": "2.7"}, {"min_version": "7"}, {"min_version": "1.900"}])
def test_a_version_that_is_new_enough_does(admission: AdmissionQueue, wants: dict[str, str]) -> None:
    admission.arrive(start(**wants))
    assert admitted(admission) == ["a"]


@pytest.mark.parametrize(
    ("live", "newest", "steps"),
    [("2.7", "2.9", 2), ("2.9", "2.9", 0), ("2.9", "", 0), ("2.9", "2.8", 0), ("3.0", "2.8", 0), ("2.7", "2.9", 10**9)],
)
def test_weights_that_are_fresh_enough_do(
    engine: Engine, admission: AdmissionQueue, live: str, newest: str, steps: int
) -> None:
    engine.live_version, engine.newest_version = live, newest
    admission.arrive(start(max_staleness=steps))
    assert admitted(admission) == ["a"]


@pytest.mark.parametrize(
    ("wants", "reason"),
    [
        ({"min_version": "2.8"}, "version 2.7 is live, and the request wants 2.8 or newer"),
        ({"min_version": "8"}, "version 2.7 is live, and the request wants 2.8 or newer"),
        ({"min_version": "3.0"}, "version 2.7 is live, and the request wants 3.0 or newer"),
        (
            {"max_staleness": 1},
            "version 2.7 is live, 2 steps behind 2.9, the newest that was published, and the request",
        ),
    ],
)
def test_whoever_would_not_wait_is_refused_with_both_versions(
    admission: AdmissionQueue, wants: dict[str, object], reason: str
) -> None:
    admission.arrive(start(**wants))
    ((_, said),) = refused(admission)
    assert said.startswith(reason)
    assert "waited" not in said


def test_weights_of_an_older_epoch_are_staler_than_any_number(engine: Engine, admission: AdmissionQueue) -> None:
    engine.newest_version = "3.0"
    admission.arrive(start(max_staleness=10**9))
    ((_, said),) = refused(admission)
    assert "version 2.7 is live, an epoch behind 3.0" in said


def test_a_request_waits_until_its_version_is_live_and_the_door_is_open(
    engine: Engine, admission: AdmissionQueue
) -> None:
    """The update that brings it closes the door in passing."""
    admission.arrive(start("a", min_version="2.8", version_wait_s=5.0))
    assert admitted(admission) == []
    engine.is_admitting, engine.live_version = False, ""
    assert admitted(admission) == []
    assert admission.is_looking_out
    engine.live_version = "2.8"
    assert admitted(admission) == []
    engine.is_admitting = True
    assert admitted(admission) == ["a"]
    assert admission.seconds_to_expiry() is None


def test_a_plain_step_is_one_of_the_epoch_in_which_the_request_came(engine: Engine, admission: AdmissionQueue) -> None:
    admission.arrive(start("a", min_version="8", version_wait_s=5.0))
    assert admitted(admission) == []
    engine.live_version = "3.0"
    assert admitted(admission) == ["a"]


def test_a_request_that_waited_for_long_enough_is_refused_and_nobody_else(
    engine: Engine, admission: AdmissionQueue
) -> None:
    admission.arrive(start("long", min_version="2.8", version_wait_s=60.0))
    engine.now_s += 2
    admission.arrive(start("short", min_version="2.8", version_wait_s=5.0))
    assert admitted(admission) == []
    assert admission.seconds_to_expiry() == 5.0
    engine.now_s += 5
    assert admission.seconds_to_expiry() == 0
    assert refused(admission) == [("short", "version 2.7 is live, and the request wants 2.8 or newer; waited 5 s")]
    assert admission.seconds_to_expiry() == 53.0
    engine.live_version = "2.8"
    assert admitted(admission) == ["long"]


def test_waiting_ends_also_while_the_door_is_closed(engine: Engine, admission: AdmissionQueue) -> None:
    admission.arrive(start("a", min_version="2.8", version_wait_s=5.0))
    admission.look()
    engine.is_admitting = False
    engine.now_s += 5
    assert refused(admission) == [("a", f"{CLOSED}; waited 5 s")]


def test_the_wait_counts_from_the_arrival_also_at_an_engine_that_settles(
    engine: Engine, admission: AdmissionQueue
) -> None:
    engine.is_settling = True
    admission.arrive(start("a", min_version="2.8", version_wait_s=5.0))
    engine.now_s += 6
    assert admission.look() == ([], [])
    engine.is_settling = False
    assert [name for name, _ in refused(admission)] == ["a"]


@pytest.mark.parametrize(
    ("wants", "reason"),
    [
        ({"min_version": "new"}, "min_weight_version: 'new' is no weight version"),
        ({"min_version": "2.08"}, "min_weight_version: '2.08' is no weight version"),
        (
            {"min_version": "2.8", "version_wait_s": float("inf")},
            "weight_version_wait_s must be 0 to 3600 seconds, got inf",
        ),
        (
            {"min_version": "2.8", "version_wait_s": float("nan")},
            "weight_version_wait_s must be 0 to 3600 seconds, got nan",
        ),
        ({"min_version": "2.8", "version_wait_s": -1.0}, "weight_version_wait_s must be 0 to 3600 seconds, got -1.0"),
    ],
)
def test_what_makes_no_sense_is_refused_at_once_and_no_other_request(
    admission: AdmissionQueue, wants: dict[str, object], reason: str
) -> None:
    admission.arrive(start("odd", **wants))
    admission.arrive(start("fine"))
    verdicts = admission.look()
    assert [each.request_id for each in verdicts.admitted] == ["fine"]
    ((name, said),) = verdicts.refused
    assert (name, said[: len(reason)]) == ("odd", reason)


def test_whoever_is_here_may_be_cancelled_and_whoever_is_not_is_left_to_others(
    engine: Engine, admission: AdmissionQueue
) -> None:
    admission.arrive(start("held", min_version="2.8", version_wait_s=5.0))
    admission.look()
    admission.arrive(start("arrived"))
    admission.arrive(start("joins"))
    assert [admission.cancel(name) for name in ("held", "arrived", "unknown")] == [True, True, False]
    assert admitted(admission) == ["joins"]
    assert not admission.cancel("joins")
    engine.now_s += 60
    assert refused(admission) == []


def test_an_engine_that_stops_refuses_everybody_once(admission: AdmissionQueue) -> None:
    admission.arrive(start("held", min_version="2.8", version_wait_s=5.0))
    admission.look()
    admission.arrive(start("arrived"))
    assert admission.refuse_all("stopping") == [("held", "stopping"), ("arrived", "stopping")]
    assert (admission.refuse_all("stopping"), admission.look()) == ([], ([], []))


@pytest.mark.parametrize(
    ("wants", "live", "newest"),
    [
        ({"min_version": "2.7"}, "2.6", ""),
        ({"max_staleness": 2}, "2.7", "2.10"),
    ],
)
def test_whoever_was_let_in_and_has_not_begun_is_refused_where_its_version_is_gone(
    engine: Engine, admission: AdmissionQueue, wants: dict[str, object], live: str, newest: str
) -> None:
    """And whoever has begun goes on."""
    for name in "ab":
        admission.arrive(start(name, **wants))
    assert admitted(admission) == ["a", "b"]
    engine.waiting = {"b"}
    engine.live_version, engine.newest_version = live, newest
    engine.is_admitting = False
    assert admitted(admission) == []
    engine.is_admitting = True
    (refusal,) = refused(admission)
    assert refusal.request_id == "b"
    assert f"version {live} is live" in refusal.reason
    assert engine.waiting == set()
    assert not admission.num_waiting


def test_whoever_is_called_back_may_wait_for_its_version_and_joins_again(
    engine: Engine, admission: AdmissionQueue
) -> None:
    admission.arrive(start("a", min_version="2.7", version_wait_s=5.0))
    assert admitted(admission) == ["a"]
    engine.waiting = {"a"}
    engine.live_version = "2.6"
    assert admitted(admission) == []
    assert (engine.waiting, admission.num_waiting) == (set(), 1)
    engine.live_version = "2.7"
    assert admitted(admission) == ["a"]


def test_a_plain_step_is_one_of_the_epoch_that_a_restarted_trainer_publishes_in(
    engine: Engine, admission: AdmissionQueue
) -> None:
    engine.live_version, engine.newest_version = "2.7", "3.1"
    admission.arrive(start("a", min_version="1"))
    assert "the request wants 3.1 or newer" in refused(admission)[0].reason
