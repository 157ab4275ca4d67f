"""What FastDeploy's runner derived from weights follows them: on the stand-in for it, with a main and an MTP model."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle
import pytest

from fastdeploy_rl._native import Mapping
from fastdeploy_rl.engines.fastdeploy.cache_transfer import CacheTransfer
from fastdeploy_rl.engines.fastdeploy.engine_hooks import EngineHooks
from fastdeploy_rl.engines.fastdeploy.expert_parallel import ExpertParallel
from fastdeploy_rl.engines.fastdeploy.model_runner import FastDeployModelRunner
from fastdeploy_rl.engines.fastdeploy.model_weights import ModelWeights
from fastdeploy_rl.errors import ConfigurationError, DeadlineExceededError, LifecycleError
from fastdeploy_rl.memory.tensor_view import TensorView
from fastdeploy_rl.model_group import ModelGroup
from tests.engines.fastdeploy.standin.config import EngineLine, FDConfig
from tests.engines.fastdeploy.standin.gpu_model_runner import GPUModelRunner

OLD, NEW = "a" * 64, "b" * 64
PROMPT = {"prompt": [1, 2, 3], "max_tokens": 6, "request_id": "r"}


class RecordedTransfer(CacheTransfer):
    """Nobody listens: what would be said stands in `calls`."""

    def __init__(self, calls: list[str], **options: Any) -> None:
        super().__init__(1, **{"has_process": False, "has_prefix_tree": False, **options})
        self._calls = calls

    def tell_pages_go(self) -> None:
        self._calls.append("tell pages go")

    def await_pages_gone(self) -> None:
        self._calls.append("await pages gone")

    is_silent = False

    def clear_tree(self) -> None:
        self._calls.append("clear tree")
        self.is_tree_silent = self.is_silent
        if self.is_silent:
            raise DeadlineExceededError("no answer of the engine's prefix tree")

    def renew_tree(self) -> None:
        self._calls.append("renew tree")


class Scene:
    """An engine on weights of digest OLD; `calls`: what is called of FastDeploy's runner and said to others, in order,
    once `record` was called."""

    def __init__(self, *, has_started: bool = True, **options: Any) -> None:
        self.fd_config = FDConfig(EngineLine(1, 0, 1, "ipc", "", {}, "", mtp=True, graphs=True))
        self.calls: list[str] = []
        self.gpu = GPUModelRunner(self.fd_config, "cpu", 0, 1, 0)
        self.gpu.load_model()
        self.transfer = RecordedTransfer(self.calls, **options)
        self.expert_parallel = ExpertParallel(self.fd_config.parallel_config, lambda: None)
        self.hooks = EngineHooks(self.gpu, expert_parallel=self.expert_parallel, cache_transfer=self.transfer)
        main = FastDeployModelRunner(ModelWeights(self.gpu.model, 0, 1), self.hooks)
        draft = FastDeployModelRunner(ModelWeights(self.gpu.proposer.model, 0, 1))
        self.runner = ModelGroup(main, mtp=draft)
        self.bind(1)
        self.runner.rebuild_kv_cache(OLD)
        if has_started:
            self.gpu.profile_run()
            self.gpu.update_share_input_block_num(self.gpu.num_gpu_blocks)
            self.gpu.capture_model()

    def bind(self, seed: int) -> None:
        """Weights in memory of their own."""
        random = np.random.default_rng(seed)
        views = {}
        for spec in self.runner.parameters():
            views[spec.name] = TensorView(Mapping.private(4 * int(np.prod(spec.shape))), 0, "F32", spec.shape)
            views[spec.name].numpy()[...] = random.normal(0, 0.3, spec.shape)
        self.runner.bind(views)

    def record(self, monkeypatch: pytest.MonkeyPatch) -> None:
        draft = self.gpu.proposer
        for owner, name in [
            (self.gpu.model, "clear_graph_opt_backend"),
            (draft.model, "clear_graph_opt_backend"),
            (draft, "clear_mtp_cache"),
            (self.gpu, "clear_cache"),
            (self.gpu.share_inputs, "reset_share_inputs"),
            (draft.model_inputs, "reset_model_inputs"),
            (draft, "initialize_kv_cache"),
            (self.gpu, "initialize_kv_cache"),
            (self.gpu, "capture_model"),
        ]:
            monkeypatch.setattr(owner, name, self._recorded(f"{type(owner).__name__}.{name}", getattr(owner, name)))
        self.calls.clear()

    def _recorded(self, name: str, call: Any) -> Any:
        def recorded(**named: Any) -> Any:
            self.calls.append(name)
            return call(**named)

        return recorded

    def begin(self) -> None:
        """A request, with its prompt and a token done."""
        self.gpu.insert_tasks_v1([PROMPT], 1)
        self.gpu.execute_model()

    def finish(self) -> list[int]:
        while self.runner.num_requests():
            self.gpu.execute_model()
        return self.gpu.outputs["r"]

    def answer(self) -> list[int]:
        self.begin()
        return self.finish()

    @property
    def pages(self) -> dict[str, paddle.Tensor]:
        return {**self.gpu.cache_kvs_map, **self.gpu.proposer.cache_kvs_map}

    def page_bytes(self) -> bytes:
        return b"".join(pages.numpy().tobytes() for pages in self.pages.values())


@contextmanager
def unchanged(scene: Scene) -> Iterator[None]:
    """Not a byte of a page, no graph, no request, and nothing said."""
    before = scene.page_bytes(), dict(scene.gpu.model.graphs), scene.runner.num_requests()
    scene.calls.clear()
    yield
    assert (scene.page_bytes(), dict(scene.gpu.model.graphs), scene.runner.num_requests()) == before
    assert scene.calls == []


# --- before FastDeploy is ready -------------------------------------------------------------------------------


def test_until_fastdeploy_has_made_its_cache_and_graphs_nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(has_started=False)
    scene.record(monkeypatch)
    scene.runner.drain(0)
    scene.runner.rebuild_kv_cache(NEW)
    scene.runner.keep_kv_cache(NEW)
    assert scene.runner.recapture_graphs() == 0
    scene.runner.drop_kv_cache()
    assert (scene.calls, scene.pages, scene.runner.has_graphs, scene.runner.num_requests()) == ([], {}, False, 0)


def test_graphs_that_cannot_be_dropped_are_refused_at_the_start() -> None:
    gpu = Scene(has_started=False).gpu
    gpu.fd_config.graph_opt_config.graph_opt_level = 1
    with pytest.raises(ConfigurationError, match="graph_opt_level 1"):
        EngineHooks(gpu, expert_parallel=None, cache_transfer=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("variable", ["ENABLE_V1_KVCACHE_MANAGER", "FD_USE_BLOCK_WISE_CUDA_GRAPH"])
def test_what_fastdeploy_keeps_elsewhere_is_refused_at_the_start(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "1")
    with pytest.raises(ConfigurationError, match=variable):
        Scene(has_started=False)


# --- pages ----------------------------------------------------------------------------------------------------


def test_resident_pages_and_scales_are_emptied_where_they_are() -> None:
    scene = Scene()
    scene.gpu.cache_kvs_map["key_cache_scales_0"] = paddle.ones([8, 1, 4])
    scene.answer()
    assert any(scene.page_bytes())
    before = {name: pages.data_ptr() for name, pages in scene.pages.items()}
    graphs = dict(scene.gpu.model.graphs)
    scene.runner.rebuild_kv_cache(NEW)
    assert not any(scene.page_bytes())
    assert {name: pages.data_ptr() for name, pages in scene.pages.items()} == before
    assert scene.gpu.model.graphs == graphs
    assert scene.calls == ["clear tree", "renew tree"]


def test_pages_go_after_graphs_and_after_others_were_told(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()
    scene.record(monkeypatch)
    scene.runner.drop_kv_cache()
    scene.runner.drop_kv_cache()
    clear_graphs = ["StandinModel.clear_graph_opt_backend"] * 2
    away = ["tell pages go", "MTPProposer.clear_mtp_cache", "GPUModelRunner.clear_cache", "await pages gone"]
    assert scene.calls == [*clear_graphs, *away, "clear tree"]
    assert (scene.pages, scene.runner.has_kv_cache, scene.runner.has_graphs) == ({}, False, False)


def test_pages_come_back_in_fastdeploys_order_with_inputs_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()
    expected = scene.answer()
    scene.runner.drop_kv_cache()
    scene.record(monkeypatch)
    scene.runner.rebuild_kv_cache(OLD)
    assert scene.calls == [
        "InputBatch.reset_share_inputs",
        "ProposerInputBatch.reset_model_inputs",
        "MTPProposer.initialize_kv_cache",
        "GPUModelRunner.initialize_kv_cache",
        "renew tree",
    ]
    assert scene.runner.recapture_graphs() == 3
    assert scene.answer() == expected


def test_a_cache_may_go_twice_without_a_forward_pass_between() -> None:
    """FastDeploy's proposer deletes what it has deleted already, and raises."""
    scene = Scene()
    expected = scene.answer()
    for _ in range(2):
        scene.runner.drop_kv_cache()
        scene.runner.rebuild_kv_cache(OLD)
    assert scene.answer() == expected


