"""Manifests: canonical, digested, and closed against hostile bytes."""

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastdeploy_rl import manifest as manifest_module
from fastdeploy_rl.checksum import Fletcher4
from fastdeploy_rl.dtypes import DTYPES, itemsize
from fastdeploy_rl.errors import ManifestError
from fastdeploy_rl.manifest import (
    Fused,
    Manifest,
    Part,
    Run,
    Segment,
    Tensor,
    build_manifest,
    content_digest_of,
    decode,
    encode,
    file_digest,
)
from fastdeploy_rl.version import WeightVersion

SUM = Fletcher4(1, 2, 3, 4).hex()


def segment(locator: str = "arena-0", num_bytes: int = 8192, generation: int = 2) -> Segment:
    return Segment(kind="shm", locator=locator, num_bytes=num_bytes, arena=0, generation=generation)


def whole(name: str = "w", shape: tuple[int, ...] = (4, 6), dtype: str = "F32", offset: int = 0) -> Tensor:
    parts = (Part(segment=0, offset=offset, start=0, stop=0),)
    return Tensor(name=name, dtype=dtype, shape=shape, shard_axis=None, parts=parts, checksum=SUM)


def sharded(*spans: tuple[int, int], name: str = "s", axis: int = 0, offset: int = 4096) -> Tensor:
    parts = tuple(Part(segment=0, offset=offset + 512 * i, start=a, stop=b) for i, (a, b) in enumerate(spans))
    return Tensor(name=name, dtype="F32", shape=(4, 6), shard_axis=axis, parts=parts, checksum=SUM)


def manifest_of(*tensors: Tensor, layout: str = "full", aliases: dict[str, str] | None = None) -> Manifest:
    return build_manifest(WeightVersion(3, 1200), layout, [segment()], tensors, aliases or {})


def example() -> Manifest:
    turned = msgspec.structs.replace(whole("t", offset=1024), is_transposed=True)
    tensors = (whole(), sharded((0, 2), (2, 4)), turned, fused(("q", 0, 4), ("k", 0, 2), offset=2048))
    return manifest_of(*tensors, layout="tp:2", aliases={"z": "w", "head": "w"})


def edited(change: Callable[[dict[str, Any]], None]) -> bytes:
    """Canonical bytes of the example after a change to its JSON."""
    document = json.loads(encode(example()))
    change(document)
    return json.dumps(document, separators=(",", ":")).encode()


