"""Where each tensor of a version goes inside its arena.

Owns what a convention makes of the trainer's names, the cut of tensors into tensor-parallel shards, and the order of
the pieces (what every rank needs, then rank 0's, then rank 1's ...; each aligned to 512 bytes). Pure arithmetic over
borrowed tensors: refuses to know arenas and channels, and a model's right shapes (only the engine's coverage check
does). Invariant: each source byte has exactly one place.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from types import MappingProxyType
from typing import NamedTuple

from fastdeploy_rl.checksum import Fletcher4
from fastdeploy_rl.dtypes import itemsize
from fastdeploy_rl.errors import ConfigurationError, ManifestError, TrainerError
from fastdeploy_rl.manifest import ALIGNMENT, Part, Segment, Tensor, aligned, build_manifest, layout_ranks
from fastdeploy_rl.memory.host_tensor import HostTensor
from fastdeploy_rl.plan.conventions import Convention, TensorRule, paddle_llama
from fastdeploy_rl.publish.contribution import ContributedPart, ContributedTensor, Contribution
from fastdeploy_rl.version import WeightVersion

_DRAFT = Segment(kind="shm", locator="draft", num_bytes=2**62, arena=0, generation=0)


class Shard(NamedTuple):
    """What this process holds of a larger tensor: indices [start, stop) of `axis`, which has `size` in the whole one.
    The axis counts in the tensor as the trainer has it."""

    axis: int
    start: int
    stop: int
    size: int


Shards = Mapping[str, Shard]
"""By the trainer's name; a tensor that is not here is whole."""

NO_SHARDS: Shards = MappingProxyType({})


class Piece(NamedTuple):
    """One part: `rows` rows of `row_bytes`, `source_stride` apart from `source_offset` on in the trainer's tensor,
    packed at `target_offset` of the arena; in the whole tensor they lie `place_stride` apart from `place_offset` on.
    Covers [start, stop) of the shard axis (0, 0 without one)."""

    rows: int
    row_bytes: int
    source_offset: int
    source_stride: int
    target_offset: int
    start: int
    stop: int
    place_offset: int
    place_stride: int

    @property
    def num_bytes(self) -> int:
        return self.rows * self.row_bytes


@dataclass(frozen=True, eq=False)
class ArrangedTensor:
    """A tensor under the engine's name, with the places of its pieces in the order of the shard axis. `trainer_name`:
    what its trainer calls it; `shape`: of the whole tensor."""

    rule: TensorRule
    trainer_name: str
    host: HostTensor
    shape: tuple[int, ...]
    shard_axis: int | None
    pieces: tuple[Piece, ...]

    @property
    def name(self) -> str:
        return self.rule.name

    @property
    def num_bytes(self) -> int:
        """Of the whole tensor."""
        return prod(self.shape) * itemsize(self.host.dtype)


Placing = Callable[[ArrangedTensor, Piece], tuple[int, int]]
"""Number of the segment and offset in it where a piece lies."""


@dataclass(frozen=True, eq=False)
class Arrangement:
    """All tensors of one version; `num_bytes` is what an arena needs. Borrows the caller's tensors until dropped."""

    layout: str
    tensors: tuple[ArrangedTensor, ...]
    aliases: dict[str, str]
    num_bytes: int

    @property
    def payload_bytes(self) -> int:
        """What is read: every piece once."""
        return sum(piece.num_bytes for tensor in self.tensors for piece in tensor.pieces)

    @property
    def description(self) -> object:
        """Equal for arrangements that `check` cannot tell apart; which slices this process has is left out."""
        tensors = [(t.rule, t.host.dtype, t.shape, t.shard_axis, len(t.pieces)) for t in self.tensors]
        return self.layout, tensors, self.aliases

    def check(self, version: WeightVersion) -> None:
        """ManifestError, naming the tensor, for what no manifest may say (names, dimensions, counts)."""
        drafts, end = [], 0
        for tensor in self.tensors:
            drafts.append(_draft(tensor, end))
            end = aligned(end + tensor.num_bytes)
        build_manifest(version, self.layout, [_DRAFT], drafts, self.aliases)

    def contribution(
        self, publisher: int, segments: Sequence[Segment], place: Placing, sums: Sequence[Sequence[Fletcher4]]
    ) -> Contribution:
        """`sums`: the checksum of each piece of each tensor, as its share of the whole tensor's."""
        return Contribution(
            publisher=publisher,
            layout=self.layout,
            segments=tuple(segments),
            tensors=tuple(_contributed(tensor, place, own) for tensor, own in zip(self.tensors, sums, strict=True)),
            aliases=self.aliases,
        )


def in_arena(tensor: ArrangedTensor, piece: Piece) -> tuple[int, int]:
    """The place of a piece that was copied to its `target_offset` of the only segment."""
    return 0, piece.target_offset


