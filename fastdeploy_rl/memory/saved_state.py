"""State dicts as `paddle.save` writes them: a pickle, read without pickle, its arrays found where they lie.

Owns the few opcodes and names of which such a file consists (protocols 2 to 5, numpy 1 and 2), and their bounds. A name
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
from typing import TYPE_CHECKING, Final, NamedTuple

from fastdeploy_rl.dtypes import itemsize
from fastdeploy_rl.errors import CheckpointError
from fastdeploy_rl.memory.file_map import MAX_DIMENSIONS, MAX_HEADER_BYTES, StoredTensor
from fastdeploy_rl.memory.regular_file import open_regular

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAX_OPS: Final = 2_000_000
"""About 30 stand for a tensor; so many are read in a moment, and need little memory."""
MAX_MEMO: Final = 1_000_000
MAX_STACK: Final = 10_000
"""Values in hand at a time; a pickle puts them into their containers a thousand at a time."""
MAX_DEPTH: Final = 16
"""Of containers in each other; a state dict has four."""
MAX_TEXT_BYTES: Final = 4096
MAX_INTEGER_BYTES: Final = 9

NAME_TABLE: Final = "StructuredToParameterName@@"
"""The entry where `paddle.save` keeps what each tensor was called inside of Paddle."""
_SPLIT_TABLE = "UnpackBigParamInfor@@"
"""Where protocols 2 and 3 say which tensors of more than 1 GiB they cut into pieces."""

SIGNATURE_BYTES: Final = 9
_WINDOW_BYTES = 1 << 14
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


def read_saved_file(path: Path) -> SavedTensors:
    """As `read_saved_state`, of a file, which is not mapped for it. CheckpointError names the file and what is wrong
    with it."""
    try:
        with open(open_regular(path), "rb", buffering=0) as file:
            descriptor, num_bytes = file.fileno(), os.fstat(file.fileno()).st_size
            return _read(lambda offset, count: os.pread(descriptor, count, offset), num_bytes, str(path))
    except OSError as error:
        raise CheckpointError(f"{path!s:.500}: {error.strerror}") from error


def is_saved_state(first_bytes: bytes) -> bool:
    """Whether a file that begins with these is a pickle and no safetensors file: FastDeploy gives both one name. Its
    first SIGNATURE_BYTES tell."""
    if int.from_bytes(first_bytes[:8], "little") <= MAX_HEADER_BYTES and first_bytes[8:9] == b"{":
        return False  # a safetensors header of 640 bytes begins as a pickle does
    return _is_pickle(first_bytes)


def _is_pickle(first_bytes: bytes) -> bool:
    return len(first_bytes) >= 2 and first_bytes[0] == 0x80 and 2 <= first_bytes[1] <= 5


def _read(read: Callable[[int, int], bytes], num_bytes: int, what: str) -> SavedTensors:
    reader = _Reader(_Cursor(read, num_bytes))
    try:
        return _tensors(reader.run())
    except _RefusedError as refused:
        raise CheckpointError(f"{what:.500}: {refused}; nothing was executed") from None
    except _WrongError as wrong:
        raise CheckpointError(f"{what:.500}: byte {reader.opcode_at}: {wrong}; nothing was executed") from None


class _WrongError(Exception):
    """What is wrong with an opcode; its place is added where this is caught."""


class _RefusedError(Exception):
    """What is wrong with the state dict as a whole, or with a tensor of it."""


# --- bytes -----------------------------------------------------------------------------------------------


class _Cursor:
    """Goes through the data once, forwards."""

    def __init__(self, read: Callable[[int, int], bytes], num_bytes: int) -> None:
        self._read = read
        self._window = b""
        self._start = 0
        self.position = 0
        self.num_bytes = num_bytes

    def take(self, count: int) -> bytes:
        """The next few bytes."""
        begin = self.position - self._start
        if begin + count > len(self._window):
            self._refill(count)
            begin = 0
        self.position += count
        return self._window[begin : begin + count]

    def byte(self) -> int:
        """The next one."""
        begin = self.position - self._start
        if begin >= len(self._window):
            self._refill(1)
            begin = 0
        self.position += 1
        return self._window[begin]

    def skip(self, count: int) -> int:
        """Steps over bytes and tells where they begin."""
        begin = self.position
        if count > self.num_bytes - begin:
            raise _WrongError(f"truncated: {count} bytes are to follow, {self.num_bytes - begin} are left")
        self.position += count
        return begin

    def line(self) -> str:
        """Text up to the end of a line, as in GLOBAL."""
        text = b""
        while not text.endswith(b"\n"):
            if len(text) > MAX_TEXT_BYTES:
                raise _WrongError(f"a name of more than {MAX_TEXT_BYTES} bytes")
            text += self.take(1)
        return _decoded(text[:-1])

    def number(self, num_bytes: int) -> int:
        return int.from_bytes(self.take(num_bytes), "little")

    def _refill(self, count: int) -> None:
        left = self.num_bytes - self.position
        self._window, self._start = self._read(self.position, min(max(count, _WINDOW_BYTES), left)), self.position
        if len(self._window) < count:
            raise _WrongError(f"truncated: {count} bytes are to follow, {len(self._window)} are left")


def _decoded(text: bytes) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError:
        raise _WrongError(f"text {text[:80]!r} is not UTF-8") from None


# --- values: inert, whatever the file calls them -----------------------------------------------------------


class _LongText(NamedTuple):
    """Text of which only the length was looked at. In protocol 2, the bytes of an array."""

    num_bytes: int


class _Bytes(NamedTuple):
    """Bytes where they lie."""

    offset: int
    num_bytes: int


class _Encoded(NamedTuple):
    """Bytes that the file holds as text."""


class _Container:
    """`depth` counts it and the deepest that it holds. `is_held`: it lies in another one, and may change no more: so
    that depths stay true and nothing holds itself."""

    __slots__ = ("depth", "is_held")

    def __init__(self) -> None:
        self.depth = 1
        self.is_held = False

    def hold(self, values: Sequence[object]) -> None:
        if self.is_held:
            raise _WrongError(f"{_described(self)} changes after it was put into another one")
        for value in values:
            if isinstance(value, _Container):
                self._hold(value)

    def _hold(self, value: "_Container") -> None:
        if value is self:
            raise _WrongError(f"{_described(self)} holds itself")
        value.is_held = True
        self.depth = max(self.depth, value.depth + 1)
        if self.depth > MAX_DEPTH:
            raise _WrongError(f"containers more than {MAX_DEPTH} deep")


class _Items(_Container):
    """A tuple or list."""

    __slots__ = ("values",)

    def __init__(self, values: Sequence[object]) -> None:
        super().__init__()
        self.values: list[object] = []
        self.extend(values)

    def extend(self, values: Sequence[object]) -> None:
        self.hold(values)
        self.values += values


class _Table(_Container):
    """A dict."""

    __slots__ = ("entries",)

    def __init__(self) -> None:
        super().__init__()
        self.entries: dict[str, object] = {}

    def update(self, keys: Sequence[object], values: Sequence[object]) -> None:
        self.hold(values)
        for key, value in zip(keys, values, strict=True):
            if not isinstance(key, str):
                raise _WrongError(f"a key of a dict is {_described(key)}, not text")
            if key in self.entries:
                raise _WrongError(f"{key[:200]!r} is named twice")
            self.entries[key] = value


class _Global(NamedTuple):
    """A name of something that a pickle would import."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module[:80]!r}.{self.name[:80]!r}"


