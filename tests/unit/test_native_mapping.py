"""Mappings: who keeps them mapped, what their words hold, and DLPack in both directions."""

import gc
import os
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest

from fastdeploy_rl import _native
from fastdeploy_rl._native import Mapping

NUMPY_TYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}


class Exporter:
    """What numpy's from_dlpack wants around a capsule."""

    def __init__(self, capsule: object) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: object) -> object:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


def map_file(path: Path, content: bytes, *, writable: bool) -> Mapping:
    path.write_bytes(content)
    fd = os.open(path, os.O_RDWR)
    try:
        return Mapping.map_fd(fd, len(content), writable)
    finally:
        os.close(fd)


def test_private_mapping_is_zeroed_page_aligned_and_writable() -> None:
    mapping = Mapping.private(10_000)
    assert (mapping.num_bytes, mapping.is_writable, mapping.is_closed) == (10_000, True, False)
    assert mapping.address % os.sysconf("SC_PAGESIZE") == 0
    assert bytes(memoryview(mapping)) == bytes(10_000)


def test_writable_file_mapping_reaches_the_file(tmp_path: Path) -> None:
    mapping = map_file(tmp_path / "file", b"abcd", writable=True)
    memoryview(mapping)[1:3] = b"XY"
    assert (tmp_path / "file").read_bytes() == b"aXYd"


def test_read_only_mapping_gives_read_only_views_and_no_stores(tmp_path: Path) -> None:
    mapping = map_file(tmp_path / "file", b"abcdefgh", writable=False)
    view = memoryview(mapping)
    assert view.readonly
    with pytest.raises(TypeError):
        view[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        _native.store_u64(mapping, 0, 1)
    with pytest.raises(ValueError, match="read-only"):
        _native.ring_bell(mapping, 0)
    assert (tmp_path / "file").read_bytes() == b"abcdefgh"


def test_mapping_beyond_the_end_of_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"short")
    with (tmp_path / "file").open("rb") as file, pytest.raises(ValueError, match="5"):
        Mapping.map_fd(file.fileno(), 6, False)


def test_system_errors_keep_their_number() -> None:
    read_end, write_end = os.pipe()
    try:
        with pytest.raises(OSError, match=r"."):
            Mapping.map_fd(-1, 1, False)
        with pytest.raises(ValueError, match="positive"):
            Mapping.map_fd(read_end, 0, False)
    finally:
        os.close(read_end)
        os.close(write_end)
    with pytest.raises(MemoryError):
        Mapping.private(2**60)


def test_close_is_refused_while_views_live_and_nothing_happens() -> None:
    mapping = Mapping.private(64)
    array = np.frombuffer(mapping, np.uint8)
    assert mapping.num_exports == 1
    with pytest.raises(BufferError, match="alive"):
        mapping.close()
    array[0] = 7
    assert not mapping.is_closed
    del array
    mapping.close()
    mapping.close()
    assert (mapping.is_closed, mapping.num_exports) == (True, 0)


def test_closed_mapping_gives_nothing_away() -> None:
    mapping = Mapping.private(64)
    mapping.close()
    with pytest.raises(BufferError, match="closed"):
        memoryview(mapping)
    with pytest.raises(ValueError, match="closed"):
        _native.load_u64(mapping, 0)
    with pytest.raises(ValueError, match="closed"):
        mapping.dlpack(0, [1], "U8")
    with pytest.raises(ValueError, match="closed"):
        mapping.prefault(1)
    with pytest.raises(ValueError, match="closed"):
        _native.WordWatcher(mapping, 0, Mapping.private(64), 0, 1000)


@pytest.mark.parametrize("writable", [True, False])
def test_prefault_leaves_the_contents_alone(tmp_path: Path, writable: bool) -> None:
    content = os.urandom(5 * 4096 + 17)
    mapping = map_file(tmp_path / "file", content, writable=writable)
    mapping.prefault(3)
    assert bytes(memoryview(mapping)) == content
    with pytest.raises(ValueError, match="num_threads"):
        mapping.prefault(0)


def test_bytes_that_a_file_has_no_more_are_an_error_and_no_signal(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(5 * 4096))
    with path.open("r+b") as file:
        mapping = Mapping.map_fd(file.fileno(), 5 * 4096, writable=False)
        mapping.bring_in(1, 5 * 4096 - 1)
        file.truncate(2 * 4096)
        mapping.bring_in(0, 2 * 4096)
        mapping.bring_in(5 * 4096, 0)
        with pytest.raises(OSError, match="Bad address"):
            mapping.bring_in(2 * 4096 - 1, 2)
    for offset, num_bytes in ((-1, 1), (0, 5 * 4096 + 1), (0, -1)):
        with pytest.raises(ValueError, match="bytes"):
            mapping.bring_in(offset, num_bytes)
    mapping.close()
    with pytest.raises(ValueError, match="closed"):
        mapping.bring_in(0, 1)


