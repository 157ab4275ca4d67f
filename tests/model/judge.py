"""What must hold when everything has come to rest, read without asking the product for its opinion of itself.

Bytes are compared with the trainer's arrays; what was ever live is the runners' own account."""

from fastdeploy_rl.board import layout
from fastdeploy_rl.board.layout import SlotState
from fastdeploy_rl.publish.channel import Channel
from fastdeploy_rl.publish.leases import NUM_ARENAS, LeaseTable
from fastdeploy_rl.report import EngineStatus
from fastdeploy_rl.update.client import BoardClient
from fastdeploy_rl.version import WeightVersion
from tests.model.actors import wait_until
from tests.model.engine import NUM_RANKS, ModelEngine
from tests.model.people import Request, Trainer, weights_of

NORMAL, CLEARED = 0, -2
REST_S = 25.0


def mend(engine: ModelEngine) -> None:
    """Whoever stands still goes on, and whoever is dead is started again."""
    for rank in list(engine.ranks):
        rank.actor.spare()
        rank.actor.resume()
    engine.is_restarting.set()


def await_rest(engine: ModelEngine, requests: list[Request]) -> EngineStatus:
    """Nobody waits, nothing is pending, every rank is there; each wait is bounded."""
    wait_until(lambda: all(request.is_over for request in requests), lambda: f"waiting: {_told(requests)}", REST_S)
    wait_until(lambda: _is_at_rest(engine), lambda: f"no rest: {story(engine)}", REST_S)
    return engine.board.status()


def _is_at_rest(engine: ModelEngine) -> bool:
    if not engine.is_healthy():
        return False
    status = engine.board.status()
    if (
        status.update != "idle"
        or {"NORMAL": NORMAL, "CLEARED": CLEARED}.get(status.legacy_status) != engine.word.load()
    ):
        return False
    if any(layout.is_in_state(word, SlotState.RUNNING) for word in slots(engine)):
        return False
    last = layout.command_in(engine.board.load(layout.INSTALL_DECISION_OFFSET))
    records = [engine.board.read_rank(rank) for rank in range(NUM_RANKS)]
    coordinator = engine.ranks[0].manager._coordinator
    if coordinator is None or coordinator.is_taking_over or coordinator._recovery.is_needed():
        return False
    return all((record.command, record.ballot) == (last, layout.Ballot.FINISHED) or not last for record in records)


def slots(engine: ModelEngine) -> list[int]:
    return [engine.board.load(layout.request_offset(slot)) for slot in range(layout.NUM_REQUEST_SLOTS)]


def story(engine: ModelEngine) -> str:
    with BoardClient(engine.port) as client:
        history = [f"{e.kind} {e.version} {e.outcome} {e.error} {e.reason}" for e in client.history(8)]
    return "\n".join(
        [
            f"status {engine.board.status()}",
            f"word {engine.word.load()} lost {engine.board.lost_ranks()} condemned {engine.board.condemned_ranks()}",
            f"words install {engine.board.load(layout.INSTALL_DECISION_OFFSET):#x} "
            f"commit {engine.board.load(layout.COMMIT_DECISION_OFFSET):#x}",
            f"dead {[(rank.actor.name, rank.actor.stores, rank.actor.last_words) for rank in engine.dead]}",
            f"complaints {engine.complaints}",
            f"slots {[hex(word) for word in slots(engine) if word]}",
            *history,
        ]
    )


def _told(requests: list[Request]) -> list[tuple[str, str, str]]:
    return [(request.kind, request.version, request.told) for request in requests]


def judge(engine: ModelEngine, trainer: Trainer, requests: list[Request]) -> EngineStatus:
    """At rest."""
    status = await_rest(engine, requests)
    told = story(engine)
    assert not engine.complaints, told
    _judge_weights(engine, trainer, status, told)
    for request in requests:
        _judge_request(engine, trainer, request, told)
    _judge_history(engine, told)
    wait_until(lambda: not any(slots(engine)), lambda: f"slots are taken: {story(engine)}", 5)
    wait_until(lambda: _are_leases_right(engine, status), lambda: f"leases: {_leases(engine)} {story(engine)}", 5)
    return status


def _judge_weights(engine: ModelEngine, trainer: Trainer, status: EngineStatus, told: str) -> None:
    word = engine.word.load()
    if word == NORMAL:
        assert status.is_serving, told
        assert status.legacy_status == "NORMAL", told
        assert status.version not in trainer.bad, told
        assert engine.holds(weights_of(trainer.seeds[status.version])), f"not bitwise {status.version}: {told}"
        assert {rank.version for rank in status.ranks} == {status.version}, told
        assert {rank.runner.version for rank in engine.ranks} == {status.version}, told
    else:
        assert word == CLEARED, told
        assert not status.is_serving, told
        assert not status.version, told
        assert engine.is_bare(), told


def _judge_request(engine: ModelEngine, trainer: Trainer, request: Request, told: str) -> None:
    """One outcome, and a true one."""
    assert request.told != "waiting", f"{request}: {told}"
    assert request.surprise is None, f"{request}: {told}"
    if request.error is not None:
        assert not str(request.error).startswith("no outcome of"), f"lost: {request} {told}"
        assert str(request.error), told
    if request.told == "done" and request.kind == "update":
        version = request.report.version
        assert request.version in ("", version), f"{request}: {told}"
        assert version not in trainer.bad, told
        assert all(version in seen for seen in engine.seen), f"never live everywhere: {request} {told}"


def _judge_history(engine: ModelEngine, told: str) -> None:
    """Versions grow; nobody forces in the model."""
    with BoardClient(engine.port) as client:
        done = [e.version for e in client.history(10_000) if e.kind == "update" and e.outcome == "done"]
    versions = [WeightVersion.parse(version) for version in done if version]
    assert versions == sorted(versions), f"{versions}: {told}"


def _leases(engine: ModelEngine) -> list[tuple[int, str, int]]:
    channel = Channel(engine.channel)
    table = LeaseTable(channel.leases_of(0), channel.holders_dir)
    if not table.path.exists():
        return []
    table.open()
    try:
        return [
            (arena, table.version(arena), len(holders))
            for arena in range(NUM_ARENAS)
            if (holders := table.holders(arena))
        ]
    finally:
        table.close()


def _are_leases_right(engine: ModelEngine, status: EngineStatus) -> bool:
    """A lease for each rank on what lies in published memory, and none else."""
    leases = _leases(engine)
    is_aliased = status.version not in ("", "0.0") and engine.apply_mode != "copy"
    return leases == ([] if not is_aliased else [(leases[0][0] if leases else 0, status.version, NUM_RANKS)])
