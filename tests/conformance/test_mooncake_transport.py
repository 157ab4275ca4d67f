"""The `mooncake` transport: over the real library in its TCP mode, and over one that fails, stalls and has an HCA."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from source_suite import SourceSuite, arrived, plan_of, weights
from transport_suite import Connect, TransportSuite, fetched

from fastdeploy_rl._native import Mapping
from fastdeploy_rl.config import Deadlines
from fastdeploy_rl.errors import (
    ConfigurationError,
    DeadlineExceededError,
    NoPublicationError,
    SegmentError,
)
from fastdeploy_rl.plan.byte_range import ByteRange
from fastdeploy_rl.publish.channel import Channel
from fastdeploy_rl.publish.publisher import WeightPublisher
from fastdeploy_rl.publish.weight_server import ChannelShelf, WeightServer
from fastdeploy_rl.sources import rsync
from fastdeploy_rl.sources.base import SourceConfig, WeightSource
from fastdeploy_rl.sources.fetching import FetchingSource
from fastdeploy_rl.testing.fake_mooncake import FakeMooncake, fake_hcas
from fastdeploy_rl.transport.base import Fetch, Offer
from fastdeploy_rl.transport.connection import Connection
from fastdeploy_rl.transport.mooncake import MooncakeTransport
from fastdeploy_rl.transport.mooncake_engine import MAX_SLICES, Library, MooncakeEngine, MooncakeSettings, load_library
from fastdeploy_rl.transport.mooncake_exporter import ExportingShelf, MooncakeExporter
from fastdeploy_rl.transport.tcp_server import TcpServer
from fastdeploy_rl.transport.wire import Places
from fastdeploy_rl.update.planned_transfer import transfer_planned

SOON_S = 20.0
WEIGHTS = {
    "a": np.arange(3 << 20, dtype=np.uint8).reshape(3, 1 << 20),
    "b": np.random.default_rng(0).standard_normal((300, 40)).astype(np.float32),
}


def soon(seconds: float = SOON_S) -> int:
    return time.monotonic_ns() + int(seconds * 1e9)


@pytest.fixture
def infiniband_dir(tmp_path: Path) -> Path:
    return fake_hcas(tmp_path)


@dataclass
class Scene:
    """A trainer that has published WEIGHTS, exports them, and an engine's transport to it."""

    publisher: WeightPublisher
    server: TcpServer
    exporter: MooncakeExporter
    transport: MooncakeTransport
    exporting: ExportingShelf

    def offer(self) -> Offer:
        return self.transport.offer(None, deadline_ns=soon())

    def fetch(self, ranges: Sequence[ByteRange], target: Mapping, seconds: float = SOON_S) -> Fetch:
        return self.transport.fetch(self.offer(), ranges, target, deadline_ns=soon(seconds))


@contextmanager
def scene(
    directory: Path,
    library: Library,
    settings: MooncakeSettings,
    *,
    bucket_bytes: int = 1 << 20,
    deadlines: Deadlines | None = None,
) -> Iterator[Scene]:
    channel = Channel(directory / "channel")
    with WeightPublisher(channel.path, max_arenas=2) as publisher:
        publisher.publish(WEIGHTS, step=1)
        shelf = ChannelShelf(channel, Deadlines())
        exporter = MooncakeExporter.open(settings, library=library)
        exporting = ExportingShelf(shelf, exporter)
        with TcpServer(exporting) as server:
            transport = MooncakeTransport.open(
                server.address, settings, library=library, bucket_bytes=bucket_bytes, deadlines=deadlines
            )
            yield Scene(publisher, server, exporter, transport, exporting)
            transport.close()
        exporter.close()
        shelf.close()


def published(offer: Offer, wanted: ByteRange) -> bytes:
    """As it lies in shared memory, read without any of the code under test."""
    with open(f"/dev/shm/{offer.manifest.segments[wanted.segment].locator}", "rb") as file:
        data = file.read()
    starts = [wanted.offset + row * wanted.stride for row in range(wanted.rows)]
    return b"".join(data[start : start + wanted.row_bytes] for start in starts)


def landed(target: Mapping, wanted: ByteRange) -> bytes:
    with memoryview(target) as view:
        return bytes(view[wanted.target_offset : wanted.target_offset + wanted.num_bytes])


