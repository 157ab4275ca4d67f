"""One manifest out of what one or several trainer processes contribute to a version.

Owns the agreement between them: which tensor is whose, that shards tile, that what two of them publish under one name
is the same. Pure: refuses to know files, memory and who waits for whom. Invariant: a manifest that comes out names each
byte once, and its checksums are those of the whole tensors, added up from the parts' (they are linear).
"""

from collections.abc import Sequence
from functools import reduce
from itertools import accumulate
from typing import NamedTuple

import msgspec

from fastdeploy_rl.checksum import Fletcher4, add
from fastdeploy_rl.errors import TrainerError
from fastdeploy_rl.manifest import Count, Fused, Manifest, Part, Segment, Tensor, build_manifest
from fastdeploy_rl.version import WeightVersion


class ContributedPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """As `manifest.Part`, in a segment of the same contribution; `checksum`: its share in that of the whole tensor."""

    segment: Count
    offset: Count
    start: Count
    stop: Count
    checksum: Fletcher4


class ContributedTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one process has of a tensor; `shape` and axes are those of the whole one, as in `manifest.Tensor`."""

    name: str
    dtype: str
    shape: tuple[Count, ...]
    shard_axis: Count | None
    parts: tuple[ContributedPart, ...]
    is_transposed: bool
    fused: Fused | None

    @property
    def kind(self) -> tuple[object, ...]:
        """What all who publish a tensor must agree on."""
        return self.dtype, self.shape, self.shard_axis, self.is_transposed, self.fused


class Contribution(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What process number `publisher` puts into a version."""

    publisher: Count
    layout: str
    segments: tuple[Segment, ...]
    tensors: tuple[ContributedTensor, ...]
    aliases: dict[str, str]


class _Share(NamedTuple):
    """One process's part of a tensor, its segment counted in the united manifest."""

    publisher: int
    start: int
    stop: int
    checksum: Fletcher4
    part: Part


def unite(version: WeightVersion, contributions: Sequence[Contribution]) -> Manifest:
    """The manifest of all contributions together, in their order. TrainerError naming the tensor and the processes
    where they do not fit together; ManifestError for what no manifest may say."""
    layouts = {contribution.layout for contribution in contributions}
    if len(layouts) != 1:
        raise TrainerError(f"the parts of {version} have different layouts: {', '.join(sorted(layouts))}")
    # Where each one's segments begin among all; at the end, how many there are.
    bases = accumulate((len(contribution.segments) for contribution in contributions), initial=0)
    shares: dict[str, list[_Share]] = {}
    kinds: dict[str, tuple[int, ContributedTensor]] = {}
    for contribution, base in zip(contributions, bases, strict=False):
        for tensor in contribution.tensors:
            publisher, first = kinds.setdefault(tensor.name, (contribution.publisher, tensor))
            _check_kind(publisher, first, contribution.publisher, tensor)
            shares.setdefault(tensor.name, []).extend(
                _shares(contribution.publisher, tensor, base, len(contribution.segments))
            )
    tensors = {name: _join(tensor, shares[name]) for name, (_, tensor) in kinds.items()}
    segments = [segment for contribution in contributions for segment in contribution.segments]
    return build_manifest(version, layouts.pop(), segments, list(tensors.values()), _aliases(contributions, tensors))


def _shares(publisher: int, tensor: ContributedTensor, base: int, num_segments: int) -> list[_Share]:
    if any(part.segment >= num_segments for part in tensor.parts):
        raise TrainerError(f"{tensor.name!r:.600} lies in a segment that part {publisher} does not publish")
    return [
        _Share(publisher, p.start, p.stop, p.checksum, Part(base + p.segment, p.offset, p.start, p.stop))
        for p in tensor.parts
    ]


def _check_kind(publisher: int, first: ContributedTensor, other: int, tensor: ContributedTensor) -> None:
    if first.kind != tensor.kind:
        raise TrainerError(
            f"{tensor.name!r} is {_described(first)} on part {publisher} and {_described(tensor)} on part {other}: "
            "all parts must publish it alike"
        )


def _described(tensor: ContributedTensor) -> str:
    cut = "whole" if tensor.shard_axis is None else f"cut along axis {tensor.shard_axis}"
    turned = ", transposed" if tensor.is_transposed else ""
    return f"{tensor.dtype} {list(tensor.shape)} {cut}{turned}{', fused' if tensor.fused else ''}"


def _join(tensor: ContributedTensor, shares: list[_Share]) -> Tensor:
    kept: dict[tuple[int, int], _Share] = {}
    for share in sorted(shares, key=lambda share: share.publisher):
        first = kept.setdefault((share.start, share.stop), share)
        if first.checksum != share.checksum:
            where = "" if tensor.shard_axis is None else f" [{share.start}, {share.stop}) of axis {tensor.shard_axis}"
            raise TrainerError(
                f"{tensor.name!r}{where} has different values on part {first.publisher} and on part "
                f"{share.publisher}: make them equal, or publish it from one of them"
            )
    tiles = sorted(kept.values(), key=lambda share: (share.start, share.stop))
    if tensor.shard_axis is not None:
        _check_tiling(tensor, tensor.shape[tensor.shard_axis], tiles)
    return Tensor(
        name=tensor.name,
        dtype=tensor.dtype,
        shape=tensor.shape,
        shard_axis=tensor.shard_axis,
        parts=tuple(share.part for share in tiles),
        checksum=reduce(add, (share.checksum for share in tiles)).hex(),
        is_transposed=tensor.is_transposed,
        fused=tensor.fused,
    )


def _check_tiling(tensor: ContributedTensor, size: int, tiles: Sequence[_Share]) -> None:
    end = 0
    for share in tiles:
        if share.start != end:
            fault = "nobody has" if share.start > end else "there is more than one owner of"
            low, high = sorted((share.start, end))
            raise TrainerError(
                f"{tensor.name!r}: {fault} [{low}, {high}) of axis {tensor.shard_axis}; part {share.publisher} "
                f"publishes [{share.start}, {share.stop})"
            )
        end = share.stop
    if end != size:
        raise TrainerError(
            f"{tensor.name!r}: nobody has [{end}, {size}) of axis {tensor.shard_axis}: publish all of its {size}"
        )


def _aliases(contributions: Sequence[Contribution], tensors: dict[str, Tensor]) -> dict[str, str]:
    """Further names. A name that is a tensor of its own on another part must have the same values there."""
    aliases: dict[str, str] = {}
    for contribution in contributions:
        for name, target in contribution.aliases.items():
            if target not in tensors:
                raise TrainerError(
                    f"part {contribution.publisher} calls {name!r} the same as {target!r}, which nobody has"
                )
            other = tensors.get(name) or tensors[aliases.get(name, target)]
            if other.checksum != tensors[target].checksum:
                raise TrainerError(
                    f"{name!r} is the same tensor as {target!r} on part {contribution.publisher}, and another one "
                    "elsewhere: tied tensors must be equal on all parts"
                )
            if name not in tensors:
                aliases.setdefault(name, target)
    return aliases
