"""What FastDeploy's other processes are told over real status words: threads play its cache-transfer process, which
owns the pages that the runner is attached to, and the prefix tree of its engine."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import paddle
import pytest

from fastdeploy_rl._native import Mapping
from fastdeploy_rl.board.legacy import KV_CACHE_WORD, PREFIX_TREE_WORD, StatusWord, create_words, unlink_words
from fastdeploy_rl.engines.fastdeploy.cache_transfer import CacheTransfer
from fastdeploy_rl.engines.fastdeploy.engine_hooks import EngineHooks
from fastdeploy_rl.engines.fastdeploy.expert_parallel import ExpertParallel
from fastdeploy_rl.engines.fastdeploy.model_runner import FastDeployModelRunner
from fastdeploy_rl.engines.fastdeploy.model_weights import ModelWeights
from fastdeploy_rl.engines.fastdeploy.settings import EngineSettings, PluginOptions
from fastdeploy_rl.errors import ConfigurationError, DeadlineExceededError
from fastdeploy_rl.lifecycle import LegacyStatus
from fastdeploy_rl.memory.tensor_view import TensorView
from tests.engines.fastdeploy.standin.config import EngineLine, FDConfig
from tests.engines.fastdeploy.standin.gpu_model_runner import GPUModelRunner, set_data_ipc, unset_data_ipc
from tests.process.numpy_engine import free_port

NORMAL, UPDATING = LegacyStatus.NORMAL, LegacyStatus.UPDATING
CLEARING, CLEARED = LegacyStatus.CLEARING, LegacyStatus.CLEARED
OLD, NEW = "a" * 64, "b" * 64
_SHORT_S = 0.2


@pytest.fixture
def port() -> Iterator[int]:
    port = free_port()
    create_words(port)
    yield port
    unlink_words(port)


def store(port: int, name: str, value: int) -> None:
    with closing(StatusWord(name, port)) as word:
        word.store(value)


def load(port: int, name: str) -> int:
    with closing(StatusWord(name, port)) as word:
        return word.load()


@contextmanager
def listening(port: int, name: str, answers: dict[int, Callable[[], int]]) -> Iterator[list[int]]:
    """A thread that answers in a word; what it heard, in order."""
    heard: list[int] = []
    is_over = threading.Event()

    def listen() -> None:
        with closing(StatusWord(name, port)) as word:
            while not is_over.is_set():
                found = word.load()
                if found in answers:
                    heard.append(found)
                    word.store(answers[found]())
                word.wait_change(word.load(), time.monotonic_ns() + 5_000_000)

    thread = threading.Thread(target=listen, name=f"plays {name}")
    thread.start()
    try:
        yield heard
    finally:
        is_over.set()
        thread.join(20)


@contextmanager
def listening_tree(port: int) -> Iterator[list[int]]:
    answers: dict[int, Callable[[], int]] = {CLEARING: lambda: CLEARED, UPDATING: lambda: NORMAL}
    with listening(port, PREFIX_TREE_WORD, answers) as heard:
        yield heard


class OwningRunner(GPUModelRunner):
    """As FastDeploy has it since May 2026: pages that are swapped to the host are the runner's, the other process is
    attached to them, and waits for it are without a deadline here as well."""

    enable_cache_manager_v1 = False

    def initialize_kv_cache(self, profile: bool = False) -> None:
        super().initialize_kv_cache(profile)
        self.cache_ready_signal.value[0] = 1

    def clear_cache(self, profile=False):
        while not profile and self.cache_ready_signal.value[0] != 0:
            time.sleep(0.001)
        super().clear_cache(profile)


class Engine:
    """The stand-in runner, attached to pages of another process, on weights of digest OLD."""

    def __init__(self, port: int, *, timeout_s: float = 10.0, has_prefix_tree: bool = False) -> None:
        self.fd_config = FDConfig(EngineLine(port, 0, 1, "ipc", "", {}, ""))
        self.fd_config.cache_config.num_cpu_blocks = 4
        self.gpu = GPUModelRunner(self.fd_config, "cpu", 0, 1, 0)
        self.gpu.load_model()
        self.transfer = CacheTransfer(port, has_process=True, has_prefix_tree=has_prefix_tree, timeout_s=timeout_s)
        self.expert_parallel = ExpertParallel(self.fd_config.parallel_config, lambda: None)
        hooks = EngineHooks(self.gpu, expert_parallel=self.expert_parallel, cache_transfer=self.transfer)
        self.runner = FastDeployModelRunner(ModelWeights(self.gpu.model, 0, 1), hooks)
        self.runner.bind(
            {
                spec.name: TensorView(Mapping.private(4 * int(np.prod(spec.shape))), 0, "F32", spec.shape)
                for spec in self.runner.parameters()
            }
        )
        self.runner.rebuild_kv_cache(OLD)
        self.pages: dict[str, paddle.Tensor] = {}
        self.make_pages()
        self.gpu.update_share_input_block_num(8)
        self.detached: list[bool] = []

    @property
    def ready(self) -> np.ndarray:
        return self.gpu.cache_ready_signal.value

    def make_pages(self) -> int:
        """As the other process does."""
        for layer in range(2):
            for kind in ("key", "value"):
                name = f"{kind}_caches_{layer}_rank0.device0"
                self.pages[name] = paddle.full([8, 1, 4, 8], 0.0)
                set_data_ipc(self.pages[name], name)
        self.ready[0] = 1
        return NORMAL

    def free_pages(self) -> int:
        """Once the runner is detached, which comes after it has told."""
        deadline = time.monotonic() + 10
        while self.ready[0] != 0 and time.monotonic() < deadline:
            time.sleep(0.001)
        self.detached.append(not self.gpu.cache_kvs_map)
        for name in self.pages:
            unset_data_ipc(name)
        self.pages.clear()
        return CLEARED

    @contextmanager
    def owned(self, port: int) -> Iterator[list[int]]:
        with listening(port, KV_CACHE_WORD, {CLEARING: self.free_pages, UPDATING: self.make_pages}) as heard:
            yield heard

    def is_attached(self) -> bool:
        held = self.gpu.cache_kvs_map
        return held.keys() == self.pages.keys() and all(
            held[name].data_ptr() == pages.data_ptr() for name, pages in self.pages.items()
        )


def test_the_owner_of_pages_is_told_before_they_go_and_awaited(port: int) -> None:
    engine = Engine(port)
    with engine.owned(port) as heard:
        engine.runner.drop_kv_cache()
        assert (heard, engine.detached, engine.pages) == ([CLEARING], [True], {})
        assert load(port, KV_CACHE_WORD) == CLEARED
        engine.runner.rebuild_kv_cache(NEW)
        assert heard == [CLEARING, UPDATING]
    assert engine.is_attached()
    assert load(port, KV_CACHE_WORD) == NORMAL


def test_pages_that_another_process_copies_are_not_emptied_under_its_hands(port: int) -> None:
    engine = Engine(port)
    before = {name: pages.data_ptr() for name, pages in engine.pages.items()}
    kept = dict(engine.pages)
    with engine.owned(port) as heard:
        engine.runner.rebuild_kv_cache(NEW)
    assert heard == [CLEARING, UPDATING]
    assert engine.is_attached()
    assert {name: pages.data_ptr() for name, pages in engine.pages.items()} != before
    del kept


def test_what_fastdeploys_loop_told_already_is_not_told_again(port: int) -> None:
    """From CLEARED it stores UPDATING before it calls the runner; the owner may have pages by then."""
    engine = Engine(port)
    with engine.owned(port) as heard:
        engine.runner.drop_kv_cache()
        store(port, KV_CACHE_WORD, UPDATING)
        deadline = time.monotonic() + 10
        while load(port, KV_CACHE_WORD) != NORMAL and time.monotonic() < deadline:
            time.sleep(0.001)
        engine.runner.rebuild_kv_cache(NEW)
    assert heard == [CLEARING, UPDATING]
    assert engine.is_attached()


def test_a_loop_that_told_too_much_while_pages_are_there_leaves_one_set_of_pages(port: int) -> None:
    """A trainer's update of a live engine: FastDeploy tells UPDATING though nothing was cleared."""
    engine = Engine(port)
    store(port, KV_CACHE_WORD, UPDATING)
    with engine.owned(port) as heard:
        engine.runner.rebuild_kv_cache(NEW)
    assert heard[-2:] == [CLEARING, UPDATING]
    assert engine.is_attached()