def test_prefault_makes_every_page_resident() -> None:
    mapping = Mapping.private(16 << 20)
    mapping.prefault(2)
    rss = next(int(line.split()[1]) for line in smaps_of(mapping.address) if line.startswith("Rss:"))
    assert rss >= 16 << 10


def smaps_of(address: int) -> list[str]:
    """The lines about the mapping that holds `address`."""
    lines: list[str] = []
    is_ours = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split(" ", 1)[0]
        if "-" in head:
            start, stop = (int(part, 16) for part in head.split("-"))
            is_ours = start <= address < stop
        if is_ours:
            lines.append(line)
    return lines


@pytest.mark.parametrize("name", NUMPY_TYPES)
def test_dlpack_tensor_shares_the_bytes(name: str) -> None:
    dtype = np.dtype(NUMPY_TYPES[name])
    mapping = Mapping.private(4096)
    array = np.from_dlpack(Exporter(mapping.dlpack(512, [2, 3], name)))
    assert (array.dtype, array.shape, array.__array_interface__["data"][0]) == (dtype, (2, 3), mapping.address + 512)
    memoryview(mapping)[512] = 1
    assert array.reshape(-1).view(np.uint8)[0] == 1


@pytest.mark.parametrize("shape", [[], [0], [3, 0, 2], [1, 1]])
def test_dlpack_of_scalars_and_empty_tensors(shape: list[int]) -> None:
    array = np.from_dlpack(Exporter(Mapping.private(64).dlpack(64 - 4 * int(np.prod(shape)), shape, "F32")))
    assert array.shape == tuple(shape)


def test_dlpack_tensor_keeps_the_memory_when_the_mapping_object_is_gone() -> None:
    mapping = Mapping.private(4096)
    memoryview(mapping)[:4] = b"\x01\x02\x03\x04"
    gone = weakref.ref(mapping) if hasattr(mapping, "__weakref__") else None
    array = np.from_dlpack(Exporter(mapping.dlpack(0, [4], "U8")))
    address = mapping.address
    del mapping
    gc.collect()
    assert gone is None or gone() is None
    assert array.tolist() == [1, 2, 3, 4]
    assert smaps_of(address)
    del array
    assert not smaps_of(address)


def test_capsules_count_as_exports_until_they_or_their_tensors_die() -> None:
    mapping = Mapping.private(64)
    unconsumed = mapping.dlpack(0, [4], "U8")
    assert mapping.num_exports == 1
    array = np.from_dlpack(Exporter(mapping.dlpack(0, [4], "U8")))
    assert mapping.num_exports == 2
    with pytest.raises(BufferError):
        mapping.close()
    del unconsumed
    assert mapping.num_exports == 1
    del array
    assert mapping.num_exports == 0


@pytest.mark.parametrize(
    ("offset", "shape", "dtype"),
    [
        (0, [65], "U8"),
        (61, [1], "F32"),
        (2, [1], "F32"),
        (-4, [1], "F32"),
        (0, [-1], "F32"),
        (0, [2**62, 2**62], "F32"),
        (0, [0, 2**40, 2**40], "F32"),
        (0, [1], "F8_E8M0"),
        (0, [1], "float32"),
    ],
)
def test_dlpack_outside_the_mapping_is_refused(offset: int, shape: list[int], dtype: str) -> None:
    mapping = Mapping.private(64)
    with pytest.raises(ValueError, match=r"\w"):
        mapping.dlpack(offset, shape, dtype)
    assert mapping.num_exports == 0


@pytest.mark.parametrize("name", NUMPY_TYPES)
def test_borrowed_numpy_tensor_is_a_flat_buffer(name: str) -> None:
    array = np.zeros((3, 5), NUMPY_TYPES[name])
    borrowed = _native.borrow_dlpack(array.__dlpack__())
    assert (borrowed.address, borrowed.num_bytes) == (array.__array_interface__["data"][0], array.nbytes)
    assert (borrowed.dtype, borrowed.shape, borrowed.is_contiguous, borrowed.is_cpu) == (name, (3, 5), True, True)
    memoryview(borrowed)[0] = 1
    assert array.view(np.uint8)[0, 0] == 1


def test_borrowed_tensor_outlives_its_lender() -> None:
    array = np.arange(1000, dtype=np.int64)
    lender = weakref.ref(array)
    borrowed = _native.borrow_dlpack(array.__dlpack__())
    view = memoryview(borrowed)
    del array, borrowed
    assert lender() is not None
    assert view[8] == 1
    del view
    gc.collect()
    assert lender() is None


def test_borrowed_tensor_with_gaps_shows_no_buffer() -> None:
    borrowed = _native.borrow_dlpack(np.zeros((4, 4), np.float32)[:, :2].__dlpack__())
    assert not borrowed.is_contiguous
    with pytest.raises(BufferError, match="contiguous"):
        memoryview(borrowed)
    assert _native.borrow_dlpack(np.zeros((1, 4), np.float32)[:, :4].T.__dlpack__()).is_contiguous


