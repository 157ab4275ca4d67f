"""Where everything lies that a decode step reads or writes and that outlives the step.

Owns the record: every bound parameter, and the arena of the KV cache. Refuses to know what is done with it. Invariant:
two ledgers are equal exactly when a graph that was captured under one is valid under the other; a ledger holds no
memory, only what is written down of it.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from fastdeploy_rl.memory.tensor_view import TensorView


class Address(NamedTuple):
    """`num_bytes` from `pointer` on, of elements `dtype` (a safetensors name)."""

    name: str
    pointer: int
    num_bytes: int
    dtype: str


class AddressLedger:
    """Hashable, made to be compared: a model has hundreds of parameters, so the hash is computed once."""

    __slots__ = ("_entries", "_hash")

    def __init__(self, entries: Iterable[Address]) -> None:
        self._entries = tuple(sorted(entries))
        self._hash = hash(self._entries)

    @classmethod
    def of(cls, views: Mapping[str, TensorView], *others: Address) -> "AddressLedger":
        """Of parameters bound to `views`, and of what else the graphs were or will be captured with."""
        bound = [
            Address(name, view.mapping.address + view.offset, view.num_bytes, view.dtype)
            for name, view in views.items()
        ]
        return cls([*bound, *others])

    def names_elsewhere(self, other: "AddressLedger") -> list[str]:
        """What does not lie in the same place in both, or is in one of them alone."""
        return sorted({entry.name for entry in {*self._entries} ^ {*other._entries}})

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, AddressLedger):
            return NotImplemented
        return self._hash == other._hash and self._entries == other._entries

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"AddressLedger({len(self._entries)} addresses, {self._hash & 0xFFFFFFFF:08x})"
