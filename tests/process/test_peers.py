"""A late joiner gets its weights from an engine that has them and the trainer is not loaded, whatever the peer does."""

import os
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdeploy_rl.config import Deadlines
from fastdeploy_rl.coverage import ParameterSpec
from fastdeploy_rl.engines.numpy.runner import NumpyModel, random_weights
from fastdeploy_rl.errors import ChecksumMismatchError, ConfigurationError, NoPublicationError, PeerLostError
from fastdeploy_rl.plan.conventions import TensorRule
from fastdeploy_rl.update.client import BoardClient
from tests.process.numpy_engine import NumpyEngine
from tests.process.test_rank_death import await_recovery, kill
from tests.process.test_update_numpy import MODEL, as_the_engine, flip
from tests.process.trainer import Trainer


def free_ports(num: int) -> int:
    """The first of so many ports, one after the other, where nobody listens, and from which the system gives none to
    whoever connects somewhere."""
    for _ in range(100):
        first = 10_000 + secrets.randbelow(20_000)
        with ExitStack() as stack, suppress(OSError):
            for port in range(first, first + num):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
    raise RuntimeError(f"no {num} free ports in a row")


def engine(
    channel: Path,
    num_ranks: int,
    *,
    model: NumpyModel = MODEL,
    apply_mode: str = "auto",
    is_restarted_on_death: bool = False,
    **rsync_config: Any,
) -> NumpyEngine:
    return NumpyEngine(
        model,
        channel=channel,
        num_ranks=num_ranks,
        apply_mode=apply_mode,
        load_strategy="rsync",
        rsync_config=rsync_config,
        deadlines=Deadlines(update_s=20.0, attach_s=20.0, rejoin_s=20.0, finish_s=0.3),
        is_restarted_on_death=is_restarted_on_death,
    )


@contextmanager
def serving(
    channel: Path, num_ranks: int, *, model: NumpyModel = MODEL, **rsync_config: Any
) -> Iterator[tuple[NumpyEngine, BoardClient, str]]:
    """An engine that serves what it has, and its address."""
    address = f"127.0.0.1:{free_ports(num_ranks)}"
    with (
        engine(channel, num_ranks, model=model, serve=address, **rsync_config) as peer,
        BoardClient(peer.port) as client,
    ):
        yield peer, client, address


def publish(trainer: Trainer, step: int, layout: str = "full") -> dict[str, np.ndarray]:
    weights = random_weights(MODEL, step)
    trainer.publish(weights, step=step, layout=layout, convention=as_the_engine)
    return weights


@pytest.fixture
def channel(tmp_path: Path) -> Path:
    return tmp_path / "channel"


@pytest.mark.parametrize(
    ("num_ranks", "num_late", "apply_mode"), [(2, 2, "auto"), (1, 3, "alias"), (3, 1, "auto"), (2, 3, "copy")]
)
def test_a_late_joiner_reads_nothing_but_the_manifest_from_the_trainer(
    channel: Path, num_ranks: int, num_late: int, apply_mode: str
):
    """Also where it has another number of ranks, each of which then needs bytes of several."""
    with (
        Trainer("rsync", channel) as trainer,
        serving(channel, num_ranks) as (peer, peer_client, address),
        engine(channel, num_late, peers=[address], apply_mode=apply_mode) as late,
        BoardClient(late.port) as client,
    ):
        weights = publish(trainer, 1)
        peer_client.update()
        num_sent = trainer.server.num_payload_bytes
        assert num_sent > 0
        report = client.update()
        assert (report.version, late.holds(weights)) == ("1.1", True)
        assert report.receipt.content_digest == peer_client.receipt().content_digest
        assert trainer.server.num_payload_bytes == num_sent
        assert peer.holds(weights)


def test_peers_alone_will_do(channel: Path, tmp_path: Path):
    """No trainer's address is known: the newest version of the peers is taken."""
    with (
        Trainer("rsync", channel) as trainer,
        serving(channel, 2) as (_, peer_client, address),
        engine(tmp_path / "elsewhere", 2, peers=[address]) as late,
        BoardClient(late.port) as client,
    ):
        with pytest.raises((NoPublicationError, PeerLostError)):
            client.update()
        assert late.holds(random_weights(MODEL, 0))
        for step in (1, 2):
            weights = publish(trainer, step)
            peer_client.update()
            assert client.update().version == f"1.{step}"
            assert late.holds(weights)


