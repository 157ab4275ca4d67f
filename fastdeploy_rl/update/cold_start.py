"""A cold start's weights as if an update had brought them, so that they have a receipt of the same kind.

Owns the checksums of what a checkpoint put into memory: `live` of each parameter, and `read` as if the engine's own
global tensors had been published in the engine's layout and dtype. So the checksums of a cold engine and of an updated
one with the same weights in the same layout agree."""

from collections.abc import Iterator, Sequence
from hashlib import sha256
from math import prod
from operator import mul

import msgspec

from fastdeploy_rl._native import Place, Region, transfer
from fastdeploy_rl.checksum import ZERO, Fletcher4, add
from fastdeploy_rl.coverage import Coverage, ParameterSpec
from fastdeploy_rl.dtypes import itemsize
from fastdeploy_rl.memory.tensor_view import TensorView
from fastdeploy_rl.plan.geometry import Axis, strides_of, strips
from fastdeploy_rl.runner import ModelRunner
from fastdeploy_rl.update.live_weights import LiveWeights
from fastdeploy_rl.version import WeightVersion


def cold_weights(
    version: WeightVersion, views: dict[str, TensorView], runner: ModelRunner, num_threads: int
) -> LiveWeights:
    """Reads every parameter once. The weights own nothing but the views. Their `content_digest` tells what this rank's
    KV cache was filled by; the engine's own comes from the receipts of all ranks."""
    specs = [spec for spec in runner.parameters() if spec.coverage is Coverage.UPDATED]
    jobs = [
        (spec.name, region)
        for spec in specs
        for region in _regions(spec, views[spec.name], runner.rank, runner.num_ranks)
    ]
    live = {spec.name: ZERO for spec in specs}
    read = {spec.name: ZERO for spec in specs if _is_counted(spec, runner.rank)}
    sums = transfer([region for _, region in jobs], num_threads)
    for (name, _), (place, own) in zip(jobs, sums, strict=True):
        live[name] = add(live[name], Fletcher4(*(own or ZERO)))
        if place is not None:
            read[name] = add(read[name], Fletcher4(*place))
    return LiveWeights(
        version=version,
        content_digest=sha256("".join(value.hex() for value in live.values()).encode()).hexdigest(),
        views=views,
        read=read,
        live=live,
        is_read_back=True,
    )


def specs_digest(specs: Sequence[ParameterSpec]) -> str:
    """Names, dtypes, shapes and split of the model's tensors: what a manifest's layout digest is for a publication."""
    return sha256(msgspec.json.encode([_layout(spec) for spec in specs])).hexdigest()


def _layout(spec: ParameterSpec) -> tuple[object, ...]:
    fused = [(part.name, part.size) for part in spec.fused]
    split = spec.shard_axis, spec.is_transposed, fused, spec.fused_axis, spec.vocab_rows
    return spec.name, spec.dtype, spec.shape, *split


def _is_counted(spec: ParameterSpec, rank: int) -> bool:
    """Of a replicated parameter only rank 0's bytes count."""
    return spec.shard_axis is not None or rank == 0


def _regions(spec: ParameterSpec, view: TensorView, rank: int, num_ranks: int) -> Iterator[Region]:
    """Reads the parameter, each row placed in the global tensor. What is fused
    lies apart there: of [q_0 | k_0] on rank 0 and [q_1 | k_1] on rank 1 it is [q_0 | q_1 | k_0 | k_1]."""
    item, total = itemsize(spec.dtype), prod(spec.shape) * itemsize(spec.dtype)
    inside, whole = strides_of(view.shape, item), strides_of(spec.shape, item)
    for local, placed, shape in _blocks(spec, view.shape, rank, num_ranks):
        source, place = sum(map(mul, local, inside)), sum(map(mul, placed, whole))
        for strip in strips(tuple(map(Axis, shape, inside, whole, inside)), item, item) if prod(shape) else ():
            read_place = Place(place + strip.whole, strip.whole_stride, total)
            yield Region(
                source=view.mapping,
                source_offset=view.offset + source + strip.source,
                source_stride=strip.source_stride,
                rows=strip.rows,
                row_bytes=strip.width * item,
                read_place=read_place if _is_counted(spec, rank) else None,
                live_place=Place(source + strip.source, strip.source_stride, view.num_bytes),
            )


Index = tuple[int, ...]


def _blocks(spec: ParameterSpec, shape: Index, rank: int, num_ranks: int) -> Iterator[tuple[Index, Index, Index]]:
    """(first index in this rank's parameter, first index in the global tensor, shape) of each run of indices that stays
    together."""
    axes = range(len(shape))
    placed = [rank * shape[axis] if axis == spec.shard_axis else 0 for axis in axes]
    if not spec.fused:
        yield (0,) * len(shape), tuple(placed), shape
        return
    is_split = spec.fused_axis == spec.shard_axis
    local_start = global_start = 0
    for part in spec.fused:
        size = part.size // num_ranks if is_split else part.size
        first = global_start + (rank * size if is_split else 0)
        yield (
            tuple(local_start if axis == spec.fused_axis else 0 for axis in axes),
            tuple(first if axis == spec.fused_axis else placed[axis] for axis in axes),
            tuple(size if axis == spec.fused_axis else shape[axis] for axis in axes),
        )
        local_start, global_start = local_start + size, global_start + part.size