RANGES = [
    ByteRange(0, 0, 0, 1, 3 << 20, 0),
    ByteRange(0, 7, 128, 3000, 5, 3 << 20),
    ByteRange(0, 64, 0, 1, 0, 0),
    ByteRange(0, 4096, 512, 8, 512, (3 << 20) + (1 << 16)),
]
"""Large; of more rows than a call may have; without bytes; of rows that follow each other."""
TARGET_BYTES = (3 << 20) + (1 << 17)


@pytest.fixture(scope="module", autouse=True)
def resident() -> None:
    """A socket and threads of the real library stay until the process ends: they are there before a test counts what
    it leaves."""
    with suppress(ConfigurationError):
        MooncakeEngine.open(MooncakeSettings(), load_library(), patience_s=5).close()


@pytest.fixture(scope="module")
def real() -> Library:
    try:
        return load_library()
    except ConfigurationError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def real_exporter(real: Library) -> Iterator[MooncakeExporter]:
    """One for many tests, and there before they begin: to end an engine of the library takes a second."""
    exporter = MooncakeExporter.open(library=real)
    exporter.export([Mapping.private(4096)], [""]).release()
    yield exporter
    exporter.close()


@pytest.fixture(params=["fake rdma", "real tcp"])
def engines(request: pytest.FixtureRequest, infiniband_dir: Path) -> tuple[Library, MooncakeSettings]:
    if request.param == "real tcp":
        return request.getfixturevalue("real"), MooncakeSettings()
    return FakeMooncake(), MooncakeSettings("rdma", infiniband_dir=infiniband_dir)


@contextmanager
def served(channel: Path, exporter: MooncakeExporter) -> Iterator[str]:
    """The address of a server that exports what is published there."""
    with ExitStack() as stack:
        shelf = ChannelShelf(Channel(channel), Deadlines())
        stack.callback(shelf.close)
        exporting = ExportingShelf(shelf, exporter)
        yield stack.enter_context(TcpServer(exporting)).address


class _MooncakeSuite(TransportSuite):
    """Fixtures to provide: `library`, `settings`, and `exporter`."""

    @pytest.fixture
    def connect(
        self,
        channel: Path,
        publisher: WeightPublisher,
        library: Library,
        settings: MooncakeSettings,
        exporter: MooncakeExporter,
    ) -> Iterator[Connect]:
        with ExitStack() as stack:
            address = stack.enter_context(served(channel, exporter))

            def connect(bucket_bytes: int) -> MooncakeTransport:
                transport = MooncakeTransport.open(address, settings, library=library, bucket_bytes=bucket_bytes)
                stack.callback(transport.close)
                return transport

            yield connect


class TestRealLibraryOverTcp(_MooncakeSuite):
    @pytest.fixture
    def library(self, real: Library) -> Library:
        return real

    @pytest.fixture
    def settings(self) -> MooncakeSettings:
        return MooncakeSettings()

    @pytest.fixture
    def exporter(self, real_exporter: MooncakeExporter) -> MooncakeExporter:
        return real_exporter


class TestFakeLibraryOverRdma(_MooncakeSuite):
    @pytest.fixture
    def library(self) -> Library:
        return FakeMooncake()

    @pytest.fixture
    def settings(self, infiniband_dir: Path) -> MooncakeSettings:
        return MooncakeSettings("rdma", infiniband_dir=infiniband_dir)

    @pytest.fixture
    def exporter(self, library: Library, settings: MooncakeSettings) -> Iterator[MooncakeExporter]:
        exporter = MooncakeExporter.open(settings, library=library)
        yield exporter
        exporter.close()


class TestMooncakeSource(SourceSuite):
    """As an engine that has an HCA fetches."""

    OWNS_MEMORY = True

    @pytest.fixture
    def source(self, channel: Path, infiniband_dir: Path, publisher: WeightPublisher) -> Iterator[WeightSource]:
        fake, settings = FakeMooncake(), MooncakeSettings("rdma", infiniband_dir=infiniband_dir)
        exporter = MooncakeExporter.open(settings, library=fake)
        with served(channel, exporter) as address:
            transport = MooncakeTransport.open(address, settings, library=fake, bucket_bytes=48)
            source = FetchingSource(transport, SourceConfig(channel))
            yield source
            source.close()
        exporter.close()
        assert (fake.live, fake.registered) == ([], [])


