"""The laws of fletcher4, against a reference that sums the definition with Python integers."""

import re
import struct
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdeploy_rl import checksum
from fastdeploy_rl.checksum import (
    ZERO,
    Fletcher4,
    add,
    append,
    contribution,
    int64_tensor_form,
    num_words,
    of_bytes,
    shift,
)

BYTES = st.binary(max_size=200)
SUMS = st.builds(Fletcher4, *[st.integers(0, 2**64 - 1)] * 4)
WORDS = st.integers(0, 2**40)


def reference(data: bytes) -> Fletcher4:
    """The definition, word by word."""
    padded = data + b"\0" * (-len(data) % 4)
    words = [int.from_bytes(padded[at : at + 4], "little") for at in range(0, len(padded), 4)]
    ks = range(len(words), 0, -1)
    weights = [(1, k, k * (k + 1) // 2, k * (k + 1) * (k + 2) // 6) for k in ks]
    return Fletcher4(*(sum(w * weight[i] for w, weight in zip(words, weights, strict=True)) % 2**64 for i in range(4)))


@given(BYTES)
def test_of_bytes_is_the_definition(data: bytes) -> None:
    assert of_bytes(data) == reference(data)


@given(BYTES)
def test_of_bytes_is_four_running_sums_as_in_zfs(data: bytes) -> None:
    a = b = c = d = 0
    for (word,) in struct.iter_unpack("<I", data + b"\0" * (-len(data) % 4)):
        a += word
        b += a
        c += b
        d += c
    assert of_bytes(data) == tuple(value % 2**64 for value in (a, b, c, d))


@given(BYTES)
def test_int64_tensor_form_is_the_definition(data: bytes) -> None:
    assert int64_tensor_form(data) == reference(data)


@pytest.mark.parametrize("num_bytes", [2**18 - 1, 2**18, 2**18 + 5, 3 * 2**18 + 2])
def test_forms_agree_over_several_blocks(num_bytes: int) -> None:
    data = np.random.default_rng(num_bytes).integers(0, 256, num_bytes, np.uint8).tobytes()
    assert of_bytes(data) == int64_tensor_form(data) == reference(data)


def test_sums_wrap_the_same_way_in_every_form() -> None:
    """Over two rows of all-ones words C and D pass 2^64 many times; a closed form gives the true sums."""
    n = checksum.ROW_WORDS + 7
    weights = (n, n * (n + 1) // 2, n * (n + 1) * (n + 2) // 6, n * (n + 1) * (n + 2) * (n + 3) // 24)
    expected = Fletcher4(*((2**32 - 1) * weight % 2**64 for weight in weights))
    data = np.full(n, 0xFFFFFFFF, np.uint32)
    assert of_bytes(data) == expected
    assert int64_tensor_form(data) == expected


def test_weights_of_the_longest_row_are_exact() -> None:
    k = checksum.ROW_WORDS
    data = np.zeros(k, np.uint32)
    data[0] = 1
    assert int64_tensor_form(data) == Fletcher4(1, k, k * (k + 1) // 2, k * (k + 1) * (k + 2) // 6)


@pytest.mark.parametrize("num_bytes", range(8))
def test_the_last_word_is_zero_padded(num_bytes: int) -> None:
    data = b"\xff" * num_bytes
    assert of_bytes(data) == of_bytes(data + b"\0" * (-num_bytes % 4))


def test_nothing_has_the_checksum_zero() -> None:
    assert of_bytes(b"") == int64_tensor_form(b"") == ZERO
    assert of_bytes(np.zeros((0, 3), np.float32)) == ZERO


@given(BYTES, BYTES, BYTES)
def test_appending_pieces_gives_the_whole(x: bytes, y: bytes, z: bytes) -> None:
    x, y = x[: len(x) // 4 * 4], y[: len(y) // 4 * 4]
    x_then_y = append(of_bytes(x), of_bytes(y), num_words(len(y)))
    assert append(x_then_y, of_bytes(z), num_words(len(z))) == of_bytes(x + y + z)


@given(SUMS, SUMS, WORDS, SUMS, WORDS)
def test_append_is_associative(x: Fletcher4, y: Fletcher4, y_words: int, z: Fletcher4, z_words: int) -> None:
    left = append(append(x, y, y_words), z, z_words)
    assert left == append(x, append(y, z, z_words), y_words + z_words)


@given(BYTES, st.integers(0, 50))
def test_shift_is_zero_words_behind(data: bytes, after: int) -> None:
    data = data[: len(data) // 4 * 4]
    assert shift(of_bytes(data), after) == of_bytes(data + bytes(4 * after))


@given(SUMS, WORDS, WORDS)
def test_shifts_add_up(sums: Fletcher4, x: int, y: int) -> None:
    assert shift(shift(sums, x), y) == shift(sums, x + y)


@given(SUMS, SUMS, WORDS)
def test_shift_is_linear(x: Fletcher4, y: Fletcher4, after: int) -> None:
    assert shift(add(x, y), after) == add(shift(x, after), shift(y, after))


@given(BYTES, st.integers(0, 9), st.integers(0, 9))
def test_contribution_is_the_tensor_with_every_other_byte_zero(data: bytes, before: int, after: int) -> None:
    total = before + len(data) + after
    assert contribution(data, before, total) == of_bytes(bytes(before) + data + bytes(after))


@given(BYTES, st.lists(st.integers(0, 200), max_size=6), st.randoms(use_true_random=False))
def test_contributions_of_slices_add_up_in_any_order(data: bytes, cuts: list[int], random: object) -> None:
    """Slices may begin and end inside a word."""
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    pieces = list(pairwise(edges))
    random.shuffle(pieces)  # type: ignore[attr-defined]
    sums = ZERO
    for start, stop in pieces:
        sums = add(sums, contribution(data[start:stop], start, len(data)))
    assert sums == of_bytes(data)


@pytest.mark.parametrize(("offset", "total"), [(-1, 8), (5, 8), (9, 8), (0, 3)])
def test_a_region_outside_its_tensor_is_refused(offset: int, total: int) -> None:
    with pytest.raises(ValueError, match=f"region of 4 bytes at {offset} leaves a tensor of {total} bytes"):
        contribution(b"abcd", offset, total)


@given(st.binary(min_size=1, max_size=64), st.integers(0, 511))
def test_one_flipped_bit_changes_the_checksum(data: bytes, bit: int) -> None:
    flipped = bytearray(data)
    flipped[bit // 8 % len(data)] ^= 1 << bit % 8
    assert of_bytes(flipped) != of_bytes(data)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=20, unique=True))
def test_order_of_words_matters(words: list[int]) -> None:
    data = np.array(words, np.uint32)
    assert of_bytes(data[::-1].copy()) != of_bytes(data)


@settings(deadline=None)
@given(st.sampled_from(["<f4", "<u2", "?", "<i8"]), st.sampled_from([(), (3,), (3, 5), (2, 1, 7)]))
def test_any_contiguous_array_is_its_bytes(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(int(np.prod(shape)), dtype=np.int64).astype(dtype).reshape(shape)
    assert of_bytes(array) == int64_tensor_form(array) == of_bytes(array.tobytes()) == of_bytes(memoryview(array))


def test_an_array_that_is_not_contiguous_is_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        of_bytes(np.zeros((4, 4), np.float32)[:, :2])


@given(SUMS)
def test_text_round_trips(sums: Fletcher4) -> None:
    assert re.fullmatch("[0-9a-f]{64}", sums.hex())
    assert Fletcher4.parse(sums.hex()) == sums


@pytest.mark.parametrize("text", ["", "0" * 63, "0" * 65, "G" * 64, "A" * 64, "0" * 64 + "\n", "-" + "0" * 63])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="64 lowercase hex digits"):
        Fletcher4.parse(text)
