"""fletcher4: the checksum of a tensor's bytes (as in ZFS, 64-bit sums over little-endian 32-bit words).

With words w_1..w_n (the last zero-padded) and k = n - i + 1:

    A = sum w    B = sum k w    C = sum k(k+1)/2 w    D = sum k(k+1)(k+2)/6 w      each mod 2^64

This file owns the law and its exact, slow reference; the fast form is the native core's, which must agree bit for bit.
It refuses to know what a tensor is. Invariant, on which receipts rest: the sums are *linear*, so the contributions of
regions that tile some bytes add up to the checksum of the whole. It finds accidents, not attackers.
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    Bytes = ReadableBuffer | NDArray[Any]

_MASK = 2**64 - 1
_WORD_BYTES = 4
_HEX_TEXT = re.compile("[0-9a-f]{64}")

ROW_WORDS = 2**20
"""The longest row of the int64 form: its largest weight, k(k+1)(k+2), stays below 2^63."""

_BLOCK_WORDS = 2**16  # the tables of a block fit in a cache; any size up to ROW_WORDS is exact


class Fletcher4(NamedTuple):
    """Four sums, each in [0, 2^64)."""

    a: int
    b: int
    c: int
    d: int

    def hex(self) -> str:
        """The text form: 64 lowercase hex digits, A B C D."""
        return "".join(f"{value:016x}" for value in self)

    @classmethod
    def parse(cls, text: str) -> "Fletcher4":
        """Raises ValueError unless `text` is exactly what `hex` gives."""
        if not _HEX_TEXT.fullmatch(text):
            raise ValueError(f"a checksum is 64 lowercase hex digits, got {text!r:.80}")
        return cls(*(int(text[at : at + 16], 16) for at in range(0, 64, 16)))


ZERO = Fletcher4(0, 0, 0, 0)


def append(first: Fletcher4, second: Fletcher4, num_words_second: int) -> Fletcher4:
    """Sums of two pieces one after the other; `first` must end on a word boundary."""
    n = num_words_second
    t2 = n * (n + 1) // 2
    t3 = n * (n + 1) * (n + 2) // 6
    return Fletcher4(
        (first.a + second.a) & _MASK,
        (first.b + n * first.a + second.b) & _MASK,
        (first.c + n * first.b + t2 * first.a + second.c) & _MASK,
        (first.d + n * first.c + t2 * first.b + t3 * first.a + second.d) & _MASK,
    )


def shift(sums: Fletcher4, num_words_after: int) -> Fletcher4:
    """Sums of the same bytes with that many zero words behind them."""
    return append(sums, ZERO, num_words_after)


def add(x: Fletcher4, y: Fletcher4) -> Fletcher4:
    """The linear sum: contributions of two regions of one tensor to its checksum."""
    return Fletcher4(*((p + q) & _MASK for p, q in zip(x, y, strict=True)))


def of_bytes(buffer: "Bytes") -> Fletcher4:
    """Checksum of a C-contiguous buffer of any size and type; reads it once and keeps nothing."""
    sums = ZERO
    for words in _blocks(buffer, _BLOCK_WORDS):
        sums = append(sums, _block_sums(words.astype(np.uint64)), words.size)
    return sums


def contribution(data: "Bytes", offset: int, total_bytes: int) -> Fletcher4:
    """Checksum of a tensor of `total_bytes` in which `data` lies at byte `offset` and every other byte is zero.

    `offset` need not be a multiple of a word. Raises ValueError where the region leaves the tensor.
    """
    region = _flat(data)
    if offset < 0 or offset + region.size > total_bytes:
        raise ValueError(f"region of {region.size} bytes at {offset} leaves a tensor of {total_bytes} bytes")
    first_word, lead = divmod(offset, _WORD_BYTES)
    if lead:
        region = np.concatenate([np.zeros(lead, np.uint8), region])
    words_after = num_words(total_bytes) - first_word - num_words(region.size)
    return shift(of_bytes(region), words_after)


def num_words(num_bytes: int) -> int:
    """How many 32-bit words hold that many bytes."""
    return -(-num_bytes // _WORD_BYTES)


def int64_tensor_form(buffer: "Bytes") -> Fletcher4:
    """The form a GPU runs: rows of at most 2^20 words, masked to unsigned, against an exact int64 weight table; int64
    arithmetic wraps as mod 2^64 does. Rows are combined on the host. Here numpy's int64 stands in for the device."""
    sums = ZERO
    for row in _blocks(buffer, ROW_WORDS):
        words = row.view(np.int32).astype(np.int64) & 0xFFFFFFFF
        sums = append(sums, _block_sums(words), words.size)
    return sums


def _flat(buffer: "Bytes") -> NDArray[np.uint8]:
    return np.frombuffer(buffer if isinstance(buffer, np.ndarray) else memoryview(buffer), np.uint8)


def _blocks(buffer: "Bytes", block_words: int) -> Iterator[NDArray[np.uint32]]:
    """The words of the buffer in blocks of that many; what does not fill a last word comes zero-padded, by itself."""
    data = _flat(buffer)
    whole = data.size - data.size % _WORD_BYTES
    for start in range(0, whole, block_words * _WORD_BYTES):
        yield data[start : min(start + block_words * _WORD_BYTES, whole)].view("<u4")
    if whole < data.size:
        yield np.frombuffer(data[whole:].tobytes().ljust(_WORD_BYTES, b"\0"), "<u4")


def _block_sums(words: NDArray[np.uint64] | NDArray[np.int64]) -> Fletcher4:
    weights = _weights(words.size)
    sums = [words.sum(dtype=words.dtype)] + [np.dot(words, table.view(words.dtype)) for table in weights]
    return Fletcher4(*(int(value) & _MASK for value in sums))


@lru_cache(maxsize=2)
def _weights(size: int) -> tuple[NDArray[np.int64], ...]:
    """k, k(k+1)/2 and k(k+1)(k+2)/6 for k = size..1, exact."""
    k = np.arange(size, 0, -1, dtype=np.int64)
    return k, k * (k + 1) // 2, k * (k + 1) * (k + 2) // 6
