"""The order and the text of weight versions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy_rl.errors import VersionFormatError
from fastdeploy_rl.version import WeightVersion

NUMBERS = st.integers(0, 2**63 - 1)
VERSIONS = st.builds(WeightVersion, NUMBERS, NUMBERS)


@given(VERSIONS)
def test_text_round_trips(version: WeightVersion) -> None:
    assert WeightVersion.parse(str(version)) == version


@given(VERSIONS, VERSIONS)
def test_order_is_that_of_epoch_then_step(x: WeightVersion, y: WeightVersion) -> None:
    assert (x < y) == ((x.epoch, x.step) < (y.epoch, y.step))
    assert (x == y) == (hash(x) == hash(y) and str(x) == str(y))


def test_a_new_epoch_is_above_every_step_of_the_old_one() -> None:
    assert WeightVersion(3, 2**63 - 1) < WeightVersion(4, 0)


def test_a_foreign_number_is_that_step_of_the_current_epoch() -> None:
    assert WeightVersion.parse("1200", current_epoch=3) == WeightVersion(3, 1200)
    assert WeightVersion.parse("4.1", current_epoch=3) == WeightVersion(4, 1)


def test_a_plain_number_means_nothing_without_an_epoch() -> None:
    with pytest.raises(VersionFormatError, match=r"'1200' is no weight version; write EPOCH\.STEP"):
        WeightVersion.parse("1200")


@pytest.mark.parametrize(
    "text",
    [
        "",
        ".",
        "3.",
        ".3",
        "3.1.2",
        "03.1",
        "3.01",
        "-1.2",
        "+1.2",
        "3.1 ",
        " 3.1",
        "3.1\n",
        "v3",
        "\u0663.\u0661",
        "1e3",
        "3,1",
    ],
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(VersionFormatError):
        WeightVersion.parse(text, current_epoch=3)


@pytest.mark.parametrize("text", [f"{2**63}.0", f"0.{2**63}", f"{2**63}", "9" * 5000])
def test_a_number_too_large_is_refused(text: str) -> None:
    with pytest.raises(VersionFormatError) as caught:
        WeightVersion.parse(text, current_epoch=3)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("number", [-1, 2**63, 1.0, True, "1", None])
def test_a_version_is_made_of_numbers_in_range(number: object) -> None:
    with pytest.raises(VersionFormatError):
        WeightVersion(number, 0)  # type: ignore[arg-type]
    with pytest.raises(VersionFormatError):
        WeightVersion(0, number)  # type: ignore[arg-type]


def test_a_version_does_not_change() -> None:
    version = WeightVersion(3, 1)
    with pytest.raises(AttributeError):
        version.step = 2  # type: ignore[misc]
    assert str(version) == "3.1"
