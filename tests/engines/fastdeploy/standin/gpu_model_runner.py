"""FastDeploy's model runner on a CPU: real Paddle parameters and KV pages, and a forward pass each bit of which depends
on them.

Names, order and treacherous traits are FastDeploy's: a cache that is cleared twice is an error, pages of another
process are waited for without a deadline, a graph computes on the memory that it was captured with, whatever is bound
since. Left out: the sampler, collectives (each rank computes on its share), kinds of attention."""

import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import paddle

from tests.engines.fastdeploy.standin.model_loader import DRAFT, StandinModel, get_model_loader

Floats = npt.NDArray[np.float32]
HEAD_DIM = 8
_NAP_S = 0.001
_IPC: dict[str, paddle.Tensor] = {}
"""CUDA memory that a process has exported, by the name that it gave."""


# --- what FastDeploy has compiled for CUDA ------------------------------------------------------------------


def set_data_ipc(tensor: paddle.Tensor, name: str) -> None:
    _IPC[name] = tensor


def share_external_data(name: str, shape: list[int]) -> paddle.Tensor:
    tensor = paddle.empty(shape)
    _IPC[name]._share_buffer_to(tensor)
    return tensor


def unset_data_ipc(name: str) -> None:
    """The exporter's end."""
    _IPC.pop(name, None)


class Graph(NamedTuple):
    """A decode step as it was captured: memory, not parameters."""

    state: Mapping[str, paddle.Tensor]
    caches: list[paddle.Tensor]


def _capture(model: Any, caches: list[paddle.Tensor]) -> Graph:
    return Graph({name: _alias(value) for name, value in model.state_dict().items()}, [_alias(c) for c in caches])


def _alias(tensor: paddle.Tensor) -> paddle.Tensor:
    if not tensor._is_initialized():
        raise RuntimeError("CUDA error(700): a graph of memory that is not there")
    alias = paddle.empty(tensor.shape, tensor.dtype)
    tensor._share_buffer_to(alias)
    return alias


# --- what a model computes --------------------------------------------------------------------------------


class Step(NamedTuple):
    """One token of one request; `pages`: of its KV, in order; `main`: the main model's hidden state, for a draft."""

    token: int
    position: int
    pages: list[int]
    main: Floats | None = None


def _forward(graph: Graph, step: Step) -> tuple[Floats, Floats]:
    """Hidden state after attention, and what the parameters make of it. Writes its KV into the pages."""
    (_, embedding), *others = graph.state.items()
    table = embedding.numpy()
    hidden = table[step.token % len(table)]
    for keys, values in zip(graph.caches[::2], graph.caches[1::2], strict=True):
        hidden = _attend(keys, values, hidden, step)
    output = hidden if step.main is None else np.concatenate([hidden, step.main])
    for _, parameter in others:
        output = _apply(parameter.numpy(), output)
    return hidden, output


