"""Who is asked for which bytes: peers before the publisher, nobody twice, and every byte from somebody who has it."""

import logging
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from fastdeploy_rl import manifest as manifests
from fastdeploy_rl._native import Mapping
from fastdeploy_rl.checksum import of_bytes
from fastdeploy_rl.errors import (
    AuthenticationError,
    ConfigurationError,
    DeadlineExceededError,
    FastDeployRLError,
    NoPublicationError,
    PeerLostError,
)
from fastdeploy_rl.manifest import Part, Segment, Tensor
from fastdeploy_rl.plan.byte_range import ByteRange
from fastdeploy_rl.transport import peers
from fastdeploy_rl.transport.base import Offer
from fastdeploy_rl.transport.peers import PeerEngine, PeerTransport
from fastdeploy_rl.version import WeightVersion

DATA = np.random.default_rng(0).integers(0, 256, 4096, np.uint8).tobytes()
WHOLE = ByteRange(0, 0, 0, 1, 4096, 0)


def offer_of(step: int) -> Offer:
    tensor = Tensor("w", "U8", (4096,), None, (Part(0, 0, 0, 0),), of_bytes(DATA).hex())
    version = WeightVersion(1, step)
    manifest = manifests.build_manifest(version, "full", [Segment("shm", "s", 4096, 0, 0)], [tensor], {})
    return Offer(version, manifest, manifests.file_digest(manifests.encode(manifest)))


class Server:
    """Has `held` of version `step`, and may fail: at once, or after a number of ranges."""

    def __init__(
        self,
        held: Sequence[ByteRange] = (WHOLE,),
        *,
        step: int = 1,
        of_ranks: int = 1,
        error: FastDeployRLError | None = None,
        fails_after: int | None = None,
    ) -> None:
        self.until_ns: list[int] = []
        self.held = held
        self.step = step
        self.error = error
        self.fails_after = fails_after
        self.asked: list[ByteRange] = []
        self.num_fetches = 0
        self.close_errors: list[FastDeployRLError] = []
        self._of_ranks = of_ranks
        self.open_fetches = 0

    def _answer(self) -> None:
        if self.error is not None:
            raise self.error

    def num_ranks(self, *, deadline_ns: int) -> int:
        self._answer()
        return self._of_ranks

    def offer(self, version: WeightVersion | None, *, deadline_ns: int) -> Offer:
        self._answer()
        if version not in (None, WeightVersion(1, self.step)):
            raise NoPublicationError(f"version {version} is not to be had: there is 1.{self.step}")
        return offer_of(self.step)

    def holdings(self, offer: Offer, *, deadline_ns: int) -> Sequence[ByteRange]:
        self._answer()
        if offer.version.step != self.step:
            raise NoPublicationError("not held")
        return self.held

    def fetch(self, offer: Offer, ranges: Sequence[ByteRange], target: Mapping, *, deadline_ns: int) -> "Sending":
        self._answer()
        self.until_ns.append(deadline_ns)
        self.num_fetches += 1
        return Sending(self, ranges, target)

    def trim(self) -> None:
        pass

    def close(self) -> None:
        pass

    @property
    def asked_bytes(self) -> int:
        return sum(each.num_bytes for each in self.asked)


class Sending:
    def __init__(self, server: Server, ranges: Sequence[ByteRange], target: Mapping) -> None:
        self._server, self._ranges, self._target = server, ranges, target
        self.num_bytes = 0
        server.open_fetches += 1

    def arrivals(self) -> Iterator[Sequence[int]]:
        for index, each in enumerate(self._ranges):
            if index == self._server.fails_after:
                raise PeerLostError("the peer was killed")
            for row in range(each.rows):
                start, place = each.offset + row * each.stride, each.target_offset + row * each.row_bytes
                data = DATA[start : start + each.row_bytes]
                memoryview(self._target)[place : place + each.row_bytes] = data
            self._server.asked.append(each)
            self.num_bytes += each.num_bytes
            yield [index]

    def close(self) -> None:
        if self._server.close_errors:
            raise self._server.close_errors.pop()
        self._server.open_fetches -= self._ranges is not None
        self._ranges = None  # type: ignore[assignment]


NOBODY = PeerLostError("nobody listens there")


def gone() -> Server:
    """A publisher that is not there."""
    return Server(error=NOBODY)


def engine(*ranks: Server, own_rank: int = 0) -> PeerEngine:
    def connect(number: int) -> Server:
        return ranks[number] if number < len(ranks) else Server(error=NOBODY)

    return PeerEngine("engine", connect, own_rank)


def soon() -> int:
    return time.monotonic_ns() + 10_000_000_000


def rows(*offsets: int, size: int = 16) -> list[ByteRange]:
    """One range each, packed into the target."""
    return [ByteRange(0, offset, size, 1, size, place * size) for place, offset in enumerate(offsets)]


