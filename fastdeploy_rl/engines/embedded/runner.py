"""One tensor-parallel rank of the embedded engine, as the weight manager and the worker loop see it.

Owns the model shard, its KV cache, its decode graphs and, on rank 0, the scheduler. Knows neither processes nor HTTP
nor where weights come from. Invariants: the scheduler knows the digest of the weights that are bound, so that
nothing of the cache is taken for what other weights made; and no decode step runs through a graph that was captured
with other memory than is bound.
"""

import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
from paddle.base import core

from fastdeploy_rl.collectives.base import Collectives
from fastdeploy_rl.control.generation import EngineLoad
from fastdeploy_rl.coverage import ParameterSpec
from fastdeploy_rl.engines.embedded.address_ledger import Address, AddressLedger
from fastdeploy_rl.engines.embedded.checkpoint import Checkpoint
from fastdeploy_rl.engines.embedded.cpu_graphs import CpuGraph
from fastdeploy_rl.engines.embedded.graph_pool import Graph, GraphPool
from fastdeploy_rl.engines.embedded.kv_cache import CacheShape, KVCache
from fastdeploy_rl.engines.embedded.model import DecoderModel, StepInputs
from fastdeploy_rl.engines.embedded.model_config import ModelConfig, parameter_specs, read_config
from fastdeploy_rl.engines.embedded.page_allocator import PAGE_TOKENS, PageAllocator, default_num_pages
from fastdeploy_rl.engines.embedded.sampler import SampledToken, sample
from fastdeploy_rl.engines.embedded.scheduler import RunningRequest, Scheduler, SchedulerLimits, Step
from fastdeploy_rl.errors import ConfigurationError, LifecycleError
from fastdeploy_rl.memory import paddle_view
from fastdeploy_rl.memory.tensor_view import TensorView

Floats = npt.NDArray[np.float32]


_PAUSE_S = 0.5
"""So long after a forward pass it counts as one that others follow: longer than a step of many requests."""