@dataclass
class _Dtype:
    """numpy's `dtype`: `kind` as "f4", `order` as "<", None before it was said."""

    kind: str
    order: str | None = None


@dataclass
class _Array:
    """numpy's `ndarray`; what it holds was not looked at yet."""

    shape: object = None
    dtype: object = None
    is_fortran: object = None
    data: object = None
    is_built: bool = False


_NOTHING: Final = object()
"""None, as the file has it: an empty stack is something else."""


def _described(value: object) -> str:
    if value is _NOTHING:
        return "None"
    return {_Items: "a tuple or list", _Table: "a dict", _Array: "an array", _Dtype: "a dtype"}.get(
        type(value), f"{type(value).__name__.strip('_').lower()}"
    )


# --- the names -------------------------------------------------------------------------------------------


def _reconstruct(values: Sequence[object]) -> object:
    """An empty array, whose state follows."""
    if len(values) != 3 or values[0] != _Global("numpy", "ndarray"):
        raise _WrongError("numpy's _reconstruct is to make something else than an ndarray")
    return _Array()


def _from_buffer(values: Sequence[object]) -> object:
    """An array as protocol 5 has it: data, dtype, shape, order."""
    if len(values) != 4 or values[3] not in ("C", "F"):
        raise _WrongError("numpy's _frombuffer has no data, dtype, shape and order")
    return _Array(values[2], values[1], values[3] == "F", values[0], is_built=True)


