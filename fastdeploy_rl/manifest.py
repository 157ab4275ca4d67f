"""The manifest: the immutable description of one published version.

Owns the JSON format, its bounds, the rules every manifest keeps, and the three digests. Refuses to know who reads or
writes the file and whether the bytes are there. Invariant: a `Manifest` that came out of `build_manifest` or `decode`
is safe to follow - every part lies inside its segment, no two parts share a byte, names are unique, shards tile their
axis, runs tile theirs and the logical tensors that they name, digests hold.

Sizes and offsets are in bytes, digests are sha256 as 64 hex digits. The format name is `fastdeploy_rl.manifest/1`.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Annotated, Any, Final, Literal

import msgspec

from fastdeploy_rl.checksum import Fletcher4
from fastdeploy_rl.dtypes import DTYPES, itemsize
from fastdeploy_rl.errors import ManifestError, VersionFormatError
from fastdeploy_rl.version import WeightVersion

FORMAT: Final = "fastdeploy_rl.manifest/1"
MAX_BYTES: Final = 64 << 20
MAX_TENSORS: Final = 200_000
MAX_SEGMENTS: Final = 4096
MAX_NAME_BYTES: Final = 512
MAX_DIMENSIONS: Final = 8
MAX_RUNS: Final = 8192
"""Of one fused tensor. All runs of a manifest together count against MAX_TENSORS."""
MAX_PIECES: Final = 65536
"""Runs times parts of one fused tensor: what planning for it may cost."""
MAX_TENSOR_PARTS: Final = 400_000
"""Of all tensors together."""
MAX_COMMAS: Final = 6_000_000
"""In the bytes: more than a manifest within the other bounds has, and few enough to be read in a moment."""
MAX_QUOTES: Final = 10_000_000
"""Likewise."""
ALIGNMENT: Final = 512

_LIMIT = 2**63
_QUOTES_PER_ALIAS = 4  # around its name, and around that of its target; those inside are escaped
# What would make one line of a message or a log two, or hide part of it from a terminal.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_LOCATOR = re.compile(r"[A-Za-z0-9_.-]{1,200}", re.ASCII)
_LAYOUT = re.compile(r"full|tp:([1-9][0-9]{0,3})", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)

Count = Annotated[int, msgspec.Meta(ge=0, le=_LIMIT - 1)]


class Segment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """A run of bytes. `kind` "shm": `locator` names a shared-memory object, without "/"; "file": a file beside
    the manifest, whose parts may begin anywhere, and which knows no arenas (0). `arena`: row of the publisher's lease
    table; `generation`: the even generation of that arena while it holds this version. `publisher`: which of the
    processes that publish this version together; each has a lease table of its own. `is_borrowed`: the trainer's own
    memory, which it changes once nobody leases it."""

    kind: Literal["shm", "file"]
    locator: str
    num_bytes: Count
    arena: Count
    generation: Count
    publisher: Count = 0
    is_borrowed: bool = False


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One contiguous piece of a tensor: indices [start, stop) along its shard axis, at `offset` of segment number
    `segment`. A tensor without a shard axis has one part, 0 to 0."""

    segment: Count
    offset: Count
    start: Count
    stop: Count


class Run(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Indices [start, stop) of the logical tensor `name`, along the axis of the fused tensor that holds them."""

    name: str
    start: Count
    stop: Count


class Fused(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """What a tensor that holds several logical ones consists of: `runs` tile its `axis` (of the shape as stored) in
    order. Interleaved groups (the query heads, key and value of one group, then the next) are just more runs."""

    axis: Count
    runs: tuple[Run, ...]


class Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """One named tensor: global shape, C-contiguous parts that tile `shard_axis` in order, fletcher4 of the *whole*
    tensor's bytes in row-major order (however it is sharded). Shape and axes are those of the tensor as stored.

    `is_transposed`: its last two axes are swapped against the engine's layout (torch's [out, in]). `fused`: it supplies
    the logical tensors that its runs name, in place of its own name."""

    name: str
    dtype: str
    shape: tuple[Count, ...]
    shard_axis: Count | None
    parts: tuple[Part, ...]
    checksum: str
    is_transposed: bool = False
    fused: Fused | None = None

    @property
    def num_bytes(self) -> int:
        """Of the whole tensor."""
        return prod(self.shape) * itemsize(self.dtype)

    def part_bytes(self, part: Part) -> int:
        """Of one part."""
        if self.shard_axis is None:
            return self.num_bytes
        return prod(self.shape[: self.shard_axis] + self.shape[self.shard_axis + 1 :], start=part.stop - part.start) * (
            itemsize(self.dtype)
        )


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Made and checked by `build_manifest` and `decode` only. `aliases`: a further name -> the tensor's name."""

    format: Literal["fastdeploy_rl.manifest/1"]
    version: str
    layout: str
    segments: tuple[Segment, ...]
    tensors: tuple[Tensor, ...]
    aliases: dict[str, str]
    layout_digest: str
    content_digest: str

    @property
    def weight_version(self) -> WeightVersion:
        return WeightVersion.parse(self.version)