# --- round trip and canonical form


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    letters = st.characters(codec="utf-8", exclude_categories=["Cc", "Zl", "Zp"])
    names = draw(st.lists(st.text(letters, min_size=1, max_size=12), max_size=6, unique=True))
    tensors, offset = [], 0
    for name in names:
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
        axis = draw(st.none() | st.integers(0, len(shape) - 1)) if shape else None
        edges = [0, 0] if axis is None else [0, *sorted(draw(st.lists(st.integers(0, shape[axis]), max_size=2)))]
        edges = edges if axis is None else [*edges, shape[axis]]
        dtype = draw(st.sampled_from(DTYPES))
        parts = []
        for start, stop in pairwise(edges):
            parts.append(Part(segment=0, offset=offset, start=start, stop=stop))
            offset += 512 * (1 + 5**4 * itemsize(dtype) // 512)
        checksum = Fletcher4(*(draw(st.integers(0, 2**64 - 1)) for _ in range(4))).hex()
        tensors.append(Tensor(name, dtype, shape, axis, tuple(parts), checksum))
    aliases = {name + "+" + name: name for name in names[:2] if name + "+" + name not in names}
    version = WeightVersion(draw(st.integers(0, 2**63 - 1)), draw(st.integers(0, 2**63 - 1)))
    return build_manifest(version, "full", [segment(num_bytes=offset)], tensors, aliases)


@given(manifests())
def test_decode_undoes_encode(manifest: Manifest) -> None:
    data = encode(manifest)
    assert decode(data) == manifest
    assert encode(decode(data)) == data


def test_order_of_aliases_does_not_show_in_the_bytes() -> None:
    one = manifest_of(whole(), aliases={"a": "w", "b": "w"})
    other = manifest_of(whole(), aliases={"b": "w", "a": "w"})
    assert encode(one) == encode(other)


def test_version_is_readable() -> None:
    assert decode(encode(example())).weight_version == WeightVersion(3, 1200)


def test_empty_and_zero_dim_tensors_are_legal() -> None:
    manifest = manifest_of(whole("scalar", shape=()), whole("empty", shape=(0, 7), offset=512))
    assert [tensor.num_bytes for tensor in decode(encode(manifest)).tensors] == [4, 0]


def test_an_empty_manifest_is_legal() -> None:
    manifest = build_manifest("0.0", "full", [], [], {})
    assert decode(encode(manifest)) == manifest


def test_parts_have_the_bytes_of_their_range() -> None:
    assert [sharded((0, 1), (1, 4)).part_bytes(part) for part in sharded((0, 1), (1, 4)).parts] == [24, 72]
    assert [sharded((0, 1), (1, 6), axis=1).part_bytes(part) for part in sharded((0, 1), (1, 6)).parts] == [16, 80]
    assert whole().part_bytes(whole().parts[0]) == whole().num_bytes == 96


# --- digests

REPLACEMENTS: dict[str, tuple[dict[str, Any], bool, bool]] = {
    "name": ({"name": "v"}, True, True),
    "dtype": ({"dtype": "I32"}, True, True),
    "shape": ({"shape": (6, 4)}, True, True),
    "place": ({"parts": (Part(segment=0, offset=512, start=0, stop=0),)}, False, False),
    "checksum": ({"checksum": Fletcher4(9, 9, 9, 9).hex()}, False, True),
}


@pytest.mark.parametrize("case", REPLACEMENTS)
def test_digests_change_with_what_they_cover_and_nothing_else(case: str) -> None:
    change, is_layout_changed, is_content_changed = REPLACEMENTS[case]
    before, after = manifest_of(whole()), manifest_of(msgspec.structs.replace(whole(), **change))
    assert (before.layout_digest != after.layout_digest) == is_layout_changed
    assert (before.content_digest != after.content_digest) == is_content_changed
    assert file_digest(encode(before)) != file_digest(encode(after))


def test_layout_digest_covers_sharding_layout_and_aliases() -> None:
    variants = [
        manifest_of(sharded((0, 4))),
        manifest_of(sharded((0, 6), axis=1)),
        manifest_of(whole("s")),
        manifest_of(sharded((0, 4)), layout="tp:1"),
        manifest_of(sharded((0, 4)), aliases={"a": "s"}),
    ]
    assert len({variant.layout_digest for variant in variants}) == len(variants)


def test_digests_do_not_depend_on_version_order_or_place() -> None:
    x, y = whole("x"), whole("y", offset=512)
    one = build_manifest("1.1", "full", [segment()], [x, y], {})
    other = build_manifest("2.5", "full", [segment("elsewhere", generation=8)], [y, x], {})
    assert (one.layout_digest, one.content_digest) == (other.layout_digest, other.content_digest)


def test_content_digest_follows_from_sums_in_any_order() -> None:
    manifest = example()
    sums = {tensor.name: Fletcher4.parse(tensor.checksum) for tensor in reversed(manifest.tensors)}
    assert content_digest_of(manifest.layout_digest, sums) == manifest.content_digest
    sums["w"] = Fletcher4(1, 2, 3, 5)
    assert content_digest_of(manifest.layout_digest, sums) != manifest.content_digest


def test_names_cannot_be_glued_together_to_the_same_digest() -> None:
    x, y = Fletcher4(1, 0, 0, 0), Fletcher4(2, 0, 0, 0)
    glued = {f'a","{x.hex()}"],["b': y}
    assert content_digest_of("", {"a": x, "b": y}) != content_digest_of("", glued)


@pytest.mark.parametrize("field", ["layout_digest", "content_digest"])
def test_a_wrong_digest_is_refused(field: str) -> None:
    with pytest.raises(ManifestError, match="digests do not match"):
        decode(edited(lambda document: document.update({field: "0" * 64})))


def test_a_changed_checksum_is_refused() -> None:
    with pytest.raises(ManifestError, match="digests do not match"):
        decode(edited(lambda document: document["tensors"][0].update(checksum="0" * 64)))


# --- what no manifest may say

BAD_TENSORS: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"dtype": "F8"}, "w: unknown dtype 'F8'"),
    "too many dimensions": ({"shape": (1,) * 9}, "w: 9 dimensions are more than 8"),
    "negative size": ({"shape": (-1, 6)}, r"w: -1 is not in \[0, 2\^63\)"),
    "overflowing size": ({"shape": (2**31, 2**31)}, "w: shape .* is larger than any memory"),
    "overflowing size times zero": ({"shape": (0, 2**40, 2**40)}, "w: shape .* is larger than any memory"),
    "no parts": ({"parts": ()}, r"w: parts \[\] do not tile axis None"),
    "two parts of a whole": ({"parts": whole().parts * 2}, "w: parts .* do not tile axis None"),
    "range of a whole": ({"parts": (Part(0, 0, 0, 4),)}, r"w: parts \[\(0, 4\)\] do not tile axis None"),
    "shard axis beyond shape": ({"shard_axis": 2}, r"w: shard axis 2 is no axis of shape \[4, 6\]"),
    "negative shard axis": ({"shard_axis": -1}, "w: shard axis -1 is no axis"),
    "gap": ({"shard_axis": 0, "parts": (Part(0, 0, 0, 1), Part(0, 512, 2, 4))}, "w: parts .* do not tile axis 0"),
    "shared index": ({"shard_axis": 0, "parts": (Part(0, 0, 0, 3), Part(0, 512, 2, 4))}, "do not tile axis 0"),
    "short": ({"shard_axis": 1, "parts": (Part(0, 0, 0, 5),)}, r"w: parts \[\(0, 5\)\] do not tile axis 1"),
    "backwards": ({"shard_axis": 0, "parts": (Part(0, 0, 0, 5), Part(0, 512, 5, 4))}, "do not tile axis 0"),
    "segment": ({"parts": (Part(1, 0, 0, 0),)}, "w: segment 1 of 1 does not exist"),
    "negative segment": ({"parts": (Part(-1, 0, 0, 0),)}, "w: -1 is not in"),
    "negative offset": ({"parts": (Part(0, -512, 0, 0),)}, "w: -512 is not in"),
    "alignment": ({"parts": (Part(0, 256, 0, 0),)}, "w: offset 256 is not a multiple of 512"),
    "end": ({"parts": (Part(0, 8192, 0, 0),)}, "w: bytes 8192 to 8288 leave the 8192 of segment 'arena-0'"),
    "far": ({"parts": (Part(0, 2**62, 0, 0),)}, "w: bytes .* leave the 8192 of segment 'arena-0'"),
    "checksum": ({"checksum": "0" * 63}, "w: checksum must be 64 lowercase hex digits"),
    "upper-case checksum": ({"checksum": "A" * 64}, "w: checksum must be 64 lowercase hex digits"),
    "empty name": ({"name": ""}, "tensor name '' has 0 bytes; 1 to 512 are allowed"),
    "long name": ({"name": "é" * 257}, "has 514 bytes; 1 to 512 are allowed"),
    "surrogate name": ({"name": "\ud800"}, "is not UTF-8"),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_a_bad_tensor_is_refused_by_name(case: str) -> None:
    change, message = BAD_TENSORS[case]
    with pytest.raises(ManifestError, match=message):
        manifest_of(msgspec.structs.replace(whole(), **change))