class _Held(NamedTuple):
    """A tensor of this process, and where it stands in the whole one."""

    rule: TensorRule
    host: HostTensor
    shape: tuple[int, ...]
    axis: int | None
    start: int
    stop: int
    is_shard: bool


def arrange(
    tensors: Mapping[str, HostTensor],
    layout: str,
    convention: Convention = paddle_llama,
    shards: Shards = NO_SHARDS,
) -> Arrangement:
    """Places every tensor. `layout`: "full", or "tp:N" to cut those that `convention` gives a shard axis for into N
    equal shards. `shards`: which tensors are a slice of a larger one.

    The same memory under two names is stored once and becomes an alias of the first. TrainerError where two names
    become one, or a shard is not what it says; ConfigurationError for another layout, an axis the tensor does not have,
    or one that N does not divide.
    """
    num_ranks = _num_ranks(layout)
    _check_shards_given(shards, tensors)
    held = {
        name: _held(name, host, _rule(convention, name, _whole(host, shards.get(name))), shards.get(name), num_ranks)
        for name, host in tensors.items()
    }
    _refuse_doubled_names(held)
    aliases = _same_memory(held)
    stored = {name: tensor for name, tensor in held.items() if tensor.rule.name not in aliases}
    placed, num_bytes = _place({name: _cut(tensor, num_ranks) for name, tensor in stored.items()}, stored)
    arranged = tuple(
        ArrangedTensor(tensor.rule, name, tensor.host, tensor.shape, tensor.axis, placed[name])
        for name, tensor in stored.items()
    )
    return Arrangement(layout, arranged, aliases, num_bytes)


def _check_shards_given(shards: Shards, tensors: Mapping[str, HostTensor]) -> None:
    for name, shard in shards.items():
        if name not in tensors:
            raise ConfigurationError(f"shards name {name!r:.600}, which is not among the tensors")
        if not isinstance(shard, Shard) or any(type(number) is not int for number in shard):
            raise ConfigurationError(f"the shard of {name!r:.600} must be a Shard of four integers, got {shard!r:.80}")


def _num_ranks(layout: str) -> int:
    """N of "tp:N"; 0 for "full"."""
    try:
        return layout_ranks(layout)
    except (ManifestError, TypeError) as error:
        raise ConfigurationError(f"layout must be 'full' or 'tp:N' with N in 1 to 9999, got {layout!r:.80}") from error


def _whole(host: HostTensor, shard: Shard | None) -> tuple[int, ...]:
    """The shape of the tensor of which the trainer has a slice: conventions speak of whole ones."""
    if shard is None:
        return host.shape
    return tuple(shard.size if axis == shard.axis else size for axis, size in enumerate(host.shape))


def _rule(convention: Convention, name: str, shape: tuple[int, ...]) -> TensorRule:
    rule = convention(name, shape)
    if not isinstance(rule, TensorRule) or not isinstance(rule.name, str):
        raise ConfigurationError(
            f"the convention must give a TensorRule with a name for {name!r:.600}, got {rule!r:.80}"
        )
    if rule.is_transposed and len(shape) < 2:
        raise ConfigurationError(f"{name!r} cannot be transposed: its shape is {list(shape)}")
    return rule


def _held(name: str, host: HostTensor, rule: TensorRule, shard: Shard | None, num_ranks: int) -> _Held:
    if shard is not None:
        _check_shard(name, host, shard)
        shape = (*host.shape[: shard.axis], shard.size, *host.shape[shard.axis + 1 :])
        ranks = num_ranks if rule.shard_axis == shard.axis else 0
        _check_axis(name, shape, shard.axis, ranks)
        return _Held(rule, host, shape, shard.axis, shard.start, shard.stop, True)
    if not num_ranks or rule.shard_axis is None:
        return _Held(rule, host, host.shape, None, 0, 0, False)
    _check_axis(name, host.shape, rule.shard_axis, num_ranks)
    return _Held(rule, host, host.shape, rule.shard_axis, 0, host.shape[rule.shard_axis], False)


def _check_shard(name: str, host: HostTensor, shard: Shard) -> None:
    axis, start, stop, size = shard
    if not 0 <= axis < len(host.shape):
        raise TrainerError(f"{name!r} is no shard along axis {axis}: its shape is {list(host.shape)}")
    if not 0 <= start <= stop <= size or host.shape[axis] != stop - start:
        raise TrainerError(
            f"{name!r} of shape {list(host.shape)} is not [{start}, {stop}) of {size} along axis {axis}: "
            "give the range that this tensor holds"
        )


def _check_axis(name: str, shape: tuple[int, ...], axis: int, num_ranks: int) -> None:
    if not 0 <= axis < len(shape):
        raise ConfigurationError(f"{name!r} cannot be sharded along axis {axis}: its shape is {list(shape)}")
    if num_ranks and shape[axis] % num_ranks:
        raise ConfigurationError(
            f"{name!r} cannot be cut for layout tp:{num_ranks}: axis {axis} of shape {list(shape)} "
            f"does not divide by {num_ranks}; publish with layout='full' or another N"
        )


