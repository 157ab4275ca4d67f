"""Says what an update came to from what every rank holds, byte by byte, and from nothing that the product says of it.

Pure. The references are worked out by numpy from the trainer's arrays; the product's checksums have no say."""

import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

Held = Mapping[str, bytes]
"""The raw bytes of every parameter of one rank; empty where it holds nothing."""


class Reference(NamedTuple):
    """What every rank must hold, and the first token that it must then give, when one version is live."""

    held: tuple[Held, ...]
    tokens: tuple[int, ...]

    @classmethod
    def of(cls, held: Sequence[Held]) -> "Reference":
        return cls(tuple(held), tuple(token_of(rank) for rank in held))


def token_of(held: Held) -> int:
    """The numpy engine's forward pass, written down a second time."""
    token = 0
    for name in sorted(held):
        token = zlib.crc32(held[name], token)
    return token


def differ_everywhere(one: Reference, other: Reference) -> bool:
    """Each tensor of each rank that has bytes is another one, so that no mixture passes for a version."""
    pairs = zip(one.held, other.held, strict=True)
    return all(a[name] != b[name] for a, b in pairs for name in a if a[name]) and set(one.tokens).isdisjoint(
        other.tokens
    )


class Seen(NamedTuple):
    """`tokens`: None from a rank that refuses the request. `is_serving`, `admission`: what the engine says it is."""

    held: tuple[Held, ...]
    tokens: tuple[int | None, ...]
    is_serving: bool
    admission: str


TORN = "torn"


def outcome_of(seen: Seen, old: Reference, new: Reference) -> str:
    """old, new: every byte of every rank is that version's, and requests are answered by it. fenced, cleared: no rank
    holds a byte, and all refuse. Anything else is TORN."""
    for name, reference in (("old", old), ("new", new)):
        if seen.held == reference.held and seen.tokens == reference.tokens and seen.is_serving:
            return name
    is_empty = not any(seen.held) and all(token is None for token in seen.tokens)
    if is_empty and not seen.is_serving:
        return "fenced" if seen.admission == "fenced" else "cleared"
    return TORN


def what_is_torn(seen: Seen, old: Reference, new: Reference) -> str:
    """For a message: of each rank how many parameters are the old ones, the new ones, and neither."""
    told = [f"says {seen.admission}, {'serving' if seen.is_serving else 'not serving'}"]
    for rank, held in enumerate(seen.held):
        olds = sum(held[name] == old.held[rank].get(name) for name in held)
        news = sum(held[name] == new.held[rank].get(name) for name in held)
        answer = "refuses" if seen.tokens[rank] is None else "answers"
        told.append(f"rank {rank} holds {len(held)} parameters, {olds} old, {news} new, and {answer}")
    return "; ".join(told)