def test_a_trainer_that_has_gone_is_not_needed_where_a_peer_has_its_version(channel: Path):
    with serving(channel, 2) as (peer, peer_client, address):
        with Trainer("rsync", channel) as trainer:
            weights = publish(trainer, 1)
            peer_client.update()
        with engine(channel, 2, peers=[address]) as late, BoardClient(late.port) as client:
            client.update()
            assert late.holds(weights)
            assert peer.holds(weights)


def test_a_late_joiner_is_a_peer_for_the_next_one(channel: Path, tmp_path: Path):
    with (
        Trainer("rsync", channel) as trainer,
        serving(channel, 1) as (_, first_client, first_address),
        serving(tmp_path / "a", 2, peers=[first_address]) as (_, second_client, second_address),
        engine(tmp_path / "b", 1, peers=[second_address]) as third,
        BoardClient(third.port) as third_client,
    ):
        weights = publish(trainer, 1)
        first_client.update()
        second_client.update()
        first_client.clear()
        third_client.update()
        assert third.holds(weights)


def test_engines_that_name_each_other_and_themselves_take_turns(channel: Path):
    """One list of peers in the configuration of all of them."""
    ports = free_ports(2)
    addresses = [f"127.0.0.1:{port}" for port in (ports, ports + 1)]
    with (
        Trainer("rsync", channel) as trainer,
        engine(channel, 1, serve=addresses[0], peers=addresses) as first,
        engine(channel, 1, serve=addresses[1], peers=addresses) as second,
        BoardClient(first.port) as first_client,
        BoardClient(second.port) as second_client,
    ):
        num_bytes = 0
        for step in (1, 2, 3):
            weights = publish(trainer, step)
            for client in (first_client, second_client)[:: 1 if step % 2 else -1]:
                assert client.update().version == f"1.{step}"
            assert first.holds(weights)
            assert second.holds(weights)
            num_bytes = num_bytes or trainer.server.num_payload_bytes
            assert trainer.server.num_payload_bytes == step * num_bytes


def test_a_peer_that_was_cleared_has_nothing_to_give(channel: Path):
    """Its memory is gone: the trainer is asked."""
    with (
        Trainer("rsync", channel) as trainer,
        serving(channel, 2) as (_, peer_client, address),
        engine(channel, 2, peers=[address]) as late,
        BoardClient(late.port) as client,
    ):
        weights = publish(trainer, 1)
        peer_client.update()
        peer_client.clear()
        num_sent = trainer.server.num_payload_bytes
        client.update()
        assert late.holds(weights)
        assert trainer.server.num_payload_bytes == 2 * num_sent


def test_a_peer_whose_memory_was_changed_spoils_nothing_but_the_first_attempt(channel: Path):
    """The late joiner sees it by the checksums, keeps what it has, and the next time asks the trainer."""
    with (
        Trainer("rsync", channel) as trainer,
        serving(channel, 1) as (peer, peer_client, address),
        engine(channel, 1, peers=[address]) as late,
        BoardClient(late.port) as client,
    ):
        weights = publish(trainer, 1)
        peer_client.update()
        flip(f"/proc/{peer.workers[0].pid}/mem", peer.ask(0, "address layers.0.up"))
        with pytest.raises(ChecksumMismatchError, match=r"layers\.0\.up"):
            client.update()
        assert late.holds(random_weights(MODEL, 0))
        assert client.update().version == "1.1"
        assert late.holds(weights)


def test_a_rank_that_was_killed_gives_again_when_it_is_back(channel: Path, tmp_path: Path):
    """At the address that it had, what it has fetched anew."""
    address = f"127.0.0.1:{free_ports(2)}"
    with (
        Trainer("rsync", channel) as trainer,
        engine(channel, 2, serve=address, is_restarted_on_death=True) as peer,
        BoardClient(peer.port) as peer_client,
        engine(tmp_path / "elsewhere", 2, peers=[address]) as late,
        BoardClient(late.port) as client,
    ):
        weights = publish(trainer, 1)
        peer_client.update()
        kill(peer, 1)
        await_recovery(peer, peer_client, 1)
        assert client.update().version == "1.1"
        assert late.holds(weights)


