"""Hostile input by hypothesis: documents that were valid once, records and words with extreme values, and raw bytes.

Knows nothing of who reads it. A strategy draws one random generator and mutates with it: drawing each choice on its own
would spend the time on choosing."""

import copy
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

_NUMBERS = (0, 1, -1, 2, 3, 7, 15, 16, 17, 511, 512, 513, 4095, 4096, 2**31 - 1, 2**31, 2**32, 2**53 + 1)
_LARGE = (2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 10**30, 10**400)
_TEXTS = (
    "",
    ".",
    "..",
    "../../etc/passwd",
    "/dev/zero",
    "a/b",
    "a\0b",
    "\x1b[2J",
    "\u2028",
    "\ud800",
    "é" * 300,
    "x" * 513,
    "w",
    "full",
    "tp:0",
    "tp:9999",
    "1.1",
    "18446744073709551616.1",
    "9" * 40,
    "0" * 64,
    "LATEST",
    "manifest-1.1-0000000000000000.json",
    "fastdeploy_rl_board.1",
    "model_weights_status.1",
)
_OTHERS = (None, True, False, 0.5, float("nan"), float("inf"), [], {}, [[]], [[[[[[[[[[]]]]]]]]]], {"a": {"a": {}}})
_MAX_HOLDERS = 2000
_PER_DRAW = 10
_WORDS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 255, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 2**64 - 2)


Inputs = st.SearchStrategy[list[bytes]]


def several(make: Callable[[random.Random], bytes]) -> Inputs:
    """A handful of what `make` makes of one generator."""

    def make_all(random: random.Random) -> list[bytes]:
        return [make(random) for _ in range(_PER_DRAW)]

    return st.builds(make_all, st.randoms(use_true_random=True))


def documents(samples: Sequence[bytes]) -> Inputs:
    """JSON near one of `samples`: values replaced, doubled, taken away; then, sometimes, bytes changed."""
    return several(lambda random: _document(random, random.choice(samples))) | raw(samples)


def raw(samples: Sequence[bytes]) -> Inputs:
    """Bytes near one of `samples`, or any."""
    damaged = several(lambda random: _damaged(random, random.choice(samples)))
    return damaged | st.lists(st.binary(max_size=300), max_size=_PER_DRAW)


def patches(offsets: Sequence[int], texts: Sequence[int], num_bytes: int) -> Inputs:
    """JSON list of [offset, hex]: words at `offsets`, text at `texts`, and anything anywhere in `num_bytes`."""
    return several(lambda random: _patches(random, (offsets, texts, num_bytes)))


def _document(random: random.Random, sample: bytes) -> bytes:
    document = json.loads(sample)
    for _ in range(random.choice((1, 1, 1, 2, 3, 8))):
        document = _edited(random, document)
    # As msgspec writes it, so that what is hostile is the meaning and not the form.
    data = json.dumps(document, separators=(",", ":"), ensure_ascii=random.random() < 0.2)
    encoded = data.encode("utf-8", "surrogatepass")
    return _damaged(random, encoded) if random.random() < 0.1 else encoded


def _edited(random: random.Random, document: Any) -> Any:
    holders = [holder for holder in _holders(document) if holder]
    if not holders:
        return _value(random)
    if len(holders) > _MAX_HOLDERS:
        return document  # copies of copies grow without end
    holder = random.choice(holders)
    key = random.choice(list(holder)) if isinstance(holder, dict) else random.randrange(len(holder))
    choice = random.randrange(8)
    if choice < 4:
        holder[key] = _value(random)
    elif choice == 4:
        del holder[key]
    elif choice == 5:
        _add(random, holder, holder[key])
    elif choice == 6:
        holder[key] = _shifted(random, holder[key])
    else:
        other = random.choice(holders)
        holder[key] = copy.deepcopy(random.choice(list(other.values()) if isinstance(other, dict) else other))
    return document


def _holders(value: Any) -> list[Any]:
    """All lists and objects inside, `value` first."""
    if not isinstance(value, (dict, list)):
        return []
    inner = value.values() if isinstance(value, dict) else value
    return [value, *(holder for item in inner for holder in _holders(item))]


def _add(random: random.Random, holder: Any, value: Any) -> None:
    copies = random.choice((1, 1, 1, 20, 200))
    if isinstance(holder, list):
        holder.extend(copy.deepcopy(value) for _ in range(copies))
    else:
        names = {random.choice(_TEXTS) + "x" * (index % 7) for index in range(min(copies, 20))}
        holder.update({name: copy.deepcopy(value) for name in names})


def _shifted(random: random.Random, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        return _value(random)
    if isinstance(value, int):
        return random.choice((value + 1, value - 1, -value, value * 2, value + 512, value ^ 1, value << 32))
    return random.choice((value + "x", value[:-1], value.upper(), value * 30, value[::-1]))


def _value(random: random.Random) -> Any:
    return copy.deepcopy(random.choice(random.choice((_NUMBERS, _LARGE, _TEXTS, _OTHERS))))


def _damaged(random: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 5))):
        at = random.randrange(len(changed) + 1)
        choice = random.randrange(5)
        if choice == 0:
            del changed[at:]
        elif choice == 1:
            changed[at:at] = random.choice((b"\0", b"\xff", b'"', b"[", b"{", b",", b" ", b"9" * 30, b"\xed\xa0\x80"))
        elif choice == 2 and at < len(changed):
            changed[at] ^= 1 << random.randrange(8)
        elif choice == 3:
            stop = at + random.randrange(1, 64)
            changed[at:at] = changed[at:stop]
        else:
            del changed[at : at + random.randrange(1, 16)]
    return bytes(changed)


def _patches(random: random.Random, place: tuple[Sequence[int], Sequence[int], int]) -> bytes:
    words, texts, num_bytes = place
    found: list[tuple[int, str]] = []
    for _ in range(random.choice((1, 1, 2, 4, 12))):
        choice = random.randrange(8)
        if choice < 5:
            value = random.choice(_WORDS) if random.random() < 0.6 else random.getrandbits(64)
            found.append((random.choice(words), value.to_bytes(8, "little").hex()))
        elif choice < 7 and texts:
            text = random.choice(_TEXTS).encode("utf-8", "surrogatepass") + random.choice((b"", b"\0", b"\xff\xfe"))
            found.append((random.choice(texts), text[:200].hex()))
        else:
            found.append((random.randrange(num_bytes), random.randbytes(random.choice((1, 4, 64, 500))).hex()))
    return json.dumps(found).encode()
