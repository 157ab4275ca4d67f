"""State dicts as `paddle.save` writes them: a pickle, read without pickle, its arrays found where they lie.

Owns the few names of which such a file consists (numpy 1 and 2); opcodes and bounds are those of `inert_pickle`. A name
is a constant here: nothing is imported, called or executed, and whatever is not on the list is an error. Refuses to
know models. Invariant: a `StoredTensor` that was handed out lies inside the data, C-contiguous and little-endian.

The file is read in windows and never mapped for it, the arrays' bytes are stepped over; what is kept is a few objects
for each opcode, of which there may be no more than MAX_OPS.
"""

import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

from fastdeploy_rl.dtypes import itemsize
from fastdeploy_rl.errors import CheckpointError
from fastdeploy_rl.memory.file_map import MAX_DIMENSIONS, MAX_HEADER_BYTES, StoredTensor
from fastdeploy_rl.memory.inert_pickle import (
    ENDLESS_NS,
    NOTHING,
    PLAIN_OPCODES,
    Bytes,
    Cursor,
    Items,
    LongText,
    PickleReader,
    Table,
    WrongError,
    described,
    is_pickle,
    text_bytes,
    value_of,
)
from fastdeploy_rl.memory.regular_file import open_regular

if TYPE_CHECKING:
    from typing_extensions import Buffer

NAME_TABLE: Final = "StructuredToParameterName@@"
"""The entry where `paddle.save` keeps what each tensor was called inside of Paddle."""
_SPLIT_TABLE = "UnpackBigParamInfor@@"
"""Where protocols 2 and 3 say which tensors of more than 1 GiB they cut into pieces."""

SIGNATURE_BYTES: Final = 9
_LIMIT = 2**63


class SavedTensors(NamedTuple):
    """What a saved state dict holds, by name; offsets count from its first byte. `aliases`: a further name of the very
    same array -> the name it has in `tensors`."""

    tensors: dict[str, StoredTensor]
    aliases: dict[str, str]


def read_saved_state(data: "Buffer", what: str = "saved state") -> SavedTensors:
    """Where the tensors of a state dict lie in `data`, of which nothing is copied. CheckpointError names `what` and the
    tensor or the byte that is wrong."""
    with memoryview(data) as view, view.cast("B") as flat:
        return _read(lambda offset, count: bytes(flat[offset : offset + count]), flat.nbytes, what)


def read_saved_file(path: Path, deadline_ns: int = ENDLESS_NS) -> SavedTensors:
    """As `read_saved_state`, of a file, which is not mapped for it. CheckpointError names the file and what is wrong
    with it, DeadlineExceededError how far it came."""
    try:
        with open(open_regular(path), "rb", buffering=0) as file:
            descriptor, num_bytes = file.fileno(), os.fstat(file.fileno()).st_size
            return _read(lambda offset, count: os.pread(descriptor, count, offset), num_bytes, str(path), deadline_ns)
    except OSError as error:
        raise CheckpointError(f"{path!s:.500}: {error.strerror}") from error


def is_saved_state(first_bytes: bytes) -> bool:
    """Whether a file that begins with these is a pickle and no safetensors file: FastDeploy gives both one name. Its
    first SIGNATURE_BYTES tell."""
    if int.from_bytes(first_bytes[:8], "little") <= MAX_HEADER_BYTES and first_bytes[8:9] == b"{":
        return False  # a safetensors header of 640 bytes begins as a pickle does
    return is_pickle(first_bytes)


def _read(read: Callable[[int, int], bytes], num_bytes: int, what: str, deadline_ns: int = ENDLESS_NS) -> SavedTensors:
    saved = value_of(_Reader(Cursor(read, num_bytes)), what, deadline_ns)
    try:
        return _tensors(saved)
    except _RefusedError as refused:
        raise CheckpointError(f"{what:.500}: {refused}; nothing was executed") from None


class _RefusedError(Exception):
    """What is wrong with the state dict as a whole, or with a tensor of it."""


