"""Where the bytes of a publication go in the shards of its snapshot."""

import json
from collections import Counter
from itertools import pairwise
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdeploy_rl.dtypes import itemsize
from fastdeploy_rl.errors import ManifestError
from fastdeploy_rl.manifest import Manifest, Part, Segment, Tensor, aligned, build_manifest
from fastdeploy_rl.plan.part_rows import pieces_of
from fastdeploy_rl.publish.snapshot_layout import lay_out, snapshot_manifest

SHARED = Segment(kind="shm", locator="arena", num_bytes=2**40, arena=0, generation=2)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """Tensors whole or in parts, in an arena of any order, of all sizes around the alignment."""
    tensors: list[Tensor] = []
    end = 0
    for number in range(draw(st.integers(1, 6))):
        dtype = draw(st.sampled_from(["F32", "BF16", "U8", "F64"]))
        shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 8, 33]), max_size=3)))
        axis = draw(st.one_of(st.none(), st.integers(0, len(shape) - 1))) if shape else None
        cuts = sorted(draw(st.lists(st.integers(0, shape[axis]), max_size=3))) if axis is not None else []
        bounds = [0, *cuts, shape[axis]] if axis is not None else [0, 0]
        parts = []
        for start, stop in pairwise(bounds):
            parts.append(Part(0, end, start, stop))
            size = prod(shape) * itemsize(dtype)
            end = aligned(end + size) + draw(st.sampled_from([0, 512]))
        tensors.append(Tensor(f"t{number}", dtype, shape, axis, tuple(parts), "0" * 64))
    draw(st.randoms()).shuffle(tensors)
    return build_manifest("3.4", "full", [SHARED], tensors, {"alias": tensors[0].name})


@settings(deadline=None)
@given(manifests(), st.sampled_from([1, 100, 1000, 10**9]))
def test_the_snapshot_is_the_same_version_and_every_part_has_an_aligned_place(manifest: Manifest, limit: int) -> None:
    shards = lay_out(manifest, limit)
    snapshot = snapshot_manifest(manifest, shards)
    assert (snapshot.layout_digest, snapshot.content_digest) == (manifest.layout_digest, manifest.content_digest)
    assert (snapshot.version, snapshot.aliases) == (manifest.version, manifest.aliases)
    for tensor in snapshot.tensors:
        for part in tensor.parts:
            assert part.offset % itemsize(tensor.dtype) == 0
            size = tensor.part_bytes(part)
            assert part.offset % min(512, size & -size or 1) == 0


@settings(deadline=None)
@given(manifests(), st.sampled_from([1, 100, 1000, 10**9]))
def test_a_shard_is_what_the_reference_reads_and_within_its_bound(manifest: Manifest, limit: int) -> None:
    for shard in lay_out(manifest, limit):
        length = int.from_bytes(shard.header[:8], "little")
        assert 8 + length == len(shard.header)
        assert len(shard.header) % 512 == 0
        described = json.loads(shard.header[8:])
        described.pop("__metadata__")
        spans = sorted(entry["data_offsets"] for entry in described.values())
        assert [start for start, _ in spans] == [0, *(stop for _, stop in spans[:-1])]
        assert len(shard.header) + max(stop for _, stop in spans) == shard.num_bytes
        assert (
            sum(entry.num_bytes for entry in shard.entries) <= limit
            or len([entry for entry in shard.entries if entry.num_bytes]) == 1
        )
        for entry in shard.entries:
            about = described[entry.name]
            assert about["data_offsets"][0] == entry.offset - len(shard.header)
            assert prod(about["shape"]) * itemsize(about["dtype"]) == entry.num_bytes


@settings(deadline=None)
@given(manifests(), st.sampled_from([7, 64, 4096]))
def test_the_pieces_of_an_entry_are_its_bytes_in_order_and_tile_the_whole_tensor(manifest: Manifest, size: int) -> None:
    seen = {tensor.name: Counter[int]() for tensor in manifest.tensors}
    for shard in lay_out(manifest, 10**9):
        for entry in shard.entries:
            at = entry.source.offset
            for rows in pieces_of(entry.tensor, entry.source, size):
                assert rows.num_bytes <= size
                assert rows.source_offset == at
                at += rows.num_bytes
                for row in range(rows.rows):
                    start = rows.place_offset + row * rows.place_stride
                    seen[entry.tensor.name].update(range(start, start + rows.row_bytes))
            assert at == entry.source.offset + entry.num_bytes
    for tensor in manifest.tensors:
        assert seen[tensor.name] == Counter(range(tensor.num_bytes))


def test_a_name_in_a_header_stands_for_one_entry() -> None:
    parts = (Part(0, 0, 0, 1), Part(0, 512, 1, 2))
    tensors = [
        Tensor("a", "U8", (2,), 0, parts, "0" * 64),
        Tensor("a#0-1", "U8", (1,), None, (Part(0, 1024, 0, 0),), "0" * 64),
        Tensor("__metadata__", "U8", (1,), None, (Part(0, 1536, 0, 0),), "0" * 64),
    ]
    (shard,) = lay_out(build_manifest("1.1", "full", [SHARED], tensors, {}), 10**9)
    assert [entry.name for entry in shard.entries] == ["a#0-1", "a#1-2", "a#0-1#", "__metadata__#"]


def test_more_shards_than_a_manifest_may_name_are_an_error() -> None:
    tensors = [Tensor(f"t{i}", "U8", (1,), None, (Part(0, 512 * i, 0, 0),), "0" * 64) for i in range(5000)]
    manifest = build_manifest("1.1", "full", [SHARED], tensors, {})
    with pytest.raises(ManifestError, match="5000 segments are more than 4096"):
        snapshot_manifest(manifest, lay_out(manifest, 1))