def _attend(keys: paddle.Tensor, values: paddle.Tensor, hidden: Floats, step: Step) -> Floats:
    """[pages, 1, tokens of a page, HEAD_DIM] each; over what is before, and itself."""
    size = keys.shape[2]
    page, slot = step.pages[step.position // size], step.position % size
    keys[page, 0, slot] = paddle.to_tensor(hidden)
    values[page, 0, slot] = paddle.to_tensor(hidden * np.float32(0.5))
    known = [keys.numpy()[step.pages, 0].reshape(-1, HEAD_DIM), values.numpy()[step.pages, 0].reshape(-1, HEAD_DIM)]
    k, v = (rows[: step.position + 1] for rows in known)
    weights = np.tanh(k @ hidden)
    return hidden + weights @ v / np.float32(step.position + 1)


def _apply(parameter: Floats, hidden: Floats) -> Floats:
    if parameter.ndim == 1:
        return hidden * parameter
    product = hidden @ (parameter if parameter.shape[0] == len(hidden) else parameter.T)
    return np.tanh(product + np.float32(0.1))  # nothing that is negated twice goes unseen


# --- inputs -------------------------------------------------------------------------------------------------


class InputBatch:
    def __init__(self, fd_config: Any) -> None:
        self.fd_config = fd_config

    def __getitem__(self, key):
        if hasattr(self, key):
            return getattr(self, key)
        raise KeyError(key)

    def __setitem__(self, key, value):
        setattr(self, key, value)

    def __contains__(self, key):
        return hasattr(self, key)

    def __delitem__(self, key):
        self.pop(key)

    def pop(self, key, default=None):
        """None is no default: FastDeploy raises."""
        value = self[key] if default is None else self.get(key, default)
        delattr(self, key)
        return value

    def get(self, key, default=None):
        return getattr(self, key, default)

    def update(self, values):
        vars(self).update(values)

    def init_share_inputs(self):
        max_num_seqs = self.fd_config.scheduler_config.max_num_seqs
        self.stop_flags = paddle.full([max_num_seqs, 1], True, dtype="bool")
        self.seq_lens_decoder = paddle.full([max_num_seqs, 1], 0, dtype="int32")
        self.step_idx = paddle.full([max_num_seqs, 1], 0, dtype="int64")
        pages_per_request = self.fd_config.cache_config.total_block_num // max_num_seqs
        self.block_tables = paddle.full([max_num_seqs, pages_per_request], -1, dtype="int32")
        self.req_ids = [""] * max_num_seqs

    def reset_share_inputs(self):
        for name, value in (("stop_flags", True), ("seq_lens_decoder", 0), ("step_idx", 0), ("block_tables", -1)):
            getattr(self, name).fill_(value)
        self.req_ids = [""] * len(self.req_ids)


class ProposerInputBatch(InputBatch):
    def __init__(self, fd_config: Any, target_model_input_batch: InputBatch) -> None:
        super().__init__(fd_config)
        self.target_model_input_batch = target_model_input_batch

    def init_share_inputs(self):
        self.reset_model_inputs()

    def reset_model_inputs(self):
        """Copies of what the main model's inputs are at present."""
        self.stop_flags = paddle.clone(self.target_model_input_batch["stop_flags"])
        self.block_tables = paddle.clone(self.target_model_input_batch["block_tables"])


class ForwardMeta:
    caches: list[paddle.Tensor] | None = None

    def __init__(self, caches: list[paddle.Tensor]) -> None:
        self.caches = caches

    def clear_caches(self):
        if self.caches:
            del self.caches


# --- the runners --------------------------------------------------------------------------------------------


def _makes_pages(fd_config: Any, profile: bool) -> bool:
    """Else another process does, and this one is attached to them."""
    cache = fd_config.cache_config
    is_alone = not (cache.num_cpu_blocks > 0 or cache.kvcache_storage_backend)
    return profile or (is_alone and fd_config.scheduler_config.splitwise_role == "mixed")


def _fill_cache_map(runner: Any, layers: range, num_blocks: int, makes: bool) -> list[paddle.Tensor]:
    caches = []
    for layer in layers:
        for kind in ("key", "value"):
            name = f"{kind}_caches_{layer}_rank{runner.local_rank}.device{runner.device_id}"
            shape = [num_blocks, 1, runner.fd_config.cache_config.block_size, HEAD_DIM]
            if makes:
                pages = paddle.full(shape, 0, dtype="float32")
                set_data_ipc(pages, name)
            else:
                pages = share_external_data(name, shape)
            runner.cache_kvs_map[name] = pages
            caches.append(pages)
    return caches


class MTPProposer:
    def __init__(self, fd_config, main_model, local_rank, device_id, target_model_inputs):
        self.fd_config = fd_config
        self.local_rank = local_rank
        self.device_id = device_id
        self.model = StandinModel(DRAFT, fd_config.parallel_config.tensor_parallel_size)
        self.model_inputs = ProposerInputBatch(fd_config, target_model_inputs)
        self.model_inputs.init_share_inputs()
        self.num_main_model_layers = fd_config.model_config.num_hidden_layers
        self.cache_kvs_map: dict[str, paddle.Tensor] = {}
        self.forward_meta: ForwardMeta | None = None

    def initialize_kv_cache(self, main_model_num_blocks, profile: bool = False):
        layers = range(self.num_main_model_layers, self.num_main_model_layers + 1)
        makes = _makes_pages(self.fd_config, profile)
        self.model_inputs["caches"] = _fill_cache_map(self, layers, main_model_num_blocks, makes)

    def update_mtp_block_num(self, num_gpu_blocks) -> None:
        self.initialize_kv_cache(main_model_num_blocks=num_gpu_blocks)

    def clear_mtp_cache(self, profile=False):
        if not _makes_pages(self.fd_config, profile):
            for pages in self.cache_kvs_map.values():
                pages._clear_data()
        self.cache_kvs_map.clear()
        del self.model_inputs["caches"]
        if self.forward_meta is not None:
            del self.forward_meta.caches


class GPUModelRunner:
    def __init__(self, fd_config: Any, device: str, device_id: int, rank: int, local_rank: int) -> None:
        self.fd_config = fd_config
        self.parallel_config = fd_config.parallel_config
        self.device = device
        self.device_id = device_id
        self.rank = rank
        self.local_rank = local_rank
        self.spec_method = fd_config.speculative_config.method
        self.use_cudagraph = fd_config.graph_opt_config.use_cudagraph
        self.cudagraph_capture_sizes = [4, 2, 1]
        self.is_kvcache_sleeping = False
        self.is_weight_sleeping = False
        self.cache_kvs_map: dict[str, paddle.Tensor] = {}
        self.share_inputs = InputBatch(fd_config)
        self.share_inputs.init_share_inputs()
        self.forward_meta: ForwardMeta | None = None
        # In shared memory at FastDeploy's; here nobody else looks at it but a thread of a test.
        self.cache_ready_signal = SimpleNamespace(value=np.zeros(self.parallel_config.tensor_parallel_size, np.int32))
        self.current_launch_token_num = 0
        self.outputs: dict[str, list[int]] = {}
        self.logits: dict[str, str] = {}
        self._prompts: dict[int, list[int]] = {}
        self._left: dict[int, int] = {}

    @property
    def is_sleeping(self):
        return self.is_weight_sleeping or self.is_kvcache_sleeping

    # --- start ---------------------------------------------------------------------------------------

    def load_model(self) -> None:
        self.model = get_model_loader(load_config=self.fd_config.load_config).load_model(fd_config=self.fd_config)
        self._init_speculative_proposer()

    def get_model(self) -> Any:
        return self.model

    def _init_speculative_proposer(self):
        self.proposer = None
        if self.spec_method is not None:
            self.proposer = MTPProposer(
                self.fd_config, self.get_model(), self.local_rank, self.device_id, self.share_inputs
            )

    def profile_run(self) -> None:
        self.num_gpu_blocks = self.fd_config.cache_config.total_block_num
        self.initialize_kv_cache(profile=True)
        if self.proposer is not None:
            self.proposer.initialize_kv_cache(main_model_num_blocks=self.num_gpu_blocks, profile=True)
            self.proposer.clear_mtp_cache(profile=True)
        self.clear_cache(profile=True)

    def update_share_input_block_num(self, num_gpu_blocks: int) -> None:
        self.num_gpu_blocks = num_gpu_blocks
        self.initialize_kv_cache()
        if self.proposer is not None:
            self.proposer.update_mtp_block_num(num_gpu_blocks)

    # --- KV cache ------------------------------------------------------------------------------------

    def initialize_kv_cache(self, profile: bool = False) -> None:
        makes, rank = _makes_pages(self.fd_config, profile), self.local_rank
        while not makes and self.cache_ready_signal.value[rank] != 1:
            time.sleep(_NAP_S)
        layers = range(self.fd_config.model_config.num_hidden_layers)
        self.share_inputs["caches"] = _fill_cache_map(self, layers, self.num_gpu_blocks, makes)
        if makes and not profile:
            self.cache_ready_signal.value[rank] = 1

    def clear_cache(self, profile=False):
        if not _makes_pages(self.fd_config, profile):
            for pages in self.cache_kvs_map.values():
                pages._clear_data()
            self.cache_ready_signal.value[self.local_rank] = 0
        self.cache_kvs_map.clear()
        self.share_inputs.pop("caches", None)
        if self.forward_meta is not None:
            self.forward_meta.clear_caches()

    # --- requests ------------------------------------------------------------------------------------

    def clear_requests(self):
        self.share_inputs["stop_flags"][:] = True

    def insert_tasks_v1(self, req_dicts: list[Any], num_running_requests: int | None = None):
        """`prompt`: token ids; `max_tokens`; the rest is the scheduler's choice at FastDeploy's: the slot `idx`, its
        `block_tables`, and how many tokens of the prompt have their KV in these already (`num_cached_tokens`)."""
        inputs = self.share_inputs
        for request in req_dicts:
            free = int(np.flatnonzero(inputs["stop_flags"].numpy())[0])
            idx = request.get("idx", free)
            size = inputs["block_tables"].shape[1]
            inputs["block_tables"][idx] = paddle.to_tensor(
                request.get("block_tables", list(range(idx * size, (idx + 1) * size))), dtype="int32"
            )
            inputs["req_ids"][idx] = str(request.get("request_id", f"request-{len(self.outputs)}"))
            inputs["seq_lens_decoder"][idx] = request.get("num_cached_tokens", 0)
            inputs["stop_flags"][idx] = False
            self._prompts[idx] = list(request["prompt"])
            self._left[idx] = request.get("max_tokens", 4)
            self.outputs[inputs["req_ids"][idx]] = []

    # --- computing -----------------------------------------------------------------------------------

    def execute_model(
        self, model_forward_batch: list[Any] | None = None, num_running_requests: int | None = None
    ) -> None:
        self.execute_model_normal(model_forward_batch, num_running_requests)

    def execute_model_normal(
        self, model_forward_batch: list[Any] | None = None, num_running_requests: int | None = None
    ) -> None:
        """One token more for each request; the first time all of its prompt."""
        running = np.flatnonzero(~self.share_inputs["stop_flags"].numpy()).tolist()
        self.current_launch_token_num = len(running)
        if not running:
            return
        self.forward_meta = ForwardMeta(self.share_inputs["caches"])
        if self.proposer is not None:
            self.proposer.forward_meta = ForwardMeta(self.proposer.model_inputs["caches"])
        is_decoding = all(self.share_inputs["step_idx"][idx].item() for idx in running)
        key = len(running) if is_decoding and self.use_cudagraph else 0
        for idx in running:
            _advance(self, idx, key)

    def capture_model(self) -> None:
        """A step that finds no graph of its size captures one in passing."""
        if self.use_cudagraph:
            for size in self.cudagraph_capture_sizes:
                _graph(self.model, self.share_inputs, size)
                if self.proposer is not None:
                    _graph(self.proposer.model, self.proposer.model_inputs, size)


def _graph(model: Any, inputs: InputBatch, size: int) -> Graph:
    """`size` 0: what is bound now."""
    caches = inputs["caches"]
    if not size:
        return _capture(model, caches)
    if size not in model.graphs:
        model.graphs[size] = _capture(model, caches)
    graph: Graph = model.graphs[size]
    return graph


def _advance(runner: GPUModelRunner, idx: int, size: int) -> None:
    inputs = runner.share_inputs
    name, begun = inputs["req_ids"][idx], inputs["step_idx"][idx].item()
    position = inputs["seq_lens_decoder"][idx].item()
    tokens = [runner.outputs[name][-1]] if begun else runner._prompts[idx][position:]
    for token in tokens:
        step = Step(token, position, inputs["block_tables"].numpy()[idx].tolist())
        output = _compute(runner, step, size)
        position += 1
    token = int(output.argmax())
    runner.outputs[name].append(token)
    runner.logits[name] = runner.logits.get(name, "") + output.tobytes().hex()
    inputs["seq_lens_decoder"][idx] = position
    inputs["step_idx"][idx] = begun + 1
    if begun + 1 >= runner._left[idx]:
        inputs["stop_flags"][idx] = True
        inputs["step_idx"][idx] = inputs["seq_lens_decoder"][idx] = 0


def _compute(runner: GPUModelRunner, step: Step, size: int) -> Floats:
    """Logits of the main model, and behind them what the draft model says."""
    hidden, logits = _forward(_graph(runner.model, runner.share_inputs, size), step)
    if runner.proposer is None:
        return logits
    draft = _graph(runner.proposer.model, runner.proposer.model_inputs, size)
    return np.concatenate([logits, _forward(draft, step._replace(main=hidden))[1]])