def test_every_byte_lands_where_it_belongs(tmp_path: Path, engines: tuple[Library, MooncakeSettings]) -> None:
    target = Mapping.private(TARGET_BYTES)
    with scene(tmp_path, *engines, bucket_bytes=4097) as here:
        offer = here.offer()
        fetch = here.fetch(RANGES, target)
        assert sorted(fetched(fetch)) == [0, 1, 2, 3]
        assert [landed(target, each) for each in RANGES] == [published(offer, each) for each in RANGES]
        assert fetch.num_bytes == sum(each.num_bytes for each in RANGES)
        assert target.num_exports == 0


def test_versions_follow_each_other_over_the_same_engine_and_arena(
    tmp_path: Path, engines: tuple[Library, MooncakeSettings]
) -> None:
    target = Mapping.private(TARGET_BYTES)
    with scene(tmp_path, *engines) as here:
        for step in (2, 3, 4):
            here.publisher.publish({"a": np.full((1000,), step, np.float32)}, step=step)
            offer = here.offer()
            wanted = ByteRange(0, 0, 0, 1, 4000, 128)
            fetched(here.transport.fetch(offer, [wanted], target, deadline_ns=soon()))
            assert (offer.version.step, landed(target, wanted)) == (step, published(offer, wanted))


# --- what the library is asked to do


def fake_scene(
    directory: Path, fake: FakeMooncake, infiniband_dir: Path, protocol: str = "rdma", **options: Any
) -> AbstractContextManager[Scene]:
    return scene(directory, fake, MooncakeSettings(protocol, infiniband_dir=infiniband_dir), **options)


def test_a_call_has_neither_more_slices_nor_more_bytes_than_it_may(tmp_path: Path, infiniband_dir: Path) -> None:
    fake = FakeMooncake()
    with fake_scene(tmp_path, fake, infiniband_dir, bucket_bytes=4000) as here:
        fetched(here.fetch(RANGES, Mapping.private(TARGET_BYTES)))
    sizes = [[num_bytes for _, _, num_bytes in call] for call in fake.calls]
    assert max(map(len, sizes)) <= MAX_SLICES
    assert max(map(sum, sizes)) <= 4000
    assert max(map(len, sizes)) > 500, "rows that lie apart travel together"


def test_memory_is_known_to_the_library_only_while_it_is_used(tmp_path: Path, infiniband_dir: Path) -> None:
    fake = FakeMooncake()
    target = Mapping.private(TARGET_BYTES)
    with fake_scene(tmp_path, fake, infiniband_dir) as here:
        assert fake.live == []
        with fake.stalled() as is_stalled:
            fetch = here.fetch(RANGES, target)
            assert is_stalled.wait(SOON_S)
            registered = dict(fake.registered)
            assert target.address in registered
            assert registered[target.address] == RANGES[-1].target_offset + RANGES[-1].num_bytes
            assert len(registered) == 1 + len(here.offer().manifest.segments)
        fetched(fetch)
        await_true(lambda: fake.registered == [])
        assert len(fake.live) == 2, "kept for the next fetch"
        here.transport.trim()
        assert len(fake.live) == 1
    assert fake.live == []


def test_over_tcp_nobody_is_told_of_the_memory_that_is_fetched_into(tmp_path: Path, infiniband_dir: Path) -> None:
    fake = FakeMooncake()
    target = Mapping.private(TARGET_BYTES)
    with fake_scene(tmp_path, fake, infiniband_dir, "tcp") as here, fake.stalled() as is_stalled:
        fetch = here.fetch(RANGES, target)
        assert is_stalled.wait(SOON_S)
        assert target.address not in dict(fake.registered)
        here.transport.trim()
    fetch.close()


# --- what goes wrong


def test_a_failed_call_is_made_again_from_where_it_stopped(tmp_path: Path, infiniband_dir: Path) -> None:
    fake = FakeMooncake()
    fake.codes.extend([0, -1])
    target = Mapping.private(TARGET_BYTES)
    with fake_scene(tmp_path, fake, infiniband_dir) as here:
        offer = here.offer()
        assert sorted(fetched(here.fetch(RANGES, target))) == [0, 1, 2, 3]
        assert landed(target, RANGES[1]) == published(offer, RANGES[1])
    assert fake.calls[1][0][0] == fake.calls[2][0][0] == target.address + (1 << 20)


