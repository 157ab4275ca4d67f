"""The protocol of the tcp transport: what its frames are, what may be in them, and how both ends prove their secret.

    server -> client   ServerHello{magic, protocol, nonce, needs_secret, num_ranks}
    client -> server   ClientHello{nonce, proof}
    server -> client   Welcome{proof}
    client -> server   Ask{version}       -> Offered{manifest}
                       Hold{file_digest}  -> Held{}        the version stays until the connection ends, or another Hold
                       Read{ranges}       -> Data{num_bytes}, then that many bytes: the ranges, packed, in order
                       Locate{}           -> Places{session, addresses}   where the held version's segments lie
                       List{}             -> Holdings{ranges}             which bytes of the held version are here
    server -> client   Failed{error, message}   in place of any answer

A frame is its payload's length (u32, big endian), its kind (u8) and a msgpack map. Owns formats and bounds; knows no
sockets. Invariant: whatever bytes come, decoding gives a message within its bounds or PeerLostError. Bytes are neither
encrypted nor signed: a secret keeps strangers out, not those who can change what travels (checksums see that).
"""

import hashlib
import hmac
import secrets
import struct
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, TypeVar, get_args

import msgspec

from fastdeploy_rl import manifest as manifests
from fastdeploy_rl.errors import (
    AuthenticationError,
    FastDeployRLError,
    OverloadedError,
    PeerLostError,
    TrainerError,
    WorldError,
    from_wire,
    wire_text,
)
from fastdeploy_rl.plan.byte_range import ByteRange

PROTOCOL: Final = 1
NONCE_BYTES: Final = 32
MAX_HELLO_BYTES: Final = 4096
"""Of a frame before both ends know each other."""
MAX_FRAME_BYTES: Final = 1 << 20
MAX_MANIFEST_FRAME_BYTES: Final = manifests.MAX_BYTES + 4096
MAX_RANGES: Final = 1024
"""Of one Read."""
MAX_HELD_RANGES: Final = 1 << 18
"""That a server lists."""
MAX_HOLDINGS_FRAME_BYTES: Final = MAX_HELD_RANGES * 64
MAX_ROWS: Final = 1 << 16
"""Of all ranges of one Read, those without gaps counted as one: they cost time and memory of whoever gathers them."""
MAX_READ_BYTES: Final = 1 << 30
_MAX_MESSAGE = 4000
_LIMIT = 2**63
_TOLD: Final = (TrainerError, WorldError, AuthenticationError, OverloadedError)
"""What the other end may say of weights, its machine and us. Its caller and its engine are not ours: what it tells of
them would be untrue here."""
_HEADER = struct.Struct("!IB")
HEADER_BYTES: Final = _HEADER.size

_Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
_Proof = Annotated[bytes, msgspec.Meta(max_length=32)]
_Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
_Count = Annotated[int, msgspec.Meta(ge=0, le=_LIMIT - 1)]
_Text = Annotated[str, msgspec.Meta(max_length=_MAX_MESSAGE)]


class ServerHello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`num_ranks`: of an engine whose ranks each serve what they have."""

    magic: Literal["fastdeploy_rl"]
    protocol: int
    nonce: _Nonce
    needs_secret: bool
    num_ranks: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]


class ClientHello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`proof`: empty where no secret is needed."""

    nonce: _Nonce
    proof: _Proof


class Welcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    proof: _Proof


