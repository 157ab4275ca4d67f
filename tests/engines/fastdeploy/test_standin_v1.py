"""FastDeploy's V1 way to new weights: pause, sleep, wake up and update over control requests to every rank.

The trainer is one of FastDeploy's own: it writes `model_state` files of each rank and `version.yaml` into the model's
directory, one dictionary for main and draft model. One engine of two ranks serves the tests one after another."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from fastdeploy_rl.publish.fastdeploy_files import write_model_state, write_version
from tests.engines.fastdeploy.standin.front_end import FrontEnd
from tests.engines.fastdeploy.standin.ipc_signal import ModelWeightsStatus
from tests.engines.fastdeploy.standin.trainer import Weights, as_the_engine, held_bytes, random_weights, slices
from tests.process.trainer import Trainer

_RANKS = 2
_SOON_S = 30.0


class Scene:
    """An engine that came up on step 1."""

    def __init__(self, stack: ExitStack, installed: Path, directory: Path) -> None:
        self.directory = directory
        self.step = 0
        self._num_requests = 0
        self.live = self.write()
        options = {"channel": str(directory / "channel"), "metas_dir": "", "update_s": 20.0}
        self.front = stack.enter_context(
            FrontEnd(
                load_strategy="ipc_snapshot",
                metadata=installed,
                num_ranks=_RANKS,
                mtp=True,
                is_v1=True,
                graphs=True,
                model_dir=directory,
                options=options,
            )
        )

    def write(self, *, without: str | None = None) -> Weights:
        """The next step's files: what main and draft model both have stands in them once."""
        self.step += 1
        weights = random_weights(self.step)
        weights["mtp/eh_proj.weight"] = random_weights(self.step, mtp=True)["mtp/eh_proj.weight"]
        for rank in range(_RANKS):
            held = slices({name: value for name, value in weights.items() if name != without}, rank, _RANKS)
            flat = {name.removeprefix("mtp/"): value for name, value in held.items()}
            write_model_state(self.directory, flat, rank=rank, gpu=rank, num_parts=2)
        write_version(self.directory, self.step)
        return weights | {"mtp/embed_tokens.weight": weights["embed_tokens.weight"]}

    def update(self) -> list[dict[str, object]]:
        """A good version, live at once."""
        self.live = self.write()
        self.front.post("/v1/pause")
        answer = self.front.post("/v1/update_weights", {"version": str(self.step)})
        assert answer.status == 200, answer.body
        assert self.front.post("/v1/resume").status == 200
        self.check()
        return answer.body

    def check(self) -> None:
        """Every byte of every rank is that of the live version."""
        assert self.front.dump() == held_bytes(self.live, _RANKS)

    def logits(self) -> list[str]:
        """Of each rank: all bits of the logits of one short answer, as hex."""
        self._num_requests += 1
        name = f"request-{self._num_requests}"
        assert self.front.post("/v1/completions", {"request_id": name, "prompt": [7, 1], "max_tokens": 3}).status == 200
        deadline = time.monotonic() + _SOON_S
        while True:
            looked = self.front.ask("look", names=["outputs", "logits"])
            if all(len(held["outputs"].get(name, [])) == 3 for held in looked):
                return [held["logits"][name] for held in looked]
            assert time.monotonic() < deadline, "the answer is there"

    def marks(self) -> list[list[bool]]:
        """Of each rank: whether FastDeploy takes weights and KV cache for asleep."""
        looked = self.front.ask("look", names=["is_weight_sleeping", "is_kvcache_sleeping", "is_sleeping"])
        return [list(marks.values()) for marks in looked]