def bring(transport: PeerTransport, wanted: Sequence[ByteRange], step: int = 1) -> list[int]:
    """Fetches, checks every byte, and that each range was told complete when it was; returns the order."""
    target = Mapping.private(8192)
    fetch = transport.fetch(offer_of(step), wanted, target, deadline_ns=soon())
    order = []
    for batch in fetch.arrivals():
        for number in batch:
            each = wanted[number]
            expected = b"".join(DATA[each.offset + row * each.stride :][: each.row_bytes] for row in range(each.rows))
            assert bytes(memoryview(target)[each.target_offset :][: each.num_bytes]) == expected
            order.append(number)
    fetch.close()
    assert sorted(order) == list(range(len(wanted)))
    return order


WANTED = rows(0, 512, 1024, 2048)


def test_a_peer_that_has_everything_leaves_nothing_to_the_publisher(caplog: pytest.LogCaptureFixture) -> None:
    publisher, peer = Server(), Server()
    with caplog.at_level(logging.INFO):
        bring(PeerTransport(publisher, [engine(peer)], 0), WANTED)
    assert (peer.asked_bytes, publisher.num_fetches) == (64, 0)
    assert "bytes_from_peers=64 bytes_from_publisher=0" in caplog.text


def test_what_no_peer_has_comes_from_the_publisher(caplog: pytest.LogCaptureFixture) -> None:
    publisher, peer = Server(), Server(rows(0, 1024))
    with caplog.at_level(logging.INFO):
        bring(PeerTransport(publisher, [engine(peer)], 0), WANTED)
    assert (peer.asked_bytes, publisher.asked_bytes) == (32, 32)
    assert "bytes_from_peers=32 bytes_from_publisher=32" in caplog.text


def test_the_rank_of_the_same_number_is_asked_before_the_others() -> None:
    ranks = [Server(of_ranks=3) for _ in range(3)]
    bring(PeerTransport(gone(), [engine(*ranks, own_rank=1)], 1), WANTED)
    assert [rank.asked_bytes for rank in ranks] == [0, 64, 0]


@pytest.mark.parametrize("scratch_bytes", [1, 40, 1 << 20])
def test_a_range_is_put_together_from_ranks_that_are_cut_otherwise(
    monkeypatch: pytest.MonkeyPatch, scratch_bytes: int
) -> None:
    """Columns: each row of ours is half one rank's and half another's. However little memory there is on the way."""
    monkeypatch.setattr(peers, "_SCRATCH_BYTES", scratch_bytes)
    left, right = ByteRange(0, 0, 64, 8, 16, 0), ByteRange(0, 16, 64, 8, 16, 0)
    ranks = [Server([left], of_ranks=2), Server([right], of_ranks=2)]
    publisher = Server()
    bring(PeerTransport(publisher, [engine(*ranks)], 0), [ByteRange(0, 0, 64, 8, 32, 0), *rows(600, 700)])
    assert [rank.asked_bytes for rank in ranks] == [128, 128]
    assert publisher.asked_bytes == 32


def test_a_rank_that_an_engine_has_not_is_no_reason_to_leave_its_others_out() -> None:
    """Three ranks of ours, two of theirs."""
    ranks = [Server(rows(0, 512), of_ranks=2), Server(rows(1024, 2048), of_ranks=2)]
    publisher = Server()
    bring(PeerTransport(publisher, [engine(*ranks, own_rank=2)], 2), WANTED)
    assert publisher.num_fetches == 0


def test_a_peer_that_dies_in_the_middle_is_left_out_and_what_it_sent_stays(caplog: pytest.LogCaptureFixture) -> None:
    publisher, dying, other = Server(), Server(fails_after=2), Server(rows(1024))
    assert bring(PeerTransport(publisher, [engine(dying), engine(other)], 0), WANTED) == [0, 1, 2, 3]
    assert (dying.asked, other.asked, publisher.asked) == (WANTED[:2], WANTED[2:3], WANTED[3:])
    assert (dying.num_fetches, dying.open_fetches) == (1, 0)
    assert "the peer was killed" in caplog.text


def test_an_engine_that_has_not_the_version_is_asked_once() -> None:
    """Its ranks go from version to version together."""
    publisher, older = Server(), [Server(step=0, of_ranks=3), Server(of_ranks=3), Server(of_ranks=3)]
    bring(PeerTransport(publisher, [engine(*older)], 0), WANTED)
    assert [rank.num_fetches for rank in older] == [0, 0, 0]
    assert publisher.asked_bytes == 64


REFUSALS = [
    NOBODY,
    NoPublicationError("not held"),
    PeerLostError("no frame of ours"),
    ConfigurationError("no port has that number"),
]


@pytest.mark.parametrize("error", REFUSALS)
def test_a_peer_that_refuses_is_not_asked_again_in_this_fetch(error: FastDeployRLError) -> None:
    publisher, refusing = Server(), Server(error=error)
    bring(PeerTransport(publisher, [engine(refusing)], 0), WANTED)
    assert (refusing.num_fetches, publisher.asked_bytes) == (0, 64)


