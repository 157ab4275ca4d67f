"""A cold start's weights as if an update had brought them, so that they have a receipt of the same kind.

Owns the checksums of what a checkpoint put into memory: `live` of each parameter, and `read` as if the engine's own
global tensors had been published in the engine's layout and dtype. So the checksums of a cold engine and of an updated
one with the same weights in the same layout agree."""

from collections.abc import Sequence
from hashlib import sha256
from math import prod

import msgspec

from fastdeploy_rl._native import Place, Region, transfer
from fastdeploy_rl.checksum import Fletcher4
from fastdeploy_rl.coverage import Coverage, ParameterSpec
from fastdeploy_rl.dtypes import itemsize
from fastdeploy_rl.memory.tensor_view import TensorView
from fastdeploy_rl.runner import ModelRunner
from fastdeploy_rl.update.live_weights import LiveWeights
from fastdeploy_rl.version import WeightVersion


def cold_weights(
    version: WeightVersion, views: dict[str, TensorView], runner: ModelRunner, num_threads: int
) -> LiveWeights:
    """Reads every parameter once. The weights own nothing but the views."""
    specs = [spec for spec in runner.parameters() if spec.coverage is Coverage.UPDATED]
    regions = [_region(spec, views[spec.name], runner.rank, runner.num_ranks) for spec in specs]
    sums = transfer(regions, num_threads)
    live = {spec.name: Fletcher4(*(own or ())) for spec, (_, own) in zip(specs, sums, strict=True)}
    read = {spec.name: Fletcher4(*place) for spec, (place, _) in zip(specs, sums, strict=True) if place is not None}
    return LiveWeights(
        version=version,
        content_digest=sha256("".join(value.hex() for value in live.values()).encode()).hexdigest(),
        views=views,
        read=read,
        live=live,
    )


def specs_digest(specs: Sequence[ParameterSpec]) -> str:
    """Names, dtypes, shapes and split of the model's tensors: what a manifest's layout digest is for a publication."""
    return sha256(msgspec.json.encode([(s.name, s.dtype, s.shape, s.shard_axis) for s in specs])).hexdigest()


def _region(spec: ParameterSpec, view: TensorView, rank: int, num_ranks: int) -> Region:
    """Reads the parameter row by row, each placed in the global
    tensor; of a replicated one only rank 0's bytes count."""
    size = itemsize(spec.dtype)
    axis = spec.shard_axis if spec.shard_axis is not None else 0
    share = 1 if spec.shard_axis is None else num_ranks
    inner = prod(spec.shape[axis:]) * size // share if spec.shape else size
    rows = prod(spec.shape[:axis]) if inner else 0
    stride = inner * share
    owns = spec.shard_axis is not None or rank == 0
    offset = rank * inner if rows and spec.shard_axis is not None else 0
    return Region(
        source=view.mapping,
        source_offset=view.offset,
        source_stride=inner,
        rows=rows,
        row_bytes=inner,
        read_place=Place(offset, stride, rows * stride) if owns else None,
        live_place=Place(0, inner, view.num_bytes),
    )