def _dtype(values: Sequence[object]) -> object:
    if not 1 <= len(values) <= 3 or not isinstance(values[0], str):
        raise _WrongError("numpy's dtype is made of something else than its name")
    return _Dtype(values[0])


def _encode(values: Sequence[object]) -> object:
    """How protocol 2 has bytes: as text, to be turned into what it stands for."""
    if len(values) != 2 or values[1] != "latin1" or not isinstance(values[0], (str, _LongText)):
        raise _WrongError("_codecs.encode of something else than text in latin1")
    return _Encoded()


def _no_bytes(values: Sequence[object]) -> object:
    if values:
        raise _WrongError("bytes are made of something")
    return _Encoded()


def _tuple(values: Sequence[object]) -> object:
    """How Paddle has a tensor in what it takes for no state dict: a tuple of its name and its array."""
    if len(values) != 1 or not isinstance(values[0], _Items):
        raise _WrongError("a tuple is made of something else than a tuple")
    return values[0]


def _ordered(values: Sequence[object]) -> object:
    if values:
        raise _WrongError("an OrderedDict is made of something")
    return _Table()


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


# --- opcodes (https://github.com/python/cpython/blob/main/Lib/pickletools.py) ----------------------------------


class _Reader:
    """Goes through the opcodes once. `opcode_at`: where the last one lies, for messages."""

    def __init__(self, cursor: _Cursor) -> None:
        self._cursor = cursor
        self._stack: list[object] = []
        self._marks: list[int] = []
        self._memo: dict[int, object] = {}
        self.opcode_at = 0

    def run(self) -> object:
        """The one value that the data describes."""
        cursor, opcodes = self._cursor, {ord(code): getattr(self, name) for code, name in _OPCODES.items()}
        if cursor.num_bytes < 2 or not _is_pickle(cursor.take(2)):
            raise _WrongError("no state dict of paddle.save (a pickle of protocol 2 to 5)")
        for _ in range(MAX_OPS):
            self.opcode_at = cursor.position
            code = cursor.byte()
            if len(self._stack) > MAX_STACK:
                raise _WrongError(f"more than {MAX_STACK} values in hand")
            if code == ord("."):
                return self._result()
            if code not in opcodes:
                raise _WrongError(f"opcode {code:#04x} {chr(code)!r} has no place in a state dict")
            opcodes[code]()
        raise _WrongError(f"more than {MAX_OPS} opcodes")

    def _result(self) -> object:
        left = self._cursor.num_bytes - self._cursor.position
        if len(self._stack) != 1 or self._marks or left:
            raise _WrongError(
                f"it ends with {len(self._stack)} values, {len(self._marks)} marks and {left} bytes left over"
            )
        return self._stack[0]

    # --- the stack

    def _pop(self) -> object:
        if len(self._stack) <= (self._marks[-1] if self._marks else 0):
            raise _WrongError("takes more than there is")
        return self._stack.pop()

    def _popped(self, count: int) -> list[object]:
        return [self._pop() for _ in range(count)][::-1]

    def _since_mark(self) -> list[object]:
        if not self._marks:
            raise _WrongError("there is no mark")
        start = self._marks.pop()
        values = self._stack[start:]
        del self._stack[start:]
        return values

    def _top(self) -> object:
        if len(self._stack) <= (self._marks[-1] if self._marks else 0):
            raise _WrongError("takes more than there is")
        return self._stack[-1]

    def mark(self) -> None:
        if len(self._marks) >= MAX_DEPTH:
            raise _WrongError(f"more than {MAX_DEPTH} marks")
        self._marks.append(len(self._stack))

    def frame(self) -> None:
        length = self._cursor.number(8)
        if length > self._cursor.num_bytes - self._cursor.position:
            raise _WrongError(f"truncated: a frame of {length} bytes")

    # --- plain values

    def none(self) -> None:
        self._stack.append(_NOTHING)

    def true(self) -> None:
        self._stack.append(True)

    def false(self) -> None:
        self._stack.append(False)

    def integer(self) -> None:
        self._stack.append(int.from_bytes(self._cursor.take(4), "little", signed=True))

    def integer_1(self) -> None:
        self._stack.append(self._cursor.number(1))

    def integer_2(self) -> None:
        self._stack.append(self._cursor.number(2))

    def long_1(self) -> None:
        length = self._cursor.number(1)
        if length > MAX_INTEGER_BYTES:
            raise _WrongError(f"an integer of {length} bytes")
        self._stack.append(int.from_bytes(self._cursor.take(length), "little", signed=True))

    def text_1(self) -> None:
        self._text(1)

    def text_4(self) -> None:
        self._text(4)

    def text_8(self) -> None:
        self._text(8)

    def _text(self, length_bytes: int) -> None:
        length = self._cursor.number(length_bytes)
        if length > MAX_TEXT_BYTES:
            self._cursor.skip(length)
            self._stack.append(_LongText(length))
        else:
            self._stack.append(_decoded(self._cursor.take(length)))

    def bytes_1(self) -> None:
        self._bytes(1)

    def bytes_4(self) -> None:
        self._bytes(4)

    def bytes_8(self) -> None:
        self._bytes(8)

    def _bytes(self, length_bytes: int) -> None:
        length = self._cursor.number(length_bytes)
        self._stack.append(_Bytes(self._cursor.skip(length), length))

    # --- containers

    def empty_dict(self) -> None:
        self._stack.append(_Table())

    def empty_items(self) -> None:
        self._stack.append(_Items(()))

    def items(self) -> None:
        self._stack.append(_Items(self._since_mark()))

    def items_1(self) -> None:
        self._stack.append(_Items(self._popped(1)))

    def items_2(self) -> None:
        self._stack.append(_Items(self._popped(2)))

    def items_3(self) -> None:
        self._stack.append(_Items(self._popped(3)))

    def set_item(self) -> None:
        self._set_items(self._popped(2))

    def set_items(self) -> None:
        self._set_items(self._since_mark())

    def _set_items(self, values: list[object]) -> None:
        table = self._top()
        if not isinstance(table, _Table) or len(values) % 2:
            raise _WrongError(f"{len(values)} keys and values are to go into {_described(table)}")
        table.update(values[::2], values[1::2])

    def append(self) -> None:
        self._append(self._popped(1))

    def append_items(self) -> None:
        self._append(self._since_mark())

    def _append(self, values: list[object]) -> None:
        items = self._top()
        if not isinstance(items, _Items):
            raise _WrongError(f"{len(values)} values are to go into {_described(items)}")
        items.extend(values)

    # --- the memo

    def put_1(self) -> None:
        self._put(self._cursor.number(1))

    def put_4(self) -> None:
        self._put(self._cursor.number(4))

    def memoize(self) -> None:
        self._put(len(self._memo))

    def _put(self, index: int) -> None:
        if len(self._memo) >= MAX_MEMO:
            raise _WrongError(f"more than {MAX_MEMO} values are remembered")
        self._memo[index] = self._top()

    def get_1(self) -> None:
        self._get(self._cursor.number(1))

    def get_4(self) -> None:
        self._get(self._cursor.number(4))

    def _get(self, index: int) -> None:
        if index not in self._memo:
            raise _WrongError(f"value {index} was not remembered")
        self._stack.append(self._memo[index])

    # --- names

    def name(self) -> None:
        self._name(self._cursor.line(), self._cursor.line())

    def stack_name(self) -> None:
        self._name(*self._popped(2))

    def _name(self, module: object, name: object) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise _WrongError(f"a name is made of {_described(module)} and {_described(name)}")
        known = _Global(module, name)
        if known not in _NAMES:
            raise _WrongError(f"{known} has no place in a state dict")
        self._stack.append(known)

    def reduce(self) -> None:
        made, arguments = self._popped(2)
        if not isinstance(made, _Global) or made not in _MADE or not isinstance(arguments, _Items):
            raise _WrongError(f"{made if isinstance(made, _Global) else _described(made)} cannot be called")
        self._stack.append(_MADE[made](arguments.values))

    def build(self) -> None:
        state, built = self._pop(), self._top()
        values = state.values if isinstance(state, _Items) else []
        if isinstance(built, _Array) and not built.is_built and len(values) == 5:
            _, built.shape, built.dtype, built.is_fortran, built.data = values
            built.is_built = True
        elif isinstance(built, _Dtype) and built.order is None and _is_plain(values):
            built.order = str(values[1])
        else:
            raise _WrongError(f"{_described(built)} takes no such state")


