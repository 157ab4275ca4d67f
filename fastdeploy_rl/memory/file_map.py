"""Memory-mapped safetensors files: the header read strictly, the bytes reachable without a copy.

Owns the file format (8 bytes header length, JSON header, data;
https://github.com/huggingface/safetensors) and its bounds. Knows nothing of models. Invariant:
a `StoredTensor` that was handed out lies inside the file, and tensors do not overlap.
"""

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from fastdeploy_rl import _native
from fastdeploy_rl.dtypes import itemsize
from fastdeploy_rl.errors import CheckpointError, ConfigurationError
from fastdeploy_rl.memory.tensor_view import TensorView

MAX_HEADER_BYTES = 100_000_000
"""The limit of the reference implementation."""
MAX_DIMENSIONS = 8


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies; `offset` counts from the start of the file, shape is as stored."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class FileMap:
    """One safetensors file, mapped read-only. Arrays taken from it keep the mapping alive after `close`."""

    def __init__(self, path: Path, mapping: _native.Mapping, tensors: dict[str, StoredTensor]) -> None:
        self.path = path
        self.tensors = tensors
        self._mapping: _native.Mapping | None = mapping

    @classmethod
    def open(cls, path: Path) -> "FileMap":
        """Maps the file and reads its header. CheckpointError names the file and the tensor that is wrong."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}") from error
        try:
            num_bytes = os.fstat(descriptor).st_size
            if num_bytes < 8:
                raise CheckpointError(f"{path}: truncated: {num_bytes} bytes, a safetensors file has at least 8")
            mapping = _native.Mapping.map_fd(descriptor, num_bytes, writable=False)
        finally:
            os.close(descriptor)
        return cls(path, mapping, _read_header(path, memoryview(mapping)))

    def view(self, name: str) -> TensorView:
        """The stored bytes of one tensor; KeyError for a name that is not in `tensors`."""
        stored = self.tensors[name]
        if self._mapping is None:
            raise CheckpointError(f"{self.path}: closed")
        return TensorView(self._mapping, stored.offset, stored.dtype, stored.shape)

    def close(self) -> None:
        self._mapping = None

    def __enter__(self) -> "FileMap":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _read_header(path: Path, data: memoryview) -> dict[str, StoredTensor]:
    header_bytes = int.from_bytes(data[:8], "little")
    start = 8 + header_bytes
    if header_bytes > MAX_HEADER_BYTES or start > len(data):
        raise CheckpointError(
            f"{path}: truncated or no safetensors file: header of {header_bytes} bytes, file of {len(data)}"
        )
    try:
        header = msgspec.json.decode(bytes(data[8:start]), type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: header is not a JSON object: {error}") from error
    header.pop("__metadata__", None)
    tensors = {name: _read_entry(path, name, entry, start, len(data)) for name, entry in header.items()}
    _refuse_overlap(path, tensors.values())
    return tensors


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def _read_entry(path: Path, name: str, raw: object, start: int, file_bytes: int) -> StoredTensor:
    try:
        entry = msgspec.convert(raw, _Entry)
        expected = math.prod(entry.shape) * itemsize(entry.dtype)
    except (msgspec.ValidationError, ConfigurationError) as error:
        raise CheckpointError(f"{path}: tensor {name}: broken header entry: {error}") from error
    begin, end = entry.data_offsets
    if (
        len(entry.shape) > MAX_DIMENSIONS
        or any(size < 0 for size in entry.shape)
        or begin < 0
        or end - begin != expected
    ):
        raise CheckpointError(
            f"{path}: tensor {name}: shape {list(entry.shape)} {entry.dtype} does not fit bytes {begin}..{end}"
        )
    if start + end > file_bytes:
        raise CheckpointError(
            f"{path}: truncated: tensor {name} ends at byte {start + end}, the file has {file_bytes}; "
            f"get the checkpoint again"
        )
    return StoredTensor(name, entry.dtype, entry.shape, start + begin, expected)


def _refuse_overlap(path: Path, tensors: Iterable[StoredTensor]) -> None:
    in_order = sorted(tensors, key=lambda tensor: (tensor.offset, tensor.num_bytes))
    for before, after in pairwise(in_order):
        if before.offset + before.num_bytes > after.offset:
            raise CheckpointError(f"{path}: tensors {before.name} and {after.name} overlap")
