"""What an engine must offer so that its weights can be kept live: the seam between this package and any model runner.

The core knows tensors only through this Protocol. All calls come from the engine's own loop thread, at a decode
boundary, except `parameters`, which is constant, and `prepare` and `recapture_seconds`, which may come from any thread.
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

    def prepare(self, views: Mapping[str, TensorView]) -> object:
        """Whatever makes a later `bind` of these views quick, done while requests are served; for its caller to keep
        until then. It keeps the views' mappings."""
        ...

    def bind(self, views: Mapping[str, TensorView]) -> None:
        """Rebinds every updated parameter to the given memory (a rebind, not a copy,
        unless `fills_parameters`); ties follow, derived tensors are recomputed in place. The runner keeps
        the views, and so their mappings, until the next `bind` or `unbind`."""
        ...

    @property
    def fills_parameters(self) -> bool:
        """`bind` copies the views' bytes into parameters that lie elsewhere, as on a device; whoever changes the bytes
        of a view binds it again."""
        ...

    def verify_bound(self) -> None:
        """ChecksumMismatchError, naming a parameter, where what it holds is not what its view holds; there is nothing
        to compare where parameters lie in their views."""
        ...

    def unbind(self) -> None:
        """Lets go of every parameter, so that their memory can return to the system."""
        ...

    def drain(self, deadline_ns: int) -> None:
        """Returns when no request is inside a forward pass and the device is idle. Requests in flight are kept, to go
        on afterwards."""
        ...

    @property
    def is_computing(self) -> bool:
        """Forward passes follow one another, on this rank, just now; from any thread."""
        ...

    def num_requests(self, *, begun: bool = False) -> int:
        """Requests that have not ended; `begun`: without those that have neither tokens nor KV of their own yet. 0 on
        ranks that keep no account of requests."""
        ...

    def abort_requests(self, reason: str, *, is_fault: bool = True, begun: bool = False) -> None:
        """Ends every request in flight (`begun`: as in `num_requests`) with that reason: as a fault of the engine's, or
        in order, so that what a request has so far is its answer."""
        ...

    @property
    def has_kv_cache(self) -> bool:
        """Its memory is there."""
        ...

    def drop_kv_cache(self) -> None:
        """Frees the memory of the KV cache. Kept requests recompute theirs."""
        ...

    def rebuild_kv_cache(self, content_digest: str) -> None:
        """An empty KV cache for weights with that digest: allocated if it was dropped, else every page invalidated and
        scales reset. Kept requests recompute theirs."""
        ...

    def keep_kv_cache(self, content_digest: str) -> None:
        """The weights have that digest from now on. Requests in flight go on with the KV that they have; no other
        request is ever given KV that these or other weights than the present ones filled. Where the cache is dropped
        it is allocated, empty."""
        ...

    def recapture_graphs(self) -> int:
        """Makes graphs valid for the addresses bound now; returns how many had to be captured anew: none where these
        addresses were bound before and their graphs are still there, or where there are no graphs."""
        ...

    @property
    def has_graphs(self) -> bool:
        """Graphs are in use, of whatever addresses."""
        ...

    def drop_graphs(self) -> None:
        """Frees every captured graph and what belongs to it."""
        ...

    def recapture_seconds(self, views: Mapping[str, TensorView]) -> float:
        """How long `recapture_graphs` would take if these were bound, as measured before; 0 where nothing would have to
        be captured."""
        ...

    def set_version(self, version: str) -> None:
        """From now on every generated token carries this version."""
        ...
