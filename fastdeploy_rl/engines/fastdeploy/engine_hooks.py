"""What FastDeploy's model runner derived from weights: requests, KV pages and captured graphs, of its main model and of
an MTP model beside it.

Owns when they are dropped, emptied, made and captured, and which digest the pages belong to. Refuses to know how
weights arrive and other ranks. Invariants: no graph is there that was captured with other addresses than parameters and
pages have; pages hold KV of the weights with the noted digest, or none.

FastDeploy makes pages and graphs itself, after it has loaded the model: until then nothing here does. Its scheduler is
in another process: a request whose KV is lost cannot be computed again, as nobody here could tell it so.

Written for FastDeploy 2.6. What runs on a device alone (synchronizing, capturing) was not run on a GPU.
"""

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import paddle

from fastdeploy_rl.config import fastdeploy_switches
from fastdeploy_rl.engines.fastdeploy.cache_transfer import CacheTransfer
from fastdeploy_rl.engines.fastdeploy.expert_parallel import ExpertParallel
from fastdeploy_rl.engines.fastdeploy.settings import MTP
from fastdeploy_rl.errors import ConfigurationError, DeadlineExceededError, LifecycleError

_log = logging.getLogger(__name__)

_DRAFT_GRAPHS = "draft_model_use_cudagraph"
_CLEAR_GRAPHS = ("clear_graph_opt_backend", "clear_grpah_opt_backend")
"""Of a model: since 2.6, and up to 2.5."""
_UNSUPPORTED = ("ENABLE_V1_KVCACHE_MANAGER", "FD_USE_BLOCK_WISE_CUDA_GRAPH")
_LENGTHS = ("seq_lens_encoder", "seq_lens_decoder")
"""Of a request's tokens, by slot; 0 where it came to its end."""
_UNKNOWN = ""
"""Digest of pages that were just emptied, or of which nothing is known."""
_ROUTES = (
    "FastDeploy's own ways are open: POST /v1/pause with /v1/update_weights, /v1/sleep and /v1/wakeup (with "
    "FD_ENABLE_V1_UPDATE_WEIGHTS), or else the status word"
)
_PAUSE_S = 0.5
"""So long after a forward pass it counts as one that others follow."""
_LOOK_S = 0.001

Addresses = Mapping[str, int]