def test_pages_that_could_not_all_be_made_are_none_and_can_be_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()
    expected = scene.answer()
    scene.runner.drop_kv_cache()
    with monkeypatch.context() as patch:

        def out_of_memory(**_: Any) -> None:
            scene.gpu.cache_kvs_map["key_caches_0"] = paddle.zeros([1])
            raise MemoryError

        patch.setattr(scene.gpu, "initialize_kv_cache", out_of_memory)
        with pytest.raises(MemoryError):
            scene.runner.rebuild_kv_cache(OLD)
    assert not scene.runner.has_kv_cache
    scene.runner.drop_kv_cache()
    assert scene.pages == {}
    scene.runner.rebuild_kv_cache(OLD)
    assert scene.answer() == expected


# --- requests in flight ---------------------------------------------------------------------------------------


def test_requests_in_flight_are_not_robbed_of_their_kv() -> None:
    scene = Scene()
    expected = scene.answer()
    scene.begin()
    with unchanged(scene):
        with pytest.raises(LifecycleError, match="1 requests are in flight"):
            scene.runner.rebuild_kv_cache(NEW)
        scene.runner.rebuild_kv_cache(OLD)  # as when the update is undone
    assert scene.finish() == expected


def test_requests_that_were_aborted_stand_in_nobodys_way() -> None:
    """Nor does what they left in the inputs, which the next request of the same slot would go on from."""
    scene = Scene()
    scene.begin()
    assert scene.runner.num_requests() == scene.runner.num_requests(begun=True) == 1
    scene.runner.abort_requests("the weights were updated")
    assert scene.runner.num_requests() == 0
    scene.runner.rebuild_kv_cache(NEW)
    assert not any(scene.page_bytes())
    assert scene.answer() == Scene().answer()