def test_after_a_failed_call_nobody_writes_into_memory_that_is_given_back(tmp_path: Path, infiniband_dir: Path) -> None:
    fake = FakeMooncake()
    fake.writes_after_failure = True
    fake.codes.extend([-1] * 1000)
    target = Mapping.private(TARGET_BYTES)
    with fake_scene(tmp_path, fake, infiniband_dir) as here:
        fetch = here.fetch(RANGES, target, 0.5)
        with pytest.raises(DeadlineExceededError, match=r"return code -1"):
            fetched(fetch)
        fetch.close()
        assert late_writers() == []
        assert target.num_exports == 0


def test_a_call_that_does_not_return_is_waited_for_until_the_deadline(tmp_path: Path, infiniband_dir: Path) -> None:
    fake = FakeMooncake()
    with fake_scene(tmp_path, fake, infiniband_dir) as here, fake.stalled():
        fetch = here.fetch(RANGES, Mapping.private(TARGET_BYTES), 0.2)
        with pytest.raises(DeadlineExceededError, match=r"version 1\.1 over mooncake .* 0 bytes have come"):
            list(fetch.arrivals())
        fake.lift()
        await_true(lambda: closes(fetch))


def test_a_call_that_does_not_return_keeps_the_memory_until_it_does(tmp_path: Path, infiniband_dir: Path) -> None:
    fake = FakeMooncake()
    target = Mapping.private(TARGET_BYTES)
    deadlines = Deadlines(let_go_s=0.1)
    with fake_scene(tmp_path, fake, infiniband_dir, deadlines=deadlines) as here:
        with fake.stalled() as is_stalled:
            fetch = here.fetch(RANGES, target)
            assert is_stalled.wait(SOON_S)
            with pytest.raises(SegmentError, match=r"has not returned .* stay held"):
                fetch.close()
            with pytest.raises(SegmentError):
                here.transport.close()
            with pytest.raises(BufferError):
                target.close()
        await_true(lambda: closes(fetch))
        assert target.num_exports == 0
        assert len(fake.live) <= 1, "the engine that stalled is not used again"


def test_bytes_that_were_not_held_all_the_while_are_not_taken(tmp_path: Path, infiniband_dir: Path) -> None:
    fake = FakeMooncake()
    with fake_scene(tmp_path, fake, infiniband_dir) as here:
        with fake.stalled(code=0) as is_stalled:
            fetch = here.fetch(RANGES, Mapping.private(TARGET_BYTES), 2.0)
            assert is_stalled.wait(SOON_S)
            here.server.close()
        with pytest.raises(DeadlineExceededError, match=r"does not answer"):
            fetched(fetch)
        fetch.close()
        assert fetch.num_bytes == 0
        assert len(fake.calls) == 1


def test_a_server_that_is_started_again_elsewhere_is_found_and_the_fetch_goes_on(tmp_path: Path) -> None:
    fake = FakeMooncake()
    target = Mapping.private(TARGET_BYTES)
    with fake_scene(tmp_path, fake, tmp_path, "tcp") as here:
        servers = [here.server.address]
        transport = MooncakeTransport.open(lambda: servers[-1], library=fake, bucket_bytes=1 << 20)
        offer = transport.offer(None, deadline_ns=soon())
        fake.codes.append(0)
        with fake.stalled() as is_stalled:
            fetch = transport.fetch(offer, RANGES, target, deadline_ns=soon())
            assert is_stalled.wait(SOON_S)
            here.server.close()
            with TcpServer(here.exporting) as server:
                servers.append(server.address)
                fake.lift()
                assert sorted(fetched(fetch)) == [0, 1, 2, 3]
        transport.close()
        assert [landed(target, each) for each in RANGES[1:]] == [published(offer, each) for each in RANGES[1:]]
    begins = [call[0][0] - target.address for call in fake.calls]
    assert begins[:4] == [0, 1 << 20, 1 << 20, 2 << 20]


def test_a_version_that_is_gone_is_said_to_be_gone(tmp_path: Path, infiniband_dir: Path) -> None:
    with fake_scene(tmp_path, FakeMooncake(), infiniband_dir) as here:
        offer = here.offer()._replace(file_digest="0" * 64)
        with pytest.raises(NoPublicationError):
            here.transport.fetch(offer, RANGES, Mapping.private(TARGET_BYTES), deadline_ns=soon())