def build_manifest(
    version: WeightVersion | str,
    layout: str,
    segments: Sequence[Segment],
    tensors: Sequence[Tensor],
    aliases: Mapping[str, str],
) -> Manifest:
    """A checked manifest with its digests. `layout` is "full" or
    "tp:N". Raises ManifestError naming the tensor at fault."""
    manifest = Manifest(
        format=FORMAT,
        version=str(version),
        layout=layout,
        segments=tuple(segments),
        tensors=tuple(tensors),
        aliases=dict(aliases),
        layout_digest="",
        content_digest="",
    )
    _check(manifest)
    layout_digest, content_digest = _digests(manifest)
    return msgspec.structs.replace(manifest, layout_digest=layout_digest, content_digest=content_digest)


def aligned(offset: int) -> int:
    """The first place from `offset` on where a part may begin."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def layout_ranks(layout: str) -> int:
    """N of "tp:N", 0 for "full". ManifestError for other text."""
    match = _LAYOUT.fullmatch(layout)
    if match is None:
        raise ManifestError(f"manifest: layout must be full or tp:N, got {layout[:80]!r}")
    return int(match[1] or 0)


def encode(manifest: Manifest) -> bytes:
    """The canonical bytes: equal manifests give equal bytes. ManifestError where they are more than `decode` takes."""
    data = _encoded(manifest)
    check_bytes(data)
    return data


def _encoded(manifest: Manifest) -> bytes:
    return msgspec.json.encode(msgspec.structs.replace(manifest, aliases=dict(sorted(manifest.aliases.items()))))


def check_bytes(data: bytes, what: str = "manifest") -> None:
    """ManifestError where the bytes of a manifest, or of another document that describes tensors (`what`), are so many,
    or divided so finely, that parsing them would take long. Looking costs next to nothing."""
    if len(data) > MAX_BYTES:
        raise ManifestError(f"{what} of {len(data)} bytes is larger than {MAX_BYTES}")
    for char, limit, plural in ((b",", MAX_COMMAS, "commas"), (b'"', MAX_QUOTES, "quotes")):
        if data.count(char) > limit:
            raise ManifestError(f"{what} of {len(data)} bytes has more than {limit} {plural}: none needs them")


def decode(data: bytes) -> Manifest:
    """Reads canonical bytes. Strict and bounded: whatever is
    wrong with them raises ManifestError, naming the tensor."""
    check_bytes(data)
    manifest = _parse(data)
    _check(manifest)
    if _encoded(manifest) != data:
        raise ManifestError(f"manifest {manifest.version} is not in canonical form (order, spaces or repeated keys)")
    if (manifest.layout_digest, manifest.content_digest) != _digests(manifest):
        raise ManifestError(f"manifest {manifest.version}: its digests do not match what it describes")
    return manifest


def file_digest(data: bytes) -> str:
    """sha256 of the canonical bytes."""
    return hashlib.sha256(data).hexdigest()


def content_digest_of(layout_digest: str, checksums: Mapping[str, Fletcher4]) -> str:
    """The digest that equal weights in an equal layout share, from the checksum of each tensor (aliases left out).

    Receipts compute theirs with it, from sums of what was read; names in any order.
    """
    return _content_digest(layout_digest, {name: value.hex() for name, value in checksums.items()})


def _content_digest(layout_digest: str, checksums: Mapping[str, str]) -> str:
    return _digest_of([layout_digest, sorted(checksums.items())])


def _digests(manifest: Manifest) -> tuple[str, str]:
    tensors = sorted(manifest.tensors, key=lambda tensor: tensor.name)
    described = [_layout_of(tensor) for tensor in tensors]
    layout_digest = _digest_of([manifest.layout, described, sorted(manifest.aliases.items())])
    # Checksums have one text each, which was looked at: it is what a parsed one would give again.
    return layout_digest, _content_digest(layout_digest, {tensor.name: tensor.checksum for tensor in tensors})


def _layout_of(tensor: Tensor) -> list[object]:
    """What the layout digest covers. Tensors in the engine's own layout are described as they were before others
    could be published, so that their digests stay what they are."""
    described: list[object] = [tensor.name, tensor.dtype, tensor.shape, tensor.shard_axis]
    if tensor.is_transposed or tensor.fused is not None:
        described += [tensor.is_transposed, tensor.fused]
    return described


def _digest_of(described: object) -> str:
    return hashlib.sha256(msgspec.json.encode(described)).hexdigest()


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A manifest as it is read: with its aliases unparsed. A table of millions would take seconds and gigabytes before
    anybody could count it, so that their text is counted first."""

    format: Literal["fastdeploy_rl.manifest/1"]
    version: str
    layout: str
    segments: tuple[Segment, ...]
    tensors: tuple[Tensor, ...]
    aliases: msgspec.Raw
    layout_digest: str
    content_digest: str


