"""Frames between supervisor and workers: whole whatever the pieces, bounded, and an error when malformed."""

import socket
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy_rl.control.generation import EngineLoad, GeneratedToken, GenerationRequest, SamplingOptions
from fastdeploy_rl.engines.embedded.messages import (
    MAX_MESSAGE_BYTES,
    Cancel,
    Failed,
    FrameDecoder,
    FromWorker,
    Start,
    Stop,
    Tokens,
    ToWorker,
    WorkerSocket,
    encode,
)
from fastdeploy_rl.errors import DeadlineExceededError, PeerLostError

TO_WORKER = [
    Start("1", GenerationRequest([1, 2, 3], 5, SamplingOptions(temperature=0.0, seed=2**63 - 1))),
    Start("2", GenerationRequest([1], 5, SamplingOptions(logit_bias={7: -100.0}), num_logprobs=3)),
    Cancel("1"),
    Stop(),
]


@given(st.lists(st.sampled_from(TO_WORKER), max_size=6), st.integers(1, 40))
def test_messages_arrive_whole_however_they_are_cut(messages: list[ToWorker], piece: int) -> None:
    stream = b"".join(map(encode, messages))
    decoder = FrameDecoder(ToWorker)
    received = [found for at in range(0, len(stream), piece) for found in decoder.feed(stream[at : at + piece])]
    assert received == messages


@given(st.binary(max_size=64))
def test_foreign_bytes_are_an_error_or_an_incomplete_frame(data: bytes) -> None:
    frame = struct.pack("<I", len(data)) + data
    try:
        received = FrameDecoder(FromWorker).feed(frame)
    except PeerLostError:
        return
    assert all(encode(message) for message in received)


def test_a_message_for_the_other_direction_is_refused() -> None:
    with pytest.raises(PeerLostError, match="malformed"):
        FrameDecoder(FromWorker).feed(encode(Stop()))


def test_a_frame_that_claims_too_much_is_refused_before_it_is_read() -> None:
    with pytest.raises(PeerLostError, match=str(MAX_MESSAGE_BYTES)):
        FrameDecoder(ToWorker).feed(struct.pack("<I", MAX_MESSAGE_BYTES + 1))


def test_worker_socket_reads_without_waiting_and_notices_the_end() -> None:
    ours, theirs = socket.socketpair()
    worker = WorkerSocket(theirs)
    assert worker.receive() == []
    ours.sendall(encode(Cancel("7")) + encode(Stop()))
    assert worker.receive() == [Cancel("7"), Stop()]
    token = GeneratedToken(5, "1.2", -0.25, "stop", top_logprobs=((5, -0.25), (7, -2.0)))
    tokens = Tokens([("7", token)], EngineLoad(1, 2, 3, 4))
    worker.send(tokens, timeout_s=5)
    assert FrameDecoder(FromWorker).feed(ours.recv(1 << 16)) == [tokens]
    ours.close()
    with pytest.raises(PeerLostError, match="gone"):
        worker.receive()
    with pytest.raises(PeerLostError, match="gone"):
        worker.send(Failed(0, "EngineError", "x"), timeout_s=5)
    worker.close()


def test_a_supervisor_that_does_not_read_costs_a_worker_its_deadline_only() -> None:
    ours, theirs = socket.socketpair()
    worker = WorkerSocket(theirs)
    with pytest.raises(DeadlineExceededError):
        worker.send(Failed(0, "EngineError", "x" * (8 << 20)), timeout_s=0.05)
    worker.close()
    ours.close()


def test_unknown_fields_are_refused() -> None:
    body = msgspec.msgpack.encode({"type": "cancel", "request_id": 5})
    with pytest.raises(PeerLostError, match="malformed"):
        FrameDecoder(ToWorker).feed(struct.pack("<I", len(body)) + body)
