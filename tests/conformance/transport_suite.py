"""What every transport must do, whichever way the bytes travel: inherit `TransportSuite`, give it two fixtures."""

import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import pytest

from fastdeploy_rl import manifest as manifests
from fastdeploy_rl._native import Mapping
from fastdeploy_rl.errors import DeadlineExceededError, LifecycleError, NoPublicationError
from fastdeploy_rl.plan.byte_range import ByteRange
from fastdeploy_rl.publish.publisher import WeightPublisher
from fastdeploy_rl.transport.base import Fetch, Offer, Transport
from fastdeploy_rl.version import WeightVersion

Connect = Callable[[int], Transport]
"""A new transport to the publisher, with buckets of so many bytes; closed when the test ends."""
EDGE = 64
"""Bytes of a target on each side of what is fetched."""


def weights(step: int) -> dict[str, np.ndarray]:
    """About 300 KB; every version has other bytes in the same layout."""
    rng = np.random.default_rng(step)
    return {
        "matrix": rng.integers(0, 256, (256, 1024), np.uint8),
        "vector": rng.standard_normal(7001).astype(np.float32),
        "one": rng.integers(0, 256, 1, np.uint8),
        "empty": np.zeros((0, 3), np.float32),
    }


def soon() -> int:
    """A deadline that only a transport that hangs reaches."""
    return time.monotonic_ns() + 30_000_000_000


def whole(offer: Offer) -> list[ByteRange]:
    """A range for each tensor, one behind the other."""
    ranges, place = [], EDGE
    for tensor in offer.manifest.tensors:
        part = tensor.parts[0]
        ranges.append(ByteRange(part.segment, part.offset, tensor.num_bytes, 1, tensor.num_bytes, place))
        place += tensor.num_bytes
    return ranges


def target_for(ranges: Sequence[ByteRange]) -> Mapping:
    """Filled with a pattern, and larger than it must be."""
    target = Mapping.private(max((each.target_offset + each.num_bytes for each in ranges), default=EDGE) + EDGE)
    np.frombuffer(target, np.uint8)[:] = 0xA5
    return target


def fetched(fetch: Fetch) -> list[int]:
    """The indices in the order in which they came; closes it."""
    try:
        return [index for batch in fetch.arrivals() for index in batch]
    finally:
        fetch.close()


def packed(state: dict[str, np.ndarray], offer: Offer, wanted: ByteRange) -> bytes:
    """What the range has to bring, out of the trainer's own arrays."""
    for tensor in offer.manifest.tensors:
        part = tensor.parts[0]
        if part.segment == wanted.segment and part.offset <= wanted.offset < part.offset + max(1, tensor.num_bytes):
            data, start = state[tensor.name].tobytes(), wanted.offset - part.offset
            rows = [start + row * wanted.stride for row in range(wanted.rows)]
            return b"".join(data[row : row + wanted.row_bytes] for row in rows)
    raise AssertionError(f"no tensor has {wanted}")


def assert_landed(target: Mapping, state: dict[str, np.ndarray], offer: Offer, ranges: Sequence[ByteRange]) -> None:
    """Every range as it was published, and nothing else was touched."""
    expected = bytearray(b"\xa5" * target.num_bytes)
    for wanted in ranges:
        expected[wanted.target_offset : wanted.target_offset + wanted.num_bytes] = packed(state, offer, wanted)
    with memoryview(target) as view:
        assert bytes(view) == bytes(expected)


def rows_of_matrix(
    offer: Offer, place: int, *, start: int, row_bytes: int, rows: int = 256, step: int = 1
) -> ByteRange:
    """Columns of the matrix: every `step`-th row."""
    part = next(tensor for tensor in offer.manifest.tensors if tensor.name == "matrix").parts[0]
    return ByteRange(part.segment, part.offset + start, 1024 * step, rows, row_bytes, place)


