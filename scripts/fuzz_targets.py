"""What is fuzzed in files: of a channel, a run directory, a checkpoint. Each target has its hostile input and the
reader that takes it. `fuzz_board` has what lies in shared memory; `fuzz_run` lists all targets.
"""

import json
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
from fuzz_inputs import Inputs, documents, patches, raw

from fastdeploy_rl import manifest as manifests
from fastdeploy_rl.checksum import Fletcher4
from fastdeploy_rl.coverage import ParameterSpec
from fastdeploy_rl.errors import FastDeployRLError
from fastdeploy_rl.manifest import Fused, Manifest, Part, Run, Segment, Tensor, build_manifest
from fastdeploy_rl.memory.file_map import FileMap
from fastdeploy_rl.memory.ipc_metas import HANDLE_BYTES, IpcMeta, read_ipc_metas, write_ipc_metas
from fastdeploy_rl.memory.saved_state import SavedArray, read_saved_state, write_saved_state
from fastdeploy_rl.plan.byte_range import ByteRange
from fastdeploy_rl.plan.planner import make_plan
from fastdeploy_rl.publish import leases
from fastdeploy_rl.publish.channel import Channel, Latest
from fastdeploy_rl.publish.contribution import ContributedPart, ContributedTensor, Contribution, unite
from fastdeploy_rl.publish.leases import NUM_ARENAS, NUM_SLOTS, Holder, LeaseTable
from fastdeploy_rl.publish.meeting import Meeting, Offer
from fastdeploy_rl.publish.meeting import Part as MeetingPart
from fastdeploy_rl.publish.weight_server import WeightServer, read_server_address
from fastdeploy_rl.receipt import RankReceipt, Receipt
from fastdeploy_rl.report import RankReport, UpdateReport
from fastdeploy_rl.transport import wire
from fastdeploy_rl.transport.address import parse_address
from fastdeploy_rl.update.history import read_history
from fastdeploy_rl.update.rank_files import RankFiles, RankPart
from fastdeploy_rl.version import WeightVersion

Reader = Callable[[bytes], object]
"""Takes one input to where it would be read. Returns, or raises an error of the tree: anything else is a find."""


@dataclass(frozen=True)
class Target:
    """`open` makes what the reader needs (files, segments) and takes it away again."""

    name: str
    inputs: Inputs
    open: Callable[[], AbstractContextManager[Reader]]


class BrokenPromiseError(Exception):
    """A reader took what it must not take, or something else is there afterwards than before."""


def in_turn(*readers: Callable[[], object]) -> None:
    """Calls all of them, and raises the first error of the tree at the end."""
    errors = []
    for reader in readers:
        try:
            reader()
        except FastDeployRLError as error:
            errors.append(error)
    if errors:
        raise errors[0]


# --- valid documents to begin with ---------------------------------------------------------------------

_SUM = Fletcher4(1, 2, 3, 4)
_SPECS = [ParameterSpec("w", "F32", (4, 6), 0), ParameterSpec("q", "F32", (4, 6), 0)]


def _segment(publisher: int = 0) -> Segment:
    return Segment("shm", f"fastdeploy_rl.0.a.1.{publisher}.0.b", 1 << 16, 0, 2, publisher)


def _manifest() -> Manifest:
    def tensor(name: str, offset: int, axis: int | None, *spans: tuple[int, int], fused: Fused | None = None) -> Tensor:
        parts = tuple(Part(0, offset + 512 * index, *span) for index, span in enumerate(spans))
        return Tensor(name, "F32", (4, 6), axis, parts, _SUM.hex(), fused=fused)

    tensors = [
        tensor("w", 0, None, (0, 0)),
        tensor("s", 4096, 0, (0, 2), (2, 4)),
        tensor("f", 8192, None, (0, 0), fused=Fused(0, (Run("q", 0, 2), Run("k", 0, 1), Run("q", 2, 3)))),
    ]
    return build_manifest("1.1", "full", [_segment()], tensors, {"head": "w"})


def _contribution(publisher: int, span: tuple[int, int]) -> Contribution:
    part = ContributedPart(0, 0, *span, _SUM)
    tensor = ContributedTensor("w", "F32", (4, 6), 0, (part,), False, None)
    return Contribution(publisher, "full", (_segment(publisher),), (tensor,), {"head": "w"})


