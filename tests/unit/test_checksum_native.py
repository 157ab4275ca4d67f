"""The native core computes the same fletcher4 as the law, in every shape of work it is given."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdeploy_rl._native import Place, Region, transfer
from fastdeploy_rl.checksum import ZERO, Fletcher4, add, contribution, of_bytes

SEED = np.random.default_rng(7)
NOISE = SEED.integers(0, 256, 3 << 20, np.uint8)


def placed(offset: int, stride: int, rows: Sequence[bytes], total: int) -> Fletcher4:
    sums = ZERO
    for i, row in enumerate(rows):
        sums = add(sums, contribution(row, offset + i * stride, total))
    return sums


def read(data: np.ndarray, *, threads: int = 1, place: Place | None = None, **geometry: int) -> Fletcher4:
    region = Region(source=data, read_place=place or Place(0, data.size, data.size), **geometry)
    ((sums, live),) = transfer([region], threads)
    assert live is None
    assert sums is not None
    return Fletcher4(*sums)


@settings(deadline=None)
@given(st.integers(0, 5000), st.integers(0, 64))
def test_one_run_of_bytes(num_bytes: int, skip: int) -> None:
    data = NOISE[skip : skip + num_bytes].copy()
    assert read(data, source_offset=0, source_stride=num_bytes, rows=1, row_bytes=num_bytes) == of_bytes(data)


@pytest.mark.parametrize("num_bytes", [2**16 - 1, 2**18 + 3, (1 << 20) + 1, 3 << 20])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_large_run_split_among_threads(num_bytes: int, threads: int) -> None:
    data = NOISE[:num_bytes].copy()
    sums = read(data, threads=threads, source_offset=0, source_stride=num_bytes, rows=1, row_bytes=num_bytes)
    assert sums == of_bytes(data)


def test_words_of_all_ones_wrap_alike() -> None:
    data = np.full(1 << 20, 0xFF, np.uint8)
    assert read(data, source_offset=0, source_stride=data.size, rows=1, row_bytes=data.size) == of_bytes(data)


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_strided_rows_at_their_place(data: st.DataObject) -> None:
    rows, row_bytes = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 300))
    source_stride, place_stride = row_bytes + data.draw(st.integers(0, 40)), row_bytes + data.draw(st.integers(0, 70))
    offset, place = data.draw(st.integers(0, 33)), data.draw(st.integers(0, 33))
    total = place + place_stride * rows + data.draw(st.integers(0, 33))
    source = NOISE[: offset + source_stride * rows].copy()
    pieces = [source[offset + i * source_stride :][:row_bytes].tobytes() for i in range(rows)]
    geometry = {"source_offset": offset, "source_stride": source_stride, "rows": rows, "row_bytes": row_bytes}
    assert read(source, place=Place(place, place_stride, total), **geometry) == placed(
        place, place_stride, pieces, total
    )


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 6), st.integers(1, 150), st.integers(0, 9), st.sampled_from(["none", "F32_BF16", "BF16_F32"]))
def test_what_was_written_is_what_live_says(rows: int, row_elements: int, gap: int, cast: str) -> None:
    size, target_size = {"none": (4, 4), "F32_BF16": (4, 2), "BF16_F32": (2, 4)}[cast]
    source = np.arange(1, 1 + rows * row_elements, dtype=np.float32)
    source_bytes = (
        source.view(np.uint8) if size == 4 else (source.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    )
    row_bytes, target_row = row_elements * size, row_elements * target_size
    stride = target_row + gap * target_size
    target = np.zeros(stride * rows, np.uint8)
    region = Region(
        source=source_bytes,
        source_offset=0,
        source_stride=row_bytes,
        rows=rows,
        row_bytes=row_bytes,
        target=target,
        target_offset=0,
        target_stride=stride,
        cast=cast,
        read_place=Place(0, row_bytes, source_bytes.size),
        live_place=Place(0, stride, target.size),
    )
    ((read_sums, live_sums),) = transfer([region], 2)
    assert read_sums == of_bytes(source_bytes)
    assert live_sums == of_bytes(target)
