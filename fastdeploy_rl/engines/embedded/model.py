"""A Llama, Qwen2 or Qwen3 decoder in plain Paddle operators, one tensor-parallel shard of it.

Owns the forward pass and the parameters as a flat table of plain tensors over memory of somebody else's. Knows nothing
of requests or of how weights arrive. Invariant: parameters are only ever replaced, never written, and nothing refers to
them but `_parameters` and whoever took `buffers`.

Operators are called through `paddle._C_ops`, the functions behind the public ones: decoding one token takes over a
thousand of them, and their argument checks in Python cost as much as the small ones themselves.
"""

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import paddle

from fastdeploy_rl.collectives.base import Collectives
from fastdeploy_rl.engines.embedded.kv_cache import KVCache, LayerCache
from fastdeploy_rl.engines.embedded.model_config import EMBEDDING, FINAL_NORM, HEAD, ModelConfig, RopeScaling
from fastdeploy_rl.engines.embedded.page_allocator import PAGE_TOKENS
from fastdeploy_rl.engines.embedded.scheduler import SequenceSlice, Step
from fastdeploy_rl.errors import LifecycleError
from fastdeploy_rl.memory import paddle_view
from fastdeploy_rl.memory.paddle_view import array_tensor
from fastdeploy_rl.memory.tensor_view import TensorView

Floats = npt.NDArray[np.float32]
Tensor: TypeAlias = paddle.Tensor
ops: Any = paddle._C_ops


class Linear(NamedTuple):
    """`weight`: [in, out] of this rank. `bias`: [out]; of a row-parallel layer, added once the ranks' sum is there."""

    weight: Tensor
    bias: Tensor | None


class LayerParameters(NamedTuple):
    """One decoder layer's slices. `q_norm`, `k_norm`: over single heads, where the model has them."""

    input_norm: Tensor
    q: Linear
    k: Linear
    v: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Linear
    post_norm: Tensor
    gate: Linear
    up: Linear
    down: Linear


class Parameters(NamedTuple):
    """Everything that is bound at one time."""

    embedding: Floats
    layers: tuple[LayerParameters, ...]
    final_norm: Tensor
    head: Tensor


class StepBuffers(NamedTuple):
    """Everything that a step reads or writes and that outlives it."""

    parameters: Parameters
    layers: tuple[LayerCache, ...]


class AttentionGroup(NamedTuple):
    """Rows of the step that attend over page tables of the same length: all decoding requests together, or one prompt.

    Rows `start` to `stop` of the step. `pages`: [batch * pages of each]. `mask`: 0 or -inf, added to the scores
    [kv heads, batch, tokens of each * queries of a kv head, pages of each * PAGE_TOKENS].
    """

    start: int
    stop: int
    batch: int
    pages: Tensor
    mask: Tensor


class StepInputs(NamedTuple):
    """A `Step` as the layers need it. `slots`: where each row goes in
    the cache. Cosines and sines: [rows, q + k heads, head_dim]."""

    token_ids: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    cosines: Tensor
    sines: Tensor
    groups: tuple[AttentionGroup, ...]
    logit_rows: list[int]


