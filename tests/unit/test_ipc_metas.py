"""FastDeploy's IPC metadata, read without pickle: rows are what they say, whatever is hostile is refused by name and
never executed."""

import itertools
import pickle
import pickletools
import re
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy_rl.errors import CheckpointError, DeadlineExceededError, TrainerError
from fastdeploy_rl.memory import inert_pickle, ipc_metas
from fastdeploy_rl.memory.ipc_metas import IpcMeta, read_ipc_metas, read_ipc_metas_file, write_ipc_metas

HANDLE = bytes(range(64))
TEXT = HANDLE.decode("latin-1")
OTHER = bytes(range(255, 191, -1))


def row(handle: Any = TEXT, **changes: Any) -> list[Any]:
    """As a trainer makes it of `_share_cuda()`."""
    columns = {"offset": 512, "bytes": 24, "dtype": 16, "dims": [4, 3], "lod": [], "device": 1} | changes
    return [handle, *columns.values()]


METAS = {
    "model.norm.weight": IpcMeta(HANDLE, 512, 24, "BF16", (4, 3), 1),
    "übrig": IpcMeta(OTHER, 0, 8, "F64", (), 0),
    "empty": IpcMeta(HANDLE, 2**40, 0, "I32", (0, 3), 0),
    "small": IpcMeta(OTHER, 8, 2, "F8_E4M3", (2,), 0),
}
ROWS = {
    "model.norm.weight": row(),
    "übrig": row(OTHER.decode("latin-1"), offset=0, bytes=8, dtype=11, dims=[], device=0),
    "empty": row(offset=2**40, bytes=0, dtype=7, dims=[0, 3], lod=[[0, 1]], device=0),
    "small": row(OTHER.decode("latin-1"), offset=8, bytes=2, dtype=17, dims=[2], device=0),
}


@pytest.mark.parametrize("num_looks", [0, 1, 3])
def test_reading_ends_at_the_deadline_and_says_how_far_it_came(monkeypatch: pytest.MonkeyPatch, num_looks: int) -> None:
    """The clock is looked at every few thousand opcodes."""
    looks = itertools.count()
    monkeypatch.setattr(inert_pickle.time, "monotonic_ns", lambda: 100 if next(looks) >= num_looks else 0)
    data = pickle.dumps({str(number): row() for number in range(3000)})
    with pytest.raises(DeadlineExceededError, match=rf"ipc_metas_0: no time left to read it.* of {len(data)}") as late:
        read_ipc_metas(data, "ipc_metas_0", 100)
    found = re.search(r"at byte ([0-9]+)", str(late.value))
    assert found is not None
    assert (int(found[1]) > 1000) == (num_looks > 0)
    assert next(looks) == num_looks + 1


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_rows_are_read_as_a_trainer_pickled_them(protocol: int, tmp_path: Path) -> None:
    data = pickle.dumps(ROWS, protocol)
    assert read_ipc_metas(data) == METAS
    (tmp_path / "ipc_metas_0").write_bytes(data)
    assert read_ipc_metas_file(tmp_path / "ipc_metas_0") == METAS


@pytest.mark.parametrize("lod", [None, [], ()])
def test_handles_may_be_bytes_and_rows_tuples(lod: Any) -> None:
    data = pickle.dumps({"w": tuple(row(HANDLE, lod=lod))}, 4)
    assert read_ipc_metas(data) == {"w": METAS["model.norm.weight"]}


def test_more_rows_than_one_batch_of_a_pickle_are_read() -> None:
    rows = {f"layer.{number}": row(offset=24 * number) for number in range(2500)}
    found = read_ipc_metas(pickle.dumps(rows, 2))
    assert [meta.offset for meta in found.values()] == [24 * number for number in range(2500)]


def test_what_is_written_is_what_a_trainer_would_have_pickled() -> None:
    data = b"".join(write_ipc_metas(METAS))
    assert read_ipc_metas(data) == METAS
    expected = ROWS | {"empty": row(offset=2**40, bytes=0, dtype=7, dims=[0, 3], device=0)}
    assert pickle.loads(data) == expected
    assert {op.code for op, _, _ in pickletools.genops(data)} <= {"\x80", *"}X](es.", "\x8a"}
    assert pickle.loads(b"".join(write_ipc_metas({}))) == {}


def test_a_row_that_cannot_be_is_not_written() -> None:
    with pytest.raises(TrainerError, match="'w': 23 bytes are no BF16"):
        list(write_ipc_metas({"w": METAS["model.norm.weight"]._replace(num_bytes=23)}))


