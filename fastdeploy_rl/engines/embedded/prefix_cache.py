"""Which page holds the keys and values of which tokens, so that a prompt that begins like another need not be computed
from its beginning.

Pure law: knows neither memory nor requests. A block is a full page of tokens; its key is

    H(key of the block before it, its tokens, content digest of the weights that filled it)

and the digest is in the key of the root too. Invariant: a chain is found by requests under the weights that filled all
of it, and by no others, so that a page that is found is what the model would compute anew; and a page that is found
holds that block still: whoever is handed a page for something else makes it unknown (`overwrite`).
"""

import hashlib
from array import array
from collections import Counter
from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

from fastdeploy_rl.engines.embedded.page_allocator import PAGE_TOKENS, PageAllocator

_ROOT = b"fastdeploy_rl prefix cache"


class BlockKey(NamedTuple):
    """`key` names tokens, everything before them, and the weights; `text` the same without the weights."""

    key: bytes
    text: bytes


class PrefixCounts(NamedTuple):
    """Full pages of the prompts that were looked up, each counted once: those that were there, those that were not, and
    those that were there under other weights only."""

    num_hits: int
    num_misses: int
    num_refusals: int


def num_lookup_blocks(num_tokens: int) -> int:
    """Blocks of a prompt that may come from the cache: its last token is computed always, for its logits."""
    return max(0, num_tokens - 1) // PAGE_TOKENS


class BlockChain:
    """Keys of the blocks of one growing sequence of tokens under one content digest; each is worked out once."""

    def __init__(self, content_digest: str) -> None:
        self.content_digest = content_digest
        self._digest = content_digest.encode()
        self._keys: list[BlockKey] = []
        self._parent = BlockKey(_hash(_ROOT, self._digest), _hash(_ROOT))

    def keys(self, token_ids: Sequence[int], count: int) -> list[BlockKey]:
        """Of the first `count` blocks. The tokens of blocks that were asked for before must be the same."""
        while len(self._keys) < count:
            begin = len(self._keys) * PAGE_TOKENS
            tokens = array("q", token_ids[begin : begin + PAGE_TOKENS]).tobytes()
            parent = self._parent
            self._parent = BlockKey(_hash(parent.key, tokens, self._digest), _hash(parent.text, tokens))
            self._keys.append(self._parent)
        return self._keys[:count]


class PrefixCache:
    """Blocks that are known. The pages are the allocator's, which gives kept ones away where it must."""

    def __init__(self, allocator: PageAllocator) -> None:
        self._allocator = allocator
        self._digest = ""
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, BlockKey] = {}
        self._texts: Counter[bytes] = Counter()
        self._counts = PrefixCounts(0, 0, 0)

    @property
    def content_digest(self) -> str:
        """Of the weights that fill pages now."""
        return self._digest

    @property
    def counts(self) -> PrefixCounts:
        return self._counts

    def use_weights(self, content_digest: str) -> None:
        """Blocks of other weights stay known, and are not found until these come back or the page is needed. Weights
        without a digest could not be told from others: nothing is entered or found then."""
        self._digest = content_digest

    def new_chain(self) -> BlockChain | None:
        """For a sequence that begins under the present weights; None where these have no digest."""
        return BlockChain(self._digest) if self._digest else None

    def find(self, keys: Sequence[BlockKey]) -> list[int]:
        """Pages of the longest known beginning of a chain. Nobody is made their holder, and nothing is counted."""
        return list(takewhile(lambda page: page >= 0, (self._page_of.get(key.key, -1) for key in keys)))

    def count(self, keys: Sequence[BlockKey], num_found: int) -> None:
        """A sequence begins that needed these blocks and was given the first `num_found`."""
        absent = keys[num_found:]
        num_refused = sum(key.text in self._texts and key.key not in self._page_of for key in absent)
        hits, misses, refusals = self._counts
        self._counts = PrefixCounts(hits + num_found, misses + len(absent) - num_refused, refusals + num_refused)

    def enter(self, key: BlockKey, page: int) -> None:
        """`page` is full of this block, by the weights of the key, and is not written any more. Where another page has
        the same, that one stays."""
        if key.key not in self._page_of:
            self._allocator.keep(page)
            self._page_of[key.key] = page
            self._key_of[page] = key
            self._texts[key.text] += 1

    def overwrite(self, pages: Sequence[int]) -> None:
        """These were handed out for something else."""
        for page in pages:
            if page in self._key_of:
                self._forget(page)

    def forget_all(self) -> None:
        """No page holds anything; the counts go on."""
        self._allocator.discard_kept()
        self._page_of.clear()
        self._key_of.clear()
        self._texts.clear()

    def _forget(self, page: int) -> None:
        key = self._key_of.pop(page)
        del self._page_of[key.key]
        self._texts[key.text] -= 1
        if not self._texts[key.text]:
            del self._texts[key.text]


def _hash(*parts: bytes) -> bytes:
    """Parts have lengths of their own, so that no two lists of them read the same."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
