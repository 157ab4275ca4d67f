"""Collectives in shared memory: the common suite, every rank with a mapping of its own, as processes have.

What only separate processes can show (a killed rank, an interrupted one) stands in tests/process/test_collectives.py.
"""

import uuid
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from collectives_suite import LONG_S, CollectivesSuite, MakeRanks

from fastdeploy_rl._native import CollectiveGroup
from fastdeploy_rl.collectives.shm import ShmCollectives
from fastdeploy_rl.memory.shared_segment import SharedSegment

SLOT_BYTES = 4096


@pytest.fixture
def make_ranks() -> Iterator[MakeRanks]:
    with ExitStack() as stack:

        def make(num_ranks: int, *, timeout_s: float = LONG_S) -> list[ShmCollectives]:
            name = f"fastdeploy_rl_test_collectives.{uuid.uuid4().hex[:12]}"
            segment = SharedSegment.create(name, CollectiveGroup.required_bytes(num_ranks, SLOT_BYTES))
            stack.callback(segment.unlink)
            segment.close()
            return [
                stack.enter_context(
                    ShmCollectives(name, rank, num_ranks, create=False, slot_bytes=SLOT_BYTES, timeout_s=timeout_s)
                )
                for rank in range(num_ranks)
            ]

        yield make


class TestShmCollectives(CollectivesSuite):
    pass
