"""A WeightServer beside a trainer, and in a process of its own: who finds it, what it holds, and what it leaves."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from publication_peer import weights

import fastdeploy_rl
from fastdeploy_rl._native import Mapping
from fastdeploy_rl.errors import ChannelBusyError, ConfigurationError, DeadlineExceededError, PeerLostError
from fastdeploy_rl.plan.byte_range import ByteRange
from fastdeploy_rl.publish.publisher import WeightPublisher, retire
from fastdeploy_rl.publish.weight_server import WeightServer, read_server_address
from fastdeploy_rl.transport.base import Offer
from fastdeploy_rl.transport.tcp import TcpTransport
from fastdeploy_rl.version import WeightVersion


@pytest.fixture
def channel(tmp_path: Path) -> Path:
    return tmp_path / "channel"


def soon() -> int:
    return time.monotonic_ns() + 30_000_000_000


def ranges_of(offer: Offer) -> list[ByteRange]:
    return [
        ByteRange(part.segment, part.offset, tensor.num_bytes, 1, tensor.num_bytes, index * tensor.num_bytes)
        for index, tensor in enumerate(offer.manifest.tensors)
        for part in tensor.parts
    ]


def fetched(transport: TcpTransport, version: WeightVersion | None = None) -> tuple[WeightVersion, bytes]:
    """A version and all its bytes, tensor by tensor."""
    offer = transport.offer(version, deadline_ns=soon())
    target = Mapping.private(sum(each.num_bytes for each in ranges_of(offer)))
    fetch = transport.fetch(offer, ranges_of(offer), target, deadline_ns=soon())
    for _ in fetch.arrivals():
        pass
    fetch.close()
    with memoryview(target) as view:
        return offer.version, bytes(view)


def expected(step: int) -> bytes:
    return b"".join(array.tobytes() for array in weights(step).values())


@contextmanager
def serving(channel: Path, *options: str) -> Iterator["subprocess.Popen[str]"]:
    """`fastdeploy-rl serve-weights`, killed where it does not end by itself."""
    command = [
        sys.executable,
        "-m",
        "fastdeploy_rl.cli",
        "serve-weights",
        "--json",
        "--ipc-dir",
        str(channel),
        *options,
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            yield server
        finally:
            server.kill()


def announced(server: "subprocess.Popen[str]") -> dict[str, object]:
    assert server.stdout is not None
    found: dict[str, object] = json.loads(server.stdout.readline())
    return found


@pytest.mark.parametrize("first", ["publisher", "server"])
def test_trainer_and_server_start_and_end_in_either_order(channel: Path, first: str) -> None:
    ends = {"publisher": WeightPublisher(channel), "server": fastdeploy_rl.WeightServer(channel)}
    publisher, server = ends["publisher"], ends["server"]
    second = next(end for name, end in ends.items() if name != first)
    with ends[first], second:
        version = publisher.publish(weights(1), step=1).version
        assert fetched(TcpTransport(server.address)) == (version, expected(1))
        assert fetched(TcpTransport(partial(read_server_address, channel))) == (version, expected(1))
        assert server.num_payload_bytes == 2 * len(expected(1))
    assert not (channel / "SERVER").exists()
    assert not list(channel.glob("holders/*"))


def test_the_address_stands_in_a_file_of_this_user_alone_while_the_server_lives(channel: Path) -> None:
    with WeightServer(channel) as server:
        assert stat.S_IMODE((channel / "SERVER").stat().st_mode) == 0o600
        assert json.loads((channel / "SERVER").read_bytes()) == {"address": server.address}
        assert read_server_address(channel) == server.address
    with pytest.raises(PeerLostError, match="serve-weights"):
        read_server_address(channel)


def test_a_server_on_all_interfaces_is_found_on_the_loopback_one(channel: Path) -> None:
    with WeightServer(channel, host="0.0.0.0", secret=b"s" * 16) as server:
        assert server.address.startswith("0.0.0.0:")
        assert read_server_address(channel) == server.address.replace("0.0.0.0", "127.0.0.1")


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[]", b'{"address": "nowhere"}', b'{"address": "h:1", "more": 1}', b"x" * 5000, b"\xff"]
)
def test_a_file_that_does_not_say_where_is_an_error_of_ours(channel: Path, data: bytes) -> None:
    with WeightServer(channel):
        (channel / "SERVER").write_bytes(data)
        with pytest.raises(PeerLostError, match="does not say where"):
            read_server_address(channel)


def test_no_channel_has_no_server_and_an_open_one_is_not_believed(channel: Path) -> None:
    with pytest.raises(PeerLostError, match=f"no channel at {channel}"):
        read_server_address(channel)
    assert not channel.exists()
    with WeightServer(channel):
        channel.chmod(0o777)
        with pytest.raises(ConfigurationError, match="open to other users"):
            read_server_address(channel)
        channel.chmod(0o700)


def test_a_second_server_of_a_channel_is_refused_and_the_first_goes_on(channel: Path) -> None:
    with WeightPublisher(channel) as publisher, WeightServer(channel) as server:
        publisher.publish(weights(1), step=1)
        with pytest.raises(ChannelBusyError, match=f"live weight server .pid {os.getpid()}"):
            WeightServer(channel).start()
        assert read_server_address(channel) == server.address
        assert fetched(TcpTransport(server.address))[1] == expected(1)


def test_a_port_that_is_taken_leaves_no_server(channel: Path, tmp_path: Path) -> None:
    with WeightServer(tmp_path / "other") as other:
        with pytest.raises(ConfigurationError, match="cannot listen"):
            WeightServer(channel, port=int(other.address.rpartition(":")[2])).start()
        with pytest.raises(PeerLostError):
            read_server_address(channel)
    with WeightServer(channel):
        pass


def test_former_versions_are_served_while_they_stand(channel: Path) -> None:
    with WeightPublisher(channel, max_arenas=3) as publisher, WeightServer(channel) as server:
        versions = [publisher.publish(weights(step), step=step).version for step in (1, 2)]
        transport = TcpTransport(server.address)
        for step, version in enumerate(versions, 1):
            assert fetched(transport, version) == (version, expected(step))


def test_many_clients_of_a_version_take_one_lease(channel: Path) -> None:
    """A table has 64 slots an arena; as many clients must not keep engines on this machine out."""
    with WeightPublisher(channel, max_arenas=2) as publisher, WeightServer(channel) as server:
        publisher.publish(weights(1), step=1)
        transport = TcpTransport(server.address, num_streams=64, bucket_bytes=1000)
        offer = transport.offer(None, deadline_ns=soon())
        targets = [Mapping.private(len(expected(1))) for _ in range(2)]
        fetches = [transport.fetch(offer, ranges_of(offer), target, deadline_ns=soon()) for target in targets]
        for fetch, target in zip(fetches, targets, strict=True):
            assert sum(len(batch) for batch in fetch.arrivals()) == len(offer.manifest.tensors)
            fetch.close()
            assert np.frombuffer(target, np.uint8).tobytes() == expected(1)


def test_a_fetched_version_is_the_trainers_again_when_the_fetch_is_closed(channel: Path) -> None:
    """Until then a publisher that needs the memory waits, as for an engine on this machine."""
    with WeightPublisher(channel, max_arenas=2, deadline_s=0.3) as publisher, WeightServer(channel) as server:
        publisher.publish(weights(1), step=1)
        transport = TcpTransport(server.address)
        offer = transport.offer(None, deadline_ns=soon())
        target = Mapping.private(len(expected(1)))
        fetch = transport.fetch(offer, ranges_of(offer), target, deadline_ns=soon())
        publisher.publish(weights(2), step=2)
        with pytest.raises(DeadlineExceededError):
            publisher.publish(weights(3), step=3)
        for _ in fetch.arrivals():
            pass
        fetch.close()
    with WeightPublisher(channel, max_arenas=2) as publisher:
        for step in (3, 4):
            publisher.publish(weights(step), step=step)
    assert np.frombuffer(target, np.uint8).tobytes() == expected(1)


def test_a_channel_that_was_made_anew_is_served_as_it_is(channel: Path) -> None:
    with WeightPublisher(channel) as publisher:
        with WeightServer(channel) as server:
            publisher.publish(weights(1), step=1)
            transport = TcpTransport(server.address)
            assert fetched(transport)[1] == expected(1)
            shutil.rmtree(channel)
            with WeightPublisher(channel) as successor:
                version = successor.publish(weights(7), step=7).version
                assert fetched(transport) == (version, expected(7))
        retire(channel)


# --- as a process of its own -----------------------------------------------------------------------


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_the_verb_serves_until_it_is_interrupted(channel: Path, tmp_path: Path, end: signal.Signals) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"0123456789abcdef\n")
    secret.chmod(0o600)
    with WeightPublisher(channel) as publisher, serving(channel, "--secret-file", str(secret)) as server:
        version = publisher.publish(weights(1), step=1).version
        found = announced(server)
        assert found == {
            "event": "serving",
            "address": read_server_address(channel),
            "channel": str(channel),
            "has_secret": True,
        }
        transport = TcpTransport(partial(read_server_address, channel), secret=b"0123456789abcdef")
        assert fetched(transport) == (version, expected(1))
        server.send_signal(end)
        assert server.wait(20) == 0
        assert not (channel / "SERVER").exists()
        assert not (channel / "SERVER.LOCK").exists()


def test_a_server_that_was_killed_is_not_believed_and_leaves_its_place(channel: Path) -> None:
    with WeightPublisher(channel, max_arenas=2) as publisher, serving(channel) as server:
        publisher.publish(weights(1), step=1)
        announced(server)
        transport = TcpTransport(partial(read_server_address, channel), bucket_bytes=1000)
        offer = transport.offer(None, deadline_ns=soon())
        target = Mapping.private(len(expected(1)))
        fetch = transport.fetch(offer, ranges_of(offer), target, deadline_ns=soon())
        server.kill()
        server.wait(20)
        assert (channel / "SERVER").exists()
        with pytest.raises(PeerLostError, match="no weight server"):
            read_server_address(channel)
        with WeightServer(channel):
            for _ in fetch.arrivals():
                pass
            fetch.close()
        assert np.frombuffer(target, np.uint8).tobytes() == expected(1)
        for step in (2, 3, 4):  # the dead one's lease is void
            publisher.publish(weights(step), step=step)
