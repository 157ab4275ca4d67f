"""FastDeploy's legacy way to new weights, as a foreign trainer goes it: plain stores into the word, and two routes.

One engine of two ranks with a main and a draft model, whose trainer publishes into a channel, serves most tests one
after another."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from fastdeploy_rl.control.controller import EngineController
from fastdeploy_rl.errors import LifecycleError
from fastdeploy_rl.publish.publisher import WeightPublisher
from fastdeploy_rl.update.history import HistoryEntry
from tests.engines.fastdeploy.standin.front_end import FrontEnd
from tests.engines.fastdeploy.standin.ipc_signal import ModelWeightsStatus
from tests.engines.fastdeploy.standin.trainer import Weights, as_the_engine, held_bytes, random_weights

_SOON_S = 30.0
NORMAL, UPDATING = ModelWeightsStatus.NORMAL, ModelWeightsStatus.UPDATING
CLEARING, CLEARED = ModelWeightsStatus.CLEARING, ModelWeightsStatus.CLEARED


class Scene:
    """An engine that came up on version 1.1 of its trainer's."""

    def __init__(self, stack: ExitStack, installed: Path, directory: Path, **more: float) -> None:
        self.step = 0
        self.publisher = stack.enter_context(WeightPublisher(directory))
        self.live = self.publish()
        options = {"channel": str(directory), "metas_dir": "", "update_s": 20.0, **more}
        self.front = stack.enter_context(
            FrontEnd(load_strategy="ipc", metadata=installed, num_ranks=2, mtp=True, options=options)
        )

    def publish(self, *, without: str | None = None) -> Weights:
        """The next step's weights; `without` one of the tensors, a version that must be refused."""
        self.step += 1
        weights = random_weights(self.step, mtp=True)
        given = {name: value for name, value in weights.items() if name != without}
        self.publisher.publish(given, step=self.step, convention=as_the_engine)
        return weights

    def store(self, status: ModelWeightsStatus) -> None:
        """As a foreign trainer does: into the word, without looking."""
        self.front.signals["model_weights_status"].value[0] = status

    def store_and_await(self, status: ModelWeightsStatus, wanted: ModelWeightsStatus) -> None:
        self.store(status)
        eventually(lambda: self.front.word is wanted, f"the word reads {wanted.name}")

    def update(self) -> None:
        """A good version, live at once."""
        self.live = self.publish()
        self.store_and_await(UPDATING, NORMAL)
        self.check()

    def check(self) -> None:
        """Every byte of every rank is that of the live version."""
        assert self.front.dump() == held_bytes(self.live, 2)

    def last(self) -> HistoryEntry:
        return self.latest(1)[-1]

    def latest(self, limit: int) -> list[HistoryEntry]:
        with EngineController(self.front.port) as engine:
            return engine.history(limit)


def eventually(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _SOON_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)  # polled by a deadline, as a foreign reader does


