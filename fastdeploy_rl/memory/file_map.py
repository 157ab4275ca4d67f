"""Memory-mapped safetensors files: the header read strictly, or written, the bytes reachable without a copy.

Owns the file format (8 bytes header length, JSON header, data;
https://github.com/huggingface/safetensors) and its bounds. Knows nothing of models. Invariant:
a `StoredTensor` that was handed out lies inside the file, and tensors do not overlap.
"""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, NamedTuple

import msgspec

from fastdeploy_rl import _native
from fastdeploy_rl.dtypes import itemsize
from fastdeploy_rl.errors import CheckpointError, ConfigurationError
from fastdeploy_rl.memory.regular_file import open_regular
from fastdeploy_rl.memory.tensor_view import TensorView

MAX_HEADER_BYTES = 100_000_000
"""The limit of the reference implementation."""
MAX_TENSORS = 200_000
MAX_COMMAS = 6_000_000
"""More than a header within the other bounds has, and few enough to be read in a moment."""
MAX_DIMENSIONS = 8

_LENGTH_BYTES = 8
_Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies; `offset` counts from the start of the file, shape is as stored."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class HeaderEntry(NamedTuple):
    """A tensor that is to be written: its dtype as in safetensors, its shape, and the bytes of that."""

    name: str
    dtype: str
    shape: Sequence[int]
    num_bytes: int


def encode_header(entries: Iterable[HeaderEntry], metadata: Mapping[str, str], alignment: int = 8) -> bytes:
    """What a file begins with in which these tensors follow one another in that order: its length word, the header, and
    blanks, so that the first of them lies at a multiple of `alignment`."""
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, dtype, shape, num_bytes in entries:
        begin, end = end, end + num_bytes
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
    text = msgspec.json.encode(header)
    text += b" " * (-(_LENGTH_BYTES + len(text)) % alignment)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


class FileMap:
    """One safetensors file, mapped read-only. Arrays taken from it keep the mapping alive after `close`."""

    def __init__(
        self, path: Path, mapping: _native.Mapping, tensors: dict[str, StoredTensor], metadata: dict[str, str]
    ) -> None:
        """`metadata`: what its writer said beside the tensors; what is no text is left out."""
        self.path = path
        self.tensors = tensors
        self.metadata = metadata
        self._mapping: _native.Mapping | None = mapping

    @classmethod
    def open(cls, path: Path) -> "FileMap":
        """Maps the file and reads its header. CheckpointError names the file and the tensor that is wrong."""
        try:
            descriptor = open_regular(path)
        except OSError as error:
            raise CheckpointError(f"{path!s:.500}: {error.strerror}") from error
        try:
            file_bytes = os.fstat(descriptor).st_size
            tensors, metadata = _read_header(path, descriptor, file_bytes)
            return cls(path, _native.Mapping.map_fd(descriptor, file_bytes, writable=False), tensors, metadata)
        finally:
            os.close(descriptor)

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


def _read_header(path: Path, descriptor: int, file_bytes: int) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Read, not mapped: a file that somebody cuts meanwhile is then an error and not the end of this process."""
    if file_bytes < _LENGTH_BYTES:
        raise CheckpointError(f"{path}: truncated: {file_bytes} bytes, a safetensors file has at least {_LENGTH_BYTES}")
    header_bytes = int.from_bytes(os.pread(descriptor, _LENGTH_BYTES, 0), "little")
    start = _LENGTH_BYTES + header_bytes
    if header_bytes > MAX_HEADER_BYTES or start > file_bytes:
        raise CheckpointError(
            f"{path}: truncated or no safetensors file: header of {header_bytes} bytes, file of {file_bytes}"
        )
    header = _decoded(path, os.pread(descriptor, header_bytes, _LENGTH_BYTES))
    metadata = header.pop("__metadata__", None)
    tensors = {name: _read_entry(path, name, entry, start, file_bytes) for name, entry in header.items()}
    _refuse_overlap(path, tensors.values())
    said = metadata.items() if isinstance(metadata, dict) else ()
    return tensors, {key: text for key, text in said if isinstance(text, str)}


def _decoded(path: Path, text: bytes) -> dict[str, Any]:
    if text.count(b"{") > MAX_TENSORS + 2:  # one around all, one for __metadata__
        raise CheckpointError(f"{path}: header of {len(text)} bytes has more than {MAX_TENSORS} tensors")
    if text.count(b",") > MAX_COMMAS:
        raise CheckpointError(f"{path}: header of {len(text)} bytes has more than {MAX_COMMAS} commas: none needs them")
    try:
        header = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: header is not a JSON object: {error!s:.500}") from error
    return header


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
    data_offsets: tuple[_Size, _Size]


def _read_entry(path: Path, name: str, raw: object, start: int, file_bytes: int) -> StoredTensor:
    try:
        entry = msgspec.convert(raw, _Entry)
        expected = math.prod(entry.shape) * itemsize(entry.dtype)
    except (msgspec.ValidationError, ConfigurationError) as error:
        raise CheckpointError(f"{path}: tensor {name:.600}: broken header entry: {error!s:.500}") from error
    begin, end = entry.data_offsets
    if end - begin != expected:
        raise CheckpointError(
            f"{path}: tensor {name:.600}: shape {list(entry.shape)} {entry.dtype} does not fit bytes {begin}..{end}"
        )
    if start + end > file_bytes:
        raise CheckpointError(
            f"{path}: truncated: tensor {name:.600} ends at byte {start + end}, the file has {file_bytes}; "
            f"get the checkpoint again"
        )
    return StoredTensor(name, entry.dtype, entry.shape, start + begin, expected)


def _refuse_overlap(path: Path, tensors: Iterable[StoredTensor]) -> None:
    in_order = sorted(tensors, key=lambda tensor: (tensor.offset, tensor.num_bytes))
    for before, after in pairwise(in_order):
        if before.offset + before.num_bytes > after.offset:
            raise CheckpointError(f"{path}: tensors {before.name} and {after.name} overlap")