def test_an_address_that_is_taken_is_said_and_nothing_changes(channel: Path):
    with (
        Trainer("rsync", channel) as trainer,
        socket.create_server(("127.0.0.1", 0)) as other,
        engine(channel, 1, serve=f"127.0.0.1:{other.getsockname()[1]}") as first,
        BoardClient(first.port) as client,
    ):
        publish(trainer, 1)
        with pytest.raises(ConfigurationError, match=r"serve: cannot listen on 127\.0\.0\.1:"):
            client.update()
        assert first.holds(random_weights(MODEL, 0))


# --- in the middle of it

LARGE = NumpyModel(tuple(ParameterSpec(f"layers.{i}", "F32", (256, 128), i % 2) for i in range(16)))
BUCKET_BYTES = 64 << 10


def publish_large(trainer: Trainer, step: int) -> dict[str, np.ndarray]:
    weights = random_weights(LARGE, step)
    trainer.publish(weights, step=step, convention=lambda name, shape: TensorRule(name, 0))
    return weights


class Passage:
    """Stands before a server; does something when so many bytes have come out of it, and goes on."""

    def __init__(self, address: str, num_bytes: int, action: Callable[[], None]) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._left = num_bytes
        self._action = action
        self.is_done = threading.Event()
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        self._pool = ThreadPoolExecutor(32)

    def __enter__(self) -> "Passage":
        self._pool.submit(self._accept)
        return self

    def __exit__(self, *exception: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._pool.shutdown()
        for each in self._sockets:
            each.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._sockets.append(client)
                try:
                    server = socket.create_connection((self._host, self._port), 10)
                except OSError:
                    client.shutdown(socket.SHUT_RDWR)
                    continue
                self._sockets.append(server)
                self._pool.submit(self._carry, client, server, False)
                self._pool.submit(self._carry, server, client, True)

    def _carry(self, source: socket.socket, target: socket.socket, is_counted: bool) -> None:
        with suppress(OSError):
            while data := source.recv(16 << 10):
                if is_counted:
                    self._count(len(data))
                target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            is_due = 0 < self._left <= num_bytes
            self._left -= num_bytes
            if is_due:
                self._action()
                self.is_done.set()


def test_a_peer_that_is_killed_in_the_middle_is_replaced_by_the_trainer(channel: Path):
    with (
        Trainer("rsync", channel) as trainer,
        serving(channel, 1, model=LARGE) as (peer, peer_client, address),
        Passage(address, 1 << 20, lambda: os.kill(peer.workers[0].pid, signal.SIGKILL)) as passage,
        engine(channel, 1, model=LARGE, peers=[passage.address], bucket_bytes=BUCKET_BYTES) as late,
        BoardClient(late.port) as client,
    ):
        weights = publish_large(trainer, 1)
        peer_client.update()
        num_sent = trainer.server.num_payload_bytes
        client.update()
        assert late.holds(weights)
        assert 0 < trainer.server.num_payload_bytes - num_sent < num_sent
        assert peer.workers[0].wait(10) == -signal.SIGKILL


def test_a_peer_that_goes_on_to_a_newer_version_in_the_middle_tears_nothing(channel: Path):
    """Its memory of the old one is needed: who reads it is cut off, and gets the rest from the trainer."""
    newer: dict[str, np.ndarray] = {}

    def go_on() -> None:
        for step in (2, 3):
            newer.update(publish_large(trainer, step))
            peer_client.update()

    with (
        Trainer("rsync", channel) as trainer,
        serving(channel, 1, model=LARGE) as (peer, peer_client, address),
        Passage(address, 1 << 20, go_on) as passage,
        engine(channel, 1, model=LARGE, peers=[passage.address], bucket_bytes=BUCKET_BYTES) as late,
        BoardClient(late.port) as client,
    ):
        older = publish_large(trainer, 1)
        peer_client.update()
        assert client.update().version == "1.1"
        assert late.holds(older)
        assert client.receipt(recompute=True).version == "1.1"
        assert passage.is_done.wait(30)
        assert (peer.holds(newer), peer_client.status().version) == (True, "1.3")
