"""What an engine must offer so that its weights can be kept live: the seam between this package and any model runner.

The core knows tensors only through this Protocol. All calls come from the engine's
own loop thread, at a decode boundary, except `parameters`, which is constant.
Nothing here talks to other ranks: the manager keeps the ranks in step."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from fastdeploy_rl.coverage import ParameterSpec
from fastdeploy_rl.memory.tensor_view import TensorView


class ModelRunner(Protocol):
    """One tensor-parallel rank of an engine."""

    @property
    def rank(self) -> int: ...

    @property
    def num_ranks(self) -> int: ...

    def parameters(self) -> Sequence[ParameterSpec]:
        """Every tensor of the model, with *global* shapes; constant for the life of the runner."""
        ...

    def bound(self) -> Mapping[str, TensorView]:
        """What each updated parameter is bound to now (this rank's
        slice); empty after `unbind`. Tied names are left out."""
        ...

    def bind(self, views: Mapping[str, TensorView]) -> None:
        """Rebinds every updated parameter to the given memory (a rebind, never a
        copy); ties follow, derived tensors are recomputed in place. The runner keeps
        the views, and so their mappings, until the next `bind` or `unbind`."""
        ...

    def unbind(self) -> None:
        """Lets go of every parameter, so that their memory can return to the system."""
        ...

    def drain(self, deadline_ns: int) -> None:
        """Returns when no request is inside a forward pass. Requests
        in flight are kept, to go on after `rebuild_kv_cache`."""
        ...

    def abort_requests(self, reason: str) -> None:
        """Ends every request in flight with that reason."""
        ...

    def drop_kv_cache(self) -> None:
        """Frees the memory of the KV cache. Kept requests recompute theirs."""
        ...

    def rebuild_kv_cache(self, content_digest: str) -> None:
        """An empty KV cache for weights with that digest: allocated if it was dropped, else every page invalidated."""
        ...

    def recapture_graphs(self) -> None:
        """Makes captured graphs valid for the addresses bound now; nothing to do where there are none."""
        ...

    def set_version(self, version: str) -> None:
        """From now on every generated token carries this version."""
        ...
