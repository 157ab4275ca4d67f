"""A publication and a model match exactly, or every difference is named."""

import dataclasses
from itertools import count

import pytest
from msgspec.structs import replace

from fastdeploy_rl.checksum import Fletcher4
from fastdeploy_rl.coverage import Coverage, FusedPart, ParameterSpec, check_coverage
from fastdeploy_rl.dtypes import DTYPES
from fastdeploy_rl.errors import ConfigurationError, CoverageError
from fastdeploy_rl.manifest import Fused, Manifest, Part, Run, Segment, Tensor, build_manifest

Published = tuple[str, str, tuple[int, ...], int]


def published(*tensors: Published, aliases: dict[str, str] | None = None) -> Manifest:
    """Tensors as (name, dtype, shape, first sum of the checksum)."""
    offsets = count(0, 1 << 20)
    listed = [
        Tensor(name, dtype, shape, None, (Part(0, next(offsets), 0, 0),), Fletcher4(a, 0, 0, 0).hex())
        for name, dtype, shape, a in tensors
    ]
    segments = [Segment(kind="shm", locator="arena", num_bytes=1 << 40, arena=0, generation=0)]
    return build_manifest("3.1200", "full", segments, listed, aliases or {})


def spec(name: str, shape: tuple[int, ...] = (4,), dtype: str = "F32", **more: object) -> ParameterSpec:
    return ParameterSpec(name, dtype, shape, None, **more)  # type: ignore[arg-type]


def tied(name: str, to: str) -> ParameterSpec:
    return spec(name, coverage=Coverage.TIED, tied_to=to)


def problems(manifest: Manifest, *specs: ParameterSpec) -> list[str]:
    """The lines below the first one."""
    with pytest.raises(CoverageError) as caught:
        check_coverage(manifest, specs)
    return str(caught.value).split("\n")[1:]


def sources(manifest: Manifest, *specs: ParameterSpec) -> dict[str, str]:
    """The published name that feeds each logical tensor of the model."""
    return {name: logical.name for name, logical in check_coverage(manifest, specs).sources.items()}


def test_each_parameter_is_fed_by_its_name() -> None:
    manifest = published(("b", "F32", (4,), 1), ("a", "F32", (), 2))
    assert sources(manifest, spec("a", ()), spec("b")) == {"a": "a", "b": "b"}


def test_every_problem_is_listed_at_once_one_a_line() -> None:
    manifest = published(
        ("model.embed.weight", "F32", (577,), 1),
        ("foo", "F32", (1,), 2),
        ("ids", "I64", (4,), 3),
        ("ok", "F32", (4,), 4),
    )
    specs = [spec("model.embed.weight", (576,)), spec("model.norm.weight"), spec("ids"), spec("ok")]
    with pytest.raises(CoverageError) as caught:
        check_coverage(manifest, specs)
    assert str(caught.value).split("\n") == [
        "version 3.1200 does not fit this model, 4 problems:",
        "model.embed.weight: shape expected [576] got [577]",
        "model.norm.weight: missing",
        "ids: dtype expected F32 got I64",
        "foo: not a tensor of this model",
    ]


def test_a_tensor_can_be_wrong_in_two_ways() -> None:
    found = problems(published(("x", "U8", (2, 2), 1)), spec("x"))
    assert found == ["x: shape expected [4] got [2, 2]", "x: dtype expected F32 got U8"]


def test_equal_size_in_another_shape_is_refused() -> None:
    assert problems(published(("x", "F32", (2, 2), 1)), spec("x")) == ["x: shape expected [4] got [2, 2]"]


def test_long_lists_are_bounded() -> None:
    found = problems(published(), *(spec(f"w{i:03}") for i in range(57)))
    assert found[:20] == [f"w{i:03}: missing" for i in range(20)]
    assert found[20:] == ["... and 37 more"]


def test_exactly_twenty_problems_are_all_listed() -> None:
    assert problems(published(), *(spec(f"w{i}") for i in range(20)))[-1] == "w19: missing"


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_only_what_a_kernel_casts_is_accepted(source: str, target: str) -> None:
    manifest, model = published(("x", source, (4,), 1)), spec("x", dtype=target)
    if source == target or {source, target} <= {"F32", "F16", "BF16"}:
        assert sources(manifest, model) == {"x": "x"}
    else:
        assert problems(manifest, model) == [f"x: dtype expected {target} got {source}"]


