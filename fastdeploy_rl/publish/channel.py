"""A channel: the directory where a trainer publishes and an engine looks.

    EPOCH                                decimal text; counts publishers
    LOCK                                 flock of the live publisher
    LATEST                               JSON: version, file, file_digest
    manifest-{version}-{digest16}.json   canonical bytes of the manifest
    LEASES                               table of arenas and their holders (publish/leases.py)
    holders/{token}.lock                 one per process that holds leases

Where several processes publish a version together, number 0 owns the files above, and there are for each other one

    LOCK.{i} LEASES.{i}                  as LOCK and LEASES
    OFFER.{i}                            JSON: what process i has ready, while it waits for the others
    OUTCOME                              JSON: why the last round of offers failed, and which those were
    DECISION                             flock of whoever decides about a round just now
    BELL                                 an int32 that is rung when one of these changes

Owns the files and their atomicity. Refuses to know tensors and arenas. Invariant: `LATEST` names a complete manifest or
does not exist; a reader sees the old one or the new one, never half.
"""

import errno
import hashlib
import os
import re
import secrets
import stat
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from fastdeploy_rl import manifest as manifests
from fastdeploy_rl.errors import DeadlineExceededError, ManifestError, NoPublicationError, NoSpaceError, SegmentError
from fastdeploy_rl.manifest import Manifest
from fastdeploy_rl.memory.private_directory import check_private_directory, open_private_directory
from fastdeploy_rl.version import WeightVersion

_MAX_LATEST_BYTES = 4096
_MAX_EPOCH_BYTES = 32
_MANIFEST_NAME = re.compile(r"manifest-[0-9]+\.[0-9]+-[0-9a-f]{16}\.json", re.ASCII)
_LEFTOVER = re.compile(r"\.(EPOCH|LATEST|OUTCOME|LEASES|manifest-.*)\.[0-9a-z]+\.tmp", re.ASCII)
_LEASES_OF = re.compile(r"LEASES\.([1-9][0-9]{0,3})", re.ASCII)


class Latest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `LATEST` says: the version, the manifest file beside it, and the sha256 of that file's bytes."""

    version: str
    file: str
    file_digest: str


