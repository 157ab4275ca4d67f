"""A transport without a wire: bytes of a channel on this machine, in buckets of any size, in any order, until told to
fail. What it gives a source is what a real one may give it at its worst."""

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fastdeploy_rl._native import Mapping
from fastdeploy_rl.errors import DeadlineExceededError, FastDeployRLError
from fastdeploy_rl.manifest import encode, file_digest
from fastdeploy_rl.plan.byte_range import ByteRange
from fastdeploy_rl.publish.channel import Channel
from fastdeploy_rl.publish.channel_reader import ChannelReader, LeasedSegments
from fastdeploy_rl.sources.base import SourceConfig
from fastdeploy_rl.sources.ipc import IpcSource
from fastdeploy_rl.transport.base import Offer
from fastdeploy_rl.version import WeightVersion


@dataclass
class Delivery:
    """How bytes come. `shuffle`: None brings them in order; else the seed of their order. `batch`: how many complete
    ranges are told of at once. `failure` is raised once `failing_after` bytes have come."""

    bucket_bytes: int = 1 << 30
    shuffle: int | None = None
    batch: int = 1
    failing_after: int = 0
    failure: FastDeployRLError | None = None


class _Piece(NamedTuple):
    index: int
    segment: int
    source: int
    target: int
    num_bytes: int


class MemoryTransport:
    """`fetches`: every one that was begun. `offered`: what was asked for."""

    def __init__(self, channel: Path, delivery: Delivery | None = None) -> None:
        self.delivery = delivery or Delivery()
        self.fetches: list[MemoryFetch] = []
        self.offered: list[WeightVersion | None] = []
        self.num_trims = 0
        self.is_closed = False
        self._channel = Channel(channel)
        self._publications = IpcSource(SourceConfig(channel))
        self._reader: ChannelReader | None = None

    def offer(self, version: WeightVersion | None, *, deadline_ns: int) -> Offer:
        self.offered.append(version)
        found, manifest = self._publications.resolve(version, deadline_ns=deadline_ns)
        return Offer(found, manifest, file_digest(encode(manifest)))

    def fetch(self, offer: Offer, ranges: Sequence[ByteRange], target: Mapping, *, deadline_ns: int) -> "MemoryFetch":
        if self._reader is None:
            self._reader = ChannelReader.open(self._channel)
        fetch = MemoryFetch(self._reader.lease(offer.manifest), ranges, target, deadline_ns, self.delivery)
        self.fetches.append(fetch)
        return fetch

    def trim(self) -> None:
        self.num_trims += 1

    def close(self) -> None:
        self.is_closed = True
        for fetch in self.fetches:
            fetch.close()
        if self._reader is not None:
            self._reader.close()
            self._reader = None


class MemoryFetch:
    def __init__(
        self,
        leased: LeasedSegments,
        ranges: Sequence[ByteRange],
        target: Mapping,
        deadline_ns: int,
        delivery: Delivery,
    ) -> None:
        self.ranges = ranges
        self.num_bytes = 0
        self._leased = leased
        self._target = target
        self._deadline_ns = deadline_ns
        self._delivery = delivery

    @property
    def is_closed(self) -> bool:
        return self._leased.is_released

    def arrivals(self) -> Iterator[Sequence[int]]:
        pieces = list(_pieces(self.ranges, self._delivery.bucket_bytes))
        if self._delivery.shuffle is not None:
            random.Random(self._delivery.shuffle).shuffle(pieces)
        missing = [each.num_bytes for each in self.ranges]
        complete: list[int] = []
        for piece in pieces:
            self._check()
            self._copy(piece)
            missing[piece.index] -= piece.num_bytes
            if not missing[piece.index]:
                complete.append(piece.index)
            if len(complete) == self._delivery.batch:
                yield complete
                complete = []
        if complete:
            yield complete

    def _check(self) -> None:
        if time.monotonic_ns() >= self._deadline_ns:
            raise DeadlineExceededError("not all bytes came in time")
        if self._delivery.failure is not None and self.num_bytes >= self._delivery.failing_after:
            raise self._delivery.failure
        assert not self.is_closed, "a fetch that was closed goes on"

    def _copy(self, piece: _Piece) -> None:
        with memoryview(self._target) as target, memoryview(self._leased.segments[piece.segment]) as source:
            target[piece.target : piece.target + piece.num_bytes] = source[
                piece.source : piece.source + piece.num_bytes
            ]
        self.num_bytes += piece.num_bytes

    def close(self) -> None:
        self._leased.release()


def _pieces(ranges: Sequence[ByteRange], bucket_bytes: int) -> Iterator[_Piece]:
    """Rows, cut where a bucket ends; buckets begin anew with each row."""
    for index, each in enumerate(ranges):
        for row in range(each.rows):
            for at in range(0, each.row_bytes, bucket_bytes):
                num_bytes = min(bucket_bytes, each.row_bytes - at)
                target = each.target_offset + row * each.row_bytes + at
                yield _Piece(index, each.segment, each.offset + row * each.stride + at, target, num_bytes)