TIED_MODEL = (spec("embed"), tied("head", "embed"))


@pytest.mark.parametrize("name", ["embed", "head"])
def test_a_tied_group_is_accepted_under_either_name(name: str) -> None:
    assert sources(published((name, "F32", (4,), 1)), *TIED_MODEL) == {"embed": name, "head": name}


def test_a_tied_group_may_be_published_twice_with_equal_values() -> None:
    manifest = published(("head", "F32", (4,), 1), ("embed", "F32", (4,), 1))
    assert sources(manifest, *TIED_MODEL) == {"embed": "embed", "head": "embed"}


def test_a_tied_group_published_with_two_values_is_refused() -> None:
    manifest = published(("head", "F32", (4,), 1), ("embed", "F32", (4,), 2))
    assert problems(manifest, *TIED_MODEL) == ["head: tied to embed, but published with other values"]


def test_both_names_of_a_tied_group_are_checked() -> None:
    manifest = published(("head", "F32", (5,), 1), ("embed", "F32", (4,), 1))
    assert problems(manifest, *TIED_MODEL) == ["head: shape expected [4] got [5]"]


def test_a_missing_tied_group_is_one_problem_that_says_both_names() -> None:
    assert problems(published(), *TIED_MODEL) == ["embed: missing (or its tied name head)"]


def test_an_alias_feeds_tied_and_untied_models() -> None:
    manifest = published(("head", "F32", (4,), 1), aliases={"embed": "head"})
    expected = {"embed": "head", "head": "head"}
    assert sources(manifest, *TIED_MODEL) == expected
    assert sources(manifest, spec("embed"), spec("head")) == expected


def test_an_alias_that_the_model_does_not_have_is_surplus() -> None:
    manifest = published(("embed", "F32", (4,), 1), aliases={"other": "embed"})
    assert problems(manifest, spec("embed")) == ["other: not a tensor of this model"]


def test_a_tensor_that_is_only_used_through_its_alias_is_surplus() -> None:
    manifest = published(("other", "F32", (4,), 1), aliases={"embed": "other"})
    assert problems(manifest, spec("embed")) == ["other: not a tensor of this model"]


KEPT = [Coverage.DERIVED, Coverage.FROZEN, Coverage.TRANSIENT]


@pytest.mark.parametrize("kind", KEPT)
def test_tensors_that_take_nothing_are_not_missed(kind: Coverage) -> None:
    assert sources(published(("x", "F32", (4,), 1)), spec("x"), spec("cache", coverage=kind)) == {"x": "x"}


@pytest.mark.parametrize("kind", KEPT)
def test_tensors_that_take_nothing_cannot_be_published(kind: Coverage) -> None:
    manifest = published(("cache", "F32", (4,), 1))
    assert problems(manifest, spec("cache", coverage=kind)) == [
        f"cache: {kind.value} in this engine, cannot be published"
    ]


CONTRADICTIONS = {
    "a model names x twice": [spec("x"), spec("x")],
    "head: tied to None": [spec("head", coverage=Coverage.TIED)],
    "head: tied to 'embed'": [tied("head", "embed")],
    "head: tied to 'rope'": [spec("rope", coverage=Coverage.DERIVED), tied("head", "rope")],
    "b: tied to 'a'": [spec("x"), tied("a", "x"), tied("b", "a")],
    "head: tied to x, but of another shape": [spec("x", (5,)), tied("head", "x")],
    "head: tied to y, but of another shape": [spec("y", dtype="BF16"), tied("head", "y")],
}


