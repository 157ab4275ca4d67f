"""Trainers, clients, a foreign writer and three ranks, any of which may die or stand still: whatever they do in any
order, the engine comes to rest on one version, or on none, and tells everybody the truth."""

import contextlib
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from tests.model.actors import Actor, wait_until
from tests.model.engine import NUM_RANKS, ModelEngine
from tests.model.judge import judge, mend, story
from tests.model.people import Foreigner, Request, Trainer

_RANKS = st.integers(0, NUM_RANKS - 1)
_STORES = st.integers(0, 80)
_CLIENT_STORES = st.none() | st.integers(0, 12)
_DEADLINES_S = st.sampled_from([0.05, 0.3, 3.0, 3.0])
_MAX_WAITING = 6


class EngineModel(RuleBasedStateMachine):
    """One engine's life."""

    apply_mode = "alias"

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="fastdeploy_rl_model"))
        self.trainer = Trainer(self.directory / "channel")
        self.trainer.start()
        self.engine = ModelEngine(self.directory / "channel", self.apply_mode)
        self.engine.__enter__()
        self.foreigner = Foreigner(self.engine.port)
        self.requests: list[Request] = []
        self.num_asked = 0
        """Since all came to rest last: who waits now is not for a game to depend on."""
        self._seed = 0

    # --- trainers ----------------------------------------------------------------------------------

    @precondition(lambda self: self.trainer.is_alive)
    @rule(harm=st.sampled_from(["", "", "", "missing", "shape", "flip"]))
    def publish(self, harm: str) -> None:
        self._seed += 1
        self.trainer.publish(self._seed, harm=harm)

    @precondition(lambda self: self.trainer.is_alive)
    @rule(steps=st.integers(0, 15))
    def publish_and_die(self, steps: int) -> None:
        self._seed += 1
        self.trainer.actor.crash_after(steps)
        self.trainer.publish(self._seed)
        if not self.trainer.actor.is_dead:
            self.trainer.kill()

    @precondition(lambda self: not self.trainer.is_alive)
    @rule()
    def start_trainer(self) -> None:
        self.trainer.start()

    @precondition(lambda self: self.trainer.is_alive)
    @rule()
    def start_second_trainer(self) -> None:
        assert self.trainer.is_second_refused()

    # --- clients -----------------------------------------------------------------------------------

    @precondition(lambda self: self.num_asked < _MAX_WAITING)
    @rule(is_named=st.booleans(), deadline_s=_DEADLINES_S, crash=_CLIENT_STORES)
    def ask_update(self, is_named: bool, deadline_s: float, crash: int | None) -> None:
        version = f"{self.trainer.publisher.epoch}.{self.trainer.step}" if is_named and self.trainer.step else ""
        self._ask(Request(self.engine.port, "update", version, deadline_s), crash)

    @precondition(lambda self: self.num_asked < _MAX_WAITING)
    @rule(kind=st.sampled_from(["clear", "recompute"]), deadline_s=_DEADLINES_S, crash=_CLIENT_STORES)
    def ask(self, kind: str, deadline_s: float, crash: int | None) -> None:
        self._ask(Request(self.engine.port, kind, "", deadline_s), crash)

    def _ask(self, request: Request, crash: int | None) -> None:
        if crash is not None:
            request.actor.crash_after(crash)
        self.requests.append(request.start())
        self.num_asked += 1

    @rule()
    def let_time_pass(self) -> None:
        """Until all are answered; where ranks stand still, past the shorter deadlines."""
        with contextlib.suppress(AssertionError):
            wait_until(lambda: all(request.is_over for request in self.requests), str, 1.2)

    # --- a foreign process -------------------------------------------------------------------------

    @rule(value=st.sampled_from([1, 1, -1, -1, 0, -2, 7]), times=st.integers(1, 3))
    def write_word(self, value: int, times: int) -> None:
        for _ in range(times):
            self.foreigner.write(value)

    # --- what befalls ranks ------------------------------------------------------------------------

    @rule(rank=_RANKS, stores=_STORES)
    def crash_rank(self, rank: int, stores: int) -> None:
        self._actor(rank).crash_after(stores)

    @rule(rank=_RANKS, act=st.sampled_from(["kill", "stall", "resume"]))
    def befall(self, rank: int, act: str) -> None:
        getattr(self._actor(rank), act)()

    @rule(is_restarting=st.booleans())
    def start_again(self, is_restarting: bool) -> None:
        """Whether ranks that died, or die, are started again."""
        self.engine.is_restarting.set() if is_restarting else self.engine.is_restarting.clear()

    def _actor(self, rank: int) -> Actor:
        return self.engine.ranks[rank].actor

    # --- judgement ---------------------------------------------------------------------------------

    @rule()
    def come_to_rest(self) -> None:
        mend(self.engine)
        self.num_asked = 0
        judge(self.engine, self.trainer, self.requests)
        self._judge_causes()
        assert self.foreigner.is_answered(), f"{self.foreigner.last}: {story(self.engine)}"

    def _judge_causes(self) -> None:
        """What was ever live somebody asked for, and was not told that it was not."""
        if self.foreigner.has_updated:
            return
        told = {request.report.version for request in self.requests if request.told == "done"}
        if any(request.told in ("died", "FencedError") for request in self.requests):
            return
        for version in {version for seen in self.engine.seen for version in seen} - {"0.0"}:
            assert version in told, f"{version} is nobody's: {[r.told for r in self.requests]} {story(self.engine)}"

    def teardown(self) -> None:
        try:
            self.come_to_rest()
            self._work_on()
        finally:
            self._close()

    def _work_on(self) -> None:
        """After all that a good update works, at the first try."""
        if not self.trainer.is_alive:
            self.trainer.start()
        self._seed += 1
        publishing = self.trainer.publish(self._seed)
        assert publishing.is_done, f"{publishing} {story(self.engine)}"
        request = Request(self.engine.port, "update", publishing.version).start()
        self.requests.append(request)
        status = judge(self.engine, self.trainer, self.requests)
        assert request.told == "done", f"{request.told} {request.error}: {story(self.engine)}"
        assert status.version == publishing.version, story(self.engine)

    def _close(self) -> None:
        try:
            self.foreigner.close()
            for request in self.requests:
                request.bury()
            self.engine.__exit__(None, None, None)
        finally:
            self.trainer.close()
            self.trainer.bury()
            shutil.rmtree(self.directory, ignore_errors=True)


_IN_THE_SUITE = {"max_examples": 25, "stateful_step_count": 16, "derandomize": True, "database": None}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("apply_mode", ["alias", "copy"])
def test_the_engine_comes_to_rest_on_one_version(apply_mode: str):
    """Games of a dozen moves, judged whenever everything has come to rest, and at the end."""
    is_long = settings.get_current_profile_name() == "long"
    game = type(f"EngineModel_{apply_mode}", (EngineModel,), {"apply_mode": apply_mode})
    game.TestCase.settings = settings() if is_long else settings(settings.get_profile("long"), **_IN_THE_SUITE)
    game.TestCase("runTest").runTest()