def test_requests_end_with_a_cache_that_is_dropped() -> None:
    scene = Scene()
    scene.begin()
    scene.runner.drop_kv_cache()
    assert scene.runner.num_requests() == 0


def test_requests_go_on_with_their_kv_where_it_is_kept() -> None:
    """And with graphs of the new weights."""
    undisturbed, scene = Scene(), Scene()
    for each in (undisturbed, scene):
        each.begin()
    pages = scene.page_bytes()
    scene.bind(2)
    scene.runner.keep_kv_cache(NEW)
    assert scene.runner.recapture_graphs() == 3
    assert scene.page_bytes() == pages
    assert scene.gpu.outputs["r"][:1] == undisturbed.gpu.outputs["r"][:1]
    assert scene.finish()[1:] != undisturbed.finish()[1:]
    scene.begin()
    with pytest.raises(LifecycleError):
        scene.runner.rebuild_kv_cache(OLD)  # it was NEW's


def test_kv_is_not_kept_beside_a_prefix_tree_that_knows_old_pages() -> None:
    """With the tree FastDeploy resets which pages are free, those of requests in flight among them."""
    scene = Scene(has_prefix_tree=True)
    scene.begin()
    with unchanged(scene):
        with pytest.raises(LifecycleError, match="keep the KV cache"):
            scene.runner.keep_kv_cache(NEW)
        scene.runner.keep_kv_cache(OLD)
    scene.finish()
    with scene.expert_parallel.standing_still():
        scene.runner.keep_kv_cache(NEW)
    assert scene.calls == ["clear tree", "renew tree"]
    assert not any(scene.page_bytes())


@pytest.mark.parametrize("listens", [False, True])
def test_prefixes_are_forgotten_only_where_fastdeploys_scheduler_is_held_back(listens: bool) -> None:
    """A request that it schedules while its tree is reset would have pages that another one gets as well."""
    scene = Scene(has_prefix_tree=True, listens=listens)
    scene.answer()
    with unchanged(scene):
        for change in (scene.runner.rebuild_kv_cache, scene.runner.keep_kv_cache):
            with pytest.raises(LifecycleError, match="/v1/pause"):
                change(NEW)
            change(OLD)
    held_back = scene.expert_parallel.standing_still() if listens else scene.hooks.told_by_engine()
    with held_back:
        scene.runner.rebuild_kv_cache(NEW)
    assert not any(scene.page_bytes())


