"""The fused copy, cast and checksum against a reference in plain Python integers, with every set of kernels."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdeploy_rl import _native
from fastdeploy_rl._native import Mapping, Place, Region, transfer
from tests.unit.native_levels import kernels as kernels

QUIET = settings(max_examples=60, deadline=None)
Bytes = npt.NDArray[np.uint8]


def fletcher4(data: bytes) -> tuple[int, int, int, int]:
    a = b = c = d = 0
    padded = data + b"\0" * (-len(data) % 4)
    for start in range(0, len(padded), 4):
        a += int.from_bytes(padded[start : start + 4], "little")
        b, c, d = b + a, c + b + a, d + c + b + a
    return (a % 2**64, b % 2**64, c % 2**64, d % 2**64)


def weighted_sum(word: int, words_after: int) -> tuple[int, int, int, int]:
    """What one word counts by the closed formulas: no running sums, so that large tensors are cheap."""
    k = words_after + 1
    weights = (1, k, k * (k + 1) // 2, k * (k + 1) * (k + 2) // 6)
    return tuple(weight * word % 2**64 for weight in weights)  # type: ignore[return-value]


class Layout(NamedTuple):
    """Rows inside a buffer."""

    offset: int
    stride: int
    num_bytes: int

    def rows_of(self, buffer: Bytes, rows: int, row_bytes: int) -> Bytes:
        starts = [self.offset + row * self.stride for row in range(rows)]
        return np.concatenate([buffer[start : start + row_bytes] for start in starts] or [buffer[:0]])

    def scatter(self, rows: Bytes, num_rows: int) -> bytes:
        """The rows at their places, zeros elsewhere."""
        out = np.zeros(self.num_bytes, np.uint8)
        for row, part in enumerate(np.split(rows, num_rows) if num_rows else []):
            out[self.offset + row * self.stride :][: part.size] = part
        return out.tobytes()


@st.composite
def layouts(draw: st.DrawFn, rows: int, row_bytes: int) -> Layout:
    offset = draw(st.integers(0, 70))
    stride = row_bytes + draw(st.integers(0, 70))
    extent = (rows - 1) * stride + row_bytes if rows else 0
    return Layout(offset, stride, offset + extent + draw(st.integers(0, 70)))


def random_bytes(count: int, seed: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


@QUIET
@given(data=st.data(), rows=st.integers(0, 5), row_bytes=st.integers(0, 300), seed=st.integers(0, 2**32 - 1))
def test_strided_copy_moves_exactly_the_rows_and_sums_both_places(
    data: st.DataObject, rows: int, row_bytes: int, seed: int
) -> None:
    """Whatever the offsets, strides and phases within a word: target bytes, bytes around them, read sum, live sum."""
    source_layout, target_layout, read, live = (data.draw(layouts(rows, row_bytes)) for _ in range(4))
    source = random_bytes(source_layout.num_bytes, seed)
    target = random_bytes(target_layout.num_bytes, seed + 1)
    payload = source_layout.rows_of(source, rows, row_bytes)
    expected = target.copy()
    for row in range(rows):
        start = target_layout.offset + row * target_layout.stride
        expected[start : start + row_bytes] = payload[row * row_bytes : (row + 1) * row_bytes]
    region = Region(
        source=source,
        source_offset=source_layout.offset,
        source_stride=source_layout.stride,
        rows=rows,
        row_bytes=row_bytes,
        target=target,
        target_offset=target_layout.offset,
        target_stride=target_layout.stride,
        read_place=Place(*read),
        live_place=Place(*live),
    )
    assert transfer([region], 2) == [(fletcher4(read.scatter(payload, rows)), fletcher4(live.scatter(payload, rows)))]
    np.testing.assert_array_equal(target, expected)


@QUIET
@given(data=st.data(), num_bytes=st.integers(1, 2000), seed=st.integers(0, 2**32 - 1))
def test_contributions_of_any_split_add_up_to_the_checksum_of_the_whole(
    data: st.DataObject, num_bytes: int, seed: int
) -> None:
    source = random_bytes(num_bytes, seed)
    cuts = sorted({0, num_bytes, *data.draw(st.lists(st.integers(0, num_bytes), max_size=5))})
    regions = [
        Region(
            source=source,
            source_offset=start,
            source_stride=0,
            rows=1,
            row_bytes=stop - start,
            read_place=Place(start, 0, num_bytes),
        )
        for start, stop in itertools.pairwise(cuts)
    ]
    reads = [read for read, _ in transfer(regions, 2) if read is not None]
    assert tuple(sum(column) % 2**64 for column in zip(*reads, strict=True)) == fletcher4(source.tobytes())


@QUIET
@given(data=st.data(), rows=st.integers(1, 4), values=st.integers(0, 150), seed=st.integers(0, 2**32 - 1))
@pytest.mark.parametrize("cast", ["F32_BF16", "BF16_F32"])
def test_cast_rows_are_exact_and_summed_on_both_sides(
    cast: str, data: st.DataObject, rows: int, values: int, seed: int
) -> None:
    source_value, target_value = (4, 2) if cast == "F32_BF16" else (2, 4)
    source_layout, read = (data.draw(layouts(rows, values * source_value)) for _ in range(2))
    target_layout, live = (data.draw(layouts(rows, values * target_value)) for _ in range(2))
    source = random_bytes(source_layout.num_bytes, seed)
    target = np.zeros(target_layout.num_bytes, np.uint8)
    payload = source_layout.rows_of(source, rows, values * source_value)
    written = (to_bf16(payload.view("<u4")) if cast == "F32_BF16" else to_f32(payload.view("<u2"))).view(np.uint8)
    region = Region(
        source=source,
        source_offset=source_layout.offset,
        source_stride=source_layout.stride,
        rows=rows,
        row_bytes=values * source_value,
        target=target,
        target_offset=target_layout.offset,
        target_stride=target_layout.stride,
        cast=cast,
        read_place=Place(*read),
        live_place=Place(*live),
    )
    assert transfer([region], 1) == [(fletcher4(read.scatter(payload, rows)), fletcher4(live.scatter(written, rows)))]
    assert target.tobytes() == target_layout.scatter(written, rows)


def to_bf16(bits: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint16]:
    """Nearest by comparing the two neighbours, ties to the even one; in Python integers, value by value."""
    return np.array([_nearest_bf16(int(value)) for value in bits], np.uint16)


def _nearest_bf16(bits: int) -> int:
    if bits & 0x7FFFFFFF > 0x7F800000:
        return (bits >> 16) | 0x40
    below, rest = divmod(bits, 0x10000)
    return below + (rest > 0x8000 or (rest == 0x8000 and below % 2 == 1))


def to_f32(halves: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint32]:
    return halves.astype(np.uint32) << 16


def cast_whole(source: npt.NDArray[Any], target: npt.NDArray[Any], cast: str) -> None:
    transfer(
        [
            Region(
                source=source,
                source_offset=0,
                source_stride=0,
                rows=1,
                row_bytes=source.nbytes,
                target=target,
                cast=cast,
            )
        ],
        1,
    )


def test_float32_special_values_round_as_ieee_says() -> None:
    cases = {
        0x00000000: 0x0000,  # 0
        0x80000000: 0x8000,  # -0
        0x7F800000: 0x7F80,  # inf
        0xFF800000: 0xFF80,  # -inf
        0x7F800001: 0x7FC0,  # signalling NaN whose payload lies in the lost half
        0xFFFFFFFF: 0xFFFF,  # NaN that rounding up would turn into 0
        0x7F7FFFFF: 0x7F80,  # the largest float32 overflows to inf
        0x3F808000: 0x3F80,  # tie, down to even
        0x3F818000: 0x3F82,  # tie, up to even
        0x3F808001: 0x3F81,  # just above a tie
        0x00000001: 0x0000,  # smallest subnormal
        0x00018000: 0x0002,  # subnormal tie
    }
    source = np.array(list(cases) * 40, np.uint32)
    target = np.zeros(source.size, np.uint16)
    cast_whole(source, target, "F32_BF16")
    np.testing.assert_array_equal(target, np.array(list(cases.values()) * 40, np.uint16))


def test_every_bf16_value_survives_the_way_to_float32_and_back() -> None:
    halves = np.arange(2**16, dtype=np.uint16)
    wide, back = np.zeros(2**16, np.uint32), np.zeros(2**16, np.uint16)
    cast_whole(halves, wide, "BF16_F32")
    cast_whole(wide, back, "F32_BF16")
    np.testing.assert_array_equal(wide, to_f32(halves))
    is_nan = (halves & 0x7FFF) > 0x7F80
    np.testing.assert_array_equal(back, np.where(is_nan, halves | 0x40, halves))


@pytest.mark.parametrize("offset", [0, 1, 4, 12])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_large_copies_split_among_threads_are_whole_and_summed(offset: int, num_threads: int) -> None:
    """Big enough for several pieces and streamed stores; the target is aligned, off by words, or off by bytes."""
    source = random_bytes((6 << 20) + 13, 5)
    target = np.zeros(source.size + 64, np.uint8)
    region = Region(
        source=source,
        source_offset=0,
        source_stride=0,
        rows=1,
        row_bytes=source.size,
        target=target,
        target_offset=offset,
        read_place=Place(0, 0, source.size),
    )
    ((read, live),) = transfer([region], num_threads)
    assert (read, live) == (numpy_fletcher4(source), None)
    np.testing.assert_array_equal(target[offset : offset + source.size], source)
    assert not target[:offset].any()
    assert not target[offset + source.size :].any()


@pytest.mark.parametrize("with_sums", [True, False])
@pytest.mark.parametrize("width", [768, 772])
def test_column_slices_of_a_large_matrix_come_out_whole(with_sums: bool, width: int) -> None:
    """Streamed, many rows to a piece."""
    matrix = random_bytes(9000 * 3 * width, 6).reshape(9000, 3 * width)
    target = np.zeros((9000, width), np.uint8)
    place = Place(width, 3 * width, matrix.size) if with_sums else None
    region = Region(
        source=matrix,
        source_offset=width,
        source_stride=3 * width,
        rows=9000,
        row_bytes=width,
        target=target,
        target_stride=width,
        read_place=place,
        live_place=Place(0, width, target.size) if with_sums else None,
    )
    ((read, live),) = transfer([region], 2)
    np.testing.assert_array_equal(target, matrix[:, width : 2 * width])
    others = matrix.copy()
    others[:, width : 2 * width] = 0
    whole, rest = numpy_fletcher4(matrix.reshape(-1)), numpy_fletcher4(others.reshape(-1))
    expected = tuple((x - y) % 2**64 for x, y in zip(whole, rest, strict=True))
    assert (read, live) == ((expected, numpy_fletcher4(target.reshape(-1))) if with_sums else (None, None))


def numpy_fletcher4(data: Bytes) -> tuple[int, ...]:
    """Running sums in wrapping uint64: exact, and fast enough for megabytes."""
    sums = np.frombuffer(data.tobytes() + b"\0" * (-data.size % 4), "<u4").astype(np.uint64)
    out = []
    for _ in range(4):
        sums = np.cumsum(sums, dtype=np.uint64)
        out.append(int(sums[-1]))
    return tuple(out)


@pytest.mark.parametrize("words_after", [2**31, 2**40 + 1, 2**45 + 2, 2**60 + 3])
def test_sums_at_places_in_enormous_tensors_are_exact(words_after: int) -> None:
    """The weights of far words pass 2^128 before they are reduced."""
    word = np.array([0xDEADBEEF], "<u4")
    place = Place(0, 0, 4 * (words_after + 1))
    region = Region(source=word, source_offset=0, source_stride=0, rows=1, row_bytes=4, read_place=place)
    assert transfer([region], 1) == [(weighted_sum(0xDEADBEEF, words_after), None)]


BASE: dict[str, Any] = {"source_offset": 0, "source_stride": 8, "rows": 4, "row_bytes": 8, "target_stride": 8}
BROKEN: dict[str, dict[str, Any]] = {
    "source too short": {"source_offset": 1},
    "source stride beyond": {"source_stride": 9},
    "source rows overlap": {"source_stride": 7},
    "target too short": {"target_offset": 1},
    "target rows overlap": {"target_stride": 4},
    "target too small for the wider type": {"cast": "BF16_F32", "target_stride": 16},
    "half a value": {"cast": "F32_BF16", "row_bytes": 6},
    "unknown cast": {"cast": "F32_F64"},
    "same row counted again and again": {"source_stride": 0, "read_place": Place(0, 8, 32)},
    "same row beyond the end": {"source_stride": 0, "source_offset": 25},
    "same row too often": {"source_stride": 0, "rows": 2**61, "target": None},
    "negative offset": {"source_offset": -1},
    "negative rows": {"rows": -1},
    "product wraps": {"source_stride": 2**62, "rows": 2**62},
    "read place beyond its tensor": {"read_place": Place(1, 8, 32)},
    "read rows overlap": {"read_place": Place(0, 7, 320)},
    "live place beyond its tensor": {"live_place": Place(0, 9, 32)},
}


@pytest.mark.parametrize("change", BROKEN.values(), ids=BROKEN.keys())
def test_region_out_of_bounds_is_refused_and_touches_nothing(change: dict[str, Any]) -> None:
    source, target = random_bytes(32, 1), np.zeros(32, np.uint8)
    with pytest.raises(ValueError, match=r"\w"):
        Region(**({"source": source, "target": target} | BASE | change))
    assert not target.any()


@pytest.mark.parametrize(("row_bytes", "stride", "phase"), [(64, 192, 4), (60, 180, 0), (64, 192, 2), (68, 130, 1)])
@pytest.mark.parametrize("cast", ["none", "F32_BF16", "BF16_F32"])
def test_region_without_a_target_sums_what_it_would_have_written(
    cast: str, row_bytes: int, stride: int, phase: int
) -> None:
    """Rows that are whole blocks take another way through the kernels than rows that are not."""
    source = random_bytes(20 * stride, 9)
    wide = {"none": row_bytes, "F32_BF16": row_bytes // 2, "BF16_F32": row_bytes * 2}[cast]
    base: dict[str, Any] = {
        "source": source,
        "source_offset": 0,
        "source_stride": stride,
        "rows": 20,
        "row_bytes": row_bytes,
        "cast": cast,
        "read_place": Place(phase, stride, 20 * stride + phase),
        "live_place": Place(phase, wide, 20 * wide + phase),
    }
    target = np.zeros(20 * wide, np.uint8)
    written = transfer([Region(target=target, target_stride=wide, **base)], 1)
    assert written[0][1] == fletcher4(bytes(phase) + target.tobytes())
    assert transfer([Region(**base)], 1) == written


@QUIET
@given(
    rows=st.integers(2, 9),
    blocks=st.integers(1, 20),
    gaps=st.tuples(*[st.integers(0, 5)] * 4),
    offsets=st.tuples(*[st.integers(0, 9)] * 4),
    cast=st.sampled_from(["none", "F32_BF16", "BF16_F32"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_rows_of_whole_blocks_are_summed_as_any_others(
    rows: int, blocks: int, gaps: tuple[int, ...], offsets: tuple[int, ...], cast: str, seed: int
) -> None:
    """Short regular rows keep their sums in vector lanes from row to row."""
    row_bytes = 128 * blocks
    written_bytes = {"none": row_bytes, "F32_BF16": row_bytes // 2, "BF16_F32": row_bytes * 2}[cast]
    sizes = (row_bytes, written_bytes, row_bytes, written_bytes)
    layouts = [
        Layout(4 * offset, size + 64 * gap, 4 * offset + rows * (size + 64 * gap))
        for size, gap, offset in zip(sizes, gaps, offsets, strict=True)
    ]
    source_layout, target_layout, read, live = layouts
    source, target = random_bytes(source_layout.num_bytes, seed), np.zeros(target_layout.num_bytes, np.uint8)
    region = Region(
        source=source,
        source_offset=source_layout.offset,
        source_stride=source_layout.stride,
        rows=rows,
        row_bytes=row_bytes,
        target=target,
        target_offset=target_layout.offset,
        target_stride=target_layout.stride,
        cast=cast,
        read_place=Place(*read),
        live_place=Place(*live),
    )
    payload = source_layout.rows_of(source, rows, row_bytes)
    written = {
        "none": lambda: payload,
        "F32_BF16": lambda: to_bf16(payload.view("<u4")).view(np.uint8),
        "BF16_F32": lambda: to_f32(payload.view("<u2")).view(np.uint8),
    }[cast]()
    assert transfer([region], 1) == [(fletcher4(read.scatter(payload, rows)), fletcher4(live.scatter(written, rows)))]
    assert target.tobytes() == target_layout.scatter(written, rows)


@pytest.mark.parametrize("row_bytes", [1, 7, 64, 1000])
def test_one_row_again_and_again_fills_every_row_of_the_target(row_bytes: int) -> None:
    """As the rows of zeros that pad a vocabulary: only what is written is summed."""
    row, target = random_bytes(row_bytes + 3, 8), np.zeros(9 * row_bytes, np.uint8)
    region = Region(
        source=row,
        source_offset=3,
        source_stride=0,
        rows=9,
        row_bytes=row_bytes,
        target=target,
        target_stride=row_bytes,
        live_place=Place(0, row_bytes, target.size),
    )
    assert transfer([region], 1) == [(None, fletcher4(row[3:].tobytes() * 9))]
    assert target.tobytes() == row[3:].tobytes() * 9


def test_row_that_is_repeated_into_itself_is_refused() -> None:
    buffer = random_bytes(64, 1)
    before = buffer.copy()
    with pytest.raises(ValueError, match="overlap"):
        Region(source=buffer, target=buffer, target_offset=24, **(BASE | {"source_offset": 31, "source_stride": 0}))
    np.testing.assert_array_equal(buffer, before)


def test_source_that_overlaps_its_target_is_refused() -> None:
    buffer = random_bytes(64, 1)
    before = buffer.copy()
    with pytest.raises(ValueError, match="overlap"):
        Region(source=buffer, target=buffer, target_offset=31, **BASE)
    np.testing.assert_array_equal(buffer, before)
    transfer([Region(source=buffer, target=buffer, target_offset=32, **BASE)], 1)
    np.testing.assert_array_equal(buffer[32:], before[:32])


def test_read_only_targets_and_strided_buffers_are_refused() -> None:
    source, frozen = random_bytes(32, 1), np.zeros(32, np.uint8)
    frozen.flags.writeable = False
    with pytest.raises((BufferError, ValueError)):
        Region(source=source, target=frozen, **BASE)
    with pytest.raises((BufferError, ValueError)):
        Region(source=random_bytes(64, 1)[::2], target=np.zeros(32, np.uint8), **BASE)


def test_regions_hold_their_buffers_until_they_die() -> None:
    mapping = _native.Mapping.private(64)
    region = Region(source=mapping, source_offset=0, source_stride=0, rows=1, row_bytes=64)
    with pytest.raises(BufferError, match="alive"):
        mapping.close()
    del region
    mapping.close()


def test_bad_thread_counts_and_unknown_kernels_are_refused() -> None:
    with pytest.raises(ValueError, match="num_threads"):
        transfer([], 0)
    with pytest.raises(ValueError, match="no kernels"):
        _native.use_kernels("mmx")  # type: ignore[arg-type]
    assert transfer([], 1) == []


@pytest.mark.parametrize(
    "call",
    [
        lambda memory: transfer([None], 1),  # type: ignore[list-item]
        lambda memory: _native.futex_wait_i32(None, 0, 0, 0),  # type: ignore[arg-type]
        lambda memory: _native.WordWatcher(None, 0, memory, 0, 1000),  # type: ignore[arg-type]
        lambda memory: _native.WordWatcher(memory, 0, None, 0, 1000),  # type: ignore[arg-type]
        lambda memory: _native.CollectiveGroup(None, 0, 1, 64, 0),  # type: ignore[arg-type]
        lambda memory: _native.CudaContext(None, 0),  # type: ignore[arg-type]
    ],
)
def test_none_in_the_place_of_an_object_is_a_type_error(call: Callable[[Mapping], object]) -> None:
    """Never a crash of the process."""
    with pytest.raises(TypeError):
        call(Mapping.private(4096))
