"""A copy in host memory: the bytes come back, nobody maps them meanwhile, and what fails leaves nothing."""

import errno
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdeploy_rl._native import Mapping
from fastdeploy_rl.errors import ConfigurationError, NoSpaceError, SegmentError
from fastdeploy_rl.memory import host_copy
from fastdeploy_rl.memory.free_memory import free_memory
from fastdeploy_rl.memory.host_copy import HostCopy
from fastdeploy_rl.memory.tensor_view import TensorView
from fastdeploy_rl.update.live_weights import live_checksums

MIB = 1 << 20
OFFSETS = {"wide": 512, "none": 0, "scalar": 0, "last": 4096}


def tensors(memory: Mapping) -> dict[str, TensorView]:
    with memoryview(memory) as data:
        data[:] = np.random.default_rng(1).bytes(len(data))
    return {
        "wide": TensorView(memory, 64, "F32", (3, 5)),
        "none": TensorView(memory, 0, "F32", (0, 4)),
        "scalar": TensorView(memory, 1024, "BF16", ()),
        "last": TensorView(memory, 2048, "U8", (1001,)),
    }


def bytes_of(views: dict[str, TensorView]) -> dict[str, bytes]:
    return {name: view.numpy().tobytes() for name, view in views.items()}


def descriptors() -> set[str]:
    """What this process has open of host copies."""
    links = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{entry}"))
        except FileNotFoundError:
            continue  # the listing's own
    return {link for link in links if "host_copy" in link}


def is_mapped() -> bool:
    return "host_copy" in Path("/proc/self/maps").read_text()


def resident_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Rss:"))


@pytest.fixture
def nothing_left() -> Iterator[None]:
    yield
    assert (descriptors(), is_mapped()) == (set(), False)


@pytest.mark.usefixtures("nothing_left")
def test_bytes_and_sums_come_back_whatever_became_of_the_memory_they_were_saved_from() -> None:
    source, target = Mapping.private(8192), Mapping.private(8192)
    views = tensors(source)
    expected, sums = bytes_of(views), live_checksums(views, 1)
    copy = HostCopy.save(views, OFFSETS, 2)
    with memoryview(source) as poisoned:
        poisoned[:] = b"\xff" * len(poisoned)
    assert not is_mapped()
    for _ in range(2):  # it stays until it is released
        loaded = copy.load(target, 2)
        assert (bytes_of(loaded.views), loaded.sums, copy.sums) == (expected, sums, sums)
        assert {name: view.offset for name, view in loaded.views.items()} == OFFSETS
        assert not is_mapped()
    copy.release()
    copy.release()
    with pytest.raises(SegmentError, match="released already"):
        copy.load(target, 1)


@pytest.mark.usefixtures("nothing_left")
def test_resident_memory_falls_while_it_sleeps_and_the_memfd_cannot_be_resized() -> None:
    memory = Mapping.private(64 * MIB)
    memory.prefault(1)
    before = resident_bytes()
    copy = HostCopy.save({"all": TensorView(memory, 0, "U8", (64 * MIB,))}, {"all": 0}, 2)
    memory.close()
    assert resident_bytes() < before - 60 * MIB
    assert copy.num_bytes == 64 * MIB
    for num_bytes in (0, 65 * MIB):
        with pytest.raises(PermissionError):
            os.ftruncate(copy._descriptor, num_bytes)
    copy.release()


def out_of_memory(*arguments: Any) -> None:
    raise MemoryError


def no_space(*arguments: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    ("module", "name", "fails", "error"),
    [
        (host_copy, "free_memory", lambda: 5096, NoSpaceError),
        (os, "memfd_create", no_space, NoSpaceError),
        (os, "posix_fallocate", no_space, NoSpaceError),
        (host_copy, "transfer", out_of_memory, MemoryError),
        (host_copy, "_region", out_of_memory, MemoryError),
    ],
    ids=["room", "memfd", "fallocate", "transfer", "region"],
)
def test_a_save_that_fails_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, fails: Callable[..., Any], error: type[Exception]
) -> None:
    memory = Mapping.private(8192)
    views = tensors(memory)
    monkeypatch.setattr(module, name, fails)
    with pytest.raises(error, match="5097 bytes" if error is NoSpaceError else None):
        HostCopy.save(views, OFFSETS, 1)
    memory.close()  # nobody looks at it any more


@pytest.mark.usefixtures("nothing_left")
def test_a_load_that_fails_keeps_the_copy_for_another_try(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = Mapping.private(8192), Mapping.private(8192)
    views = tensors(source)
    copy = HostCopy.save(views, OFFSETS, 1)
    with pytest.raises(ConfigurationError, match="ends outside its mapping"):
        copy.load(Mapping.private(4096), 1)
    for name in ("transfer", "_region"):
        with monkeypatch.context() as patched:
            patched.setattr(host_copy, name, out_of_memory)
            with pytest.raises(MemoryError):
                copy.load(target, 1)
        assert not is_mapped()
    assert bytes_of(copy.load(target, 1).views) == bytes_of(views)
    copy.release()


MEMINFO = "MemTotal:  9000 kB\nMemFree: 10 kB\nMemAvailable:    4000 kB\n"
V2, V1 = "0::/a/b\n", "4:memory:/a/b\n3:cpu:/x\n0::/\n"


@pytest.mark.parametrize(
    ("meminfo", "groups", "files", "expected"),
    [
        (MEMINFO, "", {}, 4000 << 10),
        (MEMINFO, V2, {"a/b/memory.max": "max", "a/b/memory.current": "7"}, 4000 << 10),
        (MEMINFO, V2, {"a/b/memory.max": "900", "a/b/memory.current": "600"}, 300),
        (MEMINFO, V2, {"a/memory.max": "900", "a/memory.current": "600", "a/memory.stat": "inactive_file 50"}, 350),
        (MEMINFO, V2, {"memory.max": "900", "memory.current": "1000"}, 0),
        (MEMINFO, V1, {"memory/a/memory.limit_in_bytes": "900", "memory/a/memory.usage_in_bytes": "100"}, 800),
        (MEMINFO, V1, {"memory/memory.limit_in_bytes": "700", "memory/memory.usage_in_bytes": "100"}, 600),
        ("", V2, {"memory.max": "900", "memory.current": "200"}, 700),
        ("", "", {}, sys.maxsize),
    ],
)
def test_free_memory_is_the_least_that_machine_and_control_groups_allow(
    tmp_path: Path, meminfo: str, groups: str, files: dict[str, str], expected: int
) -> None:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text(meminfo)
    (tmp_path / "proc" / "self" / "cgroup").write_text(groups)
    for name, text in files.items():
        (tmp_path / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cgroup" / name).write_text(text)
    assert free_memory(tmp_path / "proc", tmp_path / "cgroup") == expected


def test_this_machine_has_some_memory_free() -> None:
    assert MIB < free_memory() < 1 << 50