class EmbeddedRunner:
    """Satisfies `fastdeploy_rl.runner.ModelRunner`. All calls come from the loop's thread, but for `prepare` and
    `recapture_seconds`; `execute` is a meeting of all ranks."""

    def __init__(
        self,
        model_dir: Path,
        rank: int,
        num_ranks: int,
        collectives: Collectives | None,
        *,
        max_num_seqs: int = 16,
        max_model_len: int | None = None,
        num_kv_pages: int | None = None,
        max_step_tokens: int = 512,
        graph_batch_sizes: Sequence[int] | None = None,
        has_prefix_cache: bool = True,
    ) -> None:
        """Reads config.json only. ConfigurationError: a model that
        does not split over `num_ranks`, limits that contradict it.

        `collectives` may be None for a single rank. `max_model_len` None: what the model was made for. `num_kv_pages`
        None: room for `max_num_seqs` of the longest requests, but no more than DEFAULT_NUM_PAGES where one fits in
        those. `max_step_tokens`: the longest piece of a prompt between two tokens of the other requests.
        `graph_batch_sizes`: decode steps of so many requests are captured (None: all that can be; empty: none).
        """
        self._model_dir = model_dir
        self._rank, self._num_ranks = rank, num_ranks
        self.config = read_config(model_dir)
        self.config.check_divides(num_ranks)
        if num_ranks > 1 and collectives is None:
            raise ConfigurationError(f"{num_ranks} ranks need collectives")
        self.max_model_len = _checked_model_len(self.config, max_model_len)
        _share_cores(num_ranks)
        num_pages = _checked_kv_pages(self.max_model_len, max_num_seqs, num_kv_pages)
        self._specs = parameter_specs(self.config, num_ranks)
        used_collectives = collectives if num_ranks > 1 else None
        self._model = DecoderModel(self.config, rank, num_ranks, self.max_model_len, used_collectives)
        shape = _cache_shape(self.config, num_ranks, num_pages)
        self._cache, self._kv_bytes = KVCache(shape), shape.num_bytes
        limits = self._scheduler_limits(max_num_seqs, max_step_tokens)
        self._scheduler: Scheduler | None = None
        if rank == 0:
            self._scheduler = Scheduler(limits, PageAllocator(num_pages), has_prefix_cache=has_prefix_cache)
        sizes = range(1, max_num_seqs + 1) if graph_batch_sizes is None else graph_batch_sizes
        self._graphs: GraphPool[StepInputs, Floats] = GraphPool(self._capture, sizes)
        self._bound: dict[str, TensorView] = {}
        self._version = ""
        self._computed_s = -_PAUSE_S

    # --- what the weight manager needs ------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def num_ranks(self) -> int:
        return self._num_ranks

    def parameters(self) -> Sequence[ParameterSpec]:
        return self._specs

    def load(self) -> dict[str, TensorView]:
        """This rank's slices of the checkpoint, in a fresh arena; not bound yet. CheckpointError where it is broken."""
        with Checkpoint.open(self._model_dir) as checkpoint:
            return checkpoint.load(self._rank, self._num_ranks)

    def bound(self) -> Mapping[str, TensorView]:
        return dict(self._bound)

    def prepare(self, views: Mapping[str, TensorView]) -> object:
        """Tensors, which Paddle takes longer to make than to use: `bind` finds them again (paddle_view.py)."""
        return [paddle_view.tensor(view) for view in views.values()]

    def bind(self, views: Mapping[str, TensorView]) -> None:
        """Graphs stay as they are: those of other addresses are stale until `recapture_graphs`."""
        self._bound = {}
        try:
            self._model.bind(views)
            self._bound = dict(views)
        finally:
            self._note_addresses()

    fills_parameters = False

    def verify_bound(self) -> None:
        """Parameters lie in their views."""

    def unbind(self) -> None:
        self._model.unbind()
        self._bound = {}
        self._note_addresses()

    def drain(self, deadline_ns: int) -> None:
        """Nothing to wait for: calls come between two steps."""

    @property
    def is_computing(self) -> bool:
        return time.monotonic() - self._computed_s < _PAUSE_S

    def num_requests(self, *, begun: bool = False) -> int:
        return 0 if self._scheduler is None else self._scheduler.num_requests(begun=begun)

    def abort_requests(self, reason: str, *, is_fault: bool = True, begun: bool = False) -> None:
        if self._scheduler is not None:
            self._scheduler.abort_all(reason, is_fault=is_fault, begun=begun)

    @property
    def has_kv_cache(self) -> bool:
        return bool(self._cache.address)

    def drop_kv_cache(self) -> None:
        if self._scheduler is not None:
            self._scheduler.preempt_all()
        self._graphs.note_bound(None)  # a graph keeps the cache that it was captured with
        self._cache.drop()

    def rebuild_kv_cache(self, content_digest: str) -> None:
        self._use_weights(content_digest, keeps_kv=False)

    def keep_kv_cache(self, content_digest: str) -> None:
        self._use_weights(content_digest, keeps_kv=True)

    def recapture_graphs(self) -> int:
        """Captures nothing while weights or cache are not there: steps run without graphs then."""
        return self._graphs.recapture()

    @property
    def has_graphs(self) -> bool:
        return self._graphs.is_in_use

    def drop_graphs(self) -> None:
        """Steps run without them until `recapture_graphs`."""
        self._graphs.drop()

    def recapture_seconds(self, views: Mapping[str, TensorView]) -> float:
        return self._graphs.seconds_for(self._ledger_of(views))

    def set_version(self, version: str) -> None:
        self._version = version

    # --- what the worker loop needs ---------------------------------------------------------------------------

    @property
    def scheduler(self) -> Scheduler:
        """LifecycleError on any rank but 0."""
        if self._scheduler is None:
            raise LifecycleError(f"rank {self._rank} has no scheduler, rank 0 has")
        return self._scheduler

    @property
    def engine_load(self) -> EngineLoad:
        """Rank 0: the scheduler's, with what this rank's graphs did."""
        return msgspec.structs.replace(
            self.scheduler.load,
            num_graphs_captured=self._graphs.num_captured,
            num_graph_replays=self._graphs.num_replays,
        )

    def execute(self, step: Step) -> Floats:
        """One forward pass; every rank passes the same step. Logits of the slices that want them: [slices, vocab]
        float32. StaleGraphError for a decode step whose graph holds other memory than is bound."""
        try:
            return self._computed(step)
        finally:
            self._computed_s = time.monotonic()

    def _computed(self, step: Step) -> Floats:
        num_decoding = _num_decoding(step)
        if self._graphs.has_graph(num_decoding):
            self._graphs.check_valid()
            self._cache.clear(step.new_pages)
            return self._graphs.replay(num_decoding, self._model.inputs(step))
        buffers = self._model.buffers(self._cache)
        self._cache.clear(step.new_pages)
        return self._model.forward(self._model.inputs(step), buffers)

    def accept(self, step: Step, logits: Floats) -> None:
        """Rank 0: samples what a step made possible; the tokens come out of `scheduler.take_outputs()`."""

        def choose(item: RunningRequest, row: int) -> SampledToken:
            request = item.request
            return sample(
                logits[row],
                request.sampling,
                seed=item.seed,
                prompt=request.token_ids,
                generated=item.generated,
                num_logprobs=request.num_logprobs,
            )

        self.scheduler.accept(step, choose, self._version)

    def _capture(self, batch_size: int) -> Graph[StepInputs, Floats]:
        """The stand-in takes a step of any size; a device's graph would be of this one."""
        return CpuGraph(partial(self._model.buffers, self._cache), self._model.forward)

    def _note_addresses(self) -> None:
        """After each change of what is bound."""
        is_whole = bool(self._bound and self._cache.address)
        self._graphs.note_bound(self._ledger_of(self._bound) if is_whole else None)

    def _ledger_of(self, views: Mapping[str, TensorView]) -> AddressLedger:
        return AddressLedger.of(views, Address("KV cache", self._cache.address, self._kv_bytes, "F32"))

    def _use_weights(self, content_digest: str, *, keeps_kv: bool) -> None:
        if self._scheduler is not None:
            self._scheduler.use_weights(content_digest, keeps_kv=keeps_kv)
        before = self._cache.address
        self._cache.allocate()
        if self._cache.address != before:  # writing every address down takes time, while the engine stands still
            self._note_addresses()

    def _scheduler_limits(self, max_num_seqs: int, max_step_tokens: int) -> SchedulerLimits:
        if max_num_seqs < 1 or max_step_tokens < 1:
            raise ConfigurationError(
                f"max_num_seqs {max_num_seqs} and max_step_tokens {max_step_tokens} must be at least 1"
            )
        return SchedulerLimits(
            max_num_seqs=max_num_seqs,
            max_model_len=self.max_model_len,
            max_step_tokens=max_step_tokens,
            vocab_size=self.config.vocab_size,
            eos_token_ids=self.config.eos_token_ids,
        )


