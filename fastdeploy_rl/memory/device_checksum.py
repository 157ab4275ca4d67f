"""fletcher4 of bytes that lie on a device, by whatever array library is there: they do not come to the host for it.

Owns the form that `checksum.int64_tensor_form` states, on arrays of torch, cupy, Paddle or numpy; imports none of them.
Refuses to know where the arrays came from. Invariant: equal to `checksum.of_bytes` of the same bytes, bit for bit; each
sum is exact modulo 2^64, since int64 arithmetic wraps. Tested on numpy, on CPU tensors of Paddle, and of torch where it
is installed; not run on a GPU.
"""

from typing import Any, NamedTuple, Protocol, TypeAlias

from fastdeploy_rl.checksum import ROW_WORDS, ZERO, Fletcher4, append, of_bytes

Array: TypeAlias = Any
"""An array or tensor of the library in use."""

_WORD_BYTES = 4
_UNSIGNED = 0xFFFFFFFF
_SUM_MASK = 2**64 - 1


class ArrayLibrary(Protocol):
    """What is used of `torch`, `cupy`, `paddle` or `numpy`: the names that they spell alike."""

    int32: Any
    int64: Any

    def ones_like(self, array: Array, dtype: Any) -> Array: ...
    def tile(self, array: Array, repeats: tuple[int, ...], /) -> Array: ...
    def cumsum(self, array: Array, axis: int, /) -> Array: ...
    def sum(self, array: Array, axis: int, /) -> Array: ...
    def stack(self, arrays: list[Array], /) -> Array: ...


class _Tables(NamedTuple):
    """For a row of `ROW_WORDS`: k, k(k+1)/2 and k(k+1)(k+2)/6 for k = ROW_WORDS..1, exact in int64. Those of a shorter
    row are their last entries. `mask`: one word of 32 ones, as an array."""

    weights: tuple[Array, Array, Array]
    mask: Array


class DeviceChecksum:
    """Checksums on one device. Keeps 24 MiB of weights there from the first call on, and takes some `batch_rows` * 20
    MiB during a call. One thread."""

    def __init__(self, arrays: ArrayLibrary, batch_rows: int = 16) -> None:
        """`batch_rows`: rows of 4 MiB that one launch sums; ValueError unless positive."""
        if batch_rows < 1:
            raise ValueError(f"at least one row is summed at a time, not {batch_rows}")
        self._arrays = arrays
        self._batch_rows = batch_rows
        self._tables: _Tables | None = None

    def of_bytes(self, data: Array) -> Fletcher4:
        """Of a one-dimensional, contiguous array of uint8 whose address is a multiple of 4 (of Paddle: no slice).

        Waits for the device; only the four sums of each row come to the host, and the bytes behind the last whole word.
        """
        num_whole = int(data.shape[0]) // _WORD_BYTES * _WORD_BYTES
        sums = self._of_words(data[:num_whole]) if num_whole else ZERO
        rest = bytes(data[num_whole:].tolist())
        return append(sums, of_bytes(rest), 1) if rest else sums

    def _of_words(self, data: Array) -> Fletcher4:
        words = data.view(self._arrays.int32)  # sliced afterwards: Paddle's views lose where a slice starts
        sums = ZERO
        for start in range(0, int(words.shape[0]), ROW_WORDS * self._batch_rows):
            sums = self._append_words(sums, words[start : start + ROW_WORDS * self._batch_rows])
        return sums

    def _append_words(self, sums: Fletcher4, words: Array) -> Fletcher4:
        """`sums`, then all whole rows at once, then the row that is shorter."""
        unsigned = _widened(words, self._arrays.int64) & self._tables_like(words).mask
        num_rows, num_rest = divmod(int(words.shape[0]), ROW_WORDS)
        pieces = ((unsigned[: num_rows * ROW_WORDS], ROW_WORDS), (unsigned[num_rows * ROW_WORDS :], num_rest))
        for piece, length in pieces:
            for row_sums in self._row_sums(piece, length) if piece.shape[0] else ():
                sums = append(sums, row_sums, length)
        return sums

    def _row_sums(self, words: Array, length: int) -> list[Fletcher4]:
        """Of each row of that many words."""
        rows = words.reshape((-1, length))
        weighted = (rows * weights[-length:] for weights in self._tables_like(words).weights)
        sums = [self._arrays.sum(summands, 1) for summands in (rows, *weighted)]
        return [Fletcher4(*(value & _SUM_MASK for value in row)) for row in zip(*self._to_host(sums), strict=True)]

    def _to_host(self, sums: list[Array]) -> list[list[int]]:
        values: list[list[int]] = self._arrays.stack(sums).tolist()
        return values

    def _tables_like(self, array: Array) -> _Tables:
        """On the device of the array."""
        if self._tables is None:
            one = self._arrays.ones_like(array[:1], dtype=self._arrays.int64)
            ones = self._arrays.tile(one, (ROW_WORDS,))
            k = ROW_WORDS + 1 - self._arrays.cumsum(ones, 0)
            self._tables = _Tables((k, k * (k + 1) // 2, k * (k + 1) * (k + 2) // 6), one * _UNSIGNED)
        return self._tables


def _widened(words: Array, int64: Any) -> Array:
    """torch is alone in calling it `to`."""
    return words.astype(int64) if hasattr(words, "astype") else words.to(int64)