MANIFEST = manifests.encode(_manifest())
_LATEST = Latest("1.1", f"manifest-1.1-{manifests.file_digest(MANIFEST)[:16]}.json", manifests.file_digest(MANIFEST))
_OFFER = Offer("0" * 16, 2, 1, _contribution(1, (2, 4)))
_OUTCOME = b'{"nonces":["0"],"error":"","text":""}'
_RECEIPT = Receipt("1.1", "ipc", "0" * 64, {"w": _SUM.hex()}, {"w": [_SUM.hex()]})
_REPORT = UpdateReport(1, "update", "done", "1.1", "", 0.1, 0.1, [RankReport(0, [])], receipt=_RECEIPT)
_PART = RankPart(RankReport(0, []), RankReceipt(0, "1.1", {"w": _SUM.hex()}, {"w": _SUM.hex()}))
_HEADER = (
    b'{"w":{"dtype":"F32","shape":[4,6],"data_offsets":[0,96]},"v":{"dtype":"F16","shape":[],"data_offsets":[96,98]}}'
)
_FRAMES = [
    wire.encode(message)
    for message in (
        wire.ServerHello("fastdeploy_rl", wire.PROTOCOL, bytes(32), True, 1),
        wire.ClientHello(bytes(32), bytes(32)),
        wire.Ask("1.1"),
        wire.Offered(MANIFEST),
        wire.Hold("0" * 64),
        wire.Read((ByteRange(0, 1, 2, 3, 4, 5), ByteRange(6, 7, 8, 9, 10, 11))),
        wire.Data(96),
        wire.Places("127.0.0.1:1", (1, 2)),
        wire.Holdings((ByteRange(0, 1, 2, 3, 4, 5),)),
        wire.Failed("NoPublicationError", "gone"),
    )
]
_SAVED_STATE = b"".join(
    bytes(piece)
    for piece in write_saved_state({"w": SavedArray("F32", (2, 3), bytes(24)), "v": SavedArray("U8", (), b"1")})
)
_IPC_METAS = {"w": IpcMeta(bytes(range(64)), 512, 24, "BF16", (4, 3)), "v": IpcMeta(bytes(64), 0, 8, "F64", ())}


# --- readers -------------------------------------------------------------------------------------------


def _read_manifest(data: bytes) -> None:
    """What is taken is what was written, and can be planned with or refused. What is refused is tried again with the
    digests that it should have had: they must not be all that stood in its way."""
    try:
        manifest = manifests.decode(data)
    except FastDeployRLError as refused:
        manifest = _signed(data, refused)
    if manifests.decode(manifests.encode(manifest)) != manifest:
        raise BrokenPromiseError("a manifest that was taken is another one when it is written")
    for tensor in manifest.tensors:
        for part in tensor.parts:
            if part.offset + tensor.part_bytes(part) > manifest.segments[part.segment].num_bytes:
                raise BrokenPromiseError(f"{tensor.name} leaves its segment")
    make_plan(manifest, _SPECS, 0, 2)


