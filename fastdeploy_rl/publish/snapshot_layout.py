"""Where each part of a published version goes in the shard files of its snapshot: safetensors, as the reference
implementation reads them.

Owns the cut into shards, the order inside one, and the snapshot's manifest. Pure arithmetic over a
manifest: refuses to know files and memory. Invariant: every part of the manifest has one entry in one shard; entries
follow each other without a gap (the reference demands it), the first of them at a multiple of 512, each aligned to the
largest power of two up to 512 that divides its size, which is a multiple of its element's size; only segments and
offsets differ from the manifest that was published, so that layout and content digest are the same.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from fastdeploy_rl.errors import ManifestError
from fastdeploy_rl.manifest import ALIGNMENT, Manifest, Part, Segment, Tensor, build_manifest
from fastdeploy_rl.memory.file_map import HeaderEntry, encode_header


class Entry(NamedTuple):
    """One part of a tensor: `source` is where it lies in the publication, `offset` where in its shard's file."""

    name: str
    tensor: Tensor
    source: Part
    num_bytes: int
    offset: int = 0


class Shard(NamedTuple):
    """One file: `header` (its length word and padding with it), then the entries in order. `num_bytes`: of it all."""

    file: str
    header: bytes
    entries: tuple[Entry, ...]
    num_bytes: int


def lay_out(manifest: Manifest, shard_bytes: int) -> tuple[Shard, ...]:
    """`shard_bytes`: no shard has more bytes of tensors, but one for a single larger part. Shards follow the order in
    which parts lie in memory: what every rank needs, then rank 0's, and so on; in one, the best aligned come first."""
    shards = list(_cut(_named(_in_memory_order(manifest)), shard_bytes))
    return tuple(_shard(entries, number, len(shards)) for number, entries in enumerate(shards, 1))


def snapshot_manifest(published: Manifest, shards: Sequence[Shard]) -> Manifest:
    """The same version in these files. ManifestError where there are more shards than a manifest may name."""
    places = {
        (entry.tensor.name, entry.source): Part(number, entry.offset, entry.source.start, entry.source.stop)
        for number, shard in enumerate(shards)
        for entry in shard.entries
    }
    manifest = build_manifest(
        published.version,
        published.layout,
        [Segment(kind="file", locator=s.file, num_bytes=s.num_bytes, arena=0, generation=0) for s in shards],
        [
            msgspec.structs.replace(tensor, parts=tuple(places[tensor.name, part] for part in tensor.parts))
            for tensor in published.tensors
        ],
        published.aliases,
    )
    digests = manifest.layout_digest, manifest.content_digest
    if digests != (published.layout_digest, published.content_digest):
        raise ManifestError(f"a snapshot of version {published.version} would not be what was published: {digests}")
    return manifest


def _in_memory_order(manifest: Manifest) -> list[tuple[Tensor, Part]]:
    parts = [(tensor, part) for tensor in manifest.tensors for part in tensor.parts]
    return sorted(parts, key=lambda found: (found[1].segment, found[1].offset))


def _named(parts: Sequence[tuple[Tensor, Part]]) -> Iterator[Entry]:
    """A name in a header stands for one tensor: parts of one get theirs from the range that they hold."""
    taken = {"__metadata__"}
    for tensor, part in parts:
        name = tensor.name if len(tensor.parts) == 1 else f"{tensor.name}#{part.start}-{part.stop}"
        while name in taken:
            name += "#"
        taken.add(name)
        yield Entry(name, tensor, part, tensor.part_bytes(part))


def _cut(entries: Iterator[Entry], shard_bytes: int) -> Iterator[list[Entry]]:
    shard: list[Entry] = []
    num_bytes = 0
    for entry in entries:
        if shard and num_bytes + entry.num_bytes > shard_bytes:
            yield shard
            shard, num_bytes = [], 0
        shard.append(entry)
        num_bytes += entry.num_bytes
    yield shard


def _shard(entries: Sequence[Entry], number: int, count: int) -> Shard:
    entries = sorted(entries, key=lambda entry: -_own_alignment(entry.num_bytes))
    header = _header(entries)
    placed, end = [], len(header)
    for entry in entries:
        placed.append(entry._replace(offset=end))
        end += entry.num_bytes
    return Shard(f"model-{number:05}-of-{count:05}.safetensors", header, tuple(placed), end)


def _own_alignment(num_bytes: int) -> int:
    """The largest power of two up to 512 that divides it; what is empty comes first, too."""
    return min(num_bytes & -num_bytes or ALIGNMENT, ALIGNMENT)


def _header(entries: Sequence[Entry]) -> bytes:
    described = [HeaderEntry(each.name, each.tensor.dtype, _shape(each), each.num_bytes) for each in entries]
    return encode_header(described, {"writer": "fastdeploy_rl"}, ALIGNMENT)


def _shape(entry: Entry) -> list[int]:
    shape, axis = list(entry.tensor.shape), entry.tensor.shard_axis
    if axis is not None:
        shape[axis] = entry.source.stop - entry.source.start
    return shape
