"""FastDeploy's `ipc_metas_{gpu}`: where a trainer's CUDA tensors lie, as a pickle that is read without pickle.

    {name: [handle, offset, bytes, dtype index, shape, lod, device]}

Owns this format: its opcodes (of plain values alone), its bounds, and both ways. Refuses to know CUDA: a handle is 64
bytes. Invariant: a row that was handed out has the bytes of its dtype and shape, at a place where memory may have them.

A row is what Paddle's `_share_cuda()` gives, its handle as text in latin-1 so that Paddle's `_new_shared_cuda` gets the
bytes back (paddle/fluid/pybind/tensor.cc). `handle` is CUDA's `cudaIpcMemHandle_t` of a whole allocation, `offset`
counts from its base. The dtype index is that of `phi::DataType`, not of the older `VarType` (measured with Paddle
3.3.1, whose `_share_filename` writes the same number: bfloat16 is 16 there, and 22 in VarType). `device` is an index in
the trainer's process and says nothing in another; tensors of a model have no `lod`.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

from fastdeploy_rl.dtypes import itemsize
from fastdeploy_rl.errors import CheckpointError, TrainerError
from fastdeploy_rl.memory.file_map import MAX_DIMENSIONS
from fastdeploy_rl.memory.inert_pickle import (
    ENDLESS_NS,
    NOTHING,
    Bytes,
    Cursor,
    Items,
    PickleReader,
    Table,
    described,
    text_bytes,
    value_of,
)
from fastdeploy_rl.memory.regular_file import read_regular

if TYPE_CHECKING:
    from typing_extensions import Buffer

METAS_PREFIX: Final = "ipc_metas_"
HANDLE_BYTES: Final = 64
MAX_FILE_BYTES: Final = 64 << 20
MAX_ROWS: Final = 200_000
_LIMIT = 2**63
_COLUMNS = 7

_DTYPES: Final = {
    1: "BOOL",
    2: "U8",
    3: "I8",
    5: "I16",
    7: "I32",
    9: "I64",
    10: "F32",
    11: "F64",
    15: "F16",
    16: "BF16",
    17: "F8_E4M3",
    18: "F8_E5M2",
}
"""phi::DataType (paddle/phi/common/data_type.h), as far as we know the dtype."""
_INDICES: Final = {dtype: index for index, dtype in _DTYPES.items()}
_UNKNOWN_DTYPES: Final = {
    0: "UNDEFINED",
    4: "UINT16",
    6: "UINT32",
    8: "UINT64",
    12: "COMPLEX64",
    13: "COMPLEX128",
    14: "PSTRING",
}
"""For messages."""


def metas_name(gpu: str | int) -> str:
    """Of the file for the tensors on one device."""
    return f"{METAS_PREFIX}{gpu}"


class IpcMeta(NamedTuple):
    """A tensor in device memory: C-contiguous, `num_bytes` from `offset` of the allocation that the 64 bytes of
    `handle` name. `dtype`: a safetensors name. `device`: an index in the process that has the memory."""

    handle: bytes
    offset: int
    num_bytes: int
    dtype: str
    shape: tuple[int, ...]
    device: int = 0


def read_ipc_metas(data: "Buffer", what: str = "IPC metadata", deadline_ns: int = ENDLESS_NS) -> dict[str, IpcMeta]:
    """The rows by name. CheckpointError names `what`, and the tensor or the byte that is wrong."""
    held = bytes(data)
    if len(held) > MAX_FILE_BYTES:
        raise CheckpointError(f"{what:.500}: it has more than {MAX_FILE_BYTES} bytes")
    reader = _Reader(Cursor(lambda offset, count: held[offset : offset + count], len(held)))
    found = value_of(reader, what, deadline_ns)
    try:
        return _rows(found, held)
    except _RefusedError as refused:
        raise CheckpointError(f"{what:.500}: {refused}; nothing was executed") from None


def read_ipc_metas_file(path: Path) -> dict[str, IpcMeta]:
    """As `read_ipc_metas`, of a file."""
    return read_ipc_metas(read_ipc_metas_bytes(path), str(path))


def read_ipc_metas_bytes(path: Path) -> bytes:
    """All of a file that `read_ipc_metas` may take. CheckpointError where it cannot be read, or is larger."""
    try:
        return read_regular(path, MAX_FILE_BYTES)
    except OSError as error:
        raise CheckpointError(f"{path!s:.500}: {error.strerror}") from error


class _Reader(PickleReader):
    KIND: ClassVar[str] = "table of IPC metadata"


class _RefusedError(Exception):
    """What is wrong with the table, or with a row of it."""


def _rows(found: object, data: bytes) -> dict[str, IpcMeta]:
    if not isinstance(found, Table):
        raise _RefusedError(f"it holds {described(found)}, not a table of tensors")
    if len(found.entries) > MAX_ROWS:
        raise _RefusedError(f"{len(found.entries)} tensors are more than {MAX_ROWS}")
    return {name: _row(name, row, data) for name, row in found.entries.items()}


def _row(name: str, row: object, data: bytes) -> IpcMeta:
    columns = row.values if isinstance(row, Items) else []
    if len(columns) != _COLUMNS:
        what = f"{len(columns)} values" if isinstance(row, Items) else described(row)
        raise _RefusedError(
            f"tensor {name:.600}: its row is {what}, not handle, offset, bytes, dtype, shape, lod and device"
        )
    handle, offset, num_bytes, index, dims, lod, device = columns
    if lod is not NOTHING and not isinstance(lod, Items):
        raise _RefusedError(f"tensor {name:.600}: its lod is {described(lod)}, not a list")
    meta = IpcMeta(
        _handle(name, handle, data),
        _count(name, "offset", offset),
        _count(name, "number of bytes", num_bytes),
        _dtype(name, index),
        _shape(name, dims),
        _count(name, "device", device),
    )
    if meta.num_bytes != math.prod(meta.shape) * itemsize(meta.dtype):
        raise _RefusedError(f"tensor {name:.600}: {meta.num_bytes} bytes are no {meta.dtype} of {list(meta.shape)}")
    if meta.offset + meta.num_bytes >= _LIMIT:
        raise _RefusedError(f"tensor {name:.600}: {meta.num_bytes} bytes at {meta.offset} are in no memory")
    return meta


def _handle(name: str, handle: object, data: bytes) -> bytes:
    found = b""
    if isinstance(handle, str):
        with contextlib.suppress(UnicodeEncodeError):
            found = handle.encode("latin-1")
    elif isinstance(handle, Bytes) and handle.num_bytes == HANDLE_BYTES:
        found = data[handle.offset : handle.offset + handle.num_bytes]
    if len(found) != HANDLE_BYTES:
        raise _RefusedError(f"tensor {name:.600}: its handle is not {HANDLE_BYTES} bytes, as text in latin-1")
    return found


def _count(name: str, what: str, value: object) -> int:
    if type(value) is not int or not 0 <= value < _LIMIT:
        raise _RefusedError(f"tensor {name:.600}: its {what} is {_told(value)}, not a number from 0 on")
    return value


def _told(value: object) -> str:
    return str(value) if type(value) is int else described(value)


def _dtype(name: str, index: object) -> str:
    if type(index) is not int or index not in _DTYPES:
        known = _UNKNOWN_DTYPES.get(index, "no index of phi::DataType") if type(index) is int else "no index"
        raise _RefusedError(f"tensor {name:.600} has dtype {_told(index)} ({known}); known are {' '.join(_INDICES)}")
    return _DTYPES[index]


def _shape(name: str, dims: object) -> tuple[int, ...]:
    if not isinstance(dims, Items) or len(dims.values) > MAX_DIMENSIONS:
        what = f"{len(dims.values)} dimensions" if isinstance(dims, Items) else described(dims)
        raise _RefusedError(f"tensor {name:.600}: its shape is {what}; at most {MAX_DIMENSIONS} dimensions are allowed")
    return tuple(_count(name, "size of a dimension", size) for size in dims.values)


# --- writing -------------------------------------------------------------------------------------------------


def write_ipc_metas(metas: Mapping[str, IpcMeta]) -> Iterator[bytes]:
    """A file that `paddle.load` reads, and `read_ipc_metas`, in pieces. TrainerError, naming the tensor, for a row that
    is not what its dtype and shape say."""
    yield b"\x80\x04}"
    for name, meta in metas.items():
        if meta.num_bytes != math.prod(meta.shape) * itemsize(meta.dtype) or len(meta.handle) != HANDLE_BYTES:
            raise TrainerError(f"{name!r:.600}: {meta.num_bytes} bytes are no {meta.dtype} of {list(meta.shape)}")
        yield text_bytes(name) + b"](" + _columns(meta) + b"es"
    yield b"."


def _columns(meta: IpcMeta) -> bytes:
    shape = b"](" + b"".join(map(_number, meta.shape)) + b"e"
    numbers = _number(meta.offset) + _number(meta.num_bytes) + _number(_INDICES[meta.dtype])
    return text_bytes(meta.handle.decode("latin-1")) + numbers + shape + b"]" + _number(meta.device)


def _number(value: int) -> bytes:
    return b"\x8a\x08" + value.to_bytes(8, "little", signed=True)