class Channel:
    """The files of one channel. Nothing is opened or made before `open()`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @property
    def lock_path(self) -> Path:
        return self.lock_of(0)

    @property
    def leases_path(self) -> Path:
        return self.leases_of(0)

    def lock_of(self, publisher: int) -> Path:
        return self.path / _numbered("LOCK", publisher)

    def leases_of(self, publisher: int) -> Path:
        return self.path / _numbered("LEASES", publisher)

    def offer_of(self, publisher: int) -> Path:
        return self.path / _numbered("OFFER", publisher)

    @property
    def decision_path(self) -> Path:
        return self.path / "DECISION"

    @property
    def bell_path(self) -> Path:
        return self.path / "BELL"

    @property
    def holders_dir(self) -> Path:
        return self.path / "holders"

    @property
    def key(self) -> str:
        """12 hex digits that tell this channel's segments from another's."""
        return hashlib.sha256(os.fsencode(self.path.resolve())).hexdigest()[:12]

    def open(self) -> None:
        """Makes the directory (0700), or checks that it is ours and closed to others (ConfigurationError)."""
        open_private_directory(self.path)
        open_private_directory(self.holders_dir)

    def check(self) -> None:
        """As `open`, for a reader: makes nothing. NoPublicationError when there is no such channel."""
        try:
            check_private_directory(self.path)
            check_private_directory(self.holders_dir)
        except FileNotFoundError as error:
            raise NoPublicationError(
                f"no channel at {self.path}: no trainer has published there yet; publish first, or name the trainer's "
                "channel (--ipc-dir)"
            ) from error

    # --- reading -----------------------------------------------------------------------------------

    def read_latest(self) -> Latest | None:
        """What was published last; None when nothing is. ManifestError when the file is not what a publisher writes."""
        try:
            data = self.read("LATEST", _MAX_LATEST_BYTES)
        except FileNotFoundError:
            return None
        try:
            latest = msgspec.json.decode(data, type=Latest)
        except msgspec.DecodeError as error:
            raise ManifestError(
                f"{self.path / 'LATEST'} is malformed: {error}; take it away (fastdeploy-rl retire) and publish again"
            ) from error
        if not _MANIFEST_NAME.fullmatch(latest.file):
            raise ManifestError(f"{self.path / 'LATEST'} names {latest.file[:80]!r}, which is no manifest of a channel")
        return latest

    def read_manifest(self, latest: Latest) -> Manifest:
        """The manifest that `latest` names, its bytes checked against
        the digest. FileNotFoundError when it was superseded."""
        data = self.read(latest.file, manifests.MAX_BYTES)
        digest = manifests.file_digest(data)
        if digest != latest.file_digest:
            raise ManifestError(
                f"{self.path / latest.file} is not what was published: sha256 {digest}, expected {latest.file_digest}"
            )
        manifest = manifests.decode(data)
        if manifest.version != latest.version:
            raise ManifestError(
                f"{self.path / latest.file} is version {manifest.version}, but LATEST says {latest.version}"
            )
        return manifest

    def read_publication(self, deadline_ns: int) -> tuple[Latest, Manifest]:
        """The latest version and its manifest, looking again where one is superseded in between. NoPublicationError
        when there is none, DeadlineExceededError when the publisher keeps overtaking us."""
        begun = time.monotonic()
        seen = None
        while True:
            latest = self.read_latest()
            if latest is None:
                raise NoPublicationError(
                    f"nothing is published in {self.path}; publish first (fastdeploy-rl publish DIR --step N); what a "
                    "WeightPublisher published goes when it closes"
                )
            if latest == seen:
                raise NoPublicationError(f"{self.path / latest.file} is missing, though LATEST names it")
            try:
                return latest, self.read_manifest(latest)
            except FileNotFoundError:
                seen = latest
            if time.monotonic_ns() >= deadline_ns:
                hint = "versions are superseded faster than they can be read"
                raise DeadlineExceededError.waiting_for(f"manifest of {self.path}", since_s=begun, hint=hint)

    def read_epoch(self) -> int:
        """The one taken last; 0 before the first."""
        try:
            text = self.read("EPOCH", _MAX_EPOCH_BYTES).strip()
        except FileNotFoundError:
            return 0
        if not text.isdigit() or len(text) > 18:
            raise SegmentError(f"{self.path / 'EPOCH'} holds {text!r}, not a number: use another channel")
        return int(text)

    def publishers(self) -> tuple[int, ...]:
        """Numbers above 0 of all processes that have, or left, a lease table here."""
        found = (_LEASES_OF.fullmatch(entry.name) for entry in os.scandir(self.path))
        return tuple(sorted(int(match[1]) for match in found if match))

    # --- writing: under the channel's lock ---------------------------------------------------------

    def take_epoch(self) -> int:
        """Counts `EPOCH` up, past that of the latest version, and returns it: the first is 1."""
        latest = self.read_latest()
        published = WeightVersion.parse(latest.version).epoch if latest else 0
        epoch = max(self.read_epoch(), published) + 1
        self.replace("EPOCH", f"{epoch}\n".encode())
        return epoch

    def write_publication(self, manifest: Manifest) -> Latest:
        """Makes `manifest` the latest version: its file first, then `LATEST`, each whole or not at all. On an error
        LATEST stands as it was."""
        data = manifests.encode(manifest)
        digest = manifests.file_digest(data)
        latest = Latest(manifest.version, f"manifest-{manifest.version}-{digest[:16]}.json", digest)
        self.replace(latest.file, data)
        self.replace("LATEST", msgspec.json.encode(latest))
        return latest

    def remove_superseded(self, latest: Latest | None) -> None:
        """Removes every manifest but the one `latest` names, and what an interrupted writer left. Publisher 0 only: it
        would take half written files from under the hands of another."""
        kept = latest.file if latest else ""
        self._remove(lambda name: bool(_LEFTOVER.fullmatch(name) or (_MANIFEST_NAME.fullmatch(name) and name != kept)))

    def remove_latest(self) -> None:
        """Takes the publication back: `LATEST` first, then the manifests."""
        (self.path / "LATEST").unlink(missing_ok=True)
        self._sync_directory()
        self._remove(lambda name: bool(_MANIFEST_NAME.fullmatch(name)))

    def remove_leftovers_of(self, publisher: int) -> None:
        """Removes the offer of one of several publishers, and what it left half written. Under its lock."""
        self.offer_of(publisher).unlink(missing_ok=True)
        names = (f".{self.offer_of(publisher).name}.", f".{self.leases_of(publisher).name}.")
        self._remove(lambda name: name.startswith(names) and name.endswith(".tmp"))

    def _remove(self, is_meant: Callable[[str], bool]) -> None:
        for entry in list(os.scandir(self.path)):
            if is_meant(entry.name):
                Path(entry.path).unlink(missing_ok=True)

    # --- files of a channel ------------------------------------------------------------------------

    def read(self, name: str, max_bytes: int) -> bytes:
        """A whole file. FileNotFoundError where there is none, ManifestError for what is no regular file or larger."""
        try:
            # Without O_NONBLOCK a pipe in a file's place would keep us for good.
            fd = os.open(self.path / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise ManifestError(f"{self.path / name} cannot be read: {error.strerror}") from error
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise ManifestError(f"{self.path / name} is no regular file")
            with open(fd, "rb", closefd=False) as file:
                data = file.read(max_bytes + 1)
        finally:
            os.close(fd)
        if len(data) > max_bytes:
            raise ManifestError(f"{self.path / name} has more than {max_bytes} bytes")
        return data

    def replace(self, name: str, data: bytes) -> None:
        """Writes a file, whole or not at all. NoSpaceError where there is no room for it."""
        try:
            self._replace(name, data)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise NoSpaceError(
                f"{self.path / name} needs {len(data)} bytes: {error.strerror}; "
                "remove leftovers (fastdeploy-rl doctor --clean) or put the channel elsewhere"
            ) from error

    def _replace(self, name: str, data: bytes) -> None:
        temporary = self.path / f".{name}.{secrets.token_hex(6)}.tmp"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(fd, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.rename(temporary, self.path / name)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        self._sync_directory()

    def _sync_directory(self) -> None:
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _numbered(name: str, publisher: int) -> str:
    return f"{name}.{publisher}" if publisher else name