class DecoderModel:
    """Rank `rank` of `num_ranks`. `bind` before `forward`; a forward pass is a meeting of all ranks. `num_positions`:
    how many tokens a request may have."""

    def __init__(
        self, config: ModelConfig, rank: int, num_ranks: int, num_positions: int, collectives: Collectives | None
    ) -> None:
        self._config = config
        self._rank = rank
        self._collectives = collectives
        self._num_heads = config.num_attention_heads // num_ranks
        self._num_kv_heads = config.num_key_value_heads // num_ranks
        self._first_token = rank * (config.padded_vocab_size(num_ranks) // num_ranks)
        self._parameters: Parameters | None = None
        self._cosines, self._sines = _rotary_tables(config, num_positions)
        self._swap_halves = _swap_halves_matrix(config.head_dim)

    def bind(self, views: Mapping[str, TensorView]) -> None:
        """Replaces every parameter; a head without a view of its
        own is the embedding. Nothing is bound when it fails."""
        self.unbind()
        tensors = {name: paddle_view.tensor(view) for name, view in {HEAD: views[EMBEDDING], **views}.items()}
        self._parameters = Parameters(
            embedding=views[EMBEDDING].numpy(),
            layers=tuple(
                _layer_parameters(tensors, f"model.layers.{index}.", self._config)
                for index in range(self._config.num_hidden_layers)
            ),
            final_norm=tensors[FINAL_NORM],
            head=tensors[HEAD],
        )

    def unbind(self) -> None:
        self._parameters = None

    def buffers(self, cache: KVCache) -> StepBuffers:
        """What is bound now. LifecycleError where weights or cache are not there."""
        if self._parameters is None:
            raise LifecycleError("no weights are bound")
        return StepBuffers(self._parameters, cache.layers)

    def forward(self, inputs: StepInputs, buffers: StepBuffers) -> Floats:
        """Logits of the slices that want them, in order: [slices, vocab] float32, the same on every rank. The pages
        that are new to their requests have been cleared."""
        hidden = self._embed(inputs.token_ids, buffers.parameters.embedding)
        for layer, layer_cache in zip(buffers.parameters.layers, buffers.layers, strict=True):
            hidden = self._attend(hidden, layer, layer_cache, inputs)
            hidden = self._feed_forward(hidden, layer)
        if not inputs.logit_rows:
            return np.empty((0, self._config.vocab_size), np.float32)
        return self._logits(hidden, inputs.logit_rows, buffers.parameters)

    def _embed(self, token_ids: npt.NDArray[np.int64], rows: Floats) -> Tensor:
        if self._collectives is None:
            return array_tensor(rows[token_ids])
        local = token_ids - self._first_token
        owned = (local >= 0) & (local < len(rows))
        hidden = np.zeros((len(token_ids), rows.shape[1]), np.float32)
        hidden[owned] = rows[local[owned]]
        self._collectives.all_reduce(hidden)
        return array_tensor(hidden)

    def _attend(self, hidden: Tensor, layer: LayerParameters, cache: LayerCache, inputs: StepInputs) -> Tensor:
        normed = self._normalize(hidden, layer.input_norm)
        query, key = self._heads(normed, layer.q, layer.q_norm), self._heads(normed, layer.k, layer.k_norm)
        query_key = self._rotate(ops.concat([query, key], 1), inputs)
        self._store(query_key, _project(normed, layer.v), cache, inputs.slots)
        attended = [self._attend_group(query_key, cache, group) for group in inputs.groups]
        joined = attended[0] if len(attended) == 1 else ops.concat(attended, 0)
        return ops.add(hidden, self._project_and_sum(joined, layer.o))

    def _heads(self, normed: Tensor, linear: Linear, norm: Tensor | None) -> Tensor:
        """-> [rows, heads of the projection, head_dim]"""
        heads = ops.reshape(_project(normed, linear), [normed.shape[0], -1, self._config.head_dim])
        return heads if norm is None else self._normalize(heads, norm)

    def _rotate(self, heads: Tensor, inputs: StepInputs) -> Tensor:
        """Rotary embedding in halves, x cos + (-x2, x1) sin, of [rows, q + k heads, head_dim]."""
        swapped = ops.matmul(heads, self._swap_halves, False, False)
        return ops.add(ops.multiply(heads, inputs.cosines), ops.multiply(swapped, inputs.sines))

    def _store(self, query_key: Tensor, value: Tensor, cache: LayerCache, slots: npt.NDArray[np.int64]) -> None:
        """Puts the new keys and values into their slots."""
        count = self._num_kv_heads
        cache.slots[:count, slots] = query_key.numpy()[:, self._num_heads :].transpose(1, 0, 2)
        cache.slots[count:, slots] = value.numpy().reshape(-1, count, self._config.head_dim).transpose(1, 0, 2)

    def _attend_group(self, query_key: Tensor, cache: LayerCache, group: AttentionGroup) -> Tensor:
        """-> [rows of the group, heads * head_dim]"""
        kv_heads, dim = self._num_kv_heads, self._config.head_dim
        per_kv, rows = self._num_heads // kv_heads, group.stop - group.start
        gathered = ops.reshape(ops.index_select(cache.pages, group.pages, 1), [2 * kv_heads, group.batch, -1, dim])
        key = ops.slice(gathered, [0], [0], [kv_heads], [1], [])
        value = ops.slice(gathered, [0], [kv_heads], [2 * kv_heads], [1], [])
        query = ops.slice(query_key, [0, 1], [group.start, 0], [group.stop, self._num_heads], [1, 1], [])
        query = ops.reshape(query, [group.batch, rows // group.batch, kv_heads, per_kv, dim])
        query = ops.reshape(ops.transpose(query, [2, 0, 1, 3, 4]), [kv_heads, group.batch, -1, dim])
        weights = ops.softmax(ops.add(ops.matmul(query, key, False, True), group.mask), -1)
        mixed = ops.reshape(ops.matmul(weights, value, False, False), [kv_heads, rows, per_kv, dim])
        return ops.reshape(ops.transpose(mixed, [1, 0, 2, 3]), [rows, -1])

    def _feed_forward(self, hidden: Tensor, layer: LayerParameters) -> Tensor:
        normed = self._normalize(hidden, layer.post_norm)
        inner = ops.swiglu(_project(normed, layer.gate), _project(normed, layer.up))
        return ops.add(hidden, self._project_and_sum(inner, layer.down))

    def _normalize(self, hidden: Tensor, weight: Tensor) -> Tensor:
        mean_square = ops.mean(ops.multiply(hidden, hidden), [-1], True)
        scale = ops.rsqrt(ops.scale(mean_square, 1.0, self._config.rms_norm_eps, True))
        return ops.multiply(ops.multiply(hidden, scale), weight)

    def _project_and_sum(self, inputs: Tensor, linear: Linear) -> Tensor:
        """A row-parallel layer: each rank has a part of the inputs, all get the sum."""
        partial = ops.matmul(inputs, linear.weight, False, False)
        if self._collectives is not None:
            self._collectives.all_reduce(_numpy_view(partial))
        return partial if linear.bias is None else ops.add(partial, linear.bias)

    def _logits(self, hidden: Tensor, rows: list[int], parameters: Parameters) -> Floats:
        if len(rows) < hidden.shape[0]:
            hidden = ops.index_select(hidden, array_tensor(np.array(rows)), 0)
        own: Floats = ops.matmul(self._normalize(hidden, parameters.final_norm), parameters.head, False, True).numpy()
        if self._collectives is None:
            return own
        gathered = self._collectives.all_gather(own).reshape(-1, *own.shape)
        whole: Floats = np.concatenate(list(gathered), axis=1)
        return whole[:, : self._config.vocab_size]

    def inputs(self, step: Step) -> StepInputs:
        """A step as `forward` takes it."""
        positions = np.concatenate([np.arange(part.start, part.start + len(part.token_ids)) for part in step.slices])
        ends = np.cumsum([len(part.token_ids) for part in step.slices])
        cosines, sines = self._rotary(positions)
        return StepInputs(
            token_ids=np.concatenate([np.asarray(part.token_ids, np.int64) for part in step.slices]),
            slots=np.concatenate([_slots(part) for part in step.slices]),
            cosines=cosines,
            sines=sines,
            groups=tuple(_groups(step.slices, self._num_heads // self._num_kv_heads)),
            logit_rows=[int(end) - 1 for end, part in zip(ends, step.slices, strict=True) if part.wants_logits],
        )

    def _rotary(self, positions: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """The tables at these positions, spread over heads; the
        softmax's 1 / sqrt(head_dim) goes along with the queries."""
        scale = np.ones((self._num_heads + self._num_kv_heads, 1), np.float32)
        scale[: self._num_heads] = self._config.head_dim**-0.5
        cosines = self._cosines[positions][:, None, :] * scale
        return array_tensor(cosines), array_tensor(self._sines[positions][:, None, :] * scale)


def _project(hidden: Tensor, linear: Linear) -> Tensor:
    outputs = ops.matmul(hidden, linear.weight, False, False)
    return outputs if linear.bias is None else ops.add(outputs, linear.bias)


def _layer_parameters(tensors: Mapping[str, Tensor], prefix: str, config: ModelConfig) -> LayerParameters:
    def linear(name: str, has_bias: bool) -> Linear:
        name = prefix + name
        return Linear(tensors[name + ".weight"], tensors[name + ".bias"] if has_bias else None)

    def head_norm(name: str) -> Tensor | None:
        return tensors[prefix + name] if config.has_qk_norm else None

    return LayerParameters(
        input_norm=tensors[prefix + "input_layernorm.weight"],
        q=linear("self_attn.q_proj", config.has_qkv_bias),
        k=linear("self_attn.k_proj", config.has_qkv_bias),
        v=linear("self_attn.v_proj", config.has_qkv_bias),
        q_norm=head_norm("self_attn.q_norm.weight"),
        k_norm=head_norm("self_attn.k_norm.weight"),
        o=linear("self_attn.o_proj", config.has_output_bias),
        post_norm=tensors[prefix + "post_attention_layernorm.weight"],
        gate=linear("mlp.gate_proj", config.has_mlp_bias),
        up=linear("mlp.up_proj", config.has_mlp_bias),
        down=linear("mlp.down_proj", config.has_mlp_bias),
    )


def _numpy_view(tensor: Tensor) -> Floats:
    """The tensor's own memory, valid while it lives (Tensor.numpy() copies)."""
    memory = (ctypes.c_float * int(np.prod(tensor.shape))).from_address(tensor.data_ptr())
    values: Floats = np.ctypeslib.as_array(memory)
    return values


def _rotary_tables(config: ModelConfig, num_positions: int) -> tuple[Floats, Floats]:
    """cos and sin of position x frequency for every position,
    [positions, head_dim]: both halves alike, as Hugging Face has it."""
    frequencies = 1.0 / config.rope_theta ** (np.arange(0, config.head_dim, 2) / config.head_dim)
    if config.rope_scaling is not None:
        frequencies = _stretched(frequencies, config.rope_scaling)
    positions = np.arange(num_positions, dtype=np.float32)
    angles = np.outer(positions, frequencies.astype(np.float32)).astype(np.float32)
    both = np.concatenate([angles, angles], axis=1)
    return np.cos(both), np.sin(both)


def _stretched(frequencies: npt.NDArray[np.float64], scaling: RopeScaling) -> npt.NDArray[np.float64]:
    """Long wavelengths divided by the factor, short ones kept, those between blended (`_compute_llama3_parameters` of
    transformers' modeling_rope_utils)."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * np.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def _swap_halves_matrix(head_dim: int) -> Tensor:
    """x @ matrix = (-x2, x1): exact (a single term in each sum),
    and one operator instead of a split, a negation and a concat."""
    half = head_dim // 2
    matrix = np.zeros((head_dim, head_dim), np.float32)
    matrix[half:, :half] = -np.eye(half)
    matrix[:half, half:] = np.eye(half)
    return array_tensor(matrix)


def _slots(part: SequenceSlice) -> npt.NDArray[np.int64]:
    """Where in the cache each token of a slice goes."""
    positions = np.arange(part.start, part.start + len(part.token_ids))
    pages = np.asarray(part.pages, np.int64)[positions // PAGE_TOKENS]
    slots: npt.NDArray[np.int64] = pages * PAGE_TOKENS + positions % PAGE_TOKENS
    return slots


def _groups(slices: Sequence[SequenceSlice], queries_per_kv_head: int) -> list[AttentionGroup]:
    """Single tokens come first (see `Step`) and share one group; each longer slice has its own."""
    num_single = sum(len(part.token_ids) == 1 for part in slices)
    groups = [_decode_group(slices[:num_single])] if num_single else []
    start = num_single
    for part in slices[num_single:]:
        groups.append(_prefill_group(part, start, queries_per_kv_head))
        start += len(part.token_ids)
    return groups


def _decode_group(slices: Sequence[SequenceSlice]) -> AttentionGroup:
    used = [part.start // PAGE_TOKENS + 1 for part in slices]
    longest = max(used)
    # A short table is padded with a page of its own: what is read there is masked, but must be this request's.
    tables = [part.pages[:count] + part.pages[:1] * (longest - count) for part, count in zip(slices, used, strict=True)]
    last = np.array([part.start for part in slices])
    hidden = np.arange(longest * PAGE_TOKENS) > last[:, None]
    mask = np.where(hidden, np.float32("-inf"), np.float32(0))[None, :, None, :]
    return AttentionGroup(0, len(slices), len(slices), array_tensor(np.array(tables).ravel()), array_tensor(mask))


def _prefill_group(part: SequenceSlice, start: int, queries_per_kv_head: int) -> AttentionGroup:
    count = len(part.token_ids)
    num_pages = -(-(part.start + count) // PAGE_TOKENS)
    own = np.arange(part.start, part.start + count)
    hidden = np.arange(num_pages * PAGE_TOKENS) > own[:, None]
    mask = np.where(hidden, np.float32("-inf"), np.float32(0)).repeat(queries_per_kv_head, axis=0)
    return AttentionGroup(start, start + count, 1, array_tensor(np.array(part.pages[:num_pages])), array_tensor(mask))
