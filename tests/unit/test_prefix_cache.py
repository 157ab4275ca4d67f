"""Blocks are found under the weights that filled them and no others; pages are counted, kept and given away in turn."""

import pytest

from fastdeploy_rl.engines.embedded.page_allocator import PAGE_TOKENS, PageAllocator
from fastdeploy_rl.engines.embedded.prefix_cache import BlockChain, BlockKey, PrefixCache, num_lookup_blocks

TOKENS = list(range(4 * PAGE_TOKENS))


def keys(digest: str, tokens: list[int] = TOKENS) -> list[BlockKey]:
    return BlockChain(digest).keys(tokens, len(tokens) // PAGE_TOKENS)


@pytest.fixture
def allocator() -> PageAllocator:
    return PageAllocator(8)


@pytest.fixture
def cache(allocator: PageAllocator) -> PrefixCache:
    made = PrefixCache(allocator)
    made.use_weights("a")
    return made


def fill(cache: PrefixCache, allocator: PageAllocator, chain: list[BlockKey]) -> list[int]:
    """Blocks that a request filled; it holds their pages."""
    pages = allocator.allocate(len(chain))
    cache.overwrite(pages)
    for key, page in zip(chain, pages, strict=True):
        cache.enter(key, page)
    return pages


def test_a_key_depends_on_every_token_before_it_on_its_place_and_on_the_weights() -> None:
    changed = [TOKENS[0] + 1, *TOKENS[1:]]
    repeated = TOKENS[:PAGE_TOKENS] * 2
    made = [*keys("a"), *keys("b"), *keys("a", changed), keys("a", repeated)[1]]
    assert len({key.key for key in made}) == len(made)
    assert [key.text for key in keys("a")] == [key.text for key in keys("b")]


def test_a_chain_grows_with_its_tokens_and_other_lengths_of_digest_are_other_chains() -> None:
    chain = BlockChain("a")
    first = chain.keys(TOKENS[:PAGE_TOKENS], 1)
    assert chain.keys(TOKENS, 4)[:1] == first
    assert chain.keys(TOKENS, 4) == keys("a")
    assert chain.keys(TOKENS, 1) == first
    assert keys("")[0].key != keys("aa")[0].key


@pytest.mark.parametrize(("num_tokens", "expected"), [(0, 0), (1, 0), (16, 0), (17, 1), (32, 1), (33, 2)])
def test_the_last_token_of_a_prompt_is_computed_always(num_tokens: int, expected: int) -> None:
    assert num_lookup_blocks(num_tokens) == expected


def test_the_longest_known_beginning_is_found(cache: PrefixCache, allocator: PageAllocator) -> None:
    pages = fill(cache, allocator, keys("a")[:2])
    assert cache.find(keys("a")) == pages
    assert cache.find(keys("a")[:1]) == pages[:1]
    assert cache.find(keys("a", [7, *TOKENS[1:]])) == []
    assert cache.find(keys("a")[1:]) == pages[1:], "a key names all that lies before it"


def test_blocks_of_other_weights_are_refused_and_come_back_with_their_weights(
    cache: PrefixCache, allocator: PageAllocator
) -> None:
    pages = fill(cache, allocator, keys("a")[:3])
    cache.use_weights("b")
    found = cache.find(keys("b"))
    cache.count(keys("b"), len(found))
    assert found == []
    assert cache.counts == (0, 1, 3)
    cache.use_weights("a")
    cache.count(keys("a"), len(cache.find(keys("a"))))
    assert cache.find(keys("a")) == pages
    assert cache.counts == (3, 2, 3)


def test_a_block_behind_a_gap_is_a_miss_and_no_refusal(cache: PrefixCache, allocator: PageAllocator) -> None:
    fill(cache, allocator, keys("a")[1:2])
    cache.count(keys("a")[:2], len(cache.find(keys("a")[:2])))
    assert cache.counts == (0, 2, 0)


def test_weights_without_a_digest_have_no_chain(cache: PrefixCache) -> None:
    cache.use_weights("")
    assert cache.new_chain() is None


def test_the_first_page_of_a_block_stays_and_a_second_one_is_kept_for_nothing(
    cache: PrefixCache, allocator: PageAllocator
) -> None:
    first, second = fill(cache, allocator, keys("a")[:1]), fill(cache, allocator, keys("a")[:1])
    assert cache.find(keys("a")) == first
    allocator.free(second)
    assert allocator.allocate(1) == second


def test_blank_pages_go_before_kept_ones_and_those_in_the_order_in_which_they_were_let_go(
    cache: PrefixCache, allocator: PageAllocator
) -> None:
    old, young = fill(cache, allocator, keys("a")[:2]), fill(cache, allocator, keys("b")[:2])
    allocator.free(young)
    allocator.free(old)
    assert allocator.num_free == 8
    assert set(allocator.allocate(4)).isdisjoint(old + young)
    assert allocator.allocate(3) == [young[1], young[0], old[1]]


def test_a_page_that_is_given_away_is_not_found_any_more(cache: PrefixCache, allocator: PageAllocator) -> None:
    pages = fill(cache, allocator, keys("a"))
    allocator.free(pages)
    cache.overwrite(allocator.allocate(6))
    assert cache.find(keys("a")) == pages[:2], "the end of a chain goes before its beginning"
    cache.use_weights("b")
    cache.count(keys("b"), 0)
    assert cache.counts == (0, 2, 2)


def test_a_shared_page_is_free_when_its_last_holder_is_gone(cache: PrefixCache, allocator: PageAllocator) -> None:
    pages = fill(cache, allocator, keys("a")[:2])
    allocator.share(pages)
    allocator.free(pages)
    assert allocator.num_free == 6
    allocator.free(pages)
    assert allocator.num_free == 8
    allocator.share(pages)
    assert allocator.num_free == 6
    with pytest.raises(ValueError, match="7 pages wanted, 6 free"):
        allocator.allocate(7)


def test_room_is_asked_for_beside_pages_that_are_to_be_shared(cache: PrefixCache, allocator: PageAllocator) -> None:
    pages = fill(cache, allocator, keys("a")[:2])
    assert allocator.can_allocate(6, beside=pages)
    allocator.free(pages)
    assert allocator.can_allocate(8)
    assert not allocator.can_allocate(7, beside=pages)
    assert allocator.can_allocate(6, beside=pages)


@pytest.mark.parametrize("odd", [[7], [0, 0], [8], [-1]])
def test_a_page_that_holds_nothing_can_be_neither_shared_nor_kept(
    cache: PrefixCache, allocator: PageAllocator, odd: list[int]
) -> None:
    assert fill(cache, allocator, keys("a")[:1]) == [0]
    with pytest.raises(ValueError, match="not all held or kept"):
        allocator.share(odd)
    with pytest.raises(ValueError, match="not handed out"):
        allocator.keep(7)
    assert allocator.num_free == 7
    allocator.free([0])
    assert allocator.num_free == 8


def test_forget_all_makes_every_page_blank_and_counts_go_on(cache: PrefixCache, allocator: PageAllocator) -> None:
    held, let_go = fill(cache, allocator, keys("a")[:1]), fill(cache, allocator, keys("a", TOKENS[::-1]))
    allocator.free(let_go)
    cache.count(keys("a")[:1], 1)
    cache.forget_all()
    assert (cache.find(keys("a")), cache.find(keys("a", TOKENS[::-1])), cache.counts) == ([], [], (1, 0, 0))
    with pytest.raises(ValueError, match="not all held or kept"):
        allocator.share(let_go)
    allocator.free(held)
    assert sorted(allocator.allocate(8)) == list(range(8))


def test_a_page_that_was_given_away_is_blank_when_it_comes_back(cache: PrefixCache, allocator: PageAllocator) -> None:
    allocator.free(fill(cache, allocator, keys("a")[:1]))
    pages = allocator.allocate(8)
    cache.overwrite(pages)
    allocator.free(pages)
    with pytest.raises(ValueError, match="not all held or kept"):
        allocator.share([0])
