"""Who holds which page of the KV cache.

Pure law: knows neither memory nor requests, nor what a page is kept for. Invariant: a page is blank, held by one or
more, or kept though nobody holds it; it is one of these and none is lost. Blank and kept pages are free: whoever wants
a page gets a blank one first, and then the kept one that nobody has held for the longest time.
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
        self._blank = list(range(num_pages - 1, -1, -1))  # a stack: pages used last are still warm
        self._holders: dict[int, int] = {}
        self._kept: set[int] = set()
        self._idle: dict[int, None] = {}  # kept and held by nobody, in the order in which they were let go

    @property
    def num_free(self) -> int:
        """Those that `allocate` can give."""
        return len(self._blank) + len(self._idle)

    @staticmethod
    def pages_for(num_tokens: int) -> int:
        return -(-num_tokens // PAGE_TOKENS)

    def can_allocate(self, count: int, *, beside: Sequence[int] = ()) -> bool:
        """`beside`: kept or held pages that are to be shared as well, and must not be given away for it."""
        return count + sum(page in self._idle for page in beside) <= self.num_free

    def allocate(self, count: int) -> list[int]:
        """`count` pages, now the caller's and kept no longer. ValueError where there are not so many; nothing changed
        then."""
        if not self.can_allocate(count):
            raise ValueError(f"{count} pages wanted, {self.num_free} free")
        pages = [self._blank.pop() if self._blank else self._take_oldest() for _ in range(count)]
        self._holders.update(dict.fromkeys(pages, 1))
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """One more holder for each of these. ValueError for a page that is blank (or named twice); nothing changed
        then."""
        if len(set(pages)) != len(pages) or not all(page in self._holders or page in self._idle for page in pages):
            raise ValueError(f"pages {sorted(pages)} are not all held or kept")
        for page in pages:
            self._idle.pop(page, None)
            self._holders[page] = self._holders.get(page, 0) + 1

    def free(self, pages: Sequence[int]) -> None:
        """One holder less for each of these; later ones are given away before earlier ones. ValueError for a page that
        is not handed out (or named twice); nothing changed then."""
        if len(set(pages)) != len(pages) or not self._holders.keys() >= set(pages):
            raise ValueError(f"pages {sorted(pages)} are not all handed out")
        for page in reversed(pages):
            self._holders[page] -= 1
            if not self._holders[page]:
                del self._holders[page]
                self._set_aside(page)

    def keep(self, page: int) -> None:
        """What is in it is of use, also when nobody holds it any more. ValueError for a page that is not handed out."""
        if page not in self._holders:
            raise ValueError(f"page {page} is not handed out")
        self._kept.add(page)

    def discard_kept(self) -> None:
        """Nothing is kept any more: pages that nobody holds are blank, others will be."""
        self._blank += reversed(self._idle)
        self._idle.clear()
        self._kept.clear()

    def _take_oldest(self) -> int:
        page = next(iter(self._idle))
        del self._idle[page]
        self._kept.discard(page)
        return page

    def _set_aside(self, page: int) -> None:
        if page in self._kept:
            self._idle[page] = None
        else:
            self._blank.append(page)
