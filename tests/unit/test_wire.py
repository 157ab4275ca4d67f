"""The protocol of the tcp transport, and what it needs: any bytes are a message or an error of ours; secrets, addresses
and buckets keep their laws."""

import os
import socket
import time
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdeploy_rl._native import Mapping
from fastdeploy_rl.errors import ConfigurationError, NoPublicationError, PeerLostError
from fastdeploy_rl.plan.byte_range import ByteRange
from fastdeploy_rl.transport import outgoing, wire
from fastdeploy_rl.transport.address import Address, parse_address
from fastdeploy_rl.transport.base import Run
from fastdeploy_rl.transport.buckets import Bucket, Piece, buckets, part, spans
from fastdeploy_rl.transport.link import Link
from fastdeploy_rl.transport.outgoing import Outgoing
from fastdeploy_rl.transport.secret import read_secret

NONCE, PROOF = bytes(range(32)), bytes(32)
MESSAGES: list[wire.Message] = [
    wire.ServerHello("fastdeploy_rl", 1, NONCE, True, 3),
    wire.ClientHello(NONCE, PROOF),
    wire.ClientHello(NONCE, b""),
    wire.Welcome(PROOF),
    wire.Ask("1.2"),
    wire.Offered(b"{}"),
    wire.Hold("0123456789abcdef" * 4),
    wire.Held(),
    wire.Read((ByteRange(0, 1, 2, 3, 4, 5), ByteRange(6, 7, 8, 9, 10, 11))),
    wire.Data(wire.MAX_READ_BYTES),
    wire.Locate(),
    wire.Places("10.0.0.1:1234", (2**62, 0)),
    wire.List(),
    wire.Holdings((ByteRange(0, 1, 2, 3, 4, 5),)),
    wire.Failed("NoPublicationError", "gone"),
]


def decoded(frame: bytes) -> wire.Message:
    num_bytes, kind = wire.payload_bytes(frame[: wire.HEADER_BYTES], 1 << 20)
    assert num_bytes == len(frame) - wire.HEADER_BYTES
    return wire.decode(kind, frame[wire.HEADER_BYTES :])


# --- frames ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_out_as_it_went_in(message: wire.Message) -> None:
    assert decoded(wire.encode(message)) == message


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (wire.ServerHello, {"magic": "another"}),
        (wire.ServerHello, {"nonce": bytes(31)}),
        (wire.ServerHello, {"num_ranks": 0}),
        (wire.ClientHello, {"nonce": bytes(33)}),
        (wire.ClientHello, {"proof": bytes(33)}),
        (wire.ClientHello, {"more": 1}),
        (wire.Ask, {"version": "1" * 65}),
        (wire.Hold, {"file_digest": "0" * 63}),
        (wire.Hold, {"file_digest": "0" * 63 + "\n"}),
        (wire.Hold, {"file_digest": "../" * 21 + "a"}),
        (wire.Data, {"num_bytes": wire.MAX_READ_BYTES + 1}),
        (wire.Data, {"num_bytes": -1}),
        (wire.Read, {"ranges": [[0] * 5]}),
        (wire.Read, {"ranges": [[0] * 6] * 1025}),
        (wire.Read, {"ranges": [["0"] * 6]}),
        (wire.Places, {"addresses": [-1]}),
    ],
)
def test_what_is_outside_its_bounds_is_no_message(kind: type[wire.Message], fields: dict[str, object]) -> None:
    sound = next(message for message in MESSAGES if type(message) is kind)
    payload = msgspec.msgpack.encode(msgspec.to_builtins(sound, builtin_types=(bytes,)) | fields)
    with pytest.raises(PeerLostError, match=f"no {kind.__name__}"):
        wire.decode(wire.encode(sound)[4], payload)


@given(st.integers(1, len(MESSAGES) - 1), st.binary(max_size=200))
def test_any_bytes_are_a_message_or_an_error_of_ours(kind: int, payload: bytes) -> None:
    try:
        message = wire.decode(kind, payload)
    except PeerLostError:
        return
    assert decoded(wire.encode(message)) == message


@given(st.binary(min_size=5, max_size=5), st.integers(0, 1 << 20))
def test_no_header_asks_for_more_than_is_allowed(header: bytes, max_bytes: int) -> None:
    try:
        num_bytes, _ = wire.payload_bytes(header, max_bytes)
    except PeerLostError:
        return
    assert 0 <= num_bytes <= max_bytes


def test_an_error_arrives_as_the_class_that_it_was() -> None:
    told = wire.failed(NoPublicationError("gone \udcff" + "x" * 10_000))
    with pytest.raises(NoPublicationError, match=r"^gone \?x+$"):
        wire.expected(decoded(wire.encode(told)), wire.Held)


@pytest.mark.parametrize("name", ["FencedError", "LifecycleError", "ConfigurationError", "SystemExit"])
def test_what_the_other_end_says_of_its_own_engine_or_caller_is_untrue_here(name: str) -> None:
    with pytest.raises(PeerLostError, match=f"the other end fails: {name}: boo"):
        wire.expected(wire.Failed(name, "boo"), wire.Held)


