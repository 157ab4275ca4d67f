"""Published tensors as the logical ones that they supply: whole ones, and those that lie fused in another.

Owns the way from a manifest's stored axes to the axes of the engine's own layout ([in, out] for linear weights).
Refuses to know the model and its ranks. Invariant: the pieces of a logical tensor tile it, each stored byte belongs to
exactly one piece of one logical tensor.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

from fastdeploy_rl.manifest import Manifest, Tensor

Value = TypeVar("Value")

WHOLE = -1
"""The axis of a piece that is all of a logical tensor."""


class Piece(NamedTuple):
    """Indices [start, stop) along `axis` of a logical tensor lie from index
    `stored_start` of that axis of `tensor` on (its shape taken as turned back)."""

    tensor: Tensor
    axis: int
    start: int
    stop: int
    stored_start: int


class LogicalTensor(NamedTuple):
    """One tensor as the engine knows it, wherever it is stored. `name` is the one it is published under."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def is_fused(self) -> bool:
        return self.pieces[0].axis != WHOLE


def logical_tensors(manifest: Manifest) -> dict[str, LogicalTensor]:
    """Every logical tensor of a publication by each of its names, aliases included."""
    found: dict[str, LogicalTensor] = {}
    runs: dict[str, list[Piece]] = {}
    for tensor in manifest.tensors:
        if tensor.fused is None:
            piece = Piece(tensor, WHOLE, 0, 0, 0)
            found[tensor.name] = LogicalTensor(tensor.name, tensor.dtype, unturned_shape(tensor), (piece,))
        else:
            for name, run in _runs(tensor):
                runs.setdefault(name, []).append(run)
    found |= {name: _assembled(name, pieces) for name, pieces in runs.items()}
    return found | {alias: found[target] for alias, target in manifest.aliases.items()}


def turned(values: Sequence[Value]) -> tuple[Value, ...]:
    """The same with the last two swapped: from stored axes to logical ones and back."""
    return (*values[:-2], values[-1], values[-2])


def turned_axis(axis: int, num_axes: int) -> int:
    """Where an axis goes when the last two are swapped."""
    return 2 * num_axes - 3 - axis if axis >= num_axes - 2 else axis


def unturned_shape(tensor: Tensor) -> tuple[int, ...]:
    return turned(tensor.shape) if tensor.is_transposed else tensor.shape


def _runs(tensor: Tensor) -> Iterator[tuple[str, Piece]]:
    fused = tensor.fused
    if fused is None:
        return
    axis = turned_axis(fused.axis, len(tensor.shape)) if tensor.is_transposed else fused.axis
    position = 0
    for run in fused.runs:
        yield run.name, Piece(tensor, axis, run.start, run.stop, position)
        position += run.stop - run.start


def _assembled(name: str, pieces: list[Piece]) -> LogicalTensor:
    pieces.sort(key=lambda piece: (piece.start, piece.stop))
    tensor, axis = pieces[0].tensor, pieces[0].axis
    shape = unturned_shape(tensor)
    return LogicalTensor(name, tensor.dtype, (*shape[:axis], pieces[-1].stop, *shape[axis + 1 :]), tuple(pieces))