class EngineHooks:
    """One rank's. All calls come from FastDeploy's loop, but for `is_computing` and `capture_seconds`."""

    def __init__(self, gpu_runner: Any, *, expert_parallel: ExpertParallel, cache_transfer: CacheTransfer) -> None:
        """`gpu_runner`: FastDeploy's GPUModelRunner with its models. ConfigurationError where it has graphs or pages of
        a kind that cannot follow the weights."""
        self._runner = gpu_runner
        self._expert_parallel, self._cache_transfer = expert_parallel, cache_transfer
        _check_can_follow(gpu_runner)
        self._has_started = False
        self._digest = _UNKNOWN
        self._captured: Addresses | None = None
        self.capture_seconds = 0.0
        """How long the last capture took; 0 where nothing was captured here yet."""
        self._computed_s = -_PAUSE_S

    # --- weights -----------------------------------------------------------------------------------

    @contextmanager
    def weights_coming(self) -> Iterator[None]:
        """Around a bind, of this model's: before it, what the weights need; after it, graphs that it made stale go."""
        self._look_at_start()
        self._expert_parallel.restart_groups()
        self._expert_parallel.recreate_buffer()
        try:
            yield
        finally:
            if self._captured is not None and self._captured != self._addresses():
                self.drop_graphs()

    @contextmanager
    def weights_going(self) -> Iterator[None]:
        self._look_at_start()
        self.drop_graphs()
        self._expert_parallel.clear_buffer()
        yield
        paddle.device.cuda.empty_cache()
        self._expert_parallel.weights_are_gone()

    # --- requests ----------------------------------------------------------------------------------

    def drain(self, deadline_ns: int) -> None:
        """FastDeploy's loop is between two forward passes; this waits for the device. DeadlineExceededError."""
        self._look_at_start()
        if paddle.device.get_device().startswith("gpu"):
            _await_device(deadline_ns)

    def note_computing(self) -> None:
        """At each of FastDeploy's turns to compute something, which it takes idle or not."""
        if getattr(self._runner, "current_launch_token_num", 1):
            self._computed_s = time.monotonic()

    @property
    def is_computing(self) -> bool:
        return time.monotonic() - self._computed_s < _PAUSE_S

    def num_requests(self) -> int:
        """Of those that this worker generates tokens for; the same on every rank of an engine."""
        return int((~self._runner.share_inputs["stop_flags"]).sum())

    def abort_requests(self, reason: str) -> None:
        if number := self.num_requests():
            _log.warning("event=requests_dropped num=%d reason=%r", number, reason)
            self._runner.clear_requests()

    # --- KV cache ----------------------------------------------------------------------------------

    @property
    def has_kv_cache(self) -> bool:
        """All of it: where making it failed half way there is something to drop, and no more."""
        return "caches" in self._runner.share_inputs and bool(self._runner.cache_kvs_map)

    @property
    def is_kv_asleep(self) -> bool:
        """FastDeploy has made pages, and they are gone."""
        return self._has_started and not self.has_kv_cache

    def told_by_engine(self) -> AbstractContextManager[None]:
        """As `CacheTransfer.told_by_engine`."""
        return self._cache_transfer.told_by_engine()

    def drop_kv_cache(self) -> None:
        """Requests in flight end with it. DeadlineExceededError where FastDeploy's other processes do not answer: this
        rank's pages are gone then."""
        self._look_at_start()
        if not (self._runner.cache_kvs_map or self._draft_pages()):
            return
        self.drop_graphs()  # they would keep the pages, and write into them
        self.abort_requests("their KV cache is dropped")
        self._digest = _UNKNOWN
        self._cache_transfer.tell_pages_go()
        if self._owns_pages:
            self._cache_transfer.await_detached(lambda: not self._is_cache_ready())
        self._let_go_of_pages()
        self._cache_transfer.await_pages_gone()
        try:
            self._cache_transfer.clear_tree()
        except DeadlineExceededError as late:  # no reason to keep weights: none come back before it is renewed
            _log.warning("event=tree_silent reason=%r", str(late))

    def _let_go_of_pages(self) -> None:
        """The draft model's first: the call for the main model's says that those of both may be freed."""
        runner, draft = self._runner, self._draft
        if draft is not None and draft.cache_kvs_map:
            # FastDeploy deletes both unseen, also where they were deleted before or have not come yet.
            if draft.forward_meta is not None and "caches" not in vars(draft.forward_meta):
                draft.forward_meta.caches = None
            draft.model_inputs["caches"] = None
            draft.clear_mtp_cache()
        if runner.cache_kvs_map:
            runner.share_inputs["caches"] = None
            runner.clear_cache()
        if hasattr(runner, "_cached_launch_token_num"):  # overlap schedule: of a step that nobody waits for any more
            runner._cached_launch_token_num = runner._cached_real_bsz = -1
            runner._cached_model_output_data = runner._cached_sampler_output = None
            runner._cached_post_process_event = None

    def rebuild_kv_cache(self, content_digest: str) -> None:
        """Empty pages, and a prefix tree that knows of none. Where pages are resident they are emptied in place, so
        that their addresses stay, unless another process swaps them.

        LifecycleError, with nothing changed: requests in flight would lose their KV, or prefixes of other weights would
        stay. DeadlineExceededError."""
        self._look_at_start()
        if not self._has_started:
            self._digest = content_digest
        elif not self.has_kv_cache:
            self._make_pages(content_digest)
        elif self._must_change(content_digest, "rebuild"):
            self._empty_pages(content_digest)

    def keep_kv_cache(self, content_digest: str) -> None:
        """As `ModelRunner.keep_kv_cache`. LifecycleError, with nothing changed, while prefixes are cached and requests
        may be given pages: FastDeploy resets its tree together with what it knows of the pages of requests."""
        self._look_at_start()
        if not self._has_started or not self.has_kv_cache:
            self.rebuild_kv_cache(content_digest)
        elif self._cache_transfer.has_prefix_tree and content_digest != self._digest:
            if self._must_change(content_digest, "keep"):
                self._empty_pages(content_digest)
        else:
            self._digest = content_digest

    def _must_change(self, content_digest: str, verb: str) -> bool:
        """False: pages hold KV of these very weights, of requests that may go on with it. That is what is asked for
        when an update is undone that was refused here before it changed anything, on every rank alike."""
        if self._cache_transfer.is_told:
            return True  # FastDeploy's engine has paused, and computes anew what it resumes
        num_requests = self.num_requests()
        is_undone = content_digest == self._digest and self._cache_transfer.is_tree_silent
        if not num_requests and self._can_reset_tree and not is_undone:
            return True
        if content_digest == self._digest:
            return False
        if num_requests:
            raise LifecycleError(
                f"cannot {verb} the KV cache for other weights while {num_requests} requests are in flight: "
                f"FastDeploy's scheduler would not compute theirs again. Wait for them to end, or pause. {_ROUTES}"
            )
        raise LifecycleError(
            f"cannot {verb} the KV cache for other weights: prefix caching is on, and nothing here can hold back "
            f"FastDeploy's scheduler while its prefix tree is reset. {_ROUTES}"
        )

    @property
    def _can_reset_tree(self) -> bool:
        return self._cache_transfer.can_reset_tree(stands_still=self._expert_parallel.stands_still)

    def _empty_pages(self, content_digest: str) -> None:
        if self._cache_transfer.must_swap_owners:
            self.drop_kv_cache()
            self._make_pages(content_digest)
            return
        self._cache_transfer.clear_tree()
        self._digest = _UNKNOWN
        self._forget_dropped_requests()
        for pages in (*self._runner.cache_kvs_map.values(), *self._draft_pages().values()):
            pages.zero_()
        self._cache_transfer.renew_tree()
        self._digest = content_digest

    def _make_pages(self, content_digest: str) -> None:
        """In FastDeploy's order: inputs first, of which the draft model's are copies."""
        if not self._can_reset_tree:
            raise LifecycleError(
                "the KV cache cannot come back here: prefix caching is on, and FastDeploy's prefix tree may still know "
                f"pages of before. {_ROUTES}"
            )
        if self._owns_pages:
            self._cache_transfer.tell_pages_come()
        else:
            self._cache_transfer.await_foreign_pages(self._is_cache_ready)
        self._take_up_pages()
        self._cache_transfer.await_pages_come()
        self._cache_transfer.renew_tree()
        self._digest = content_digest

    def _forget_dropped_requests(self) -> None:
        """A next step would write by the lengths and page tables that they left. Graphs go with that: of the buffers
        that they read FastDeploy makes some anew."""
        inputs = self._runner.share_inputs
        if any(bool((inputs[name] != 0).any()) for name in _LENGTHS if name in inputs):
            self.drop_graphs()
            self._reset_inputs()

    def _reset_inputs(self) -> None:
        """The draft model's after those that it copies."""
        runner, draft = self._runner, self._draft
        for inputs in (runner.share_inputs, runner):  # the second one up to 2.4
            if hasattr(inputs, "reset_share_inputs"):
                inputs.reset_share_inputs()
                break
        if draft is not None and hasattr(draft.model_inputs, "reset_model_inputs"):  # since 2.5
            draft.model_inputs.reset_model_inputs()

    def _take_up_pages(self) -> None:
        self._reset_inputs()
        runner, draft = self._runner, self._draft
        if draft is not None:
            draft.initialize_kv_cache(main_model_num_blocks=runner.num_gpu_blocks)
        runner.initialize_kv_cache()

    @property
    def _owns_pages(self) -> bool:
        """This process allocates them, as FastDeploy has it: until 2.6 of May 2026 never where pages are swapped."""
        cache = self._runner.fd_config.cache_config
        is_late = hasattr(self._runner, "enable_cache_manager_v1")
        return not getattr(cache, "kvcache_storage_backend", None) and (is_late or not cache.num_cpu_blocks)

    def _is_cache_ready(self) -> bool:
        """The mark of this rank's pages, of which their owner says that they are there."""
        runner = self._runner
        local_rank = runner.local_rank % runner.fd_config.parallel_config.tensor_parallel_size
        return bool(runner.cache_ready_signal.value[local_rank] == 1)

    @property
    def _draft(self) -> Any:
        """FastDeploy's MTP proposer; None without one. Other proposers have no weights."""
        proposer = getattr(self._runner, "proposer", None)
        return proposer if hasattr(proposer, "clear_mtp_cache") else None

    def _draft_pages(self) -> dict[str, Any]:
        return {} if self._draft is None else dict(self._draft.cache_kvs_map)

    # --- graphs ------------------------------------------------------------------------------------

    def recapture_graphs(self) -> int:
        """Graphs of all models together. None are captured before FastDeploy did so itself, nor while parameters or
        pages are missing."""
        self._look_at_start()
        if not (self._has_started and self._runner.use_cudagraph and self.has_kv_cache and self._has_weights()):
            return 0
        addresses = self._addresses()
        if addresses == self._captured:
            return 0
        self.drop_graphs()
        begun = time.monotonic()
        try:
            self._runner.capture_model()
        except BaseException:
            self.drop_graphs()
            raise
        self._captured, self.capture_seconds = addresses, time.monotonic() - begun
        num_graphs = len(self._runner.cudagraph_capture_sizes)
        _log.info("event=graphs_captured num=%d seconds=%.3f", num_graphs, self.capture_seconds)
        return num_graphs

    @property
    def has_graphs(self) -> bool:
        return self._captured is not None

    def drop_graphs(self) -> None:
        """Also where none are known here: FastDeploy captures one in passing where a step finds none."""
        self._look_at_start()
        if not self._runner.use_cudagraph:
            return
        _clear_graphs(self._runner.model)
        if self._draft is not None and getattr(self._runner.fd_config.graph_opt_config, _DRAFT_GRAPHS, True):
            _clear_graphs(self._draft.model)
        self._captured = None

    def _look_at_start(self) -> None:
        """FastDeploy has pages of its own making, so it has captured its graphs as well: nothing comes in between, and
        nothing was moved since."""
        if not self._has_started and self.has_kv_cache:
            self._has_started = True
            if self._runner.use_cudagraph:
                self._captured = self._addresses()

    def _models(self) -> dict[str, Any]:
        draft = self._draft
        return {"": self._runner.model} if draft is None else {"": self._runner.model, f"{MTP}/": draft.model}

    def _has_weights(self) -> bool:
        return all(tensor._is_initialized() for model in self._models().values() for tensor in _tensors_of(model))

    def _addresses(self) -> Addresses:
        """Of all that graphs were captured with and that moves when weights or pages do; 0: nowhere."""
        tensors = {
            f"{prefix}{name}": tensor
            for prefix, model in self._models().items()
            for name, tensor in model.state_dict().items()
        }
        tensors |= {**self._runner.cache_kvs_map, **self._draft_pages()}
        return {name: int(tensor.data_ptr()) if tensor._is_initialized() else 0 for name, tensor in tensors.items()}