def test_an_answer_of_another_kind_is_refused() -> None:
    with pytest.raises(PeerLostError, match="answers Data where Held"):
        wire.expected(wire.Data(1), wire.Held)
    assert wire.expected(wire.Held(), wire.Held) == wire.Held()


# --- secrets and addresses -------------------------------------------------------------------------


def test_a_proof_holds_for_one_secret_one_direction_and_these_two_nonces() -> None:
    secret, mine, yours = b"s" * 16, bytes(32), b"\1" * 32
    proof = wire.client_proof(secret, mine, yours)
    assert wire.is_proof(proof, wire.client_proof(secret, mine, yours))
    others = [
        wire.client_proof(b"t" * 16, mine, yours),
        wire.client_proof(secret, yours, mine),
        wire.client_proof(secret, mine, mine),
        wire.server_proof(secret, mine, yours),
        b"",
    ]
    assert not any(wire.is_proof(proof, other) for other in others)
    assert wire.new_nonce() != wire.new_nonce()


def test_a_secret_is_read_without_the_blanks_around_it(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b"  0123456789 abcdef\n")
    file.chmod(0o600)
    assert read_secret(file) == b"0123456789 abcdef"


@pytest.mark.parametrize(
    ("mode", "data", "reason"),
    [
        (0o644, b"0123456789abcdef", "open to other users"),
        (0o640, b"0123456789abcdef", "open to other users"),
        (0o600, b"0123456789abcde\n", "must have 16 to 4096 bytes"),
        (0o600, b"x" * 4097, "must have 16 to 4096 bytes"),
    ],
)
def test_a_secret_that_others_know_or_guess_is_refused(tmp_path: Path, mode: int, data: bytes, reason: str) -> None:
    file = tmp_path / "secret"
    file.write_bytes(data)
    file.chmod(mode)
    with pytest.raises(ConfigurationError, match=reason) as refusal:
        read_secret(file)
    assert data.decode()[:12] not in str(refusal.value)


def test_what_is_no_secret_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path, reason in (
        (tmp_path / "pipe", "no regular file"),
        (tmp_path, "no regular file"),
        (tmp_path / "x", "No such"),
    ):
        with pytest.raises(ConfigurationError, match=reason):
            read_secret(path)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:80", Address("127.0.0.1", 80)),
        ("trainer-0.local:65535", Address("trainer-0.local", 65535)),
        ("[::1]:1", Address("::1", 1)),
        ("a" * 63 + ".b.:1", Address("a" * 63 + ".b.", 1)),
    ],
)
def test_an_address_is_a_host_and_a_port(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    "text",
    [
        *("", "host", "host:", ":80", "host:0", "host:65536", "::1:80", "a b:80", "h:8\n", "h:٣"),
        *(".a:80", "a..b:80", "a" * 64 + ":80", "a." * 127 + ":80"),
    ],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="an address is"):
        parse_address(text)


# --- buckets ---------------------------------------------------------------------------------------


@st.composite
def byte_ranges(draw: st.DrawFn) -> list[ByteRange]:
    """One behind the other in the target, with gaps between some."""
    ranges, place = [], 0
    for _ in range(draw(st.integers(0, 6))):
        row_bytes, rows = draw(st.integers(0, 9)), draw(st.integers(0, 5))
        stride = row_bytes + draw(st.sampled_from([0, 0, 1, 7]))
        ranges.append(ByteRange(draw(st.integers(0, 2)), draw(st.integers(0, 50)), stride, rows, row_bytes, place))
        place += rows * row_bytes + draw(st.sampled_from([0, 3]))
    return ranges


def bytes_of(wanted: ByteRange) -> list[tuple[int, int, int]]:
    """(segment, offset, place in the target) of each byte, in order."""
    return [
        (
            wanted.segment,
            wanted.offset + row * wanted.stride + byte,
            wanted.target_offset + row * wanted.row_bytes + byte,
        )
        for row in range(wanted.rows)
        for byte in range(wanted.row_bytes)
    ]


@given(byte_ranges(), st.integers(1, 40))
def test_buckets_have_every_byte_once_and_in_order(ranges: list[ByteRange], bucket_bytes: int) -> None:
    made = list(buckets(ranges, bucket_bytes))
    pieces = [piece for bucket in made for piece in bucket.pieces]
    assert [byte for piece in pieces for byte in bytes_of(piece.wanted)] == [
        byte for each in ranges for byte in bytes_of(each)
    ]
    for index, each in enumerate(ranges):
        assert sum(piece.wanted.num_bytes for piece in pieces if piece.range_index == index) == each.num_bytes
    assert all(bucket.num_bytes == bucket_bytes for bucket in made[:-1])
    assert all(0 < bucket.num_bytes <= bucket_bytes for bucket in made)


