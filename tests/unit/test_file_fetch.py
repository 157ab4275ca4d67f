"""Byte ranges out of plain files: what lands where, and what becomes of files that change under the reader."""

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fastdeploy_rl._native import Mapping
from fastdeploy_rl.errors import DeadlineExceededError, NoPublicationError
from fastdeploy_rl.plan.byte_range import ByteRange
from fastdeploy_rl.transport import files
from fastdeploy_rl.transport.files import FileFetch, FileIdentity, identity_of

DATA = np.random.default_rng(1).integers(0, 256, (2, 3000), np.uint8)
RANGES = (
    ByteRange(0, 3, 0, 1, 997, 0),
    ByteRange(1, 10, 100, 20, 33, 1000),
    ByteRange(0, 0, 0, 0, 8, 1660),
    ByteRange(1, 2999, 1, 1, 1, 1660),
)


def soon() -> int:
    return time.monotonic_ns() + 10_000_000_000


@pytest.fixture
def identities(tmp_path: Path) -> list[FileIdentity]:
    for name, data in zip("ab", DATA, strict=True):
        (tmp_path / name).write_bytes(data.tobytes())
    return [identity_of(tmp_path / name) for name in "ab"]


def fetched(directory: Path, identities: list[FileIdentity], deadline_ns: int = 0) -> tuple[bytes, list[int]]:
    target = Mapping.private(4096)
    seen: list[int] = []
    fetch = FileFetch(directory, identities, RANGES, target, 2, deadline_ns or soon())
    with contextlib.closing(fetch):
        for batch in fetch.arrivals():
            seen += batch
    assert fetch.num_bytes == sum(each.num_bytes for each in RANGES)
    data = bytes(memoryview(target)[:1661])
    target.close()  # the fetch keeps no view of it
    return data, sorted(seen)


@pytest.mark.parametrize("gap_bytes", [16 << 10, 67, 66, 0])
@pytest.mark.parametrize("chunk_bytes", [8 << 20, 250, 100, 33, 7, 1])
def test_every_range_lands_packed_and_arrives_once(
    tmp_path: Path, identities: list[FileIdentity], monkeypatch: pytest.MonkeyPatch, chunk_bytes: int, gap_bytes: int
) -> None:
    """The result does not depend on how the work is cut, nor on whether what lies between rows is read with them."""
    monkeypatch.setattr(files, "_CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(files, "_MAX_GAP_BYTES", gap_bytes)
    found, seen = fetched(tmp_path, identities)
    rows = np.concatenate([DATA[1][10 + 100 * row : 43 + 100 * row] for row in range(20)])
    assert found[:997] == DATA[0][3:1000].tobytes()
    assert found[1000:1660] == rows.tobytes()
    assert found[1660] == DATA[1][2999]
    assert seen == [0, 1, 2, 3]


def rewrite(path: Path) -> None:
    path.write_bytes(DATA[0].tobytes()[::-1])
    os.utime(path, ns=(1, 1))


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    other.rename(path)


@pytest.mark.parametrize("change", [rewrite, replace, Path.unlink, lambda path: os.truncate(path, 2000)])
def test_files_that_are_others_by_now_are_not_read(
    tmp_path: Path, identities: list[FileIdentity], change: Callable[[Path], None]
) -> None:
    change(tmp_path / "a")
    with pytest.raises(NoPublicationError, match=f"{tmp_path}/a.*update again"):
        fetched(tmp_path, identities)


def test_a_file_that_is_cut_while_it_is_read_is_an_error_and_no_signal(
    tmp_path: Path, identities: list[FileIdentity]
) -> None:
    target = Mapping.private(4096)
    fetch = FileFetch(tmp_path, identities, (), target, 1, soon())
    fetch._opened[0] = fetch._open(0)
    os.truncate(tmp_path / "a", 500)
    with pytest.raises(NoPublicationError, match="was cut while it was read: it ends at byte 500"):
        fetch._fill(memoryview(bytearray(997)), 0, 3)
    fetch.close()


def test_a_file_that_changed_while_it_was_read_ends_the_fetch(tmp_path: Path, identities: list[FileIdentity]) -> None:
    target = Mapping.private(4096)
    with contextlib.closing(FileFetch(tmp_path, identities, RANGES, target, 1, soon())) as fetch:
        arrivals = fetch.arrivals()
        next(arrivals)  # of the range without bytes, before anything else
        rewrite(tmp_path / "b")
        with pytest.raises(NoPublicationError, match=f"{tmp_path}/b was (changed|cut)"):
            list(arrivals)


def test_a_fetch_ends_at_its_deadline(
    tmp_path: Path, identities: list[FileIdentity], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the disk does."""
    hold = threading.Event()
    monkeypatch.setattr(FileFetch, "_read", lambda *_: hold.wait(30))
    with contextlib.closing(FileFetch(tmp_path, identities, RANGES, Mapping.private(4096), 1, soon())) as fetch:
        fetch._deadline_ns = time.monotonic_ns()
        with pytest.raises(DeadlineExceededError, match=f"bytes of files in {tmp_path}"):
            list(fetch.arrivals())
        hold.set()


def test_what_is_no_regular_file_is_refused(tmp_path: Path, identities: list[FileIdentity]) -> None:
    """A pipe would keep a reader for good."""
    (tmp_path / "a").unlink()
    os.mkfifo(tmp_path / "a")
    with pytest.raises(NoPublicationError, match="no regular file"):
        fetched(tmp_path, identities)
    with pytest.raises(NoPublicationError, match="no regular file"):
        identity_of(tmp_path / "a")


def test_a_symbolic_link_is_what_it_leads_to(tmp_path: Path, identities: list[FileIdentity]) -> None:
    """Model hubs keep their files so."""
    (tmp_path / "c").symlink_to("a")
    assert identity_of(tmp_path / "c") == identities[0]._replace(name="c")
    links = [identity_of(tmp_path / "c"), identities[1]]
    assert fetched(tmp_path, links) == fetched(tmp_path, identities)