# --- tensors that are turned, and tensors that hold several


def fused(*runs: tuple[str, int, int], axis: int = 1, name: str = "qkv", **changes: Any) -> Tensor:
    """F32 [4, 6]."""
    return msgspec.structs.replace(whole(name, **changes), fused=Fused(axis, tuple(Run(*run) for run in runs)))


INTERLEAVED = (("q", 0, 2), ("k", 0, 1), ("q", 2, 4), ("k", 1, 2))


def test_transposed_and_fused_tensors_survive_the_wire() -> None:
    turned = msgspec.structs.replace(whole(offset=512), is_transposed=True)
    manifest = manifest_of(fused(*INTERLEAVED), turned)
    assert decode(encode(manifest)) == manifest
    assert b'"is_transposed":true' in encode(manifest)


def test_a_tensor_in_the_engines_layout_is_written_as_it_always_was() -> None:
    """Manifests of publishers that knew no other layout stay valid, and their digests stay what they are."""
    manifest = manifest_of(whole())
    assert b"is_transposed" not in encode(manifest)
    assert b"fused" not in encode(manifest)
    assert manifest.layout_digest == "6882d49489035e9d7b1d3b2df4a7150d3da3a05fb735aa385b1467dfc95f869c"
    spelled = encode(manifest).replace(
        b'"checksum":"%b"' % SUM.encode(), b'"checksum":"%b","fused":null' % SUM.encode()
    )
    with pytest.raises(ManifestError, match="canonical"):
        decode(spelled)