@pytest.fixture(scope="module")
def scene(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with ExitStack() as stack:
        scene = Scene(stack, installed, tmp_path_factory.mktemp("engine") / "channel")
        for _ in range(3):
            scene.update()  # the publisher has all its memory from now on
        yield scene


def test_the_engine_comes_up_on_what_its_trainer_has_published(scene: Scene):
    """And the log of the plugin proves that it is the plugin."""
    assert scene.front.ask("runner_class")[0][0].startswith("fastdeploy_rl.")
    assert (scene.front.log_dir / "fastdeploy_rl.log").read_text().count("event=active") == 2
    assert scene.front.word is NORMAL
    assert scene.front.get("/health").status == 200
    scene.check()


def test_two_stores_one_after_the_other_are_two_updates(scene: Scene):
    scene.update()
    scene.update()
    assert (scene.last().kind, scene.last().outcome) == ("update", "done")


def test_a_refused_update_leaves_the_word_normal_and_every_byte_as_it_was(scene: Scene):
    scene.publish(without="layers.0.norm.weight")
    scene.store_and_await(UPDATING, NORMAL)
    scene.check()
    assert scene.last().outcome == "rejected"
    assert "layers.0.norm.weight" in scene.last().reason
    scene.update()


def test_clear_and_update_over_the_routes(scene: Scene):
    front = scene.front
    assert front.get("/clear_load_weight").status == 200
    assert front.word is CLEARED
    assert front.get("/health").status == 304
    assert front.post("/v1/completions", {"prompt": [1]}).status == 304
    assert front.get("/clear_load_weight").body["msg"] == "model weight is cleared"
    scene.live = scene.publish()
    assert front.get("/update_model_weight").status == 200
    assert front.get("/health").status == 200
    scene.check()
    assert front.get("/update_model_weight").body["msg"] == "model weight is updated"


def test_what_is_refused_while_nothing_is_live_leaves_the_word_cleared_and_the_next_good_one_recovers(scene: Scene):
    front = scene.front
    assert front.get("/clear_load_weight").status == 200
    scene.publish(without="mtp/eh_proj.weight")
    scene.store(UPDATING)
    eventually(lambda: scene.last().outcome == "rejected", "the update is refused")
    eventually(lambda: front.word is CLEARED, "the word is CLEARED again")
    assert "mtp/eh_proj.weight" in scene.last().reason
    assert [process.poll() for process in front.workers.processes] == [None, None]
    scene.live = scene.publish()
    assert front.get("/update_model_weight").status == 200
    scene.check()


def test_an_update_over_the_board_comes_while_the_loop_decodes(scene: Scene):
    """Nobody calls FastDeploy's runner for it: it looks at each turn of its loop. What would cost a request its KV is
    refused, since FastDeploy's scheduler would not compute it again."""
    request = {"request_id": "long", "prompt": [1, 2, 3], "max_tokens": 1000}
    assert scene.front.post("/v1/completions", request).status == 200
    weights, version = scene.publish(), f"1.{scene.step}"
    begun = await_tokens(scene, 1)
    with EngineController(scene.front.port) as engine:
        with pytest.raises(LifecycleError, match="in flight"):
            engine.update(version, deadline_s=_SOON_S)
        scene.check()
        assert engine.update(version, kv="keep", deadline_s=_SOON_S).outcome == "done"
        scene.live = weights
        scene.check()
        await_tokens(scene, begun + 1)
    assert scene.front.word is NORMAL
    scene.update()  # over the word, where FastDeploy drops requests itself
    assert num_tokens(scene) == num_tokens(scene) < 1000


def num_tokens(scene: Scene) -> int:
    """Of the long request; every rank has as many."""
    (looked, *others) = (outputs["outputs"]["long"] for outputs in scene.front.ask("look", names=["outputs"]))
    assert [len(other) for other in others] == [len(looked)] * len(others)
    return len(looked)


def await_tokens(scene: Scene, least: int) -> int:
    eventually(lambda: num_tokens(scene) >= least, f"{least} tokens are there")
    return num_tokens(scene)


def test_a_rank_that_stands_still_or_dies_holds_nobody_longer_than_the_deadline(installed: Path, tmp_path: Path):
    """While weights are cleared FastDeploy's loop waits for the word, and nowhere else: not in a barrier without a
    deadline, which would be its own."""
    with ExitStack() as stack:
        scene = Scene(stack, installed, tmp_path / "channel", update_s=1.0)
        front = scene.front
        main, other = front.workers.processes
        assert front.get("/clear_load_weight").status == 200
        other.send_signal(signal.SIGSTOP)
        scene.publish()
        scene.store(UPDATING)
        assert front.get("/update_model_weight").status == 400
        assert front.get("/clear_load_weight").status == 403
        eventually(lambda: any("ranks [1] missing" in entry.reason for entry in scene.latest(3)), "it is given up")
        eventually(lambda: front.word is CLEARED, "the word tells")
        other.send_signal(signal.SIGCONT)
        eventually(lambda: other_is_heard(scene), "it follows again")
        scene.update()
        assert front.get("/clear_load_weight").status == 200
        other.kill()
        other.wait(10)
        scene.store(UPDATING)
        eventually(lambda: "ranks [1] died" in scene.last().reason, "the death is told")
        eventually(lambda: front.word is CLEARED, "the word is not stuck")
        assert main.poll() is None


def test_a_death_fences_the_engine_and_its_end_leaves_no_segment(installed: Path, tmp_path: Path):
    """Also where the rank that is left stands in a barrier of FastDeploy's, and nobody asked for an update. FastDeploy
    ends it with SIGTERM."""
    with ExitStack() as stack:
        scene = Scene(stack, installed, tmp_path / "channel")
        scene.front.workers.processes[1].kill()
        eventually(lambda: "ranks [1] died" in scene.last().reason, "the death is told")
        assert scene.last().outcome == "fenced"
        eventually(lambda: scene.front.get("/health").status == 304, "nothing is served")
        assert f"fastdeploy_rl_board.{scene.front.port}" in segments_of(scene)
    eventually(lambda: not segments_of(scene), "the segments are gone")


def other_is_heard(scene: Scene) -> bool:
    """Rank 1 has taken part in a good update."""
    scene.live = scene.publish()
    scene.store(UPDATING)
    eventually(lambda: scene.front.word in (NORMAL, CLEARED), "the update ends")
    return scene.front.word is NORMAL


def segments_of(scene: Scene) -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.endswith(f".{scene.front.port}")}