def _is_plain(state: Sequence[object]) -> bool:
    """The state of a dtype without fields, sub-arrays and metadata: version, byte order, three times None, ..."""
    return len(state) == 8 and isinstance(state[1], str) and all(value is _NOTHING for value in state[2:5])


_OPCODES: Final = {
    "(": "mark",
    "\x95": "frame",
    "N": "none",
    "\x88": "true",
    "\x89": "false",
    "J": "integer",
    "K": "integer_1",
    "M": "integer_2",
    "\x8a": "long_1",
    "\x8c": "text_1",
    "X": "text_4",
    "\x8d": "text_8",
    "C": "bytes_1",
    "B": "bytes_4",
    "\x8e": "bytes_8",
    "\x96": "bytes_8",  # BYTEARRAY8
    "}": "empty_dict",
    ")": "empty_items",
    "]": "empty_items",
    "t": "items",
    "\x85": "items_1",
    "\x86": "items_2",
    "\x87": "items_3",
    "s": "set_item",
    "u": "set_items",
    "a": "append",
    "e": "append_items",
    "q": "put_1",
    "r": "put_4",
    "\x94": "memoize",
    "h": "get_1",
    "j": "get_4",
    "c": "name",
    "\x93": "stack_name",
    "R": "reduce",
    "b": "build",
}


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
    if not isinstance(saved, _Table):
        raise _RefusedError(f"it holds {_described(saved)}, not a state dict")
    entries = dict(saved.entries)
    if _SPLIT_TABLE in entries:
        raise _RefusedError("its tensors of more than 1 GiB are in pieces; save it with paddle.save(..., protocol=4)")
    table = entries.pop(NAME_TABLE, None)
    if table is not None and not isinstance(table, _Table):
        raise _RefusedError(f"{NAME_TABLE} is {_described(table)}, not a dict")
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
    if isinstance(value, _Items) and len(value.values) == 2 and isinstance(value.values[0], str):
        value = value.values[1]
    if not isinstance(value, _Array) or not value.is_built:
        raise _RefusedError(f"entry {name[:600]!r:.600} is {_described(value)}, not a tensor")
    return value