_DECODER = msgspec.json.Decoder(_Document)
_ALIASES = msgspec.json.Decoder(dict[str, str])


def _parse(data: bytes) -> Manifest:
    try:
        document = _DECODER.decode(data)
        aliases = _ALIASES.decode(_bounded_aliases(document.aliases))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ManifestError(f"manifest cannot be read: {error!s:.500}") from error
    return Manifest(
        format=document.format,
        version=document.version,
        layout=document.layout,
        segments=document.segments,
        tensors=document.tensors,
        aliases=aliases,
        layout_digest=document.layout_digest,
        content_digest=document.content_digest,
    )


def _bounded_aliases(raw: msgspec.Raw) -> bytes:
    text = bytes(raw)
    if text.count(b'"') - text.count(b'\\"') > _QUOTES_PER_ALIAS * MAX_TENSORS:
        raise ManifestError(f"manifest: more aliases than {MAX_TENSORS}")
    return text


def _check(manifest: Manifest) -> None:
    _check_header(manifest)
    for segment in manifest.segments:
        _check_segment(segment)
    _check_unique(manifest)
    for tensor in manifest.tensors:
        _check_tensor(tensor, manifest.segments)
    _check_logical(manifest)
    _check_overlaps(manifest.tensors)


def _check_header(manifest: Manifest) -> None:
    try:
        WeightVersion.parse(manifest.version)
    except VersionFormatError as error:
        raise ManifestError(f"manifest: {error}") from error
    layout_ranks(manifest.layout)
    num_runs = sum(len(tensor.fused.runs) for tensor in manifest.tensors if tensor.fused is not None)
    if len(manifest.tensors) + len(manifest.aliases) + num_runs > MAX_TENSORS:
        raise ManifestError(
            f"manifest: {len(manifest.tensors)} tensors, {len(manifest.aliases)} aliases and {num_runs} runs are more "
            f"than {MAX_TENSORS}"
        )
    num_parts = sum(len(tensor.parts) for tensor in manifest.tensors)
    if num_parts > MAX_TENSOR_PARTS:
        raise ManifestError(f"manifest: {num_parts} parts of tensors are more than {MAX_TENSOR_PARTS}")
    if len(manifest.segments) > MAX_SEGMENTS:
        raise ManifestError(f"manifest: {len(manifest.segments)} segments are more than {MAX_SEGMENTS}")


def _check_segment(segment: Segment) -> None:
    if not _LOCATOR.fullmatch(segment.locator) or not segment.locator.strip("."):
        raise ManifestError(f"segment {segment.locator[:80]!r}: a locator is 1 to 200 of A-Z a-z 0-9 _ . -")
    _check_counts(
        f"segment {segment.locator!r}", segment.num_bytes, segment.arena, segment.generation, segment.publisher
    )
    if segment.generation % 2:
        raise ManifestError(f"segment {segment.locator!r}: generation {segment.generation} is odd (being written)")


