"""A ModelRunner whose model is a handful of numpy arrays and whose forward pass is a hash of their bytes.

Starts in a fraction of a second, so that matrices of faults and ranks run on it in full. Its `token` depends on every
byte of every parameter, so two versions of the weights never answer alike. Owns its parameter memory only until an
update rebinds it."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastdeploy_rl._native import Mapping as MemoryMapping
from fastdeploy_rl.coverage import Coverage, ParameterSpec
from fastdeploy_rl.dtypes import itemsize, numpy_dtype
from fastdeploy_rl.engines.embedded.graph_pool import MAX_SETS
from fastdeploy_rl.errors import NotServingError
from fastdeploy_rl.memory.tensor_view import TensorView

Array = NDArray[Any]

_ALIGNMENT = 64
_MAX_CALLS = 100
NUM_GRAPHS = 2
"""That a recapture captures where addresses are new."""

Ledger = frozenset[tuple[str, int]]
"""Where each parameter lies."""


@dataclass(frozen=True)
class NumpyModel:
    """Shapes of a model, the same on every rank."""

    specs: tuple[ParameterSpec, ...]


class NumpyRunner:
    """Satisfies `fastdeploy_rl.runner.ModelRunner`. What was called last, in which order, stands in `calls`. It has no
    graphs, but counts like an engine whose graphs hold for the addresses they were captured with; `capture_seconds`:
    how long it says that takes; `num_running`: how many requests it says are in flight."""

    def __init__(self, model: NumpyModel, rank: int, num_ranks: int) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.calls: list[str] = []
        self.version = ""
        self.num_captured = 0
        self.num_running = 0
        self.capture_seconds = 0.0
        self._captured: list[Ledger] = []  # used last comes last
        self._model = model
        self._bound: dict[str, TensorView] = {}
        self._kv_digest: str | None = None

    def load(self, seed: int) -> dict[str, TensorView]:
        """A cold start: binds this rank's slices of the weights that `random_weights` gives for `seed`. They lie in
        memory of their own."""
        tensors = random_weights(self._model, seed)
        views: dict[str, TensorView] = {}
        slices = {spec.name: local_values(spec, tensors, self.rank, self.num_ranks) for spec in self._updated()}
        memory = MemoryMapping.private(max(_packed_bytes(slices), _ALIGNMENT))
        offset = 0
        for spec in self._updated():
            view = TensorView(memory, offset, spec.dtype, slices[spec.name].shape)
            view.numpy()[...] = slices[spec.name]
            views[spec.name] = view
            offset += -(-view.num_bytes // _ALIGNMENT) * _ALIGNMENT
        self.bind(views)
        return views

    def _updated(self) -> list[ParameterSpec]:
        return [spec for spec in self._model.specs if spec.coverage is Coverage.UPDATED]

    def token(self) -> int:
        """The toy forward pass: one number out of every byte that is bound."""
        if not self._bound or self._kv_digest is None:
            raise NotServingError("no weights or no KV cache")
        value = 0
        for name in sorted(self._bound):
            value = zlib.crc32(np.ascontiguousarray(self._bound[name].numpy()).tobytes(), value)
        return value

    def _note(self, call: str) -> None:
        self.calls.append(call)
        del self.calls[:-_MAX_CALLS]

    # --- ModelRunner -------------------------------------------------------------------------------

    def parameters(self) -> Sequence[ParameterSpec]:
        return self._model.specs

    def bound(self) -> Mapping[str, TensorView]:
        return dict(self._bound)

    def prepare(self, views: Mapping[str, TensorView]) -> object:
        return None

    def bind(self, views: Mapping[str, TensorView]) -> None:
        self._note("bind")
        self._bound = dict(views)

    fills_parameters = False

    def verify_bound(self) -> None:
        """Parameters lie in their views."""

    def unbind(self) -> None:
        self._note("unbind")
        self._bound = {}

    def drain(self, deadline_ns: int) -> None:
        self._note("drain")

    @property
    def is_computing(self) -> bool:
        return self.num_running > 0

    def num_requests(self, *, begun: bool = False) -> int:
        return self.num_running

    def abort_requests(self, reason: str, *, is_fault: bool = True, begun: bool = False) -> None:
        self._note(f"abort {reason}")

    @property
    def has_kv_cache(self) -> bool:
        return self._kv_digest is not None

    def drop_kv_cache(self) -> None:
        self._note("drop_kv_cache")
        self._kv_digest = None

    def rebuild_kv_cache(self, content_digest: str) -> None:
        self._note("rebuild_kv_cache")
        self._kv_digest = content_digest

    def keep_kv_cache(self, content_digest: str) -> None:
        self._note("keep_kv_cache")
        self._kv_digest = content_digest

    def recapture_graphs(self) -> int:
        self._note("recapture_graphs")
        if not self._bound or self._kv_digest is None:
            return 0
        ledger = _ledger(self._bound)
        is_known = ledger in self._captured
        self._captured = [*(known for known in self._captured if known != ledger), ledger][-MAX_SETS:]
        count = 0 if is_known else NUM_GRAPHS
        self.num_captured += count
        return count

    @property
    def has_graphs(self) -> bool:
        return bool(self._captured)

    def drop_graphs(self) -> None:
        self._note("drop_graphs")
        self._captured = []

    def recapture_seconds(self, views: Mapping[str, TensorView]) -> float:
        return 0.0 if _ledger(views) in self._captured else self.capture_seconds

    def set_version(self, version: str) -> None:
        self._note(f"version {version}")
        self.version = version


def _ledger(views: Mapping[str, TensorView]) -> Ledger:
    return frozenset((name, view.mapping.address + view.offset) for name, view in views.items())


def random_weights(model: NumpyModel, seed: int) -> dict[str, Array]:
    """One version of the model's logical tensors: every byte random, in the model's dtypes (BF16 as uint16), without
    the padding of a vocabulary. Tied names are left out."""
    generator = np.random.default_rng(seed)
    weights = {}
    for spec in model.specs:
        if spec.coverage is Coverage.UPDATED:
            for name, shape in spec.logical:
                used = shape if spec.vocab_rows is None else (spec.vocab_rows, *shape[1:])
                weights[name] = _random_array(generator, spec.dtype, used)
    return weights


def local_values(spec: ParameterSpec, weights: Mapping[str, Array], rank: int, num_ranks: int) -> Array:
    """What a rank's parameter holds when the logical tensors `weights` are live."""
    parts = []
    for name, shape in spec.logical:
        part = weights[name]
        if spec.vocab_rows is not None:
            part = np.concatenate([part, np.zeros((shape[0] - spec.vocab_rows, *shape[1:]), part.dtype)])
        if spec.is_transposed:
            part = part.swapaxes(-1, -2)
        parts.append(part if spec.shard_axis is None else np.split(part, num_ranks, axis=spec.shard_axis)[rank])
    return np.concatenate(parts, axis=spec.fused_axis) if spec.fused else parts[0]


def _random_array(generator: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> Array:
    data = generator.bytes(int(np.prod(shape, dtype=np.int64)) * itemsize(dtype))
    if dtype == "BOOL":
        data = bytes(byte & 1 for byte in data)
    return np.frombuffer(data, numpy_dtype(dtype)).reshape(shape).copy()


def _packed_bytes(arrays: Mapping[str, Array]) -> int:
    return sum(-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays.values())