def _stored(name: str, array: _Array) -> StoredTensor:
    dtype, shape, data = _safetensors_dtype(name, array.dtype), _shape(name, array.shape), array.data
    if isinstance(data, (_Encoded, str, _LongText)):
        raise _RefusedError(
            f"tensor {name:.600} is stored as text (pickle protocol 2); save it with paddle.save(..., protocol=4)"
        )
    if not isinstance(data, _Bytes):
        raise _RefusedError(f"tensor {name:.600}: its data is {_described(data)}, not bytes")
    if data.num_bytes != math.prod(shape) * itemsize(dtype):
        raise _RefusedError(f"tensor {name:.600}: {data.num_bytes} bytes are no {dtype} of shape {list(shape)}")
    if array.is_fortran is not False and sum(size != 1 for size in shape) > 1:
        raise _RefusedError(f"tensor {name:.600} is in Fortran order; save it C-contiguous (numpy.ascontiguousarray)")
    return StoredTensor(name, dtype, shape, data.offset, data.num_bytes)


def _safetensors_dtype(name: str, dtype: object) -> str:
    if not isinstance(dtype, _Dtype) or dtype.kind not in _DTYPES:
        kind = dtype.kind if isinstance(dtype, _Dtype) else _described(dtype)
        raise _RefusedError(f"tensor {name:.600} has dtype {kind[:80]!r}; known are {' '.join(_DTYPES)}")
    found = _DTYPES[dtype.kind]
    if dtype.order != "<" and not (dtype.order == "|" and itemsize(found) == 1):
        raise _RefusedError(f"tensor {name:.600} has byte order {dtype.order!r:.80}; only little-endian ones are read")
    return found