def test_the_layout_digest_tells_turned_and_fused_tensors_apart() -> None:
    variants = [
        manifest_of(whole("qkv")),
        manifest_of(msgspec.structs.replace(whole("qkv"), is_transposed=True)),
        manifest_of(fused(*INTERLEAVED)),
        manifest_of(fused(("q", 0, 4), ("k", 0, 2))),
        manifest_of(fused(("q", 0, 4), ("v", 0, 2))),
    ]
    assert len({variant.layout_digest for variant in variants}) == len(variants)


def test_a_logical_tensor_may_lie_in_two_fused_ones() -> None:
    halves = [fused(("q", 0, 6), name="a"), fused(("q", 6, 8), ("k", 0, 4), name="b", offset=512)]
    assert len(manifest_of(*halves).tensors) == 2


BAD_FUSED: dict[str, tuple[tuple[Tensor, ...], str]] = {
    "no runs": ((fused(),), "qkv: fused of 0 runs; 1 to 8192 are allowed"),
    "short": ((fused(("q", 0, 5)),), r"qkv: runs of 5 indices do not tile axis 1 of \[4, 6\]"),
    "long": ((fused(("q", 0, 7)),), "qkv: runs of 7 indices do not tile"),
    "axis": ((fused(("q", 0, 6), axis=2),), r"qkv: fused axis 2 is no axis of shape \[4, 6\]"),
    "negative axis": ((fused(("q", 0, 6), axis=-1),), "qkv: -1 is not in"),
    "backwards": ((fused(("q", 0, 7), ("k", 1, 0)),), "qkv: run 'k' goes back from 1 to 0"),
    "negative": ((fused(("q", -6, 0)),), "qkv: -6 is not in"),
    "gap": ((fused(("q", 0, 3), ("q", 4, 7)),), r"q: runs \[\(0, 3\), \(4, 7\)\] do not tile a tensor from 0 on"),
    "twice": ((fused(("q", 0, 3), ("q", 0, 3)),), "q: runs .* do not tile a tensor from 0 on"),
    "late start": ((fused(("q", 2, 8)),), r"q: runs \[\(2, 8\)\] do not tile"),
    "name": ((fused(("", 0, 6)),), "tensor name '' has 0 bytes"),
    "own name": ((fused(("qkv", 0, 6)),), "qkv: run 'qkv' has the name of a tensor or an alias"),
    "a tensor's name": ((fused(("w", 0, 6)), whole(offset=512)), "qkv: run 'w' has the name of a tensor"),
    "other shape": (
        (fused(("q", 0, 6)), fused(("q", 6, 12), name="b", offset=512, shape=(5, 6))),
        "q: its runs in qkv and b are of another dtype or shape",
    ),
    "other dtype": (
        (fused(("q", 0, 6)), fused(("q", 6, 12), name="b", offset=512, dtype="I32")),
        "q: its runs in qkv and b are of another dtype or shape",
    ),
    "a vector turned": (
        (msgspec.structs.replace(whole(shape=(4,)), is_transposed=True),),
        r"w: transposed, but its shape \[4\] has no two axes",
    ),
}