def test_an_answer_of_another_ranks_process_that_comes_late_does_no_harm(port: int) -> None:
    engine = Engine(port)
    late = [CLEARED]

    def make_late() -> int:
        """The first time another process overwrites the call with its answer to the last one."""
        return late.pop() if late else engine.make_pages()

    with listening(port, KV_CACHE_WORD, {CLEARING: engine.free_pages, UPDATING: make_late}) as heard:
        engine.runner.rebuild_kv_cache(NEW)
    assert heard == [CLEARING, UPDATING, UPDATING]
    assert engine.is_attached()


def test_who_does_not_answer_is_named_after_the_deadline(port: int) -> None:
    engine = Engine(port, timeout_s=_SHORT_S)
    with pytest.raises(DeadlineExceededError, match=rf"cache-transfer process to CLEARING in kv_cache_status.{port}"):
        engine.runner.drop_kv_cache()
    assert engine.gpu.cache_kvs_map == {}
    with pytest.raises(DeadlineExceededError, match="no KV pages of the cache-transfer process"):
        engine.runner.rebuild_kv_cache(OLD)
    assert not engine.runner.has_kv_cache


def test_the_tree_is_cleared_while_nothing_is_swapped_and_renewed_when_pages_are_back(port: int) -> None:
    engine = Engine(port, has_prefix_tree=True)
    with ExitStack() as stack:
        heard = stack.enter_context(engine.owned(port))
        heard_by_tree = stack.enter_context(listening_tree(port))
        stack.enter_context(engine.expert_parallel.standing_still())
        engine.runner.drop_kv_cache()
        assert (load(port, KV_CACHE_WORD), load(port, PREFIX_TREE_WORD)) == (CLEARED, CLEARED)
        engine.runner.rebuild_kv_cache(NEW)
        assert (load(port, KV_CACHE_WORD), load(port, PREFIX_TREE_WORD)) == (NORMAL, NORMAL)
    assert (heard, heard_by_tree) == ([CLEARING, UPDATING], [CLEARING, UPDATING])