def test_no_peer_may_take_more_than_half_of_the_time_that_is_left() -> None:
    """One that gives a byte a second is no reason to miss the deadline."""
    publisher, slow, other = Server(), Server(rows(0)), Server(rows(512))
    deadline_ns = soon()
    fetch = PeerTransport(publisher, [engine(slow), engine(other)], 0).fetch(
        offer_of(1), WANTED, Mapping.private(4096), deadline_ns=deadline_ns
    )
    begun_ns = time.monotonic_ns()
    assert sum(len(batch) for batch in fetch.arrivals()) == len(WANTED)
    fetch.close()
    for peer in (slow, other):
        assert all(2 * until_ns <= deadline_ns + time.monotonic_ns() for until_ns in peer.until_ns)
        assert all(until_ns > begun_ns for until_ns in peer.until_ns)
    assert publisher.until_ns == [deadline_ns]
    assert len(slow.until_ns) == len(other.until_ns) == 1


def test_a_peer_that_names_bytes_beyond_the_segments_is_left_out() -> None:
    publisher, lying = Server(), Server([ByteRange(7, 0, 0, 1, 4096, 0)])
    bring(PeerTransport(publisher, [engine(lying)], 0), WANTED)
    assert (lying.num_fetches, publisher.asked_bytes) == (0, 64)


def test_bytes_that_nobody_has_are_the_publishers_error_to_tell() -> None:
    transport = PeerTransport(gone(), [engine(Server(rows(0, 512)))], 0)
    fetch = transport.fetch(offer_of(1), WANTED, Mapping.private(4096), deadline_ns=soon())
    with pytest.raises(PeerLostError, match="nobody listens there"):
        list(fetch.arrivals())
    fetch.close()
    assert fetch.num_bytes == 32


def test_a_fetch_that_does_not_end_is_ended_by_a_later_call() -> None:
    """Until then somebody may write into the target, and whoever owns it is told so."""
    peer = Server()
    peer.close_errors = [DeadlineExceededError("a thread goes on")] * 2
    publisher = Server()
    fetch = PeerTransport(publisher, [engine(peer)], 0).fetch(
        offer_of(1), WANTED, Mapping.private(4096), deadline_ns=soon()
    )
    with pytest.raises(DeadlineExceededError, match="a thread goes on"):
        list(fetch.arrivals())
    assert (peer.open_fetches, publisher.num_fetches) == (1, 0)
    fetch.close()
    assert peer.open_fetches == 0


def test_ranges_without_bytes_are_complete_at_once() -> None:
    bring(PeerTransport(Server(), [engine(Server())], 0), [ByteRange(0, 0, 0, 0, 16, 0), ByteRange(0, 0, 0, 3, 0, 0)])


def test_what_is_fetched_again_comes_from_the_publisher_where_it_has_it() -> None:
    """What a peer gave the first time may have been spoilt. A publisher that is gone is not waited for."""
    publisher, peer = Server(), Server()
    transport = PeerTransport(publisher, [engine(peer)], 0)
    for num_from_publisher in (0, 64, 128):
        bring(transport, WANTED)
        assert publisher.asked_bytes == num_from_publisher
    publisher.error = NOBODY
    bring(transport, WANTED)
    assert peer.asked_bytes == 128


# --- which version


def test_the_publishers_newest_is_taken_where_it_answers() -> None:
    publisher, peer = Server(step=2), Server(step=3)
    transport = PeerTransport(publisher, [engine(peer)], 0)
    assert transport.offer(None, deadline_ns=soon()).version == WeightVersion(1, 2)
    assert transport.offer(WeightVersion(1, 3), deadline_ns=soon()).version == WeightVersion(1, 3)


@pytest.mark.parametrize("error", [NOBODY, NoPublicationError("nothing")])
def test_without_a_publisher_the_newest_of_the_peers_is_taken(error: FastDeployRLError) -> None:
    peers = [engine(Server(step=2)), engine(Server(step=4)), engine(Server(error=NOBODY)), engine(Server(step=3))]
    transport = PeerTransport(Server(error=error), peers, 0)
    assert transport.offer(None, deadline_ns=soon()).version == WeightVersion(1, 4)


def test_a_publisher_with_another_secret_is_not_passed_over() -> None:
    publisher = Server(error=AuthenticationError("the weight server has another secret"))
    with pytest.raises(AuthenticationError, match="another secret"):
        PeerTransport(publisher, [engine(Server())], 0).offer(None, deadline_ns=soon())


def test_what_nobody_has_is_the_publishers_error_to_tell() -> None:
    transport = PeerTransport(Server(step=5), [engine(Server(step=4))], 0)
    with pytest.raises(NoPublicationError, match=r"1\.9 is not to be had: there is 1\.5"):
        transport.offer(WeightVersion(1, 9), deadline_ns=soon())


def test_peers_that_are_all_gone_are_named(caplog: pytest.LogCaptureFixture) -> None:
    wrong = AuthenticationError("the server wants a secret")
    with pytest.raises(PeerLostError, match="nobody listens there"):
        PeerTransport(gone(), [engine(Server(error=wrong))], 0).offer(None, deadline_ns=soon())
    assert "peer=engine version=newest reason='AuthenticationError: the server wants a secret'" in caplog.text