def _num_decoding(step: Step) -> int:
    """Requests of a step that only decodes, 0 of any other."""
    is_decoding = all(len(part.token_ids) == 1 and part.wants_logits for part in step.slices)
    return len(step.slices) if is_decoding else 0


def _share_cores(num_ranks: int) -> None:
    """More compute threads than cores, over all ranks, would wait for each other."""
    core.set_num_threads(max(1, len(os.sched_getaffinity(0)) // num_ranks))


def _checked_model_len(config: ModelConfig, wanted: int | None) -> int:
    length = config.max_position_embeddings if wanted is None else wanted
    if not 2 <= length <= config.max_position_embeddings:
        raise ConfigurationError(
            f"max_model_len must be 2 to {config.max_position_embeddings} for this model, got {length}"
        )
    return length


def _checked_kv_pages(max_model_len: int, max_num_seqs: int, wanted: int | None) -> int:
    least = PageAllocator.pages_for(max_model_len)
    pages = default_num_pages(max_model_len, max_num_seqs) if wanted is None else wanted
    if pages < least:
        raise ConfigurationError(
            f"{pages} KV pages of {PAGE_TOKENS} tokens do not hold one request of max_model_len {max_model_len}; "
            f"at least {least} are needed"
        )
    return pages


def _cache_shape(config: ModelConfig, num_ranks: int, num_pages: int) -> CacheShape:
    return CacheShape(config.num_hidden_layers, num_pages, config.num_key_value_heads // num_ranks, config.head_dim)