def _refuse_doubled_names(held: Mapping[str, _Held]) -> None:
    first: dict[str, str] = {}
    for name, tensor in held.items():
        other = first.setdefault(tensor.rule.name, name)
        if other != name:
            raise TrainerError(
                f"{other!r} and {name!r} are both {tensor.rule.name!r} to the engine: publish one of them"
            )


def _same_memory(held: Mapping[str, _Held]) -> dict[str, str]:
    """Engine's name -> the earlier one of the very same bytes, seen as the same tensor and cut in the same way."""
    first: dict[object, str] = {}
    aliases = {}
    for tensor in held.values():
        name, host = tensor.rule.name, tensor.host
        seen_as = host.shape, tensor.shape, tensor.axis, tensor.start, tensor.rule.is_transposed
        # A fused tensor's own name says nothing to the engine, so it cannot stand for another.
        original = first.setdefault((host.key, host.dtype, seen_as, tensor.rule.fused and name), name)
        if original != name and host.key.num_bytes:
            aliases[name] = original
    return aliases


def _cut(tensor: _Held, num_ranks: int) -> tuple[Piece, ...]:
    """The pieces of one tensor, not yet placed."""
    axis, shape = tensor.axis, tensor.shape
    if axis is None:
        num_bytes = tensor.host.key.num_bytes
        return (Piece(1, num_bytes, 0, num_bytes, 0, 0, 0, 0, num_bytes),)
    outer, inner = prod(shape[:axis]), prod(shape[axis + 1 :]) * itemsize(tensor.host.dtype)
    bounds = _bounds(tensor, shape[axis], num_ranks)
    return tuple(
        Piece(
            rows=outer,
            row_bytes=(stop - start) * inner,
            source_offset=(start - tensor.start) * inner,
            source_stride=(tensor.stop - tensor.start) * inner,
            target_offset=0,
            start=start,
            stop=stop,
            place_offset=start * inner,
            place_stride=shape[axis] * inner,
        )
        for start, stop in pairwise(bounds)
    )


def _bounds(tensor: _Held, size: int, num_ranks: int) -> list[int]:
    """Where the pieces of this process begin and end: at the bounds of the engine's ranks, as far as it has them."""
    ranks = num_ranks if tensor.axis == tensor.rule.shard_axis else 0
    cuts = [rank * size // ranks for rank in range(ranks + 1)] if ranks else []
    if not tensor.is_shard:
        return cuts
    return [tensor.start, *(cut for cut in cuts if tensor.start < cut < tensor.stop), tensor.stop]


def _place(cut: Mapping[str, tuple[Piece, ...]], held: Mapping[str, _Held]) -> tuple[dict[str, tuple[Piece, ...]], int]:
    placed: dict[str, list[Piece]] = {name: [] for name in cut}
    end = 0
    for name, index in _order(cut, held):
        piece = cut[name][index]
        placed[name].append(piece._replace(target_offset=end))
        end = aligned(end + piece.num_bytes)
    return {name: tuple(pieces) for name, pieces in placed.items()}, max(end, ALIGNMENT)


def _order(cut: Mapping[str, tuple[Piece, ...]], held: Mapping[str, _Held]) -> Iterable[tuple[str, int]]:
    """Whole tensors first, then the first piece of every other, then the second ..."""
    yield from ((name, 0) for name in cut if held[name].axis is None)
    cut_up = [name for name in cut if held[name].axis is not None]
    for index in range(max((len(cut[name]) for name in cut_up), default=0)):
        yield from ((name, index) for name in cut_up if index < len(cut[name]))


def _draft(tensor: ArrangedTensor, offset: int) -> Tensor:
    """The whole tensor in one part, whatever this process has of it."""
    return Tensor(
        name=tensor.name,
        dtype=tensor.host.dtype,
        shape=tensor.shape,
        shard_axis=None,
        parts=(Part(0, offset, 0, 0),),
        checksum="0" * 64,
        is_transposed=tensor.rule.is_transposed,
        fused=tensor.rule.fused,
    )


def _contributed(tensor: ArrangedTensor, place: Placing, sums: Sequence[Fletcher4]) -> ContributedTensor:
    return ContributedTensor(
        name=tensor.name,
        dtype=tensor.host.dtype,
        shape=tensor.shape,
        shard_axis=tensor.shard_axis,
        parts=tuple(
            ContributedPart(*place(tensor, piece), piece.start, piece.stop, own)
            for piece, own in zip(tensor.pieces, sums, strict=True)
        ),
        is_transposed=tensor.rule.is_transposed,
        fused=tensor.rule.fused,
    )
