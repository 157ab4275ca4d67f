"""Byte ranges: what is asked of whoever has a version's segments.

Owns the record alone, which plans make and transports carry. Refuses to know either.
"""

from typing import NamedTuple


class ByteRange(NamedTuple):
    """`rows` rows of `row_bytes`, `stride` apart from `offset` on in a segment; they land packed, one behind the other,
    from `target_offset` on. All but `segment` and `rows` in bytes."""

    segment: int
    offset: int
    stride: int
    rows: int
    row_bytes: int
    target_offset: int

    @property
    def num_bytes(self) -> int:
        return self.rows * self.row_bytes