@pytest.mark.parametrize("listens", [False, True])
def test_pages_that_the_tree_may_still_know_do_not_come_back(listens: bool) -> None:
    scene = Scene(has_prefix_tree=True, listens=listens)
    scene.runner.drop_kv_cache()
    with pytest.raises(LifecycleError, match="/v1/wakeup"):
        scene.runner.rebuild_kv_cache(OLD)
    assert scene.pages == {}
    held_back = scene.expert_parallel.standing_still() if listens else scene.hooks.told_by_engine()
    with held_back:
        scene.runner.rebuild_kv_cache(OLD)
    assert scene.runner.has_kv_cache


def test_a_tree_that_is_silent_costs_the_update_and_nothing_else() -> None:
    """To undo it is not to ask once more: the others would wait for that."""
    scene = Scene(has_prefix_tree=True)
    scene.answer()
    scene.transfer.is_silent = True
    with scene.expert_parallel.standing_still(), unchanged(scene):
        with pytest.raises(DeadlineExceededError, match="prefix tree"):
            scene.runner.rebuild_kv_cache(NEW)
        scene.calls.clear()
        scene.runner.rebuild_kv_cache(OLD)
    assert scene.calls == []


def test_memory_is_given_back_beside_a_tree_that_is_silent() -> None:
    scene = Scene(has_prefix_tree=True)
    scene.transfer.is_silent = True
    scene.runner.drop_kv_cache()
    assert scene.pages == {}
    assert scene.hooks.is_kv_asleep


def test_what_fastdeploy_has_paused_may_lose_its_kv() -> None:
    """Over V1 its engine computes anew what it resumes; a request may have come after a wakeup of pages alone."""
    scene = Scene()
    scene.begin()
    with scene.hooks.told_by_engine():
        scene.runner.rebuild_kv_cache(NEW)
    assert not any(scene.page_bytes())


def test_it_computes_while_tokens_follow_one_another() -> None:
    scene = Scene()
    scene.hooks.note_computing()
    assert not scene.runner.is_computing, "FastDeploy takes its turns idle or not"
    scene.begin()
    scene.hooks.note_computing()
    assert scene.runner.is_computing


# --- graphs ---------------------------------------------------------------------------------------------------


def test_a_bind_to_other_memory_leaves_no_graph_of_the_old_one() -> None:
    scene = Scene()
    scene.runner.bind(scene.runner.bound())
    assert scene.gpu.model.graphs.keys() == scene.gpu.proposer.model.graphs.keys() == {1, 2, 4}
    scene.bind(2)
    assert (scene.gpu.model.graphs, scene.gpu.proposer.model.graphs, scene.runner.has_graphs) == ({}, {}, False)


def test_no_graph_of_other_addresses_is_left_when_only_the_draft_model_moves() -> None:
    scene = Scene()
    scene.runner.drain(0)
    graphs = dict(scene.gpu.model.graphs)
    views = {spec.name: TensorView(Mapping.private(4 * int(np.prod(spec.shape))), 0, "F32", spec.shape)
             for spec in scene.runner.parameters()}  # fmt: skip
    draft = {name.removeprefix("mtp/"): view for name, view in views.items() if name.startswith("mtp/")}
    ModelWeights(scene.gpu.proposer.model, 0, 1).bind(draft)
    assert scene.runner.recapture_graphs() == 3
    assert not any(graphs[size] is scene.gpu.model.graphs[size] for size in graphs)
    assert scene.runner.recapture_graphs() == 0


def test_a_capture_that_fails_leaves_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()
    expected = scene.answer()
    scene.runner.drop_graphs()
    with monkeypatch.context() as patch:
        capture, draft = scene.gpu.capture_model, scene.gpu.proposer.model

        def half() -> None:
            capture()
            raise RuntimeError("CUDA out of memory")

        patch.setattr(scene.gpu, "capture_model", half)
        with pytest.raises(RuntimeError, match="out of memory"):
            scene.runner.recapture_graphs()
    assert (scene.gpu.model.graphs, draft.graphs, scene.runner.has_graphs) == ({}, {}, False)
    assert scene.answer() == expected
    assert scene.runner.recapture_graphs() == 3


def test_without_weights_no_graph_is_left_nor_captured() -> None:
    scene = Scene()
    scene.runner.unbind()
    assert (scene.gpu.model.graphs, scene.gpu.proposer.model.graphs) == ({}, {})
    assert scene.runner.recapture_graphs() == 0