@given(byte_ranges(), st.data())
def test_what_is_missing_of_a_bucket_is_all_behind_what_has_landed(
    ranges: list[ByteRange], data: st.DataObject
) -> None:
    bucket = Bucket([Piece(index, each.joined()) for index, each in enumerate(ranges)])
    everything = [byte for each in ranges for byte in bytes_of(each)]
    complete: list[Piece] = []
    while True:
        missing = bucket.missing()
        left = everything[bucket.num_landed :]
        assert [byte for piece in missing for byte in bytes_of(piece.wanted)] == left
        places = [place for start, stop in spans(missing) for place in range(start, stop)]
        assert places == [place for _, _, place in left]
        assert sum(piece.wanted.num_bytes for piece in complete) <= bucket.num_landed
        if bucket.is_complete:
            break
        complete += bucket.land(data.draw(st.integers(1, bucket.num_bytes - bucket.num_landed)))
    assert [piece for piece in complete if piece.wanted.num_bytes] == [
        piece for piece in bucket.pieces if piece.wanted.num_bytes
    ]


@given(st.integers(1, 9), st.integers(1, 6), st.integers(0, 5), st.data())
def test_a_part_of_a_range_is_three_at_most(row_bytes: int, rows: int, gap: int, data: st.DataObject) -> None:
    wanted = ByteRange(1, 7, row_bytes + gap, rows, row_bytes, 100)
    start = data.draw(st.integers(0, wanted.num_bytes))
    stop = data.draw(st.integers(start, wanted.num_bytes))
    parts = list(part(wanted, start, stop))
    assert len(parts) <= 3
    assert [byte for each in parts for byte in bytes_of(each)] == bytes_of(wanted)[start:stop]


@settings(max_examples=5)
@given(st.integers(0, 2))
def test_a_bucket_can_be_asked_for_in_one_question_also_when_it_was_interrupted(row_bytes: int) -> None:
    many_rows = ByteRange(0, 0, 3, 3 * wire.MAX_ROWS, 2, 0)
    many_ranges = [ByteRange(0, 10 * index, 3, 2, row_bytes, 6 * wire.MAX_ROWS + 10 * index) for index in range(3000)]
    for bucket in buckets([many_rows, *many_ranges], 1 << 30):
        for landed in (0, 1):
            bucket.land(landed)
            asked = [piece.wanted for piece in bucket.missing()]
            assert len(asked) <= wire.MAX_RANGES
            wire.check_read(asked)


@pytest.mark.parametrize(
    "wrong",
    [
        ByteRange(0, -1, 1, 1, 1, 0),
        ByteRange(0, 2**63, 1, 1, 1, 0),
        ByteRange(0, 0, 2, wire.MAX_ROWS + 1, 1, 0),
        ByteRange(0, 0, 0, 2**40, 2**40, 0),
        ByteRange(0, 0, 1, 1, wire.MAX_READ_BYTES + 1, 0),
        ByteRange(0, 0, 7, 2, 8, 0),
    ],
)
def test_a_question_that_would_cost_too_much_is_refused(wrong: ByteRange) -> None:
    wire.check_read([ByteRange(0, 0, 1, 2**20, 1, 0)])
    with pytest.raises(ValueError, match=r"ranges|bytes|rows"):
        wire.check_read([wrong])


# --- what a server sends ---------------------------------------------------------------------------


@pytest.fixture
def memory() -> Mapping:
    memory = Mapping.private(1 << 18)
    np.frombuffer(memory, np.uint8)[:] = np.random.default_rng(0).integers(0, 256, 1 << 18, np.uint8)
    return memory


def runs_in(memory: Mapping) -> list[Run]:
    """Short rows, more than are gathered at once; long rows; one row; none."""
    return [
        Run(memory, 3, 7, 11, 50),
        Run(memory, 0, 40_000, 50_000, 3),
        Run(memory, 5, 9),
        Run(memory, 0, 0, 5, 3),
        Run(memory, 100, 33, 40, 4),
    ]


def test_rows_are_sent_in_order_however_they_are_gathered(memory: Mapping, monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytes(memory)
    expected = b"".join(
        data[run.offset + row * run.stride :][: run.num_bytes] for run in runs_in(memory) for row in range(run.rows)
    )
    monkeypatch.setattr(outgoing, "_GATHERED_BYTES", 100)
    sent = b"".join(bytes(each) for batch in Outgoing().batches(runs_in(memory)) for each in batch)
    assert sent == expected
    memory.close()  # nobody looks at it any more


@pytest.mark.parametrize("num_batches", [1, 2, 60])
def test_what_is_not_sent_to_its_end_is_looked_at_by_nobody(
    memory: Mapping, monkeypatch: pytest.MonkeyPatch, num_batches: int
) -> None:
    monkeypatch.setattr(outgoing, "_GATHERED_BYTES", 100)
    kept = []
    with closing(Outgoing().batches(runs_in(memory))) as batches:
        for _, batch in zip(range(num_batches), batches, strict=False):
            kept.append(batch)
    memory.close()
    with pytest.raises(ValueError, match="released"):
        len(kept[-1][0])


def test_a_connection_to_oneself_is_none() -> None:
    """As where nobody listens at a port that the system gives to whoever connects."""
    own = socket.socket()
    own.bind(("127.0.0.1", 0))
    link = Link(own)
    with pytest.raises(ConnectionRefusedError, match="nobody listens"):
        link.connect(own.getsockname(), time.monotonic_ns() + 5_000_000_000)
    link.close()
