"""Apply mode auto as a table: the facts of a rank, what it picks, and the figures that its reason gives."""

from dataclasses import replace

import pytest

from fastdeploy_rl.config import ALIAS, COPY, KEEP, OFF, REFETCH
from fastdeploy_rl.sources.base import NOT_ASKED, NOT_IMMUTABLE
from fastdeploy_rl.update.apply_choice import (
    ARENA,
    GUESSED_BYTES_PER_S,
    LENT,
    MARGIN_S,
    NOTHING_TO_ALIAS,
    ApplyFacts,
    CopySpeed,
    choose,
    why_no_alias,
)

GB = 1_000_000_000
FACTS = ApplyFacts(
    why_no_alias="",
    is_lent=False,
    overwrites=GB,
    has_checksums=True,
    rollback=KEEP,
    alias_recapture_s=0.0,
    arena_recapture_s=0.0,
    copy_bytes_per_s=10e9,
    alias_needs=0,
    arena_needs=0,
    copy_needs=0,
    free_bytes=2 * GB,
)
"""All are possible; a copy in place stalls 200 ms."""
SLOW_GRAPHS = replace(FACTS, alias_recapture_s=3.0, arena_recapture_s=3.0)


@pytest.mark.parametrize(
    ("facts", "applied", "said"),
    [
        (FACTS, ALIAS, "recapture 0 ms, nothing copied; arena would stall about 0 ms; copy would stall about 200 ms"),
        (SLOW_GRAPHS, COPY, "1000000000 bytes copied and read back in about 200 ms, nothing recaptured"),
        (replace(SLOW_GRAPHS, arena_recapture_s=0.0), ARENA, "recapture 0 ms; alias would stall about 3000 ms"),
        (replace(FACTS, alias_recapture_s=MARGIN_S), ALIAS, "recapture 10 ms, nothing copied"),
        (replace(FACTS, alias_recapture_s=MARGIN_S * 1.1), ARENA, "alias would stall about 11 ms"),
        (replace(SLOW_GRAPHS, copy_bytes_per_s=0.5e9), ALIAS, "copy would stall about 4000 ms"),
        (replace(SLOW_GRAPHS, overwrites=0), ALIAS, "no copy: no memory of the engine's own is live"),
        (replace(SLOW_GRAPHS, has_checksums=False), ALIAS, "no copy: it takes checksums to undo"),
        (replace(SLOW_GRAPHS, rollback=OFF), ALIAS, "no copy: a rollback policy of off has no way back"),
        (replace(SLOW_GRAPHS, rollback=REFETCH), COPY, "alias would stall about 3000 ms"),
        (replace(SLOW_GRAPHS, copy_needs=3 * GB), ALIAS, "no copy: it needs 3000000000 bytes, 2000000000 are free"),
        (replace(FACTS, why_no_alias=NOT_ASKED), ARENA, f"no alias: {NOT_ASKED}; copy would stall about 200 ms"),
        (replace(SLOW_GRAPHS, why_no_alias=NOT_IMMUTABLE), COPY, "arena would stall about 3000 ms"),
        (replace(FACTS, why_no_alias=NOT_ASKED, arena_needs=3 * GB), COPY, "no arena: it needs 3000000000 bytes"),
        (replace(FACTS, is_lent=True), ALIAS, f"recapture 0 ms, nothing copied, {LENT}; arena would stall"),
        (replace(SLOW_GRAPHS, is_lent=True), COPY, "alias would stall about 3000 ms"),
        (
            replace(FACTS, why_no_alias=NOT_ASKED, arena_needs=3 * GB, rollback=OFF),
            COPY,
            "nothing recaptured, though a rollback policy of off has no way back from it",
        ),
        (
            replace(FACTS, why_no_alias=NOT_ASKED, arena_needs=3 * GB, copy_needs=4 * GB),
            ARENA,
            "recapture 0 ms, 3000000000 bytes needed, 2000000000 free",
        ),
        (
            replace(FACTS, why_no_alias=NOT_ASKED, arena_needs=3 * GB, has_checksums=False),
            ARENA,
            "no copy: it takes checksums to undo",
        ),
        (replace(FACTS, alias_needs=3 * GB), ARENA, "no alias: it needs 3000000000 bytes, 2000000000 are free"),
    ],
)
def test_auto_picks_the_smallest_stall_that_is_possible_and_says_its_figures(
    facts: ApplyFacts, applied: str, said: str
) -> None:
    choice = choose(facts)
    assert choice.applied == applied
    assert said in choice.reason


@pytest.mark.parametrize(
    ("aliasable_bytes", "is_immutable", "is_copied_unless_asked", "why"),
    [
        (1, True, False, ""),
        (0, True, False, NOTHING_TO_ALIAS),
        (1, False, False, NOT_IMMUTABLE),
        (1, True, True, NOT_ASKED),
    ],
)
def test_published_memory_is_used_in_place_only_where_it_may_and_can_be(
    aliasable_bytes: int, is_immutable: bool, is_copied_unless_asked: bool, why: str
) -> None:
    found = why_no_alias(
        aliasable_bytes=aliasable_bytes, is_immutable=is_immutable, is_copied_unless_asked=is_copied_unless_asked
    )
    assert found == why


def test_copy_speed_is_what_the_last_large_pass_took() -> None:
    speed = CopySpeed()
    for num_bytes, seconds, expected in (
        (1000, 1.0, GUESSED_BYTES_PER_S),
        (GB, 0.0, GUESSED_BYTES_PER_S),
        (GB, 0.5, 2e9),
        (3 * GB, 1.0, 3e9),
        (1000, 1.0, 3e9),
    ):
        speed.note(num_bytes, seconds)
        assert speed.bytes_per_s == expected