def _tensors_of(model: Any) -> Iterable[Any]:
    tensors: Iterable[Any] = model.state_dict().values()
    return tensors


def _check_can_follow(gpu_runner: Any) -> None:
    level = gpu_runner.fd_config.graph_opt_config.graph_opt_level
    if gpu_runner.use_cudagraph and level:
        raise ConfigurationError(
            f"graph_opt_level {level} with CUDA graphs: FastDeploy cannot drop static graphs, so weights could not "
            "change; set graph_opt_level to 0"
        )
    if switches := fastdeploy_switches(*_UNSUPPORTED):
        raise ConfigurationError(
            f"{', '.join(switches)} set: what FastDeploy keeps then cannot follow weights that change; unset it"
        )


def _clear_graphs(model: Any) -> None:
    for name in _CLEAR_GRAPHS:
        if hasattr(model, name):  # draft models of some kinds have none of them, and no graphs
            getattr(model, name)()
            return


def _await_device(deadline_ns: int) -> None:
    """An event on the stream in use can be looked at; what runs on other streams is waited for without a deadline,
    since Paddle has no other way. Not run on a GPU."""
    begun = time.monotonic()
    event = paddle.device.cuda.Event()
    event.record()
    while not event.query():
        if time.monotonic_ns() >= deadline_ns:
            raise DeadlineExceededError.waiting_for("end of the device's work", since_s=begun)
        time.sleep(_LOOK_S)
    paddle.device.synchronize()