@pytest.mark.parametrize("case", BAD_FUSED)
def test_a_bad_fused_tensor_is_refused_by_name(case: str) -> None:
    tensors, message = BAD_FUSED[case]
    with pytest.raises(ManifestError, match=message):
        manifest_of(*tensors)


def test_a_fused_tensor_has_no_second_name() -> None:
    with pytest.raises(ManifestError, match="alias 'a': 'qkv' is fused and supplies no tensor of its own name"):
        manifest_of(fused(("q", 0, 6)), aliases={"a": "qkv"})
    with pytest.raises(ManifestError, match="qkv: run 'q' has the name of a tensor or an alias"):
        manifest_of(fused(("q", 0, 6)), whole(offset=512), aliases={"q": "w"})


def test_runs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = manifest_of(fused(*INTERLEAVED))
    monkeypatch.setattr(manifest_module, "MAX_TENSORS", 4)
    with pytest.raises(ManifestError, match="1 tensors, 0 aliases and 4 runs are more than 4"):
        decode(encode(manifest))
    monkeypatch.setattr(manifest_module, "MAX_TENSORS", 5)
    monkeypatch.setattr(manifest_module, "MAX_RUNS", 3)
    with pytest.raises(ManifestError, match="fused of 4 runs; 1 to 3"):
        decode(encode(manifest))
    monkeypatch.setattr(manifest_module, "MAX_RUNS", 4)
    monkeypatch.setattr(manifest_module, "MAX_PIECES", 3)
    with pytest.raises(ManifestError, match="qkv: 4 runs in 1 parts are more than 3 pieces"):
        decode(encode(manifest))


LOCATORS = ["", ".", "..", "/arena", "a/b", "../arena", "a b", "a\n", "a\0", "é", "x" * 201, "C:\\x", "%2e"]


@pytest.mark.parametrize("locator", LOCATORS)
def test_an_odd_locator_is_refused(locator: str) -> None:
    with pytest.raises(ManifestError, match="a locator is 1 to 200 of"):
        build_manifest("1.0", "full", [segment(locator)], [], {})


def test_a_segment_that_is_being_written_is_refused() -> None:
    with pytest.raises(ManifestError, match="segment 'arena-0': generation 3 is odd"):
        build_manifest("1.0", "full", [segment(generation=3)], [], {})


@pytest.mark.parametrize("layout", ["", "FULL", "tp", "tp:0", "tp:-1", "tp:01", "tp:10000", "full\n", "pp:2"])
def test_an_unknown_layout_is_refused(layout: str) -> None:
    with pytest.raises(ManifestError, match="layout must be full or tp:N"):
        manifest_of(whole(), layout=layout)


def test_a_version_that_is_none_is_refused() -> None:
    with pytest.raises(ManifestError, match="'3' is no weight version"):
        build_manifest("3", "full", [], [], {})


def test_duplicate_names_are_refused() -> None:
    with pytest.raises(ManifestError, match="tensor 'w': named twice"):
        manifest_of(whole(), whole(offset=512))
    with pytest.raises(ManifestError, match="segment 'arena-0': named twice"):
        build_manifest("1.0", "full", [segment(), segment()], [], {})


