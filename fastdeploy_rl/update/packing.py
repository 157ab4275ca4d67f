"""Tensors one after another in an arena: where each lies, and how they get there.

Owns the arithmetic only. Invariant: every tensor begins at a multiple of the manifest's alignment.
"""

from collections.abc import Mapping as Dict
from collections.abc import Sequence

from fastdeploy_rl._native import Mapping, Region
from fastdeploy_rl.manifest import ALIGNMENT, aligned
from fastdeploy_rl.memory.tensor_view import TensorView


def packed(sizes: Sequence[int]) -> list[int]:
    """Aligned offsets of tensors of these sizes, one after another."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end = aligned(end + size)
    return offsets


def packed_bytes(sizes: Sequence[int]) -> int:
    """What they need together; never nothing."""
    return max(sum(map(aligned, sizes)), ALIGNMENT)


def packed_views(like: Dict[str, TensorView], arena: Mapping) -> dict[str, TensorView]:
    """The same tensors, packed into `arena`."""
    offsets = packed([view.num_bytes for view in like.values()])
    return {
        name: TensorView(arena, offset, view.dtype, view.shape)
        for (name, view), offset in zip(like.items(), offsets, strict=True)
    }


def copies(sources: Dict[str, TensorView], targets: Dict[str, TensorView]) -> list[Region]:
    """The jobs that copy each tensor to the one of its name."""
    return [
        Region(
            source=view.mapping,
            source_offset=view.offset,
            source_stride=view.num_bytes,
            rows=1,
            row_bytes=view.num_bytes,
            target=targets[name].mapping,
            target_offset=targets[name].offset,
            target_stride=view.num_bytes,
        )
        for name, view in sources.items()
    ]