# --- values: inert, whatever the file calls them -----------------------------------------------------------


class _Encoded(NamedTuple):
    """Bytes that the file holds as text."""


class _Global(NamedTuple):
    """A name of something that a pickle would import."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module[:80]!r}.{self.name[:80]!r}"


@dataclass
class _Dtype:
    """numpy's `dtype`: `kind` as "f4", `order` as "<", None before it was said."""

    DESCRIPTION: ClassVar[str] = "a dtype"

    kind: str
    order: str | None = None


@dataclass
class _Array:
    """numpy's `ndarray`; what it holds was not looked at yet."""

    DESCRIPTION: ClassVar[str] = "an array"

    shape: object = None
    dtype: object = None
    is_fortran: object = None
    data: object = None
    is_built: bool = False


# --- the names -------------------------------------------------------------------------------------------


def _reconstruct(values: Sequence[object]) -> object:
    """An empty array, whose state follows."""
    if len(values) != 3 or values[0] != _Global("numpy", "ndarray"):
        raise WrongError("numpy's _reconstruct is to make something else than an ndarray")
    return _Array()


def _from_buffer(values: Sequence[object]) -> object:
    """An array as protocol 5 has it: data, dtype, shape, order."""
    if len(values) != 4 or values[3] not in ("C", "F"):
        raise WrongError("numpy's _frombuffer has no data, dtype, shape and order")
    return _Array(values[2], values[1], values[3] == "F", values[0], is_built=True)


def _dtype(values: Sequence[object]) -> object:
    if not 1 <= len(values) <= 3 or not isinstance(values[0], str):
        raise WrongError("numpy's dtype is made of something else than its name")
    return _Dtype(values[0])


def _encode(values: Sequence[object]) -> object:
    """How protocol 2 has bytes: as text, to be turned into what it stands for."""
    if len(values) != 2 or values[1] != "latin1" or not isinstance(values[0], (str, LongText)):
        raise WrongError("_codecs.encode of something else than text in latin1")
    return _Encoded()


def _no_bytes(values: Sequence[object]) -> object:
    if values:
        raise WrongError("bytes are made of something")
    return _Encoded()


def _tuple(values: Sequence[object]) -> object:
    """How Paddle has a tensor in what it takes for no state dict: a tuple of its name and its array."""
    if len(values) != 1 or not isinstance(values[0], Items):
        raise WrongError("a tuple is made of something else than a tuple")
    return values[0]


def _ordered(values: Sequence[object]) -> object:
    if values:
        raise WrongError("an OrderedDict is made of something")
    return Table()


_MADE: Final[dict[_Global, Callable[[Sequence[object]], object]]] = {
    **{_Global(f"numpy.{core}.multiarray", "_reconstruct"): _reconstruct for core in ("core", "_core")},
    **{_Global(f"numpy.{core}.numeric", "_frombuffer"): _from_buffer for core in ("core", "_core")},
    _Global("numpy", "dtype"): _dtype,
    _Global("_codecs", "encode"): _encode,
    _Global("collections", "OrderedDict"): _ordered,
    **{_Global(module, "tuple"): _tuple for module in ("builtins", "__builtin__")},
    **{_Global(module, "bytes"): _no_bytes for module in ("builtins", "__builtin__")},
}
"""What stands for each name that may be called."""
_NAMES: Final = {*_MADE, _Global("numpy", "ndarray")}


# --- opcodes ---------------------------------------------------------------------------------------------


