"""Pickles, read without pickle: a stack machine of our own over an allow-list of opcodes, which makes inert values.

Owns the opcodes of plain values and containers (protocols 2 to 5), and the bounds of everything. Nothing is imported,
called or executed; an opcode that a reader was not given is an error. Refuses to know what a file is for: who reads a
kind of file says which opcodes it has, adds what it needs (`saved_state`), and judges the value that comes out.
Invariant: values and what is remembered of them are bounded by the opcodes read, of which there are MAX_OPS at most;
bytes are not looked at, but stepped over.
"""

import struct
import time
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Final, NamedTuple

from fastdeploy_rl.errors import CheckpointError, DeadlineExceededError

MAX_OPS: Final = 2_000_000
"""About 30 stand for a tensor; so many are read in a moment, and need little memory."""
MAX_MEMO: Final = 1_000_000
MAX_STACK: Final = 10_000
"""Values in hand at a time; a pickle puts them into their containers a thousand at a time."""
MAX_DEPTH: Final = 16
"""Of containers in each other; a state dict has four."""
MAX_TEXT_BYTES: Final = 4096
MAX_INTEGER_BYTES: Final = 9
ENDLESS_NS: Final = 2**63 - 1

_WINDOW_BYTES = 1 << 14
_LOOKS_AT_CLOCK = 4096
"""Opcodes: read in a few milliseconds."""


class WrongError(Exception):
    """What is wrong with an opcode; its place is added where this is caught."""


class LateError(Exception):
    """The deadline came."""


def is_pickle(first_bytes: bytes) -> bool:
    """Whether these begin a pickle of a protocol that is read here."""
    return len(first_bytes) >= 2 and first_bytes[0] == 0x80 and 2 <= first_bytes[1] <= 5


# --- bytes -----------------------------------------------------------------------------------------------


class Cursor:
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
            raise WrongError(f"truncated: {count} bytes are to follow, {self.num_bytes - begin} are left")
        self.position += count
        return begin

    def line(self) -> str:
        """Text up to the end of a line, as in GLOBAL."""
        text = b""
        while not text.endswith(b"\n"):
            if len(text) > MAX_TEXT_BYTES:
                raise WrongError(f"a name of more than {MAX_TEXT_BYTES} bytes")
            text += self.take(1)
        return _decoded(text[:-1])

    def number(self, num_bytes: int) -> int:
        return int.from_bytes(self.take(num_bytes), "little")

    def _refill(self, count: int) -> None:
        left = self.num_bytes - self.position
        self._window, self._start = self._read(self.position, min(max(count, _WINDOW_BYTES), left)), self.position
        if len(self._window) < count:
            raise WrongError(f"truncated: {count} bytes are to follow, {len(self._window)} are left")


def _decoded(text: bytes) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError:
        raise WrongError(f"text {text[:80]!r} is not UTF-8") from None


# --- values: inert, whatever the file calls them -----------------------------------------------------------


class LongText(NamedTuple):
    """Text of which only the length was looked at. In protocol 2, the bytes of an array."""

    num_bytes: int


class Bytes(NamedTuple):
    """Bytes where they lie."""

    offset: int
    num_bytes: int


class Container:
    """`depth` counts it and the deepest that it holds. `is_held`: it lies in another one, and may change no more: so
    that depths stay true and nothing holds itself."""

    __slots__ = ("depth", "is_held")

    def __init__(self) -> None:
        self.depth = 1
        self.is_held = False

    def hold(self, values: Sequence[object]) -> None:
        if self.is_held:
            raise WrongError(f"{described(self)} changes after it was put into another one")
        for value in values:
            if isinstance(value, Container):
                self._hold(value)

    def _hold(self, value: "Container") -> None:
        if value is self:
            raise WrongError(f"{described(self)} holds itself")
        value.is_held = True
        self.depth = max(self.depth, value.depth + 1)
        if self.depth > MAX_DEPTH:
            raise WrongError(f"containers more than {MAX_DEPTH} deep")


class Items(Container):
    """A tuple or list."""

    DESCRIPTION: ClassVar[str] = "a tuple or list"
    __slots__ = ("values",)

    def __init__(self, values: Sequence[object]) -> None:
        super().__init__()
        self.values: list[object] = []
        self.extend(values)

    def extend(self, values: Sequence[object]) -> None:
        self.hold(values)
        self.values += values


