"""A publication and a model match exactly, or every difference is named."""

from itertools import count

import pytest

from fastdeploy_rl.checksum import Fletcher4
from fastdeploy_rl.coverage import Coverage, ParameterSpec, check_coverage
from fastdeploy_rl.dtypes import DTYPES
from fastdeploy_rl.errors import ConfigurationError, CoverageError
from fastdeploy_rl.manifest import Manifest, Part, Segment, Tensor, build_manifest

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