@pytest.fixture(scope="module")
def scene(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with ExitStack() as stack:
        yield Scene(stack, installed, tmp_path_factory.mktemp("model"))


def test_an_update_is_for_an_engine_that_is_paused(scene: Scene):
    answer = scene.front.post("/v1/update_weights", {"version": "1"})
    assert (answer.status, "Pause" in answer.body) == (500, True)
    assert scene.front.post("/v1/update_weights", {"version": 1}).status == 400
    scene.check()


def test_every_rank_answers_an_update_with_its_version_and_costs(scene: Scene):
    answers = scene.update()
    assert len(answers) == _RANKS
    for rank, answer in enumerate(answers):
        assert answer.keys() >= {"sync_cost", "update_cost", "total_cost", "version", "rank"}
        assert (answer["version"], answer["rank"]) == (f"1.{scene.step}", rank)
    assert scene.front.engine.version == f"1.{scene.step}"
    scene.update()


def test_a_refused_update_tells_why_and_leaves_every_byte_as_it_was(scene: Scene):
    scene.write(without="layers.0.norm.weight")
    assert scene.front.post("/v1/pause").status == 200
    answer = scene.front.post("/v1/update_weights", {"version": str(scene.step)})
    assert answer.status == 500
    assert "layers.0.norm.weight" in answer.body
    assert scene.front.get("/v1/is_paused").body == {"is_paused": True}
    scene.check()
    scene.update()


@pytest.mark.parametrize("tags", [["weight"], "kv_cache", "weight,kv_cache", None], ids=str)
def test_what_slept_is_as_it_was_when_it_wakes_up(scene: Scene, tags: str | list[str] | None):
    body = {} if tags is None else {"tags": tags}
    named = "weight,kv_cache" if tags is None else tags
    has_weight, has_cache = "weight" in named, "kv_cache" in named
    assert scene.front.post("/v1/sleep", body).status == 200
    assert scene.front.get("/v1/is_paused").body == {"is_paused": True}
    assert scene.marks() == [[has_weight, has_cache, True]] * _RANKS
    assert scene.front.dump() == ([{}] * _RANKS if has_weight else held_bytes(scene.live, _RANKS))
    assert scene.front.post("/v1/sleep", body).status == 200, "asleep already"
    answer = scene.front.post("/v1/wakeup", body)
    assert answer.status == 200, answer.body
    assert scene.marks() == [[False, False, False]] * _RANKS
    assert scene.front.get("/v1/is_paused").body == {"is_paused": False}
    scene.check()


@pytest.mark.parametrize(("first", "second"), [("kv_cache", "weight"), ("weight", "kv_cache")])
def test_the_tags_of_what_sleeps_may_wake_up_one_by_one(scene: Scene, first: str, second: str):
    """In either order, although FastDeploy's own graphs want the KV cache before the weights; what computes
    afterwards computes the same."""
    before = scene.logits()
    assert scene.front.post("/v1/sleep").status == 200
    assert scene.front.post("/v1/wakeup", {"tags": first}).status == 200
    assert scene.marks() == [[first != "weight", first != "kv_cache", True]] * _RANKS
    assert scene.front.post("/v1/wakeup", {"tags": second}).status == 200
    assert scene.marks() == [[False, False, False]] * _RANKS
    scene.check()
    assert scene.logits() == before
    scene.update()
    assert scene.logits() != before


def test_the_legacy_routes_are_sleep_and_wakeup(scene: Scene):
    assert scene.front.get("/clear_load_weight").status == 200
    assert scene.front.dump() == [{}] * _RANKS
    scene.live = scene.write()
    assert scene.front.get("/update_model_weight").status == 200
    assert scene.front.word is ModelWeightsStatus.NORMAL
    scene.check()


def test_an_unknown_tag_reaches_no_worker(scene: Scene):
    answer = scene.front.post("/v1/sleep", {"tags": "weights"})
    assert (answer.status, "weights" in answer.body) == (500, True)
    assert scene.marks() == [[False, False, False]] * _RANKS
    scene.check()


def test_weights_come_over_the_network_as_well(installed: Path, tmp_path: Path):
    """The strategy that FastDeploy made V1 for, from a weight server in the place of its closed package."""
    channel = tmp_path / "channel"
    with Trainer("rsync", channel) as trainer:
        trainer.publish(random_weights(1), step=1, convention=as_the_engine)
        options = {"channel": str(channel), "metas_dir": "", "update_s": 20.0}
        with FrontEnd(load_strategy="rsync", metadata=installed, is_v1=True, options=options) as front:
            assert front.dump() == held_bytes(random_weights(1), 1)
            trainer.publish(random_weights(2), step=2, convention=as_the_engine)
            front.post("/v1/pause")
            answer = front.post("/v1/update_weights", {"version": "2", "verify_checksum": True})
            assert (answer.status, answer.body[0]["version"]) == (200, "1.2")
            assert front.dump() == held_bytes(random_weights(2), 1)
