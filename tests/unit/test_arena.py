"""The engine's two alternating arenas."""

import numpy as np
import pytest

from fastdeploy_rl._native import Mapping
from fastdeploy_rl.errors import SegmentError
from fastdeploy_rl.memory.arena import ArenaPair


def test_two_arenas_take_turns_and_are_reused() -> None:
    pair = ArenaPair()
    first = pair.acquire(10_000)
    second = pair.acquire(10_000)
    assert first.address != second.address
    pair.release(first)
    assert pair.acquire(10_000) is first
    assert pair.num_bytes == first.num_bytes + second.num_bytes


def test_a_third_arena_is_refused_and_the_two_stay_as_they_are() -> None:
    pair = ArenaPair()
    first, second = pair.acquire(4096), pair.acquire(4096)
    with pytest.raises(SegmentError, match="both arenas are in use"):
        pair.acquire(1)
    pair.release(second)
    assert pair.acquire(1) is second
    assert not first.is_closed


def test_a_small_free_arena_is_replaced_by_a_larger_one() -> None:
    pair = ArenaPair()
    small = pair.acquire(4096)
    pair.release(small)
    pair.release(pair.acquire(4096))
    large = pair.acquire(1 << 20)
    assert large.num_bytes >= 1 << 20


def test_releasing_what_was_never_handed_out_is_refused() -> None:
    pair = ArenaPair()
    mapping = pair.acquire(4096)
    pair.release(mapping)
    for stranger in (mapping, Mapping.private(4096)):
        with pytest.raises(SegmentError, match="no arena"):
            pair.release(stranger)


def test_drop_returns_all_memory_and_the_pair_can_be_used_again() -> None:
    pair = ArenaPair()
    held, released = pair.acquire(4096), pair.acquire(8192)
    pair.release(released)
    pair.drop()
    assert (pair.num_bytes, held.is_closed, released.is_closed) == (0, True, True)
    assert pair.acquire(4096).num_bytes == 4096


def test_drop_refuses_while_a_view_is_alive_and_succeeds_afterwards() -> None:
    pair = ArenaPair()
    viewed, other = pair.acquire(4096), pair.acquire(8192)
    view = np.frombuffer(viewed, np.uint8)
    with pytest.raises(SegmentError, match="1 arrays or tensors"):
        pair.drop()
    assert (pair.num_bytes, viewed.is_closed, other.is_closed) == (4096, False, True)
    del view
    pair.drop()
    assert pair.num_bytes == 0


def test_what_would_be_handed_out_next_is_known_without_taking_it() -> None:
    pair = ArenaPair()
    assert pair.next_mapping(4096) is None
    small, large = pair.acquire(4096), pair.acquire(8192)
    assert pair.next_mapping(1) is None
    pair.release(small)
    pair.release(large)
    for num_bytes, expected in ((1, small), (4096, small), (4097, large), (8193, None)):
        assert pair.next_mapping(num_bytes) is expected
    assert pair.acquire(4097) is large
