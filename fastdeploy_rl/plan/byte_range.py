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

    @property
    def stop(self) -> int:
        """Where its last byte ends in the segment."""
        return self.offset + max(0, self.rows - 1) * self.stride + self.row_bytes

    def joined(self) -> "ByteRange":
        """The same bytes: rows without gaps as one."""
        if self.rows != 1 and self.stride != self.row_bytes:
            return self
        return self._replace(stride=self.num_bytes, rows=1, row_bytes=self.num_bytes)