def test_a_server_without_mooncake_says_so(tmp_path: Path, infiniband_dir: Path) -> None:
    with WeightPublisher(tmp_path, max_arenas=2) as publisher, WeightServer(tmp_path) as server:
        publisher.publish(WEIGHTS, step=1)
        transport = MooncakeTransport.open(server.address, library=FakeMooncake())
        offer = transport.offer(None, deadline_ns=soon())
        with pytest.raises(NoPublicationError, match=r"tcp alone"):
            transport.fetch(offer, RANGES, Mapping.private(TARGET_BYTES), deadline_ns=soon())
        transport.close()


@pytest.mark.parametrize(
    "wanted",
    [
        ByteRange(0, 0, 0, 1, 64, TARGET_BYTES - 63),
        ByteRange(0, 0, 64, 3, 64, TARGET_BYTES - 128),
        ByteRange(9, 0, 0, 1, 64, 0),
        ByteRange(0, 1 << 40, 0, 1, 64, 0),
        ByteRange(0, -64, 0, 1, 64, 0),
    ],
)
def test_ranges_that_leave_their_memory_are_refused_before_anything_is_written(
    tmp_path: Path, infiniband_dir: Path, wanted: ByteRange
) -> None:
    fake = FakeMooncake()
    target = Mapping.private(TARGET_BYTES)
    with fake_scene(tmp_path, fake, infiniband_dir) as here:
        with pytest.raises(ValueError, match=r"[Rr]ange"):
            here.fetch([wanted], target)
        assert (fake.calls, fake.live, bytes(memoryview(target)).count(0)) == ([], [], target.num_bytes)


# --- the publisher's side, and what the real library does


def test_a_segment_is_registered_once_for_all_who_hold_it(tmp_path: Path, infiniband_dir: Path) -> None:
    fake = FakeMooncake()
    with fake_scene(tmp_path, fake, infiniband_dir) as here:
        offer = here.offer()
        with held_at(here.server.address, offer) as one:
            with held_at(here.server.address, offer) as other:
                assert one == other
                assert len(fake.registered) == len(offer.manifest.segments)
            await_true(lambda: len(here.server._connections) == 1)
            assert len(fake.registered) == len(offer.manifest.segments)
        await_true(lambda: fake.registered == [])


def test_what_is_published_cannot_be_written_to(tmp_path: Path, real: Library) -> None:
    """Whoever reaches the real library may ask it to: it writes to what it knows of, which it is given read-only."""
    stranger: Any = real()
    assert stranger.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    memory = np.full(4096, 255, np.uint8)
    with scene(tmp_path, real, MooncakeSettings()) as here:
        offer, wanted = here.offer(), ByteRange(0, 0, 0, 1, 4096, 0)
        before = published(offer, wanted)
        with held_at(here.server.address, offer) as places:
            source, target = memory.ctypes.data, places.addresses[0]
            assert stranger.batch_transfer_sync_read(places.session, [source], [target], [4096]) == 0
            assert memory.tobytes() == before
            memory[:] = 255
            assert stranger.batch_transfer_sync_write(places.session, [source], [target], [4096]) != 0
        assert published(offer, wanted) == before
        assert stranger.batch_transfer_sync_read(places.session, [source], [target], [4096]) != 0, "nobody holds it"


def test_an_engine_takes_weights_over_mooncake_as_its_config_says(tmp_path: Path, real: Library) -> None:
    with WeightPublisher(tmp_path, max_arenas=2) as publisher, WeightServer(tmp_path, mooncake=MooncakeSettings()):
        publisher.publish(weights(7), step=7)
        source = rsync.create(SourceConfig(tmp_path, rsync_config='{"transport": "mooncake", "bucket_bytes": 500}'))
        resolved = source.resolve(None, deadline_ns=soon())
        staged = arrived(source.stage(resolved, plan_of(resolved.manifest), deadline_ns=soon()))
        sums = transfer_planned(staged.plan.everything, resolved.manifest, staged.segments, {}, 1)
        assert {name: sum_.hex() for name, sum_ in sums.read.items()} == {
            tensor.name: tensor.checksum for tensor in resolved.manifest.tensors if tensor.num_bytes
        }
        staged.release()
        source.close()


@contextmanager
def held_at(address: str, offer: Offer) -> Iterator[Places]:
    connection = Connection(address, None, Deadlines())
    connection.open(soon())
    connection.hold(offer.file_digest, soon())
    yield connection.places(soon())
    connection.close()


def late_writers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "late" in thread.name]


def closes(fetch: Fetch) -> bool:
    with suppress(SegmentError):
        fetch.close()
        return True
    return False


def await_true(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.005)
