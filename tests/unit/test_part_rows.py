"""Parts as rows of the whole tensor: pieces of any size are its bytes, each once and in its place."""

import numpy as np
import pytest

from fastdeploy_rl.manifest import Part, Tensor
from fastdeploy_rl.plan.part_rows import PartRows, pieces_of, rows_of

WHOLE = np.arange(4 * 6 * 2, dtype=np.uint8).reshape(4, 6, 2)
CUTS = {None: [(0, 0)], 0: [(0, 1), (1, 4)], 1: [(0, 2), (2, 6)], 2: [(0, 1), (1, 1), (1, 2)]}


@pytest.mark.parametrize("max_bytes", [1, 5, 8, 16, 1000])
@pytest.mark.parametrize("axis", CUTS)
def test_pieces_of_all_parts_make_the_whole(axis: int | None, max_bytes: int) -> None:
    memory, found = bytearray(), np.full(WHOLE.nbytes, 255, np.uint8)
    parts = []
    for start, stop in CUTS[axis]:
        parts.append(Part(0, len(memory), start, stop))
        memory += (WHOLE if axis is None else WHOLE.take(range(start, stop), axis)).tobytes()
    tensor = Tensor("t", "U8", WHOLE.shape, axis, tuple(parts), "0" * 64)
    at = 0
    for rows in [rows for part in parts for rows in pieces_of(tensor, part, max_bytes)]:
        assert rows.source_offset == at
        assert 0 < rows.num_bytes <= max_bytes
        at += rows.num_bytes
        for row in range(rows.rows):
            source, place = rows.source_offset + row * rows.row_bytes, rows.place_offset + row * rows.place_stride
            assert (found[place : place + rows.row_bytes] == 255).all()
            found[place : place + rows.row_bytes] = memory[source : source + rows.row_bytes]
    assert found.tobytes() == WHOLE.tobytes()


def test_a_part_without_bytes_has_no_rows() -> None:
    tensor = Tensor("t", "F32", (3, 0), 0, (Part(0, 64, 0, 2), Part(0, 64, 2, 3)), "0" * 64)
    assert rows_of(tensor, tensor.parts[0]) == PartRows(64, 0, 0, 0, 0)
    assert list(pieces_of(tensor, tensor.parts[0], 8)) == []