class Table(Container):
    """A dict, whose keys are text."""

    DESCRIPTION: ClassVar[str] = "a dict"
    __slots__ = ("entries",)

    def __init__(self) -> None:
        super().__init__()
        self.entries: dict[str, object] = {}

    def update(self, keys: Sequence[object], values: Sequence[object]) -> None:
        self.hold(values)
        for key, value in zip(keys, values, strict=True):
            if not isinstance(key, str):
                raise WrongError(f"a key of a dict is {described(key)}, not text")
            if key in self.entries:
                raise WrongError(f"{key[:200]!r} is named twice")
            self.entries[key] = value


NOTHING: Final = object()
"""None, as the file has it: an empty stack is something else."""


def described(value: object) -> str:
    """What kind of value it is, for messages."""
    if value is NOTHING:
        return "None"
    return str(getattr(value, "DESCRIPTION", type(value).__name__.strip("_").lower()))


# --- opcodes (https://github.com/python/cpython/blob/main/Lib/pickletools.py) ----------------------------------

PLAIN_OPCODES: Final = {
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
}


class PickleReader:
    """Goes through the opcodes once. `opcode_at`: where the last one lies, for messages. `deadline_ns`: absolute, of
    CLOCK_MONOTONIC."""

    KIND: ClassVar[str] = "pickle of plain values"
    """What is read, for messages."""
    OPCODES: ClassVar[Mapping[str, str]] = PLAIN_OPCODES
    """Those that may be there, with the method of each."""

    def __init__(self, cursor: Cursor) -> None:
        self.cursor = cursor
        self.stack: list[object] = []
        self._marks: list[int] = []
        self._memo: dict[int, object] = {}
        self.opcode_at = 0
        self.deadline_ns = ENDLESS_NS

    def run(self) -> object:
        """The one value that the data describes."""
        cursor, opcodes = self.cursor, {ord(code): getattr(self, name) for code, name in self.OPCODES.items()}
        if cursor.num_bytes < 2 or not is_pickle(cursor.take(2)):
            raise WrongError(f"no {self.KIND} of paddle.save (a pickle of protocol 2 to 5)")
        for number in range(MAX_OPS):
            if not number % _LOOKS_AT_CLOCK and time.monotonic_ns() >= self.deadline_ns:
                raise LateError
            self.opcode_at = cursor.position
            code = cursor.byte()
            if len(self.stack) > MAX_STACK:
                raise WrongError(f"more than {MAX_STACK} values in hand")
            if code == ord("."):
                return self._result()
            if code not in opcodes:
                raise WrongError(f"opcode {code:#04x} {chr(code)!r} has no place in a {self.KIND}")
            opcodes[code]()
        raise WrongError(f"more than {MAX_OPS} opcodes")

    def _result(self) -> object:
        left = self.cursor.num_bytes - self.cursor.position
        if len(self.stack) != 1 or self._marks or left:
            raise WrongError(
                f"it ends with {len(self.stack)} values, {len(self._marks)} marks and {left} bytes left over"
            )
        return self.stack[0]

    # --- the stack

    def pop(self) -> object:
        if len(self.stack) <= (self._marks[-1] if self._marks else 0):
            raise WrongError("takes more than there is")
        return self.stack.pop()

    def popped(self, count: int) -> list[object]:
        return [self.pop() for _ in range(count)][::-1]

    def _since_mark(self) -> list[object]:
        if not self._marks:
            raise WrongError("there is no mark")
        start = self._marks.pop()
        values = self.stack[start:]
        del self.stack[start:]
        return values

    def top(self) -> object:
        if len(self.stack) <= (self._marks[-1] if self._marks else 0):
            raise WrongError("takes more than there is")
        return self.stack[-1]

    def mark(self) -> None:
        if len(self._marks) >= MAX_DEPTH:
            raise WrongError(f"more than {MAX_DEPTH} marks")
        self._marks.append(len(self.stack))

    def frame(self) -> None:
        length = self.cursor.number(8)
        if length > self.cursor.num_bytes - self.cursor.position:
            raise WrongError(f"truncated: a frame of {length} bytes")

    # --- plain values

    def none(self) -> None:
        self.stack.append(NOTHING)

    def true(self) -> None:
        self.stack.append(True)

    def false(self) -> None:
        self.stack.append(False)

    def integer(self) -> None:
        self.stack.append(int.from_bytes(self.cursor.take(4), "little", signed=True))

    def integer_1(self) -> None:
        self.stack.append(self.cursor.number(1))

    def integer_2(self) -> None:
        self.stack.append(self.cursor.number(2))

    def long_1(self) -> None:
        length = self.cursor.number(1)
        if length > MAX_INTEGER_BYTES:
            raise WrongError(f"an integer of {length} bytes")
        self.stack.append(int.from_bytes(self.cursor.take(length), "little", signed=True))

    def text_1(self) -> None:
        self._text(1)

    def text_4(self) -> None:
        self._text(4)

    def text_8(self) -> None:
        self._text(8)

    def _text(self, length_bytes: int) -> None:
        length = self.cursor.number(length_bytes)
        if length > MAX_TEXT_BYTES:
            self.cursor.skip(length)
            self.stack.append(LongText(length))
        else:
            self.stack.append(_decoded(self.cursor.take(length)))

    def bytes_1(self) -> None:
        self._bytes(1)

    def bytes_4(self) -> None:
        self._bytes(4)

    def bytes_8(self) -> None:
        self._bytes(8)

    def _bytes(self, length_bytes: int) -> None:
        length = self.cursor.number(length_bytes)
        self.stack.append(Bytes(self.cursor.skip(length), length))

    # --- containers

    def empty_dict(self) -> None:
        self.stack.append(Table())

    def empty_items(self) -> None:
        self.stack.append(Items(()))

    def items(self) -> None:
        self.stack.append(Items(self._since_mark()))

    def items_1(self) -> None:
        self.stack.append(Items(self.popped(1)))

    def items_2(self) -> None:
        self.stack.append(Items(self.popped(2)))

    def items_3(self) -> None:
        self.stack.append(Items(self.popped(3)))

    def set_item(self) -> None:
        self._set_items(self.popped(2))

    def set_items(self) -> None:
        self._set_items(self._since_mark())

    def _set_items(self, values: list[object]) -> None:
        table = self.top()
        if not isinstance(table, Table) or len(values) % 2:
            raise WrongError(f"{len(values)} keys and values are to go into {described(table)}")
        table.update(values[::2], values[1::2])

    def append(self) -> None:
        self._append(self.popped(1))

    def append_items(self) -> None:
        self._append(self._since_mark())

    def _append(self, values: list[object]) -> None:
        items = self.top()
        if not isinstance(items, Items):
            raise WrongError(f"{len(values)} values are to go into {described(items)}")
        items.extend(values)

    # --- the memo

    def put_1(self) -> None:
        self._put(self.cursor.number(1))

    def put_4(self) -> None:
        self._put(self.cursor.number(4))

    def memoize(self) -> None:
        self._put(len(self._memo))

    def _put(self, index: int) -> None:
        if len(self._memo) >= MAX_MEMO:
            raise WrongError(f"more than {MAX_MEMO} values are remembered")
        self._memo[index] = self.top()

    def get_1(self) -> None:
        self._get(self.cursor.number(1))

    def get_4(self) -> None:
        self._get(self.cursor.number(4))

    def _get(self, index: int) -> None:
        if index not in self._memo:
            raise WrongError(f"value {index} was not remembered")
        self.stack.append(self._memo[index])


def value_of(reader: PickleReader, what: str, deadline_ns: int = ENDLESS_NS) -> object:
    """The one value that the data describes. CheckpointError names `what`, and the byte at which something is wrong;
    DeadlineExceededError how far it came."""
    reader.deadline_ns = deadline_ns
    try:
        return reader.run()
    except LateError:
        raise DeadlineExceededError(
            f"{what:.500}: no time left to read it, at byte {reader.cursor.position} of {reader.cursor.num_bytes}"
        ) from None
    except WrongError as wrong:
        raise CheckpointError(f"{what:.500}: byte {reader.opcode_at}: {wrong}; nothing was executed") from None


def text_bytes(text: str) -> bytes:
    """Text as a pickle of protocol 2 and later has it; for writers."""
    data = text.encode()
    return b"X" + struct.pack("<I", len(data)) + data