@pytest.mark.parametrize(
    ("aliases", "message"),
    [
        ({"w": "w"}, "alias 'w': a tensor has that name"),
        ({"a": "nothing"}, "alias 'a': 'nothing' is no tensor of this manifest"),
        ({"a": "b", "b": "w"}, "alias 'a': 'b' is no tensor of this manifest"),
        ({"": "w"}, "tensor name '' has 0 bytes"),
    ],
)
def test_an_alias_names_an_existing_tensor_by_a_new_name(aliases: dict[str, str], message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        manifest_of(whole(), aliases=aliases)


def test_tensors_that_share_bytes_are_refused() -> None:
    with pytest.raises(ManifestError, match="x: overlaps w at byte 512 of segment 0"):
        manifest_of(whole(shape=(40, 6)), whole("x", offset=512))


def test_parts_of_one_tensor_that_share_bytes_are_refused() -> None:
    parts = (Part(0, 512, 0, 2), Part(0, 512, 2, 4))
    with pytest.raises(ManifestError, match="s: overlaps s at byte 512"):
        manifest_of(msgspec.structs.replace(sharded(), parts=parts))


def test_empty_tensors_may_lie_anywhere_in_their_segment() -> None:
    empties = [whole("inside", shape=(0,), offset=512), whole("end", shape=(0,), offset=8192)]
    assert len(manifest_of(whole(shape=(400,)), *empties).tensors) == 3
    with pytest.raises(ManifestError, match="beyond: bytes 8704 to 8704 leave"):
        manifest_of(whole("beyond", shape=(0,), offset=8704))


# --- hostile bytes


@pytest.mark.parametrize(
    ("name", "limit", "message"),
    [
        ("MAX_BYTES", 100, "is larger than 100"),
        ("MAX_TENSORS", 3, "are more than 3"),
        ("MAX_SEGMENTS", 0, "1 segments are more than 0"),
        ("MAX_TENSOR_PARTS", 4, "5 parts of tensors are more than 4"),
        ("MAX_COMMAS", 10, "more than 10 commas"),
        ("MAX_QUOTES", 10, "more than 10 quotes"),
    ],
)
def test_sizes_are_bounded(name: str, limit: int, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode(example())
    monkeypatch.setattr(manifest_module, name, limit)
    with pytest.raises(ManifestError, match=message):
        decode(data)


def test_what_no_reader_would_take_is_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = example()
    monkeypatch.setattr(manifest_module, "MAX_BYTES", 100)
    with pytest.raises(ManifestError, match="is larger than 100"):
        encode(manifest)


@pytest.mark.parametrize("name", ["a\0b", "a\nb", "\x1b[2J", "a\x7f", "a\x85b", "a\u2028b"])
def test_a_name_that_would_garble_a_line_is_refused(name: str) -> None:
    for manifest in (lambda: manifest_of(whole(name)), lambda: manifest_of(whole(), aliases={name: "w"})):
        with pytest.raises(ManifestError, match="control characters"):
            manifest()


HOSTILE: dict[str, Callable[[dict[str, Any]], None]] = {
    "unknown field": lambda d: d.update(extra=1),
    "unknown tensor field": lambda d: d["tensors"][0].update(extra=1),
    "missing field": lambda d: d.pop("aliases"),
    "null": lambda d: d.update(tensors=None),
    "other format": lambda d: d.update(format="fastdeploy_rl.manifest/2"),
    "text for a number": lambda d: d["tensors"][0].update(shape=["4", 6]),
    "float for a number": lambda d: d["tensors"][0].update(shape=[4.0, 6]),
    "bool for a number": lambda d: d["tensors"][0].update(shape=[True, 24]),
    "huge number": lambda d: d["tensors"][0].update(shape=[10**4000, 6]),
    "2^63": lambda d: d["segments"][0].update(num_bytes=2**63),
    "2^64": lambda d: d["segments"][0].update(num_bytes=2**64),
    "negative": lambda d: d["segments"][0].update(num_bytes=-1),
    "negative offset": lambda d: d["tensors"][0]["parts"][0].update(offset=-512),
    "other segment kind": lambda d: d["segments"][0].update(kind="http"),
    "path as a locator": lambda d: d["segments"][0].update(locator="../../etc/passwd"),
    "duplicate name": lambda d: d["tensors"].append(d["tensors"][0]),
    "overlap": lambda d: d["tensors"][1]["parts"][0].update(offset=0),
    "text for a bool": lambda d: d["tensors"][2].update(is_transposed="yes"),
    "unknown run field": lambda d: d["tensors"][3]["fused"]["runs"][0].update(extra=1),
    "run that goes back": lambda d: d["tensors"][3]["fused"]["runs"][0].update(start=9),
    "runs that overlap": lambda d: d["tensors"][3]["fused"]["runs"][1].update(name="q"),
    "alias of an alias": lambda d: d["aliases"].update(y="z"),
    "nan": lambda d: d["segments"][0].update(num_bytes=float("nan")),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_documents_are_refused(case: str) -> None:
    with pytest.raises(ManifestError):
        decode(edited(HOSTILE[case]))


@pytest.mark.parametrize("data", [b"", b"null", b"[]", b"{}", b"\xff\xfe", b'{"format":' + b"[" * 100_000, b"1" * 5000])
def test_bytes_that_are_no_manifest_are_refused(data: bytes) -> None:
    with pytest.raises(ManifestError, match="manifest cannot be read"):
        decode(data)


def test_every_truncation_is_refused() -> None:
    data = encode(example())
    for length in range(len(data)):
        with pytest.raises(ManifestError):
            decode(data[:length])


def test_the_same_manifest_written_otherwise_is_refused() -> None:
    """Two readers must never see different things in one file: repeated keys, spaces and order are no manifest."""
    data = encode(example())
    repeated = data.replace(b'"aliases":{', b'"aliases":{"head":"s",')
    reordered = json.dumps(json.loads(data), separators=(",", ":"), sort_keys=True).encode()
    for other in (data + b"\n", repeated, reordered, json.dumps(json.loads(data)).encode()):
        with pytest.raises(ManifestError, match="canonical"):
            decode(other)


def test_messages_stay_short_whatever_was_sent() -> None:
    for change in (
        lambda d: d.update(format="x" * 10**6),
        lambda d: d.update(version="x" * 10**6),
        lambda d: d["segments"][0].update(locator="x" * 10**6),
        lambda d: d["tensors"][0].update(name="x" * 10**6),
        lambda d: d["tensors"][0].update(checksum="x" * 10**6),
        lambda d: d["aliases"].update({"x" * 10**6: "w"}),
        lambda d: d["tensors"][3]["fused"]["runs"][0].update(name="x" * 10**6),
        lambda d: d["tensors"][3]["fused"]["runs"][0].update(name="x" * 512, start=9),
        lambda d: d["tensors"][3]["fused"]["runs"][0].update(name="x" * 512, start=1, stop=5),
        lambda d: d["aliases"].update({"a": "x" * 10**6}),
    ):
        with pytest.raises(ManifestError) as caught:
            decode(edited(change))
        assert len(str(caught.value)) < 1000


@given(st.binary(max_size=200))
def test_any_bytes_give_an_error_of_ours(data: bytes) -> None:
    with pytest.raises(ManifestError):
        decode(data)


SAMPLE = encode(example())
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.integers(0, len(SAMPLE) - 1), st.integers(1, 255))
def test_one_changed_byte_is_refused(position: int, change: int) -> None:
    """What no digest covers (version, places, generations) may become another valid manifest; nothing else may."""
    data = bytearray(SAMPLE)
    data[position] ^= change
    try:
        manifest = decode(bytes(data))
    except ManifestError:
        return
    assert (manifest.layout_digest, manifest.content_digest) == (example().layout_digest, example().content_digest)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_value_anywhere_gives_a_checked_manifest_or_an_error_of_ours(data: st.DataObject) -> None:
    document = json.loads(SAMPLE)
    holder: Any = document
    for _ in range(data.draw(st.integers(0, 4))):
        inner = [value for value in (holder.values() if isinstance(holder, dict) else holder) if value]
        inner = [value for value in inner if isinstance(value, dict | list)]
        if not inner:
            break
        holder = data.draw(st.sampled_from(inner))
    key = data.draw(st.sampled_from(list(holder) if isinstance(holder, dict) else range(len(holder))))
    holder[key] = data.draw(JSON_VALUES)
    try:
        manifest = decode(
            json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
        )
    except ManifestError:
        return
    assert decode(encode(manifest)) == manifest