def _check_unique(manifest: Manifest) -> None:
    _refuse_duplicates("segment", (segment.locator for segment in manifest.segments))
    _refuse_duplicates("tensor", (tensor.name for tensor in manifest.tensors))
    tensors = {tensor.name: tensor for tensor in manifest.tensors}
    for alias, target in manifest.aliases.items():
        _check_name(alias)
        if alias in tensors:
            raise ManifestError(f"alias {alias!r}: a tensor has that name")
        if target not in tensors:
            raise ManifestError(f"alias {alias!r}: {target[:80]!r} is no tensor of this manifest")
        if tensors[target].fused is not None:
            raise ManifestError(f"alias {alias!r}: {target!r} is fused and supplies no tensor of its own name")


def _refuse_duplicates(what: str, names: Iterator[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ManifestError(f"{what} {name[:600]!r:.600}: named twice")
        seen.add(name)


def _check_tensor(tensor: Tensor, segments: Sequence[Segment]) -> None:
    _check_name(tensor.name)
    _check_shape(tensor)
    _check_tiling(tensor)
    for part in tensor.parts:
        _check_part(tensor, part, segments)
    if tensor.is_transposed and len(tensor.shape) < 2:
        raise ManifestError(f"{tensor.name}: transposed, but its shape {list(tensor.shape)} has no two axes")
    if tensor.fused is not None:
        _check_fused(tensor, tensor.fused)
    if not _DIGEST.fullmatch(tensor.checksum):
        raise ManifestError(f"{tensor.name}: checksum must be 64 lowercase hex digits, got {tensor.checksum[:80]!r}")


def _check_name(name: str) -> None:
    try:
        num_bytes = len(name) if name.isascii() else len(name.encode())
    except UnicodeEncodeError as error:
        raise ManifestError(f"tensor name {name[:600]!r:.600} is not UTF-8") from error
    if not 1 <= num_bytes <= MAX_NAME_BYTES:
        raise ManifestError(f"tensor name {name[:80]!r} has {num_bytes} bytes; 1 to {MAX_NAME_BYTES} are allowed")
    if _CONTROL.search(name):
        raise ManifestError(f"tensor name {name[:600]!r:.600} has control characters, or breaks the line")


def _check_shape(tensor: Tensor) -> None:
    if tensor.dtype not in DTYPES:
        raise ManifestError(f"{tensor.name}: unknown dtype {tensor.dtype[:80]!r}; known are {' '.join(DTYPES)}")
    if len(tensor.shape) > MAX_DIMENSIONS:
        raise ManifestError(f"{tensor.name}: {len(tensor.shape)} dimensions are more than {MAX_DIMENSIONS}")
    _check_counts(tensor.name, *tensor.shape)
    # An axis without indices makes the others no smaller: who walks them walks just as far.
    sizes = [size or 1 for size in tensor.shape] if 0 in tensor.shape else tensor.shape
    if prod(sizes, start=itemsize(tensor.dtype)) >= _LIMIT:
        raise ManifestError(f"{tensor.name}: shape {list(tensor.shape)} is larger than any memory")


def _check_tiling(tensor: Tensor) -> None:
    if tensor.shard_axis is None and len(tensor.parts) == 1 and tensor.parts[0].start == tensor.parts[0].stop == 0:
        return
    axis, spans = tensor.shard_axis, [(part.start, part.stop) for part in tensor.parts]
    if axis is not None and not 0 <= axis < len(tensor.shape):
        raise ManifestError(f"{tensor.name}: shard axis {axis} is no axis of shape {list(tensor.shape)}")
    tiles = False
    if axis is not None:
        starts, stops = [0] + [stop for _, stop in spans], [start for start, _ in spans] + [tensor.shape[axis]]
        tiles = bool(spans) and starts == stops and all(start <= stop for start, stop in spans)
    if not tiles:
        raise ManifestError(f"{tensor.name}: parts {_shorten(spans)} do not tile axis {axis} of {list(tensor.shape)}")


def _check_part(tensor: Tensor, part: Part, segments: Sequence[Segment]) -> None:
    _check_counts(tensor.name, part.segment, part.offset)
    if part.segment >= len(segments):
        raise ManifestError(f"{tensor.name}: segment {part.segment} of {len(segments)} does not exist")
    if part.offset % ALIGNMENT and segments[part.segment].kind == "shm":
        raise ManifestError(f"{tensor.name}: offset {part.offset} is not a multiple of {ALIGNMENT}")
    segment, stop = segments[part.segment], part.offset + tensor.part_bytes(part)
    if stop > segment.num_bytes:
        raise ManifestError(
            f"{tensor.name}: bytes {part.offset} to {stop} leave the {segment.num_bytes} of segment {segment.locator!r}"
        )


def _check_fused(tensor: Tensor, fused: Fused) -> None:
    """Its runs tile its axis, in order."""
    _check_counts(tensor.name, fused.axis)
    if fused.axis >= len(tensor.shape):
        raise ManifestError(f"{tensor.name}: fused axis {fused.axis} is no axis of shape {list(tensor.shape)}")
    if not 1 <= len(fused.runs) <= MAX_RUNS:
        raise ManifestError(f"{tensor.name}: fused of {len(fused.runs)} runs; 1 to {MAX_RUNS} are allowed")
    if len(fused.runs) * len(tensor.parts) > MAX_PIECES:
        raise ManifestError(
            f"{tensor.name}: {len(fused.runs)} runs in {len(tensor.parts)} parts are more than {MAX_PIECES} pieces"
        )
    for run in fused.runs:
        _check_name(run.name)
        _check_counts(tensor.name, run.start, run.stop)
        if run.start > run.stop:
            raise ManifestError(f"{tensor.name}: run {run.name!r} goes back from {run.start} to {run.stop}")
    length = sum(run.stop - run.start for run in fused.runs)
    if length != tensor.shape[fused.axis]:
        raise ManifestError(
            f"{tensor.name}: runs of {length} indices do not tile axis {fused.axis} of {list(tensor.shape)}"
        )


def _check_logical(manifest: Manifest) -> None:
    """Each logical tensor is supplied once: whole under its own name, or by runs that tile it and agree on the rest."""
    taken = manifest.aliases.keys() | {tensor.name for tensor in manifest.tensors}
    runs: dict[str, list[tuple[int, int, Tensor]]] = {}
    for tensor in manifest.tensors:
        for run in tensor.fused.runs if tensor.fused is not None else ():
            if run.name in taken:
                raise ManifestError(f"{tensor.name}: run {run.name!r} has the name of a tensor or an alias")
            runs.setdefault(run.name, []).append((run.start, run.stop, tensor))
    for name, supplied in runs.items():
        _check_supplied(name, sorted(supplied, key=lambda run: run[:2]))


def _check_supplied(name: str, runs: Sequence[tuple[int, int, Tensor]]) -> None:
    if [start for start, _, _ in runs] != [0] + [stop for _, stop, _ in runs[:-1]]:
        raise ManifestError(f"{name}: runs {_shorten([run[:2] for run in runs])} do not tile a tensor from 0 on")
    first = runs[0][2]
    for _, _, tensor in runs[1:]:
        if tensor is not first and _apart_from_fused_axis(tensor) != _apart_from_fused_axis(first):
            raise ManifestError(f"{name}: its runs in {first.name} and {tensor.name} are of another dtype or shape")


def _apart_from_fused_axis(tensor: Tensor) -> object:
    axis = tensor.fused.axis if tensor.fused is not None else len(tensor.shape)
    return tensor.dtype, tensor.is_transposed, axis, tensor.shape[:axis], tensor.shape[axis + 1 :]


def _check_overlaps(tensors: Sequence[Tensor]) -> None:
    spans = sorted(
        (part.segment, part.offset, part.offset + num_bytes, tensor.name)
        for tensor in tensors
        for part in tensor.parts
        if (num_bytes := tensor.part_bytes(part))
    )
    for before, after in pairwise(spans):
        if before[0] == after[0] and after[1] < before[2]:
            raise ManifestError(f"{after[3]}: overlaps {before[3]} at byte {after[1]} of segment {after[0]}")


def _check_counts(what: str, *counts: int) -> None:
    """The bounds that the decoder enforces, for manifests built in memory."""
    for count in counts:
        if not 0 <= count < _LIMIT:
            raise ManifestError(f"{what}: {count} is not in [0, 2^63)")


def _shorten(values: Sequence[Any]) -> str:
    return str(list(values[:8]))[:-1] + (", ...]" if len(values) > 8 else "]")