class Ask(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`version`: its text; empty for the newest."""

    version: Annotated[str, msgspec.Meta(max_length=64)]


class Offered(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`manifest`: its canonical bytes."""

    manifest: Annotated[bytes, msgspec.Meta(max_length=manifests.MAX_BYTES)]


class Hold(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    file_digest: _Digest


class Held(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Read(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of the held version. Where the client lets them land says nothing to the server."""

    ranges: Annotated[tuple[ByteRange, ...], msgspec.Meta(max_length=MAX_RANGES)]

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in self.ranges)


class Data(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    num_bytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_READ_BYTES)]


class Locate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Places(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where another kind of transport reads the held version: `session` names the process, `addresses` has one of each
    segment of the manifest."""

    session: Annotated[str, msgspec.Meta(max_length=512)]
    addresses: Annotated[tuple[_Count, ...], msgspec.Meta(max_length=manifests.MAX_SEGMENTS)]


class List(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Holdings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Target offsets mean nothing."""

    ranges: Annotated[tuple[ByteRange, ...], msgspec.Meta(max_length=MAX_HELD_RANGES)]


class Failed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`error`: name of a class of the tree."""

    error: Annotated[str, msgspec.Meta(max_length=64)]
    message: _Text


Message = (
    ServerHello
    | ClientHello
    | Welcome
    | Ask
    | Offered
    | Hold
    | Held
    | Read
    | Data
    | Locate
    | Places
    | Failed
    | List
    | Holdings
)
M = TypeVar("M", bound=Message)
_TYPES: tuple[Any, ...] = get_args(Message)  # their order is the protocol's
_KINDS = {kind: number for number, kind in enumerate(_TYPES, 1)}
_DECODERS = {number: msgspec.msgpack.Decoder(kind) for kind, number in _KINDS.items()}


# --- frames -----------------------------------------------------------------------------------------


def encode(message: Message) -> bytes:
    """The whole frame."""
    payload = msgspec.msgpack.encode(message)
    return _HEADER.pack(len(payload), _KINDS[type(message)]) + payload


def payload_bytes(header: bytes | bytearray, max_bytes: int) -> tuple[int, int]:
    """Length and kind that a frame's header tells. PeerLostError for more than `max_bytes`, or an unknown kind: before
    anything is read, or made room for."""
    num_bytes, kind = _HEADER.unpack(header)
    if kind not in _DECODERS:
        raise PeerLostError(f"the other end speaks another protocol: {bytes(header)!r} begins no frame")
    if num_bytes > max_bytes:
        raise PeerLostError(f"the other end sends a frame of {num_bytes} bytes; at most {max_bytes} are taken here")
    return num_bytes, kind


def decode(kind: int, payload: bytes | bytearray) -> Message:
    try:
        message: Message = _DECODERS[kind].decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise PeerLostError(f"the other end sends what is no {_TYPES[kind - 1].__name__}: {error!s:.200}") from error
    return message


def expected(message: Message, kind: type[M]) -> M:
    """The message if it is of this kind; otherwise the error that it tells, or PeerLostError."""
    if isinstance(message, kind):
        return message
    if isinstance(message, Failed):
        told = from_wire(message.error, message.message)
        raise told if isinstance(told, _TOLD) else PeerLostError(f"the other end fails: {message.error}: {told}")
    raise PeerLostError(f"the other end answers {type(message).__name__} where {kind.__name__} was to come")


def failed(error: FastDeployRLError) -> Failed:
    return Failed(type(error).__name__, wire_text(error)[:_MAX_MESSAGE])


def check_read(ranges: Sequence[ByteRange]) -> None:
    """ValueError where answering would take more memory or time than one Read may, or rows overlap, which nobody
    needs. Segments are not known here."""
    if any(number < 0 or number >= _LIMIT for each in ranges for number in each):
        raise ValueError("ranges that no segment has")
    if sum(each.num_bytes for each in ranges) > MAX_READ_BYTES:
        raise ValueError(f"more than {MAX_READ_BYTES} bytes in one request")
    if sum(each.joined().rows for each in ranges) > MAX_ROWS:
        raise ValueError(f"more than {MAX_ROWS} rows in one request")
    if any(each.rows > 1 and each.stride < each.row_bytes for each in ranges):
        raise ValueError("ranges whose rows overlap")


# --- secrets ----------------------------------------------------------------------------------------


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def client_proof(secret: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    """That a client knows the secret; of these two nonces, so that nothing heard before proves anything."""
    return _proof(secret, b"fastdeploy_rl client", server_nonce, client_nonce)


def server_proof(secret: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    """Under another label: a server cannot give a client's own proof back to it."""
    return _proof(secret, b"fastdeploy_rl server", server_nonce, client_nonce)


def _proof(secret: bytes, label: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    return hmac.digest(secret, label + server_nonce + client_nonce, hashlib.sha256)


def is_proof(given: bytes, proof: bytes) -> bool:
    return hmac.compare_digest(given, proof)
