"""Pages of the KV cache are free or held, never both, and none is lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy_rl.engines.embedded.page_allocator import PAGE_TOKENS, PageAllocator

NUM_PAGES = 12


def test_pages_for_counts_started_pages() -> None:
    assert [PageAllocator.pages_for(n) for n in (0, 1, PAGE_TOKENS, PAGE_TOKENS + 1)] == [0, 1, 1, 2]


def test_too_many_pages_are_refused_and_none_is_taken() -> None:
    allocator = PageAllocator(NUM_PAGES)
    allocator.allocate(5)
    assert not allocator.can_allocate(8)
    with pytest.raises(ValueError, match="8 pages wanted, 7 free"):
        allocator.allocate(8)
    assert allocator.num_free == 7


@pytest.mark.parametrize("odd", [[0, 0], [11], [NUM_PAGES], [-1]])
def test_page_that_is_not_held_cannot_be_freed(odd: list[int]) -> None:
    allocator = PageAllocator(NUM_PAGES)
    held = allocator.allocate(2)
    assert held == [0, 1]
    with pytest.raises(ValueError, match="not all handed out"):
        allocator.free(odd)
    assert allocator.num_free == NUM_PAGES - 2
    allocator.free(held)


@given(st.lists(st.integers(min_value=-6, max_value=6), max_size=60))
def test_no_page_is_lost_or_held_twice(changes: list[int]) -> None:
    """A positive change allocates that many pages, a negative one frees the holder's oldest."""
    allocator = PageAllocator(NUM_PAGES)
    held: list[int] = []
    for change in changes:
        if change >= 0 and allocator.can_allocate(change):
            held += allocator.allocate(change)
        elif change < 0:
            given_back, held = held[:-change], held[-change:]
            allocator.free(given_back)
        assert len(set(held)) == len(held)
        assert len(held) + allocator.num_free == NUM_PAGES