def _shape(name: str, shape: object) -> tuple[int, ...]:
    sizes = shape.values if isinstance(shape, _Items) else [_NOTHING]
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
    copy. CheckpointError for a tensor whose bytes are not those of its dtype and shape."""
    yield b"\x80\x04}"
    for name, tensor in tensors.items():
        data = memoryview(tensor.data)
        if data.nbytes != math.prod(tensor.shape) * itemsize(tensor.dtype):
            raise CheckpointError(f"tensor {name:.600}: {data.nbytes} bytes are no {tensor.dtype} of {tensor.shape}")
        yield _text_bytes(name) + _array_bytes(tensor) + b"\x8e" + struct.pack("<Q", data.nbytes)
        yield data.cast("B") if data.nbytes else b""
        yield b"tbs"
    yield _text_bytes(NAME_TABLE) + b"}"
    yield from (_text_bytes(name) * 2 + b"s" for name in tensors)
    yield b"s."


def _array_bytes(tensor: SavedArray) -> bytes:
    """An array up to its data."""
    kind = _KINDS[tensor.dtype]
    order = "|" if itemsize(tensor.dtype) == 1 else "<"
    shape = b"(" + b"".join(b"\x8a\x08" + struct.pack("<q", size) for size in tensor.shape) + b"t"
    made = _text_bytes("numpy.core.multiarray") + _text_bytes("_reconstruct") + b"\x93"
    made += _text_bytes("numpy") + _text_bytes("ndarray") + b"\x93K\x00\x85C\x01b\x87R"
    described = _text_bytes("numpy") + _text_bytes("dtype") + b"\x93" + _text_bytes(kind) + b"\x89\x88\x87R"
    described += b"(K\x03" + _text_bytes(order) + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    return made + b"(K\x01" + shape + described + b"\x89"


def _text_bytes(text: str) -> bytes:
    data = text.encode()
    return b"X" + struct.pack("<I", len(data)) + data