@pytest.mark.parametrize("message", CONTRADICTIONS)
def test_a_model_that_contradicts_itself_is_refused(message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check_coverage(published(("x", "F32", (4,), 1)), CONTRADICTIONS[message])


# --- logical tensors: who fuses, turns or pads them does not matter, but they must fit


def stored(name: str, shape: tuple[int, ...], first: int = 1, offset: int = 0, **changes: object) -> Tensor:
    """F32, whole; `changes`: is_transposed, fused."""
    checksum = Fletcher4(first, 0, 0, 0).hex()
    return Tensor(name, "F32", shape, None, (Part(0, offset << 20, 0, 0),), checksum, **changes)  # type: ignore[arg-type]


def publication(*tensors: Tensor, aliases: dict[str, str] | None = None) -> Manifest:
    placed = [replace(tensor, parts=(Part(0, i << 20, 0, 0),)) for i, tensor in enumerate(tensors)]
    segments = [Segment(kind="shm", locator="arena", num_bytes=1 << 40, arena=0, generation=0)]
    return build_manifest("3.1200", "full", segments, placed, aliases or {})


def qkv(q: int, k: int) -> Tensor:
    runs = (Run("q", 0, q), Run("k", 0, k), Run("v", 0, k))
    return stored("qkv", (8, q + 2 * k), fused=Fused(1, runs))


FUSED_MODEL = spec(
    "qkv_proj", (8, 8), fused=tuple(FusedPart(n, s) for n, s in (("q", 4), ("k", 2), ("v", 2))), fused_axis=1
)
SPLIT_MODEL = (spec("q", (8, 4)), spec("k", (8, 2)), spec("v", (8, 2)))
SPLIT = (stored("q", (8, 4)), stored("k", (8, 2)), stored("v", (8, 2)))


@pytest.mark.parametrize("model", [(FUSED_MODEL,), SPLIT_MODEL])
@pytest.mark.parametrize("tensors", [(qkv(4, 2),), SPLIT])
def test_a_fused_tensor_and_its_parts_cover_each_other(
    tensors: tuple[Tensor, ...], model: tuple[ParameterSpec, ...]
) -> None:
    assert sources(publication(*tensors), *model) == {name: name for name in "qkv"}


def test_a_fused_tensor_with_other_heads_is_refused_by_its_runs() -> None:
    expected = [
        "q: shape expected [8, 4] got [8, 6] (run of qkv)",
        "k: shape expected [8, 2] got [8, 1] (run of qkv)",
        "v: shape expected [8, 2] got [8, 1] (run of qkv)",
    ]
    assert problems(publication(qkv(6, 1)), *SPLIT_MODEL) == expected
    assert problems(publication(qkv(6, 1)), FUSED_MODEL) == expected


def test_a_missing_part_is_named_with_what_it_is_part_of() -> None:
    assert problems(publication(*SPLIT[:2]), FUSED_MODEL) == ["v: missing (part of qkv_proj)"]


def test_a_run_that_the_model_does_not_have_is_named_with_its_tensor() -> None:
    assert problems(publication(qkv(4, 2)), *SPLIT_MODEL[:2]) == ["v: not a tensor of this model (run of qkv)"]


def test_the_engines_own_fused_name_is_answered_with_what_to_publish() -> None:
    found = problems(publication(*SPLIT, stored("qkv_proj", (8, 8))), FUSED_MODEL)
    assert found == [
        "qkv_proj: this engine fuses it from q, k, v; publish those, or say how it is fused (a convention)"
    ]


def test_a_turned_tensor_is_compared_as_the_engine_has_it() -> None:
    assert sources(publication(stored("w", (6, 4), is_transposed=True)), spec("w", (4, 6))) == {"w": "w"}
    assert sources(publication(stored("w", (6, 4))), spec("w", (4, 6), is_transposed=True)) == {"w": "w"}
    turned = stored("w", (6, 4), is_transposed=True)
    assert sources(publication(turned), spec("w", (6, 4), is_transposed=True)) == {"w": "w"}


def test_a_wrong_orientation_is_hinted_at_both_ways() -> None:
    assert problems(publication(stored("w", (6, 4))), spec("w", (4, 6))) == [
        "w: shape expected [4, 6] got [6, 4] (transposed?)"
    ]
    assert problems(publication(stored("w", (4, 6), is_transposed=True)), spec("w", (4, 6))) == [
        "w: shape expected [4, 6] got [6, 4] (published as transposed: is it? linear weights are [in, out] here)"
    ]


def test_the_mend_for_weights_that_lie_the_other_way_round_is_said_once_and_first() -> None:
    with pytest.raises(CoverageError) as caught:
        check_coverage(publication(stored("v", (6, 4)), stored("w", (6, 4))), [spec("v", (4, 6)), spec("w", (4, 6))])
    first, *rest = str(caught.value).split("\n")
    assert "convention=hugging_face" in first
    assert len(rest) == 2
    assert "convention" not in "".join(rest)


@pytest.mark.parametrize("rows", [5, 6, 8, 100])
def test_a_vocabulary_may_be_padded_differently(rows: int) -> None:
    model = spec("embed", (8, 2), vocab_rows=5)
    assert sources(publication(stored("embed", (rows, 2))), model) == {"embed": "embed"}


def test_a_vocabulary_with_too_few_rows_is_refused() -> None:
    model = spec("embed", (8, 2), vocab_rows=5)
    assert problems(publication(stored("embed", (4, 2))), model) == [
        "embed: vocabulary of at least 5 rows expected, got 4"
    ]
    assert problems(publication(stored("embed", (5, 3))), model) == ["embed: shape expected [8, 2] got [5, 3]"]


PADDED = spec("embed", (8, 2), vocab_rows=5)
PADDED_TIED = spec("head", (8, 2), vocab_rows=5, coverage=Coverage.TIED, tied_to="embed")


def test_tied_vocabularies_are_accepted_under_both_names_where_stored_alike() -> None:
    twice = publication(stored("embed", (6, 2)), stored("head", (6, 2)))
    assert sources(twice, PADDED, PADDED_TIED) == {"embed": "embed", "head": "embed"}
    assert [logical.name for logical in check_coverage(twice, [PADDED, PADDED_TIED]).unused] == ["head"]
    assert problems(publication(stored("embed", (6, 2)), stored("head", (6, 2), 2)), PADDED, PADDED_TIED) == [
        "head: tied to embed, but published with other values"
    ]


@pytest.mark.parametrize("other", [stored("head", (7, 2)), stored("head", (2, 6), is_transposed=True)])
def test_tied_names_in_two_layouts_are_refused(other: Tensor) -> None:
    """Equal values have other checksums there, so nothing shows that they are equal."""
    assert problems(publication(stored("embed", (6, 2)), other), PADDED, PADDED_TIED) == [
        "head: tied to embed, but published in another layout, so that nothing shows they are equal"
    ]


def test_tied_fused_parameters_are_tied_part_by_part() -> None:
    twin = spec("twin", (8, 8), coverage=Coverage.TIED, tied_to="qkv_proj", fused_axis=1)
    twin = dataclasses.replace(twin, fused=tuple(FusedPart(n, s) for n, s in (("a", 4), ("b", 2), ("c", 2))))
    assert sources(publication(qkv(4, 2)), FUSED_MODEL, twin) == dict(zip("qkvabc", "qkvqkv", strict=True))
    mixed = (stored("q", (8, 4)), stored("b", (8, 2)), stored("c", (8, 2)))
    assert sources(publication(*mixed), FUSED_MODEL, twin) == dict(zip("qkvabc", "qbcqbc", strict=True))


BAD_SPECS = {
    "w: transposed, but its shape": spec("w", (4,), is_transposed=True),
    "w: fused axis 2 is no axis": spec("w", (4, 4), fused=(FusedPart("a", 4),), fused_axis=2),
    r"w: its parts \[1, 2\] do not add up to axis 0": spec("w", (4,), fused=(FusedPart("a", 1), FusedPart("b", 2))),
    "w: a vocabulary of 5 rows does not fit": spec("w", (4, 4), vocab_rows=5),
    "w: a vocabulary of 0 rows does not fit": spec("w", (), vocab_rows=0),
    "a model names a twice": spec("w", (4,), fused=(FusedPart("a", 2), FusedPart("a", 2))),
}


@pytest.mark.parametrize("message", BAD_SPECS)
def test_a_spec_that_contradicts_itself_is_refused(message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check_coverage(publication(), [BAD_SPECS[message]])
