"""A FastDeploy model as the weight manager sees it: its parameters, and with them what FastDeploy derived from them.

Owns which of the two a call goes to, and in which order where it goes to both. Refuses to know either's inside.
Invariant: weights are bound and let go between what must come before and after (graphs, buffers, groups).
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext

from fastdeploy_rl.coverage import ParameterSpec
from fastdeploy_rl.engines.fastdeploy.engine_hooks import EngineHooks
from fastdeploy_rl.engines.fastdeploy.model_weights import ModelWeights
from fastdeploy_rl.memory.tensor_view import TensorView


class FastDeployModelRunner:
    """Satisfies `fastdeploy_rl.runner.ModelRunner`. One of several models has the engine, which is that of all of them;
    the others are weights alone."""

    def __init__(self, weights: ModelWeights, engine: EngineHooks | None = None) -> None:
        """`engine` None: what FastDeploy derives from these weights is somebody else's to keep in step."""
        self._weights, self._engine = weights, engine
        self.version = ""
        """Of the tokens that are made now; FastDeploy's own tokens carry none."""

    @property
    def rank(self) -> int:
        return self._weights.rank

    @property
    def num_ranks(self) -> int:
        return self._weights.num_ranks

    # --- weights -----------------------------------------------------------------------------------

    def parameters(self) -> Sequence[ParameterSpec]:
        return self._weights.specs

    def bound(self) -> Mapping[str, TensorView]:
        return self._weights.bound()

    def prepare(self, views: Mapping[str, TensorView]) -> object:
        return self._weights.prepare(views)

    def bind(self, views: Mapping[str, TensorView]) -> None:
        """Graphs of other addresses than these are dropped: they come back with `recapture_graphs`."""
        with nullcontext() if self._engine is None else self._engine.weights_coming():
            self._weights.bind(views)

    @property
    def fills_parameters(self) -> bool:
        return self._weights.fills_parameters

    def verify_bound(self) -> None:
        self._weights.verify_bound()

    def unbind(self) -> None:
        with nullcontext() if self._engine is None else self._engine.weights_going():
            self._weights.unbind()

    # --- requests ----------------------------------------------------------------------------------

    def drain(self, deadline_ns: int) -> None:
        if self._engine is not None:
            self._engine.drain(deadline_ns)

    @property
    def is_computing(self) -> bool:
        return self._engine is not None and self._engine.is_computing

    def num_requests(self, *, begun: bool = False) -> int:
        """Of those that FastDeploy's scheduler, in another process, has given to this worker: all have begun."""
        return 0 if self._engine is None else self._engine.num_requests()

    def abort_requests(self, reason: str, *, is_fault: bool = True, begun: bool = False) -> None:
        """This worker computes nothing more for them. FastDeploy's engine is not told: who aborts tells the clients."""
        if self._engine is not None:
            self._engine.abort_requests(reason)

    # --- what is derived from the weights ----------------------------------------------------------

    @property
    def has_kv_cache(self) -> bool:
        return self._engine is not None and self._engine.has_kv_cache

    def drop_kv_cache(self) -> None:
        if self._engine is not None:
            self._engine.drop_kv_cache()

    def rebuild_kv_cache(self, content_digest: str) -> None:
        """LifecycleError, with nothing changed, while requests are in flight that had their KV from other weights."""
        if self._engine is not None:
            self._engine.rebuild_kv_cache(content_digest)

    def keep_kv_cache(self, content_digest: str) -> None:
        """LifecycleError, with nothing changed, while requests are in flight and prefixes are cached."""
        if self._engine is not None:
            self._engine.keep_kv_cache(content_digest)

    def recapture_graphs(self) -> int:
        return 0 if self._engine is None else self._engine.recapture_graphs()

    @property
    def has_graphs(self) -> bool:
        return self._engine is not None and self._engine.has_graphs

    def drop_graphs(self) -> None:
        if self._engine is not None:
            self._engine.drop_graphs()

    def recapture_seconds(self, views: Mapping[str, TensorView]) -> float:
        if self._engine is None:
            return 0.0
        stays = self._engine.has_graphs and (self._weights.fills_parameters or self._are_bound(views))
        return 0.0 if stays else self._engine.capture_seconds

    def _are_bound(self, views: Mapping[str, TensorView]) -> bool:
        bound = self._weights.bound()
        return bool(views) and all(name in bound and view.same_place(bound[name]) for name, view in views.items())

    def set_version(self, version: str) -> None:
        self.version = version