def _signed(data: bytes, refused: FastDeployRLError) -> Manifest:
    """Raises `refused` where there is no manifest in it at all."""
    try:
        found = msgspec.json.decode(data, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise refused from None
    return build_manifest(found.version, found.layout, found.segments, found.tensors, found.aliases)


@contextmanager
def _manifest_reader() -> Iterator[Reader]:
    yield _read_manifest


@contextmanager
def _channel() -> Iterator[Channel]:
    with tempfile.TemporaryDirectory(prefix="fastdeploy_rl_fuzz.") as directory:
        channel = Channel(Path(directory) / "channel")
        channel.open()
        (channel.path / _LATEST.file).write_bytes(MANIFEST)
        yield channel


@contextmanager
def _latest_reader() -> Iterator[Reader]:
    with _channel() as channel:

        def read(data: bytes) -> None:
            (channel.path / "LATEST").write_bytes(data)
            channel.read_publication(0)

        yield read


@contextmanager
def _epoch_reader() -> Iterator[Reader]:
    """Also with an absurd epoch in LATEST: the next one is greater, or refused and EPOCH as it was."""
    with _channel() as channel:

        def read(data: bytes) -> None:
            (channel.path / "EPOCH").write_bytes(data)
            before = channel.read_epoch()
            latest = Latest(f"{before}.1", _LATEST.file, _LATEST.file_digest)
            (channel.path / "LATEST").write_bytes(msgspec.json.encode(latest))
            try:
                taken = channel.take_epoch()
            except FastDeployRLError:
                if (channel.path / "EPOCH").read_bytes() != data:
                    raise BrokenPromiseError("EPOCH was changed by what failed") from None
                raise
            WeightVersion(taken, 1)
            if taken <= before or channel.read_epoch() != taken:
                raise BrokenPromiseError(f"epoch {taken} came after {before}")

        yield read


@contextmanager
def _lease_table_reader() -> Iterator[Reader]:
    with _channel() as channel, ExitStack() as stack:
        holder = stack.enter_context(Holder(channel.holders_dir))
        table = LeaseTable(channel.leases_path, channel.holders_dir)
        table.create()
        table.close()
        pristine = channel.leases_path.read_bytes()

        def read(data: bytes) -> None:
            channel.leases_path.write_bytes(patched(data, pristine))
            table.open()
            try:
                _use_table(table, holder.token)
            finally:
                table.close()

        yield read


def _use_table(table: LeaseTable, token: int) -> None:
    for arena in range(NUM_ARENAS):
        str(table.segment(arena)), str(table.version(arena)), table.lock_paths(arena)
        for info in table.holders(arena):
            str(info)
    table.take(0, table.generation(0), token).release()
    table.repair()
    table.wait_free(range(NUM_ARENAS), 0)


def patched(data: bytes, pristine: bytes) -> bytes:
    """`pristine` with the patches of an input; other input as it is."""
    changed = bytearray(pristine)
    try:
        for offset, text in json.loads(data):
            piece = bytes.fromhex(text)[: len(changed) - offset]
            changed[offset : offset + len(piece)] = piece
    except (ValueError, TypeError):
        return data
    return bytes(changed)


@contextmanager
def _meeting_reader() -> Iterator[Reader]:
    """OFFER.1, united with an offer of our own as part 0 does, and the same bytes as OUTCOME."""
    with _channel() as channel:

        def read(data: bytes) -> None:
            for name in ("OFFER.1", "OUTCOME"):
                (channel.path / name).unlink(missing_ok=True)
                (channel.path / name).write_bytes(data)
            meeting = Meeting(channel, MeetingPart(0, 2))
            offer = meeting._standing(1)
            if offer is not None and offer.contribution is not None:
                unite(WeightVersion(1, 1), [_contribution(0, (0, 2)), offer.contribution])
            meeting._outcome()

        yield read


@contextmanager
def _run_dir_reader() -> Iterator[Reader]:
    """Every file of a run directory, the same bytes in each."""
    with tempfile.TemporaryDirectory(prefix="fastdeploy_rl_fuzz.") as directory:
        files, history = RankFiles(Path(directory)), Path(directory) / "history.jsonl"
        names = ("report.1.json", "part.1.rank0.json", "staged.1.rank0.json", "receipt.json", history.name)

        def read(data: bytes) -> None:
            for name in names:
                (Path(directory) / name).write_bytes(data)
            in_turn(
                lambda: read_history(history),
                lambda: str(files.read_report(1)),
                lambda: str(files.read_part(0, 1)),
                lambda: files.read_staged(0, 1),
                lambda: str(files.read_receipt()),
            )

        yield read


@contextmanager
def _checkpoint_reader() -> Iterator[Reader]:
    with tempfile.TemporaryDirectory(prefix="fastdeploy_rl_fuzz.") as directory:
        path = Path(directory) / "model.safetensors"

        def read(data: bytes) -> None:
            path.write_bytes(struct.pack("<Q", len(data)) + data + bytes(98))
            with FileMap.open(path) as file:
                for name in file.tensors:
                    file.view(name).numpy().tobytes()

        yield read


@contextmanager
def _saved_state_reader() -> Iterator[Reader]:
    """What is taken lies inside the data."""

    def read(data: bytes) -> None:
        for tensor in read_saved_state(data).tensors.values():
            if tensor.offset + tensor.num_bytes > len(data):
                raise BrokenPromiseError(f"{tensor.name} leaves the data")

    yield read


@contextmanager
def _ipc_metas_reader() -> Iterator[Reader]:
    """What is taken is a handle and a place in memory, and is written as it was read."""

    def read(data: bytes) -> None:
        found = read_ipc_metas(data)
        if any(len(meta.handle) != HANDLE_BYTES or meta.offset + meta.num_bytes >= 2**63 for meta in found.values()):
            raise BrokenPromiseError("a row is taken that is in no memory")
        if read_ipc_metas(b"".join(write_ipc_metas(found))) != found:
            raise BrokenPromiseError("rows that were taken are others when they are written")

    yield read


@contextmanager
def _wire_reader() -> Iterator[Reader]:
    """One frame of the tcp transport, as both ends take it in: what is taken is what goes out again, and a question
    that passes costs no more than it may."""

    def read(data: bytes) -> None:
        num_bytes, kind = wire.payload_bytes(data[: wire.HEADER_BYTES].ljust(wire.HEADER_BYTES, b"\0"), len(data))
        message = wire.decode(kind, data[wire.HEADER_BYTES :][:num_bytes])
        if wire.decode(kind, wire.encode(message)[wire.HEADER_BYTES :]) != message:
            raise BrokenPromiseError(f"{message!r:.200} is another message when it is sent")
        if isinstance(message, wire.Read):
            with suppress(ValueError):
                wire.check_read(message.ranges)
                if message.num_bytes > wire.MAX_READ_BYTES:
                    raise BrokenPromiseError(f"a question for {message.num_bytes} bytes passes")

    yield read


@contextmanager
def _server_file_reader() -> Iterator[Reader]:
    """`SERVER` of a channel, while a server lives."""
    with tempfile.TemporaryDirectory(prefix="fastdeploy_rl_fuzz.") as directory:
        channel = Path(directory) / "channel"
        with WeightServer(channel):

            def read(data: bytes) -> None:
                (channel / "SERVER").write_bytes(data)
                if not 0 < parse_address(read_server_address(channel)).port < 65536:
                    raise BrokenPromiseError("an address without a port is taken")

            yield read


@contextmanager
def _text_reader() -> Iterator[Reader]:
    """Versions and checksums as they stand in words, flags and files."""

    def read(data: bytes) -> None:
        text = data.decode("utf-8", "replace")
        version = WeightVersion.parse(text, current_epoch=1)
        if str(WeightVersion.parse(str(version))) != str(version):
            raise BrokenPromiseError(f"{text!r} is read as {version}, which is read as another one")

    yield read


_ROWS = (0, 1, NUM_ARENAS - 1)
_SLOTS = [leases._slot(row, slot) for row in _ROWS for slot in range(NUM_SLOTS)]
_TABLE_WORDS = [0, 8, leases._BELL, *map(leases._row, _ROWS), *_SLOTS, *(slot + 8 for slot in _SLOTS)]
_TABLE_TEXTS = [leases._row(row) + text for row in _ROWS for text in (leases._SEGMENT, leases._VERSION)]

FILE_TARGETS = [
    Target("manifest", documents([MANIFEST]), _manifest_reader),
    Target("latest", documents([msgspec.json.encode(_LATEST)]), _latest_reader),
    Target("epoch", raw([b"7\n", b"999999999999999999", b"9223372036854775807", b"0"]), _epoch_reader),
    Target(
        "leases",
        patches(_TABLE_WORDS, _TABLE_TEXTS, leases._TABLE_BYTES) | raw([b"FDRLLEAS" + bytes(80)]),
        _lease_table_reader,
    ),
    Target("offer", documents([msgspec.json.encode(_OFFER), _OUTCOME]), _meeting_reader),
    Target("run_dir", documents([msgspec.json.encode(r) for r in (_REPORT, _PART, _RECEIPT)]), _run_dir_reader),
    Target("checkpoint", documents([_HEADER]), _checkpoint_reader),
    Target("saved_state", raw([_SAVED_STATE]), _saved_state_reader),
    Target("ipc_metas", raw([b"".join(write_ipc_metas(_IPC_METAS))]), _ipc_metas_reader),
    Target("wire", raw(_FRAMES), _wire_reader),
    Target("server", documents([b'{"address":"127.0.0.1:8190"}', b'{"address":"[::1]:1"}']), _server_file_reader),
    Target("text", raw([b"1.1", b"3.1200", b"9223372036854775807.0", b"1200"]), _text_reader),
]