class _Reader(PickleReader):
    KIND: ClassVar[str] = "state dict"
    OPCODES: ClassVar[Mapping[str, str]] = PLAIN_OPCODES | {
        "c": "name",
        "\x93": "stack_name",
        "R": "reduce",
        "b": "build",
    }

    def name(self) -> None:
        self._name(self.cursor.line(), self.cursor.line())

    def stack_name(self) -> None:
        self._name(*self.popped(2))

    def _name(self, module: object, name: object) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise WrongError(f"a name is made of {described(module)} and {described(name)}")
        known = _Global(module, name)
        if known not in _NAMES:
            raise WrongError(f"{known} has no place in a state dict")
        self.stack.append(known)

    def reduce(self) -> None:
        made, arguments = self.popped(2)
        if not isinstance(made, _Global) or made not in _MADE or not isinstance(arguments, Items):
            raise WrongError(f"{made if isinstance(made, _Global) else described(made)} cannot be called")
        self.stack.append(_MADE[made](arguments.values))

    def build(self) -> None:
        state, built = self.pop(), self.top()
        values = state.values if isinstance(state, Items) else []
        if isinstance(built, _Array) and not built.is_built and len(values) == 5:
            _, built.shape, built.dtype, built.is_fortran, built.data = values
            built.is_built = True
        elif isinstance(built, _Dtype) and built.order is None and _is_plain(values):
            built.order = str(values[1])
        else:
            raise WrongError(f"{described(built)} takes no such state")


def _is_plain(state: Sequence[object]) -> bool:
    """The state of a dtype without fields, sub-arrays and metadata: version, byte order, three times None, ..."""
    return len(state) == 8 and isinstance(state[1], str) and all(value is NOTHING for value in state[2:5])


# --- from values to tensors ----------------------------------------------------------------------------------

_DTYPES: Final = {
    "f8": "F64",
    "f4": "F32",
    "f2": "F16",
    "u2": "BF16",  # numpy has no bfloat16: Paddle stores its upper half of a float32 so
    "i8": "I64",
    "i4": "I32",
    "i2": "I16",
    "i1": "I8",
    "u1": "U8",
    "b1": "BOOL",
}
_KINDS: Final = {dtype: kind for kind, dtype in _DTYPES.items()}


def _tensors(saved: object) -> SavedTensors:
    if not isinstance(saved, Table):
        raise _RefusedError(f"it holds {described(saved)}, not a state dict")
    entries = dict(saved.entries)
    if _SPLIT_TABLE in entries:
        raise _RefusedError("its tensors of more than 1 GiB are in pieces; save it with paddle.save(..., protocol=4)")
    table = entries.pop(NAME_TABLE, None)
    if table is not None and not isinstance(table, Table):
        raise _RefusedError(f"{NAME_TABLE} is {described(table)}, not a dict")
    return _found((name, _array(name, value)) for name, value in entries.items())


def _found(arrays: Iterator[tuple[str, _Array]]) -> SavedTensors:
    tensors: dict[str, StoredTensor] = {}
    aliases: dict[str, str] = {}
    names: dict[int, str] = {}
    owners: dict[int, str] = {}
    for name, array in arrays:
        if (first := names.setdefault(id(array), name)) != name:
            aliases[name] = first
            continue
        tensors[name] = stored = _stored(name, array)
        # Python has one object for all bytes of no more than one byte, so that these may be shared.
        if stored.num_bytes > 1 and (owner := owners.setdefault(stored.offset, name)) != name:
            raise _RefusedError(f"tensors {owner:.600} and {name:.600} overlap")
    return SavedTensors(tensors, aliases)


def _array(name: str, value: object) -> _Array:
    """An entry as it is, or as the tuple of Paddle's name and the array."""
    if isinstance(value, Items) and len(value.values) == 2 and isinstance(value.values[0], str):
        value = value.values[1]
    if not isinstance(value, _Array) or not value.is_built:
        raise _RefusedError(f"entry {name[:600]!r:.600} is {described(value)}, not a tensor")
    return value


def _stored(name: str, array: _Array) -> StoredTensor:
    dtype, shape, data = _safetensors_dtype(name, array.dtype), _shape(name, array.shape), array.data
    if isinstance(data, (_Encoded, str, LongText)):
        raise _RefusedError(
            f"tensor {name:.600} is stored as text (pickle protocol 2); save it with paddle.save(..., protocol=4)"
        )
    if not isinstance(data, Bytes):
        raise _RefusedError(f"tensor {name:.600}: its data is {described(data)}, not bytes")
    if data.num_bytes != math.prod(shape) * itemsize(dtype):
        raise _RefusedError(f"tensor {name:.600}: {data.num_bytes} bytes are no {dtype} of shape {list(shape)}")
    if array.is_fortran is not False and sum(size != 1 for size in shape) > 1:
        raise _RefusedError(f"tensor {name:.600} is in Fortran order; save it C-contiguous (numpy.ascontiguousarray)")
    return StoredTensor(name, dtype, shape, data.offset, data.num_bytes)


