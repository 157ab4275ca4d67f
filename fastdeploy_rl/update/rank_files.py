"""What ranks hand to rank 0, and the engine to its clients, through files of the run directory.

Owns their names and formats (JSON by msgspec, replaced atomically). A board slot holds a line of text; receipts of
hundreds of tensors go here."""

import contextlib
import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from fastdeploy_rl.errors import StepFailedError
from fastdeploy_rl.receipt import RankReceipt, Receipt
from fastdeploy_rl.report import RankReport, UpdateReport

KEPT_REPORTS = 32
_MAX_BYTES = 256 << 20
_SPARE_BYTES = 64 << 10
"""Of a last word: times of steps, and the text of an error."""
_CAREFUL = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""A pipe in a file's place would keep us for good, a link would lead away."""
FOLLOWED = "idle"
"""The phase that a rank shows on the board with its last word, unless that is a fence."""
_Record = TypeVar("_Record", bound=msgspec.Struct)


class RankPart(msgspec.Struct, frozen=True):
    """One rank's word on a command: what it staged, and then its last. `fence_reason` is set when it holds no complete
    version any more; `is_reborn`: this process started after the command, in the place of one that died."""

    report: RankReport | None = None
    receipt: RankReceipt | None = None
    fence_reason: str = ""
    is_reborn: bool = False


def receipts_of(parts: Iterable[RankPart]) -> list[RankReceipt]:
    """Those that the parts bring."""
    return [part.receipt for part in parts if part.receipt is not None]


def applied_of(parts: Iterable[RankPart]) -> str:
    """How ranks that share a command took weights over; those that differ, joined."""
    return "+".join(sorted({part.report.applied for part in parts if part.report is not None and part.report.applied}))


class RankFiles:
    """The files of one run directory."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def write_staged(self, rank: int, command: int, part: RankPart) -> None:
        self._write(f"staged.{command}.rank{rank}.json", part)

    def read_staged(self, rank: int, command: int) -> RankPart:
        return self._read(RankPart, f"staged.{command}.rank{rank}.json")

    def reserve_part(self, rank: int, command: int, likely: RankPart) -> None:
        """Room for the last word, taken before anything is touched, so that a disk that fills up meanwhile cannot make
        a rank that committed look like one that is lost. `likely`: as much as is known of it now."""
        self._reserve(f"part.{command}.rank{rank}.json", len(msgspec.json.encode(likely)) + _SPARE_BYTES)

    def write_part(self, rank: int, command: int, part: RankPart) -> None:
        self._write(f"part.{command}.rank{rank}.json", part)

    def read_part(self, rank: int, command: int) -> RankPart:
        return self._read(RankPart, f"part.{command}.rank{rank}.json")

    def remove_command(self, command: int) -> None:
        """What ranks left for a command that all of them finished."""
        # A pattern with the number in it would be compiled, and kept, anew for each command.
        for path in self._run_dir.glob("*.rank*.json*"):
            if path.name.split(".")[1] == str(command):
                path.unlink(missing_ok=True)

    def write_report(self, report: UpdateReport, unread: Collection[int] = ()) -> None:
        """Reports of the last KEPT_REPORTS commands stay, and older ones of the commands `unread`."""
        self._write(f"report.{report.command}.json", report)
        for path in self._run_dir.glob("report.*.json"):
            number = path.name.split(".")[1]
            if number.isdigit() and int(number) <= report.command - KEPT_REPORTS and int(number) not in unread:
                path.unlink(missing_ok=True)

    def read_report(self, command: int) -> UpdateReport:
        return self._read(UpdateReport, f"report.{command}.json")

    def write_receipt(self, receipt: Receipt) -> None:
        self._write("receipt.json", receipt)

    def read_receipt(self) -> Receipt | None:
        """None while nothing is live."""
        try:
            return self._read(Receipt, "receipt.json")
        except StepFailedError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise

    def remove_receipt(self) -> None:
        (self._run_dir / "receipt.json").unlink(missing_ok=True)

    def _reserve(self, name: str, num_bytes: int) -> None:
        with self._creating(name) as fd:
            os.posix_fallocate(fd, 0, num_bytes)

    def _write(self, name: str, record: msgspec.Struct) -> None:
        data = msgspec.json.encode(record)
        try:
            self._replace(name, data)
        except StepFailedError as error:
            # A rank that was started again writes of a command that is over while rank 0 takes its files away.
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            self._replace(name, data)

    def _replace(self, name: str, data: bytes) -> None:
        with self._creating(name) as fd:
            # Over what was reserved, and cut to size only then: room that is given back may be gone.
            written = 0
            while written < len(data):
                written += os.pwrite(fd, data[written:], written)
            os.ftruncate(fd, len(data))
            os.replace(self._run_dir / f"{name}.new", self._run_dir / name)

    @contextlib.contextmanager
    def _creating(self, name: str) -> Iterator[int]:
        """The file that is to become `name`; gone again when it does not."""
        fresh = self._run_dir / f"{name}.new"
        with contextlib.ExitStack() as stack:
            try:
                fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | _CAREFUL, 0o600)
                stack.callback(os.close, fd)
                yield fd
            except OSError as error:
                with contextlib.suppress(OSError):
                    fresh.unlink()
                raise StepFailedError(f"{name} cannot be written to {self._run_dir}: {error.strerror}") from error

    def _read(self, record: type[_Record], name: str) -> _Record:
        try:
            with open(self._run_dir / name, "rb", opener=lambda path, flags: os.open(path, flags | _CAREFUL)) as file:
                data = file.read(_MAX_BYTES + 1)
            if len(data) > _MAX_BYTES:
                raise StepFailedError(f"{name} of {self._run_dir} is larger than {_MAX_BYTES} bytes")
            return msgspec.json.decode(data, type=record)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise StepFailedError(f"{name} of {self._run_dir} cannot be read: {error!s:.500}") from error
