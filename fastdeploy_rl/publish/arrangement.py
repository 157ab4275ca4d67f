"""Where each tensor of a version goes inside its arena.

Owns the cut of full tensors into tensor-parallel shards, the order of the parts (what every rank needs, then rank 0's,
then rank 1's ...; each aligned to 512 bytes) and what that makes of the manifest. Pure arithmetic over borrowed
tensors: refuses to know arenas and channels, and a model's right shapes (only the engine's coverage check does).
Invariant: each source byte has exactly one place.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from fastdeploy_rl.checksum import Fletcher4
from fastdeploy_rl.dtypes import itemsize
from fastdeploy_rl.errors import ConfigurationError, ManifestError
from fastdeploy_rl.manifest import ALIGNMENT, Manifest, Part, Segment, Tensor, build_manifest, layout_ranks
from fastdeploy_rl.memory.host_tensor import HostTensor
from fastdeploy_rl.version import WeightVersion

ShardAxis = Callable[[str], int | None]

_DRAFT = Segment(kind="shm", locator="draft", num_bytes=2**62, arena=0, generation=0)


class Piece(NamedTuple):
    """One part: `rows` rows of `row_bytes`, `source_stride` apart from `source_offset` on in the full tensor, packed at
    `target_offset` of the arena. Covers [start, stop) of the shard axis (0, 0 without one)."""

    rows: int
    row_bytes: int
    source_offset: int
    source_stride: int
    target_offset: int
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.rows * self.row_bytes


@dataclass(frozen=True, eq=False)
class ArrangedTensor:
    """A tensor with the places of its pieces, in the order of the shard axis."""

    name: str
    host: HostTensor
    shard_axis: int | None
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, eq=False)
class Arrangement:
    """All tensors of one version; `num_bytes` is what an arena needs. Borrows the caller's tensors until dropped."""

    layout: str
    tensors: tuple[ArrangedTensor, ...]
    aliases: dict[str, str]
    num_bytes: int

    @property
    def description(self) -> object:
        """Equal for arrangements whose manifests differ in nothing but version, segment and checksums."""
        tensors = [(tensor.name, tensor.host.dtype, tensor.host.shape, tensor.shard_axis) for tensor in self.tensors]
        return self.layout, tensors, self.aliases

    def check(self, version: WeightVersion) -> None:
        """ManifestError, naming the tensor, for what no manifest may say (names, dimensions, counts)."""
        nothing = Fletcher4(0, 0, 0, 0)
        self.manifest(version, _DRAFT, {tensor.name: nothing for tensor in self.tensors})

    def manifest(self, version: WeightVersion, segment: Segment, checksums: Mapping[str, Fletcher4]) -> Manifest:
        described = [_describe(tensor, checksums[tensor.name]) for tensor in self.tensors]
        return build_manifest(version, self.layout, [segment], described, self.aliases)


def arrange(tensors: Mapping[str, HostTensor], layout: str, shard_axis: ShardAxis) -> Arrangement:
    """Places every tensor. `layout`: "full", or "tp:N" to cut
    those that `shard_axis` gives an axis for into N equal shards.

    The same memory under two names is stored once and becomes an alias of the first. ConfigurationError for another
    layout, an axis the tensor does not have, or one that N does not divide.
    """
    num_ranks = _num_ranks(layout)
    axis_of: ShardAxis = shard_axis if num_ranks else lambda name: None
    axes = {name: _checked_axis(name, host, axis_of(name), num_ranks) for name, host in tensors.items()}
    aliases = _same_memory(tensors, axes)
    stored = [name for name in tensors if name not in aliases]
    cut = {name: _cut(tensors[name], axes[name], num_ranks) for name in stored}
    placed, num_bytes = _place(cut, [name for name in stored if axes[name] is None], num_ranks)
    arranged = tuple(ArrangedTensor(name, tensors[name], axes[name], placed[name]) for name in stored)
    return Arrangement(layout, arranged, aliases, num_bytes)


def _num_ranks(layout: str) -> int:
    """N of "tp:N"; 0 for "full"."""
    try:
        return layout_ranks(layout)
    except (ManifestError, TypeError) as error:
        raise ConfigurationError(f"layout must be 'full' or 'tp:N' with N in 1 to 9999, got {layout!r:.80}") from error


def _checked_axis(name: str, host: HostTensor, axis: int | None, num_ranks: int) -> int | None:
    if axis is None:
        return None
    if not 0 <= axis < len(host.shape):
        raise ConfigurationError(f"{name!r} cannot be sharded along axis {axis}: its shape is {list(host.shape)}")
    if host.shape[axis] % num_ranks:
        raise ConfigurationError(
            f"{name!r} cannot be cut for layout tp:{num_ranks}: axis {axis} of shape {list(host.shape)} "
            f"does not divide by {num_ranks}; publish with layout='full' or another N"
        )
    return axis


def _same_memory(tensors: Mapping[str, HostTensor], axes: Mapping[str, int | None]) -> dict[str, str]:
    """Name -> the earlier name of the very same bytes, seen as the same tensor and cut in the same way."""
    first: dict[object, str] = {}
    aliases = {}
    for name, host in tensors.items():
        original = first.setdefault((host.key, host.dtype, host.shape, axes[name]), name)
        if original != name and host.key.num_bytes:
            aliases[name] = original
    return aliases


def _cut(host: HostTensor, axis: int | None, num_ranks: int) -> tuple[Piece, ...]:
    """The pieces of one tensor, not yet placed."""
    if axis is None:
        num_bytes = host.key.num_bytes
        return (Piece(1, num_bytes, 0, num_bytes, 0, 0, 0),)
    outer, size = prod(host.shape[:axis]), host.shape[axis] // num_ranks
    inner_bytes = prod(host.shape[axis + 1 :]) * itemsize(host.dtype)
    row_bytes, stride = size * inner_bytes, host.shape[axis] * inner_bytes
    return tuple(
        Piece(outer, row_bytes, rank * row_bytes, stride, 0, rank * size, (rank + 1) * size)
        for rank in range(num_ranks)
    )


def _place(
    cut: Mapping[str, tuple[Piece, ...]], replicated: Iterable[str], num_ranks: int
) -> tuple[dict[str, tuple[Piece, ...]], int]:
    replicated = list(replicated)
    whole = set(replicated)
    sharded = [name for name in cut if name not in whole]
    order = [(name, 0) for name in replicated] + [(name, rank) for rank in range(num_ranks) for name in sharded]
    placed: dict[str, list[Piece]] = {name: [] for name in cut}
    end = 0
    for name, index in order:
        piece = cut[name][index]
        placed[name].append(piece._replace(target_offset=end))
        end = _aligned(end + piece.num_bytes)
    return {name: tuple(pieces) for name, pieces in placed.items()}, max(end, ALIGNMENT)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _describe(tensor: ArrangedTensor, checksum: Fletcher4) -> Tensor:
    return Tensor(
        name=tensor.name,
        dtype=tensor.host.dtype,
        shape=tensor.host.shape,
        shard_axis=tensor.shard_axis,
        parts=tuple(Part(0, piece.target_offset, piece.start, piece.stop) for piece in tensor.pieces),
        checksum=checksum.hex(),
    )
