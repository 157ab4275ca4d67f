"""The memory behind the pages of the KV cache: one private arena for all layers of this rank.

Knows nothing of requests or of who holds which page. Invariant: nothing that a page held before is read by whoever gets
it next: a step names the pages that are new to their requests, and they are zeroed before it stores anything (`clear`);
the others hold what their requests, or requests with the same beginning, stored. Once dropped it holds no memory.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import paddle

from fastdeploy_rl import _native
from fastdeploy_rl.engines.embedded.page_allocator import PAGE_TOKENS
from fastdeploy_rl.errors import LifecycleError
from fastdeploy_rl.memory import paddle_view
from fastdeploy_rl.memory.tensor_view import TensorView

Floats = npt.NDArray[np.float32]


class CacheShape(NamedTuple):
    """Sizes of one rank's cache."""

    num_layers: int
    num_pages: int
    num_kv_heads: int
    head_dim: int

    @property
    def num_bytes(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.num_pages * PAGE_TOKENS * self.head_dim * 4


class LayerCache(NamedTuple):
    """One layer, twice over the same memory. Heads: first those of the keys, then those of the values."""

    pages: paddle.Tensor
    """[2 * kv_heads, num_pages, PAGE_TOKENS, head_dim], to gather from"""
    slots: Floats
    """[2 * kv_heads, num_pages * PAGE_TOKENS, head_dim], to store into"""


class KVCache:
    """`allocate` before use; `drop` gives the memory back."""

    def __init__(self, shape: CacheShape) -> None:
        self._shape = shape
        self._arena: _native.Mapping | None = None
        self._layers: tuple[LayerCache, ...] = ()
        self._by_page: Floats | None = None

    @property
    def address(self) -> int:
        """Where the arena begins: what a captured graph was made for. 0 while dropped."""
        return self._arena.address if self._arena is not None else 0

    @property
    def num_bytes(self) -> int:
        """Address space held now."""
        return self._arena.num_bytes if self._arena is not None else 0

    @property
    def layers(self) -> tuple[LayerCache, ...]:
        """LifecycleError while dropped."""
        if self._arena is None:
            raise LifecycleError("the KV cache is dropped; rebuild it before the next step")
        return self._layers

    def allocate(self) -> None:
        """Memory of zeros where it was dropped. Otherwise its bytes stay, for the pages that go on; all others are
        cleared when they are handed out, not here: the engine stands still."""
        if self._arena is None:
            self._map()

    def drop(self) -> None:
        """Unmaps the arena; does nothing when that is done already."""
        if self._arena is not None:
            self._layers, self._by_page = (), None
            self._arena.close()
            self._arena = None

    def clear(self, pages: Sequence[int]) -> None:
        """Zeroes pages: padding is read (and weighed with zero), so
        that a NaN left by an earlier request would spread."""
        if pages and self._by_page is not None:
            self._by_page[:, :, pages] = 0

    def _map(self) -> None:
        arena = _native.Mapping.private(self._shape.num_bytes)
        layers, pages, heads, dim = self._shape
        by_page = TensorView(arena, 0, "F32", (layers, 2 * heads, pages, PAGE_TOKENS * dim)).numpy()
        made = tuple(self._layer(arena, index) for index in range(layers))
        # All of it or nothing: what failed half way is tried anew.
        self._arena, self._by_page, self._layers = arena, by_page, made

    def _layer(self, arena: _native.Mapping, index: int) -> LayerCache:
        layers, pages, heads, dim = self._shape
        offset = index * (self._shape.num_bytes // layers)
        paged = TensorView(arena, offset, "F32", (2 * heads, pages, PAGE_TOKENS, dim))
        flat = TensorView(arena, offset, "F32", (2 * heads, pages * PAGE_TOKENS, dim))
        return LayerCache(paddle_view.tensor(paged), flat.numpy())