# --- what is hostile -------------------------------------------------------------------------------------


def refused(data: bytes, match: str) -> None:
    with pytest.raises(CheckpointError, match=match) as caught:
        read_ipc_metas(data, "ipc_metas_0")
    assert str(caught.value).startswith("ipc_metas_0: ")
    assert str(caught.value).endswith("nothing was executed")


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (row()[:6], "tensor w: its row is 6 values"),
        (7, "tensor w: its row is int"),
        ({"handle": 1}, "tensor w: its row is a dict"),
        (row("x" * 63), "its handle is not 64 bytes"),
        (row("\u0100" * 64), "its handle is not 64 bytes"),
        (row(HANDLE[:-1]), "its handle is not 64 bytes"),
        (row(None), "its handle is not 64 bytes"),
        (row(offset=-1), "its offset is -1, not a number from 0 on"),
        (row(offset=True), "its offset is bool"),
        (row(offset=2**63 - 8), r"24 bytes at \d+ are in no memory"),
        (row(bytes=25), r"25 bytes are no BF16 of \[4, 3\]"),
        (row(bytes="24"), "its number of bytes is str"),
        (row(dtype=22), r"has dtype 22 \(no index of phi::DataType\); known are BOOL"),
        (row(dtype=4, bytes=24), r"has dtype 4 \(UINT16\)"),
        (row(dtype="BF16"), "has dtype str"),
        (row(dims=[4, -3]), "its size of a dimension is -3"),
        (row(dims=[1] * 9), "its shape is 9 dimensions; at most 8"),
        (row(dims="43"), "its shape is str"),
        (row(lod="x"), "its lod is str, not a list"),
        (row(device=None), "its device is None"),
    ],
)
def test_a_row_that_is_none_is_refused_by_name(bad: Any, said: str) -> None:
    refused(pickle.dumps({"v": row(), "w": bad}, 4), said)


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


@pytest.mark.parametrize(
    "opcodes",
    [
        b"cos\nsystem\n" + text("true") + b"\x85R.",
        text("os") + text("system") + b"\x93" + text("true") + b"\x85R.",
        b"}N\x93.",
        b"}}b.",
        b"(cos\nsystem\no.",
        b"cnumpy\nndarray\n.",
        b"G\x00\x00\x00\x00\x00\x00\x00\x00.",
        b"\x8b\x01\x00\x00\x00\x01.",
    ],
)
def test_names_calls_and_what_else_no_row_needs_are_refused_where_they_stand(opcodes: bytes) -> None:
    refused(b"\x80\x04" + opcodes, r"byte \d+: opcode 0x[0-9a-f]{2} .* has no place in a table of IPC metadata")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "no table of IPC metadata of paddle.save"),
        (pickle.dumps([1], 4), "it holds a tuple or list, not a table of tensors"),
        (pickle.dumps({1: row()}, 4), "a key of a dict is int"),
        (pickle.dumps(ROWS, 4) + b"N", "1 bytes left over"),
        (b"\x80\x04}" + (text("a") + b"]") * 2 + b"ss.", "."),
    ],
)
def test_what_makes_no_table_is_refused(data: bytes, said: str) -> None:
    refused(data, said)


def test_how_much_a_file_may_say_is_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    data = pickle.dumps(ROWS, 4)
    (tmp_path / "ipc_metas_0").write_bytes(data)
    monkeypatch.setattr(ipc_metas, "MAX_ROWS", 2)
    refused(data, "4 tensors are more than 2")
    monkeypatch.setattr(ipc_metas, "MAX_FILE_BYTES", len(data) - 1)
    with pytest.raises(CheckpointError, match=f"more than {len(data) - 1} bytes"):
        read_ipc_metas(data)
    with pytest.raises(CheckpointError, match=f"more than {len(data) - 1} bytes"):
        read_ipc_metas_file(tmp_path / "ipc_metas_0")


@given(st.binary(max_size=200), st.integers(0, 400))
def test_any_bytes_give_an_error_or_rows_that_fit(data: bytes, place: int) -> None:
    whole = pickle.dumps(ROWS, 2)
    for tried in (b"\x80\x02" + data, whole[:place] + data, whole[:place] + data + whole[place + len(data) :]):
        try:
            found = read_ipc_metas(tried)
        except CheckpointError:
            continue
        assert all(len(meta.handle) == 64 and meta.offset + meta.num_bytes < 2**63 for meta in found.values())


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no regular file"):
        read_ipc_metas_file(tmp_path)
