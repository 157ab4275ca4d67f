"""Transposing copies against numpy, with casts and both checksums, any sizes and offsets, with every set of kernels."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fastdeploy_rl._native import Place, Region, transfer
from fastdeploy_rl.checksum import ZERO, Fletcher4, add, contribution
from tests.unit.native_levels import kernels as kernels

CASTS = {"F32_BF16": (4, 2), "BF16_F32": (2, 4), "F16_F32": (2, 4), "F32_F16": (4, 2), "F16_BF16": (2, 2)}
KINDS = {**{f"{size}-byte items": ("none", size, size) for size in (1, 2, 4, 8)}} | {
    name: (name, *sizes) for name, sizes in CASTS.items()
}
Bytes = npt.NDArray[np.uint8]


class Layout(NamedTuple):
    """Rows inside a buffer or a tensor."""

    offset: int
    stride: int
    num_bytes: int

    def starts(self, rows: int) -> range:
        return range(self.offset, self.offset + rows * self.stride, self.stride) if self.stride else range(0)

    def scatter(self, values: Bytes, into: Bytes) -> Bytes:
        """The rows of `values` at their places, all else as it is."""
        out = into.copy()
        for start, row in zip(self.starts(len(values)), values, strict=False):
            out[start : start + row.size] = row
        return out

    def sums(self, values: Bytes) -> Fletcher4:
        total = ZERO
        for start, row in zip(self.starts(len(values)), values, strict=False):
            total = add(total, contribution(row, start, self.num_bytes))
        return total


def random_bytes(count: int, seed: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


def cast_values(values: Bytes, cast: str) -> Bytes:
    """Rows of bytes as the plain copy casts them, which other tests compare with numpy."""
    if cast == "none" or not values.size:
        source_size, target_size = CASTS.get(cast, (1, 1))
        return values.reshape(len(values), values.shape[1] // source_size * target_size)
    source_size, target_size = CASTS[cast]
    target = np.zeros((len(values), values.shape[1] // source_size * target_size), np.uint8)
    transfer(
        [
            Region(
                source=values.copy(),
                source_offset=0,
                source_stride=0,
                rows=1,
                row_bytes=values.size,
                target=target,
                cast=cast,
            )
        ],
        1,
    )
    return target


def transposed(values: Bytes, item: int) -> Bytes:
    """Rows of bytes of the transposed matrix."""
    rows, row_bytes = values.shape
    return np.ascontiguousarray(values.reshape(rows, row_bytes // item, item).swapaxes(0, 1)).reshape(
        row_bytes // item, rows * item
    )


def spread(offset: int, row_bytes: int, gap: int, rows: int, after: int = 5) -> Layout:
    return Layout(offset, row_bytes + gap, offset + rows * (row_bytes + gap) + after)


def check(kind: str, rows: int, columns: int, offsets: tuple[int, ...], gaps: tuple[int, ...], threads: int) -> None:
    cast, item, target_item = KINDS[kind]
    source_layout = spread(offsets[0], columns * item, gaps[0], rows)
    target_layout = spread(offsets[1], rows * target_item, gaps[1], columns)
    read, live = spread(offsets[2], columns * item, gaps[2], rows), spread(offsets[3], rows * target_item, 3, columns)
    source, target = random_bytes(source_layout.num_bytes, rows), random_bytes(target_layout.num_bytes, columns + 1)
    payload = np.empty((rows, columns * item), np.uint8)
    for row, start in enumerate(source_layout.starts(rows)):
        payload[row] = source[start : start + columns * item]
    written = transposed(cast_values(payload, cast), target_item)
    expected = target_layout.scatter(written, target)
    region: dict[str, Any] = {
        "source": source,
        "source_offset": source_layout.offset,
        "source_stride": source_layout.stride,
        "rows": rows,
        "row_bytes": columns * item,
        "cast": cast,
        "read_place": Place(*read),
        "live_place": Place(*live),
        "transpose_item": item,
    }
    sums = [(tuple(read.sums(payload)), tuple(live.sums(written)))]
    assert transfer([Region(**region)], threads) == sums
    target_geometry = {"target": target, "target_offset": target_layout.offset, "target_stride": target_layout.stride}
    assert transfer([Region(**region, **target_geometry)], threads) == sums
    np.testing.assert_array_equal(target, expected)
    target[:] = random_bytes(target.size, columns + 1)
    assert transfer([Region(**region | {"read_place": None, "live_place": None}, **target_geometry)], threads) == [
        (None, None)
    ]
    np.testing.assert_array_equal(target, expected)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(0, 70),
    columns=st.integers(0, 70),
    offsets=st.tuples(*[st.integers(0, 9)] * 4),
    gaps=st.tuples(*[st.integers(0, 9)] * 3),
)
@example(rows=1, columns=300, offsets=(0, 0, 0, 0), gaps=(0, 0, 0))
@example(rows=300, columns=1, offsets=(1, 1, 1, 1), gaps=(1, 1, 1))
@example(rows=0, columns=5, offsets=(0, 0, 0, 0), gaps=(0, 0, 0))
@example(rows=5, columns=0, offsets=(0, 0, 0, 0), gaps=(0, 0, 0))
@example(rows=64, columns=64, offsets=(0, 0, 0, 0), gaps=(0, 0, 0))
def test_matrix_comes_out_transposed_cast_and_summed_at_both_places(
    kind: str, rows: int, columns: int, offsets: tuple[int, ...], gaps: tuple[int, ...]
) -> None:
    """Rows start anywhere, also inside a word or on an odd byte; bytes around them stay."""
    check(kind, rows, columns, offsets, gaps, threads=1)


@pytest.mark.parametrize("kind", ["1-byte items", "2-byte items", "4-byte items", "F32_BF16", "BF16_F32"])
@pytest.mark.parametrize(("rows", "columns", "offset"), [(513, 700, 0), (1500, 300, 64), (256, 1024, 2), (4100, 33, 1)])
def test_matrices_of_many_tiles_are_whole(kind: str, rows: int, columns: int, offset: int) -> None:
    """Several tiles each way, ragged at their ends, split among threads."""
    check(kind, rows, columns, (offset,) * 4, (0, offset, 0), threads=3)


@pytest.mark.parametrize("columns", [1200, 1216, 1217])
def test_large_matrices_written_around_the_caches_are_whole(columns: int) -> None:
    """Streamed stores: target rows start on a cache line, off it, and (odd number of halves) inside a word."""
    check("2-byte items", columns, 2600, (0, 64, 0, 0), (0, 0, 0), threads=2)


BASE: dict[str, Any] = {"source_offset": 0, "source_stride": 8, "rows": 4, "row_bytes": 8, "transpose_item": 4}
BROKEN: dict[str, dict[str, Any]] = {
    "no such item": {"transpose_item": 3},
    "item of 16 bytes": {"transpose_item": 16, "row_bytes": 16, "source_stride": 16, "rows": 1},
    "negative item": {"transpose_item": -4},
    "half an item": {"row_bytes": 6},
    "cast of another size": {"transpose_item": 2, "cast": "F32_BF16"},
    "target row of the source": {"target_stride": 8},
    "target too short": {"target_offset": 1},
    "target too small for the wider type": {"transpose_item": 2, "cast": "BF16_F32"},
    "live place beyond its tensor": {"live_place": Place(0, 17, 32)},
    "live rows overlap": {"live_place": Place(0, 15, 320)},
    "read place beyond its tensor": {"read_place": Place(1, 8, 32)},
    "target rows wrap": {"rows": 2**62, "row_bytes": 0, "transpose_item": 8},
}


@pytest.mark.parametrize("change", BROKEN.values(), ids=BROKEN.keys())
def test_bad_transposing_region_is_refused_and_touches_nothing(change: dict[str, Any]) -> None:
    source, target = random_bytes(32, 1), np.zeros(32, np.uint8)
    Region(source=source, target=target, target_stride=16, **BASE)
    with pytest.raises(ValueError, match=r"\w"):
        Region(source=source, target=target, **({"target_stride": 16} | BASE | change))
    assert not target.any()


def test_source_that_overlaps_its_transposed_target_is_refused() -> None:
    """A target of two rows of 16 bytes, far apart."""
    buffer = random_bytes(96, 1)
    before = buffer.copy()
    for start in (31, 0, 16):
        with pytest.raises(ValueError, match="overlap"):
            Region(source=buffer, target=buffer, target_offset=start, target_stride=48, **BASE)
    np.testing.assert_array_equal(buffer, before)
    transfer([Region(source=buffer, target=buffer, target_offset=32, target_stride=48, **BASE)], 1)
    values, target = before[:32].reshape(4, 2, 4), buffer[32:]
    assert (target[:16].tobytes(), target[48:].tobytes()) == (values[:, 0].tobytes(), values[:, 1].tobytes())


def test_one_row_transposed_again_and_again_fills_columns() -> None:
    row, target = np.arange(100, dtype=np.uint16), np.zeros((100, 50), np.uint16)
    region = Region(
        source=row,
        source_offset=0,
        source_stride=0,
        rows=50,
        row_bytes=200,
        target=target,
        target_stride=100,
        transpose_item=2,
    )
    transfer([region], 1)
    np.testing.assert_array_equal(target, np.repeat(row[:, None], 50, axis=1))
