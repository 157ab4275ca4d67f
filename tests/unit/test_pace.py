"""The pace of staging: pieces in order, and rests only while requests are computed and there is time."""

import time

from fastdeploy_rl.update.pace import PIECE_BYTES, Pace, in_pieces

SECOND_NS = 1_000_000_000


def test_pieces_are_all_items_in_order_and_each_is_large_enough_but_the_last() -> None:
    sizes = [PIECE_BYTES // 2, PIECE_BYTES // 2, 3 * PIECE_BYTES, 1, 2]
    pieces = list(in_pieces(sizes, lambda size: size))
    assert pieces == [sizes[:2], sizes[2:3], sizes[3:]]
    assert list(in_pieces([], lambda size: size)) == []


def test_nobody_rests_where_nothing_is_computed() -> None:
    pace = Pace(lambda: False, time.monotonic_ns() + 60 * SECOND_NS)
    pace.rest(0.01)
    assert pace.rested_s == 0


def test_who_works_beside_requests_rests_for_longer_than_the_work() -> None:
    pace = Pace(lambda: True, time.monotonic_ns() + 60 * SECOND_NS)
    pace.rest(0.01)
    assert pace.rested_s > 0.01


def test_nobody_rests_when_half_of_the_time_is_over() -> None:
    pace = Pace(lambda: True, time.monotonic_ns())
    pace.rest(0.01)
    assert pace.rested_s == 0


def test_little_work_is_rested_from_when_it_has_become_enough() -> None:
    pace = Pace(lambda: True, time.monotonic_ns() + 60 * SECOND_NS)
    for _ in range(4):
        pace.rest(0.001)
    assert pace.rested_s == 0
    pace.rest(0.001)
    assert pace.rested_s > 0.005


def test_what_was_done_while_nothing_was_computed_is_not_rested_from_later() -> None:
    is_computing = False
    pace = Pace(lambda: is_computing, time.monotonic_ns() + 60 * SECOND_NS)
    pace.rest(600.0)
    is_computing = True
    pace.rest(0.001)
    assert pace.rested_s == 0


def test_a_rest_ends_when_half_of_the_time_is_over() -> None:
    begun = time.monotonic_ns()
    pace = Pace(lambda: True, begun + SECOND_NS // 5)
    pace.rest(3600.0)
    assert 0 < pace.rested_s < 3600