def _safetensors_dtype(name: str, dtype: object) -> str:
    if not isinstance(dtype, _Dtype) or dtype.kind not in _DTYPES:
        kind = dtype.kind if isinstance(dtype, _Dtype) else described(dtype)
        raise _RefusedError(f"tensor {name:.600} has dtype {kind[:80]!r}; known are {' '.join(_DTYPES)}")
    found = _DTYPES[dtype.kind]
    if dtype.order != "<" and not (dtype.order == "|" and itemsize(found) == 1):
        raise _RefusedError(f"tensor {name:.600} has byte order {dtype.order!r:.80}; only little-endian ones are read")
    return found


def _shape(name: str, shape: object) -> tuple[int, ...]:
    sizes = shape.values if isinstance(shape, Items) else [NOTHING]
    if len(sizes) > MAX_DIMENSIONS:
        raise _RefusedError(f"tensor {name:.600} has {len(sizes)} dimensions; at most {MAX_DIMENSIONS} are allowed")
    found = tuple(size for size in sizes if type(size) is int and 0 <= size < _LIMIT)
    if len(found) != len(sizes):
        raise _RefusedError(f"tensor {name:.600} has no shape of sizes")
    return found


# --- writing -------------------------------------------------------------------------------------------------


class SavedArray(NamedTuple):
    """What `write_saved_state` writes of a tensor: a safetensors dtype, and C-contiguous bytes of that shape."""

    dtype: str
    shape: tuple[int, ...]
    data: "Buffer"


def write_saved_state(tensors: Mapping[str, SavedArray]) -> "Iterator[bytes | memoryview]":
    """A file that `paddle.load` reads, and `read_saved_state`, in pieces: those of a tensor are its own memory, not a
    copy. CheckpointError for a tensor whose bytes are not those of its dtype and shape, or whose
    dtype numpy has not."""
    yield b"\x80\x04}"
    for name, tensor in tensors.items():
        data = memoryview(tensor.data)
        if data.nbytes != math.prod(tensor.shape) * itemsize(tensor.dtype):
            raise CheckpointError(f"tensor {name:.600}: {data.nbytes} bytes are no {tensor.dtype} of {tensor.shape}")
        if tensor.dtype not in _KINDS:
            raise CheckpointError(f"tensor {name:.600}: `paddle.save` has no form for {tensor.dtype}")
        yield text_bytes(name) + _array_bytes(tensor) + b"\x8e" + struct.pack("<Q", data.nbytes)
        yield data.cast("B") if data.nbytes else b""
        yield b"tbs"
    yield text_bytes(NAME_TABLE) + b"}"
    yield from (text_bytes(name) * 2 + b"s" for name in tensors)
    yield b"s."


def _array_bytes(tensor: SavedArray) -> bytes:
    """An array up to its data."""
    kind = _KINDS[tensor.dtype]
    order = "|" if itemsize(tensor.dtype) == 1 else "<"
    shape = b"(" + b"".join(b"\x8a\x08" + struct.pack("<q", size) for size in tensor.shape) + b"t"
    made = text_bytes("numpy.core.multiarray") + text_bytes("_reconstruct") + b"\x93"
    made += text_bytes("numpy") + text_bytes("ndarray") + b"\x93K\x00\x85C\x01b\x87R"
    described = text_bytes("numpy") + text_bytes("dtype") + b"\x93" + text_bytes(kind) + b"\x89\x88\x87R"
    described += b"(K\x03" + text_bytes(order) + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    return made + b"(K\x01" + shape + described + b"\x89"
