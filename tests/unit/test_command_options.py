"""Command options as the one number that travels on the board."""

import itertools

import pytest

from fastdeploy_rl.command_options import CommandOptions, tags_of
from fastdeploy_rl.config import IN_FLIGHT, KV_POLICIES, ON_TIMEOUT, SLEEP_LEVELS
from fastdeploy_rl.errors import ConfigurationError
from fastdeploy_rl.lifecycle import Tag

TAGS = [frozenset(chosen) for count in range(4) for chosen in itertools.combinations(Tag, count)]
EVERY = [
    CommandOptions(*words)
    for words in itertools.product(
        IN_FLIGHT, ("", *KV_POLICIES), ON_TIMEOUT, TAGS, (0, *SLEEP_LEVELS), TAGS, (False, True)
    )
]


def test_every_combination_comes_back_from_its_own_number() -> None:
    numbers = [options.encode() for options in EVERY]
    assert len(set(numbers)) == len(EVERY)
    assert [CommandOptions.decode(number) for number in numbers] == EVERY


def test_no_other_number_is_taken() -> None:
    numbers = {options.encode() for options in EVERY}
    for number in [*range(2**15), 2**63, 2**64 - 1]:
        assert CommandOptions.is_number(number) == (number in numbers)
        if number not in numbers:
            with pytest.raises(ConfigurationError, match="is no number of command options"):
                CommandOptions.decode(number)


@pytest.mark.parametrize("wrong", [{"in_flight": "drop"}, {"kv": "maybe"}, {"on_timeout": "wait"}, {"level": 3}])
def test_a_word_that_is_none_is_refused_by_name(wrong: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        CommandOptions(**wrong).checked()


def test_tags_are_named_as_a_list_or_as_fastdeploy_does() -> None:
    assert tags_of("weight, kv_cache") == tags_of(["kv_cache", "weight"]) == {Tag.WEIGHT, Tag.KV_CACHE}
    assert tags_of(None) == set(Tag)
    for unknown in ("weights", "weight,", ["weight", 3], "", []):
        with pytest.raises(ConfigurationError, match="tags are weight, kv_cache, graph"):
            tags_of(unknown)