class TransportSuite:
    """Fixtures to provide: `publisher` (started, two arenas at most, and served) and `connect`."""

    # --- offers ------------------------------------------------------------------------------------

    def test_nothing_published_is_said_plainly(self, connect: Connect, publisher: WeightPublisher) -> None:
        with pytest.raises(NoPublicationError, match="nothing is published"):
            connect(1 << 20).offer(None, deadline_ns=soon())

    def test_the_newest_version_is_offered_with_its_manifest(
        self, connect: Connect, publisher: WeightPublisher
    ) -> None:
        transport = connect(1 << 20)
        for step in (1, 2):
            published = publisher.publish(weights(step), step=step)
            offer = transport.offer(None, deadline_ns=soon())
            assert (offer.version, offer.manifest) == (published.version, published.manifest)
            assert offer.file_digest == manifests.file_digest(manifests.encode(published.manifest))

    def test_a_version_can_be_asked_for_by_name(self, connect: Connect, publisher: WeightPublisher) -> None:
        first = publisher.publish(weights(1), step=1)
        publisher.publish(weights(2), step=2)
        assert connect(1 << 20).offer(first.version, deadline_ns=soon()).manifest == first.manifest

    def test_a_version_that_is_not_there_is_refused_and_the_one_that_is_is_named(
        self, connect: Connect, publisher: WeightPublisher
    ) -> None:
        published = publisher.publish(weights(1), step=5)
        missing = WeightVersion(published.version.epoch, 4)
        with pytest.raises(NoPublicationError, match=rf"{missing}.*{published.version}"):
            connect(1 << 20).offer(missing, deadline_ns=soon())

    def test_offers_come_from_any_thread(self, connect: Connect, publisher: WeightPublisher) -> None:
        version = publisher.publish(weights(1), step=1).version
        transport, found = connect(1 << 20), []
        threads = [
            threading.Thread(target=lambda: found.append(transport.offer(None, deadline_ns=soon()).version))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert found == [version] * 4

    # --- fetches -----------------------------------------------------------------------------------

    @pytest.mark.parametrize("bucket_bytes", [997, 1 << 16, 1 << 30])
    def test_the_bytes_do_not_depend_on_the_size_of_buckets(
        self, connect: Connect, publisher: WeightPublisher, bucket_bytes: int
    ) -> None:
        """Smaller than a row, smaller than a tensor, larger than everything."""
        publisher.publish(weights(1), step=1)
        transport = connect(bucket_bytes)
        offer = transport.offer(None, deadline_ns=soon())
        ranges = whole(offer)
        target = target_for(ranges)
        fetch = transport.fetch(offer, ranges, target, deadline_ns=soon())
        assert sorted(fetched(fetch)) == list(range(len(ranges)))
        assert_landed(target, weights(1), offer, ranges)
        assert fetch.num_bytes == sum(each.num_bytes for each in ranges)

    @pytest.mark.parametrize("bucket_bytes", [100, 4096, 1 << 20])
    def test_rows_land_packed_one_behind_the_other(
        self, connect: Connect, publisher: WeightPublisher, bucket_bytes: int
    ) -> None:
        publisher.publish(weights(1), step=1)
        transport = connect(bucket_bytes)
        offer = transport.offer(None, deadline_ns=soon())
        ranges = [
            rows_of_matrix(offer, EDGE, start=10, row_bytes=5),
            rows_of_matrix(offer, 4096, start=512, row_bytes=300, rows=100, step=2),
            rows_of_matrix(offer, 40_000, start=0, row_bytes=1024, rows=3),
        ]
        target = target_for(ranges)
        assert sorted(fetched(transport.fetch(offer, ranges, target, deadline_ns=soon()))) == [0, 1, 2]
        assert_landed(target, weights(1), offer, ranges)

    def test_many_small_ranges_in_any_order_land_where_they_are_wanted(
        self, connect: Connect, publisher: WeightPublisher
    ) -> None:
        publisher.publish(weights(1), step=1)
        transport = connect(5000)
        offer = transport.offer(None, deadline_ns=soon())
        rng = random.Random(0)
        places = rng.sample(range(3000), 3000)
        ranges = [
            rows_of_matrix(offer, EDGE + 8 * place, start=rng.randrange(262_000), row_bytes=rng.randrange(9), rows=1)
            for place in places
        ]
        target = target_for(ranges)
        assert sorted(fetched(transport.fetch(offer, ranges, target, deadline_ns=soon()))) == list(range(3000))
        assert_landed(target, weights(1), offer, ranges)

    def test_a_range_is_told_of_when_all_of_it_is_there(self, connect: Connect, publisher: WeightPublisher) -> None:
        publisher.publish(weights(1), step=1)
        transport = connect(10_000)
        offer = transport.offer(None, deadline_ns=soon())
        ranges = whole(offer)
        target = target_for(ranges)
        fetch = transport.fetch(offer, ranges, target, deadline_ns=soon())
        for batch in fetch.arrivals():
            for index in batch:
                start, stop = ranges[index].target_offset, ranges[index].target_offset + ranges[index].num_bytes
                with memoryview(target) as view:
                    assert bytes(view[start:stop]) == packed(weights(1), offer, ranges[index])
        fetch.close()

    def test_nothing_to_fetch_is_complete_at_once(self, connect: Connect, publisher: WeightPublisher) -> None:
        publisher.publish(weights(1), step=1)
        transport = connect(1 << 20)
        offer = transport.offer(None, deadline_ns=soon())
        nothing = rows_of_matrix(offer, EDGE, start=0, row_bytes=0)
        target = target_for([nothing])
        assert fetched(transport.fetch(offer, [], target, deadline_ns=soon())) == []
        assert fetched(transport.fetch(offer, [nothing], target, deadline_ns=soon())) == [0]
        assert_landed(target, weights(1), offer, [])

    def test_one_byte_is_one_byte(self, connect: Connect, publisher: WeightPublisher) -> None:
        publisher.publish(weights(1), step=1)
        transport = connect(1)
        offer = transport.offer(None, deadline_ns=soon())
        ranges = [rows_of_matrix(offer, EDGE, start=77, row_bytes=1, rows=1)]
        target = target_for(ranges)
        assert fetched(transport.fetch(offer, ranges, target, deadline_ns=soon())) == [0]
        assert_landed(target, weights(1), offer, ranges)

    def test_what_is_outside_the_segments_is_refused(self, connect: Connect, publisher: WeightPublisher) -> None:
        publisher.publish(weights(1), step=1)
        transport = connect(1 << 20)
        offer = transport.offer(None, deadline_ns=soon())
        end = offer.manifest.segments[0].num_bytes
        for wrong in (ByteRange(0, end - 1, 2, 1, 2, 0), ByteRange(0, 0, end, 2, 1, 0), ByteRange(9, 0, 1, 1, 1, 0)):
            target = target_for([wrong])
            with pytest.raises(Exception, match=r"segment|range|bytes") as refusal:
                fetched(transport.fetch(offer, [wrong], target, deadline_ns=soon()))
            assert not isinstance(refusal.value, DeadlineExceededError)
            assert_landed(target, weights(1), offer, [])
            target.close()

    # --- versions that go --------------------------------------------------------------------------

    def test_what_was_superseded_before_it_was_fetched_is_refused(
        self, connect: Connect, publisher: WeightPublisher
    ) -> None:
        transport = connect(1 << 20)
        publisher.publish(weights(1), step=1)
        old = transport.offer(None, deadline_ns=soon())
        for step in (2, 3, 4):
            publisher.publish(weights(step), step=step)
        target = target_for(whole(old))
        with pytest.raises(NoPublicationError):
            fetched(transport.fetch(old, whole(old), target, deadline_ns=soon()))
        assert_landed(target, weights(1), old, [])
        target.close()

    def test_a_version_stays_for_as_long_as_it_is_fetched(self, connect: Connect, publisher: WeightPublisher) -> None:
        transport = connect(1000)
        publisher.publish(weights(1), step=1)
        offer = transport.offer(None, deadline_ns=soon())
        ranges = whole(offer)
        target = target_for(ranges)
        fetch = transport.fetch(offer, ranges, target, deadline_ns=soon())
        publisher.publish(weights(2), step=2)
        fetched(fetch)
        assert_landed(target, weights(1), offer, ranges)
        for step in (3, 4, 5):  # needs the memory of what was fetched
            publisher.publish(weights(step), step=step)

    # --- ends --------------------------------------------------------------------------------------

    def test_after_close_nobody_has_the_target_any_more(self, connect: Connect, publisher: WeightPublisher) -> None:
        publisher.publish(weights(1), step=1)
        transport = connect(500)
        offer = transport.offer(None, deadline_ns=soon())
        ranges = [rows_of_matrix(offer, row * 1024, start=row * 1024, row_bytes=1024, rows=1) for row in range(256)]
        target = target_for(ranges)
        fetch = transport.fetch(offer, ranges, target, deadline_ns=soon())
        next(iter(fetch.arrivals()))
        fetch.close()
        fetch.close()
        target.close()  # would raise if anybody could still write there
        for step in (2, 3, 4):
            publisher.publish(weights(step), step=step)

    def test_a_fetch_that_was_closed_is_not_taken_for_complete(
        self, connect: Connect, publisher: WeightPublisher
    ) -> None:
        publisher.publish(weights(1), step=1)
        transport = connect(500)
        offer = transport.offer(None, deadline_ns=soon())
        ranges = [rows_of_matrix(offer, row * 1024, start=row * 1024, row_bytes=1024, rows=1) for row in range(256)]
        fetch = transport.fetch(offer, ranges, target_for(ranges), deadline_ns=soon())
        arrivals = iter(fetch.arrivals())
        told = list(next(arrivals))
        fetch.close()
        with suppress(LifecycleError):
            told += [index for batch in arrivals for index in batch]
            assert sorted(told) == list(range(256))  # it was faster than we were

    def test_closing_the_transport_ends_its_fetches(self, connect: Connect, publisher: WeightPublisher) -> None:
        publisher.publish(weights(1), step=1)
        transport = connect(500)
        offer = transport.offer(None, deadline_ns=soon())
        target = target_for(whole(offer))
        transport.fetch(offer, whole(offer), target, deadline_ns=soon())
        transport.close()
        target.close()

    def test_trimming_between_fetches_changes_nothing(self, connect: Connect, publisher: WeightPublisher) -> None:
        publisher.publish(weights(1), step=1)
        transport = connect(1 << 16)
        offer = transport.offer(None, deadline_ns=soon())
        ranges = whole(offer)
        for _ in range(2):
            target = target_for(ranges)
            fetched(transport.fetch(offer, ranges, target, deadline_ns=soon()))
            transport.trim()
            assert_landed(target, weights(1), offer, ranges)

    def test_a_deadline_in_the_past_fetches_nothing(self, connect: Connect, publisher: WeightPublisher) -> None:
        publisher.publish(weights(1), step=1)
        transport = connect(1 << 20)
        offer = transport.offer(None, deadline_ns=soon())
        target = target_for(whole(offer))
        with pytest.raises(DeadlineExceededError):
            fetched(transport.fetch(offer, whole(offer), target, deadline_ns=time.monotonic_ns()))
        with pytest.raises(DeadlineExceededError):
            transport.offer(None, deadline_ns=time.monotonic_ns())
        assert_landed(target, weights(1), offer, [])
        target.close()
        for step in (2, 3, 4):
            publisher.publish(weights(step), step=step)