def test_pages_of_the_runners_own_go_when_the_other_process_has_let_go_of_them(port: int) -> None:
    fd_config = FDConfig(EngineLine(port, 0, 1, "ipc", "", {}, ""))
    gpu = OwningRunner(fd_config, "cpu", 0, 1, 0)
    gpu.load_model()
    gpu.update_share_input_block_num(8)
    transfer = CacheTransfer(port, has_process=True, has_prefix_tree=False, timeout_s=_SHORT_S)
    expert_parallel = ExpertParallel(fd_config.parallel_config, lambda: None)
    hooks = EngineHooks(gpu, expert_parallel=expert_parallel, cache_transfer=transfer)
    with pytest.raises(DeadlineExceededError, match="no end of the use of KV pages"):
        hooks.drop_kv_cache()
    assert hooks.has_kv_cache
    ready, seen = gpu.cache_ready_signal.value, []

    def detach() -> int:
        seen.append(hooks.has_kv_cache)
        ready[0] = 0
        return CLEARED

    def attach() -> int:
        return NORMAL if ready[0] == 1 else UPDATING

    with listening(port, KV_CACHE_WORD, {CLEARING: detach, UPDATING: attach}):
        hooks.drop_kv_cache()
        assert (seen[0], hooks.has_kv_cache, load(port, KV_CACHE_WORD)) == (True, False, CLEARED)
        hooks.rebuild_kv_cache(NEW)
    assert (hooks.has_kv_cache, load(port, KV_CACHE_WORD)) == (True, NORMAL)


def test_where_fastdeploys_engine_tells_them_nothing_is_said_here(port: int) -> None:
    engine = Engine(port, has_prefix_tree=True)
    with engine.transfer.told_by_engine():
        engine.runner.rebuild_kv_cache(NEW)
        engine.runner.drop_kv_cache()
        engine.free_pages()
        engine.make_pages()
        engine.runner.rebuild_kv_cache(NEW)
    assert (load(port, KV_CACHE_WORD), load(port, PREFIX_TREE_WORD)) == (NORMAL, NORMAL)
    assert engine.is_attached()


def test_a_tree_that_does_not_answer_goes_on_as_it_was(port: int) -> None:
    transfer = CacheTransfer(port, has_process=False, has_prefix_tree=True, timeout_s=_SHORT_S)
    with pytest.raises(DeadlineExceededError, match="prefix tree to CLEARING"):
        transfer.clear_tree()
    assert load(port, PREFIX_TREE_WORD) == NORMAL
    with pytest.raises(DeadlineExceededError, match="prefix tree to UPDATING"):
        transfer.renew_tree()


def test_one_rank_speaks_to_the_tree_for_all(port: int) -> None:
    with listening_tree(port) as heard:
        follower = CacheTransfer(port, has_process=False, has_prefix_tree=True, leads=False, timeout_s=_SHORT_S)
        follower.clear_tree()
        follower.renew_tree()
        assert heard == []
        leader = CacheTransfer(port, has_process=False, has_prefix_tree=True)
        leader.renew_tree()
        leader.clear_tree()
    assert heard == [UPDATING, CLEARING]


SETTINGS = EngineSettings(
    port=1,
    own_port=2,
    rank=1,
    num_ranks=2,
    tp_rank=1,
    load_strategy="ipc",
    model_dir=Path(),
    channel=Path(),
    metas_dir=None,
    options=PluginOptions(),
    rsync_config="",
    is_expert_parallel=False,
)


def fd_config(**changes: dict[str, object]) -> SimpleNamespace:
    config = FDConfig(EngineLine(1, 1, 2, "ipc", "", {}, ""))
    for namespace, values in changes.items():
        vars(getattr(config, namespace)).update(values)
    return config  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("cache", "has_process"), [({}, False), ({"num_cpu_blocks": 1}, True), ({"kvcache_storage_backend": "x"}, True)]
)
def test_fastdeploys_settings_say_who_is_there(
    cache: dict[str, object], has_process: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = {"enable_prefix_caching": True}
    transfer = CacheTransfer.of(fd_config(cache_config={**cache, **tree}), replace(SETTINGS, tp_rank=0))
    assert (transfer.has_process, transfer.has_prefix_tree) == (has_process, True)
    assert (transfer.can_reset_tree(stands_still=True), transfer.can_reset_tree(stands_still=False)) == (True, False)
    monkeypatch.setenv("FD_ENABLE_V1_UPDATE_WEIGHTS", "1")
    assert not CacheTransfer.of(fd_config(cache_config=tree), SETTINGS).can_reset_tree(stands_still=True)


def test_prefill_and_decode_of_their_own_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="splitwise_role 'prefill'"):
        CacheTransfer.of(fd_config(scheduler_config={"splitwise_role": "prefill"}), SETTINGS)
