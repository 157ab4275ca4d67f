"""Who holds which page of the KV cache.

Pure law: knows neither memory nor requests. Invariant: a page is free or handed out, never both, and none is lost.
"""

from collections.abc import Sequence

PAGE_TOKENS = 16
"""Tokens a page has room for."""

DEFAULT_NUM_PAGES = 1024
"""16,384 tokens; memory comes into being as pages are used."""


def default_num_pages(max_model_len: int, max_num_seqs: int) -> int:
    """Room for `max_num_seqs` of the longest requests, but no more than DEFAULT_NUM_PAGES where one fits in that."""
    least = PageAllocator.pages_for(max_model_len)
    return max(least, min(least * max_num_seqs, DEFAULT_NUM_PAGES))


class PageAllocator:
    """Hands out page numbers 0 .. num_pages - 1. `can_allocate` asks, `allocate` acts."""

    def __init__(self, num_pages: int) -> None:
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: pages used last are still warm
        self._held: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @staticmethod
    def pages_for(num_tokens: int) -> int:
        return -(-num_tokens // PAGE_TOKENS)

    def can_allocate(self, count: int) -> bool:
        return count <= len(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` pages, now the caller's. ValueError where there are not so many; nothing changed then."""
        if not self.can_allocate(count):
            raise ValueError(f"{count} pages wanted, {len(self._free)} free")
        pages = [self._free.pop() for _ in range(count)]
        self._held.update(pages)
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Takes pages back. ValueError for a page that is not handed out (or named twice); nothing changed then."""
        if len(set(pages)) != len(pages) or not self._held.issuperset(pages):
            raise ValueError(f"pages {sorted(pages)} are not all handed out")
        self._held.difference_update(pages)
        self._free.extend(reversed(pages))