def test_capsule_is_consumed_once() -> None:
    array = np.zeros(3, np.float32)
    capsule = array.__dlpack__()
    _native.borrow_dlpack(capsule)
    for wrong in (capsule, array, None):
        with pytest.raises(ValueError, match="capsule"):
            _native.borrow_dlpack(wrong)


def test_dtype_without_a_name_is_refused_and_the_tensor_freed() -> None:
    array = np.zeros(3, np.complex64)
    lender = weakref.ref(array)
    with pytest.raises(ValueError, match="safetensors"):
        _native.borrow_dlpack(array.__dlpack__())
    del array
    gc.collect()
    assert lender() is None


def test_words_load_store_exchange_and_wrap() -> None:
    mapping = Mapping.private(64)
    _native.store_u64(mapping, 8, 2**64 - 1)
    assert _native.load_u64(mapping, 8) == 2**64 - 1
    assert _native.add_u64(mapping, 8, 3) == 2
    assert _native.add_u64(mapping, 8, -2) == 0
    assert _native.compare_exchange_u64(mapping, 8, 1, 9) == 0
    assert _native.compare_exchange_u64(mapping, 8, 0, 9) == 0
    assert _native.load_u64(mapping, 8) == 9
    _native.store_i32(mapping, 4, -2)
    assert _native.compare_exchange_i32(mapping, 4, -2, 5) == -2
    assert _native.load_i32(mapping, 4) == 5
    _native.store_i32(mapping, 4, 2**31 - 1)
    _native.ring_bell(mapping, 4)
    assert _native.load_i32(mapping, 4) == -(2**31)
    assert _native.load_u64(mapping, 8) == 9


@pytest.mark.parametrize("offset", [-8, 60, 64, 2**62, 4])
def test_words_outside_or_askew_are_refused(offset: int) -> None:
    mapping = Mapping.private(64)
    for call in (
        lambda: _native.load_u64(mapping, offset),
        lambda: _native.store_u64(mapping, offset, 1),
        lambda: _native.add_u64(mapping, offset, 1),
        lambda: _native.compare_exchange_u64(mapping, offset, 0, 1),
    ):
        with pytest.raises(ValueError, match="offset"):
            call()
    assert bytes(memoryview(mapping)) == bytes(64)


def test_futex_wait_ends_at_once_when_the_word_differs_and_at_the_deadline_when_not() -> None:
    mapping = Mapping.private(64)
    assert _native.futex_wait_i32(mapping, 0, 1, 0) is True
    assert _native.futex_wait_i32(mapping, 0, 0, 0) is False
    deadline = time.monotonic_ns() + 2_000_000
    assert _native.futex_wait_i32(mapping, 0, 0, deadline) is False
    assert time.monotonic_ns() >= deadline


def test_futex_wait_lets_other_threads_run_and_holds_the_mapping() -> None:
    mapping = Mapping.private(64)
    results: list[bool] = []
    waiter = threading.Thread(
        target=lambda: results.append(_native.futex_wait_i32(mapping, 0, 0, time.monotonic_ns() + 60_000_000_000))
    )
    waiter.start()
    deadline = time.monotonic() + 30
    while mapping.num_exports == 0 and time.monotonic() < deadline:
        time.sleep(0)
    with pytest.raises(BufferError):
        mapping.close()
    _native.ring_bell(mapping, 0)
    waiter.join()
    assert results == [True]
    mapping.close()


def test_watcher_rings_for_a_silent_store_and_stops_twice() -> None:
    word, bell = Mapping.private(64), Mapping.private(64)
    watcher = _native.WordWatcher(word, 4, bell, 8, 500)
    _native.store_i32(word, 4, 1)
    assert _native.futex_wait_i32(bell, 8, 0, time.monotonic_ns() + 30_000_000_000)
    assert _native.load_i32(bell, 8) == 1
    watcher.stop()
    watcher.stop()
    assert (word.num_exports, bell.num_exports) == (0, 0)
    _native.store_i32(word, 4, 2)
    assert not _native.futex_wait_i32(bell, 8, 1, time.monotonic_ns() + 5_000_000)


def test_watcher_with_a_long_period_notices_a_wake_and_stops_when_collected() -> None:
    word, bell = Mapping.private(64), Mapping.private(64)
    watcher = _native.WordWatcher(word, 0, bell, 0, 1_000_000)
    _native.ring_bell(word, 0)
    assert _native.futex_wait_i32(bell, 0, 0, time.monotonic_ns() + 30_000_000_000)
    del watcher
    word.close()
    bell.close()


def test_watcher_refuses_impossible_periods_and_read_only_bells(tmp_path: Path) -> None:
    mapping = Mapping.private(64)
    for period_us in (0, -1, 2_000_000):
        with pytest.raises(ValueError, match="period_us"):
            _native.WordWatcher(mapping, 0, mapping, 4, period_us)
    frozen = map_file(tmp_path / "file", bytes(64), writable=False)
    with pytest.raises(ValueError, match="read-only"):
        _native.WordWatcher(mapping, 0, frozen, 0, 1000)
    assert mapping.num_exports == 0
