"""A channel: the directory where a trainer publishes and an engine looks.

    EPOCH                                decimal text; counts publishers
    LOCK                                 flock of the live publisher
    LATEST                               JSON: version, file, file_digest
    manifest-{version}-{digest16}.json   canonical bytes of a manifest: the latest, former ones while memory is intact
    LEASES                               table of arenas and their holders (publish/leases.py)
    holders/{token}.lock                 one per process that holds leases
    SERVER SERVER.LOCK                   where a weight server listens, and its flock (publish/weight_server.py)

Where several processes publish a version together, number 0 owns the files above, and there are for each other one

    LOCK.{i} LEASES.{i}                  as LOCK and LEASES
    OFFER.{i}                            JSON: what process i has ready, while it waits for the others
    OUTCOME                              JSON: why the last round of offers failed, and which those were
    DECISION                             flock of whoever decides about a round just now
    BELL                                 an int32 that is rung when one of these changes

Owns the files and their atomicity. Refuses to know tensors and arenas. Invariant: `LATEST` names a complete manifest or
does not exist; a reader sees the old one or the new one, never half.
"""

import hashlib
import os
import re
import time
from collections.abc import Callable, Collection, Iterator
from itertools import islice
from pathlib import Path

import msgspec

from fastdeploy_rl import manifest as manifests
from fastdeploy_rl.errors import (
    DeadlineExceededError,
    ManifestError,
    NoPublicationError,
    SegmentError,
    VersionFormatError,
)
from fastdeploy_rl.manifest import Manifest
from fastdeploy_rl.memory.private_directory import check_private_directory, open_private_directory
from fastdeploy_rl.memory.regular_file import read_regular
from fastdeploy_rl.publish.durable_files import storing, sync_directory, write_whole
from fastdeploy_rl.version import WeightVersion

_MAX_LATEST_BYTES = 4096
_MAX_EPOCH_BYTES = 32
_MAX_EPOCH_DIGITS = 18
_MAX_ENTRIES = 10_000
"""Whoever looks for files in the directory looks at no more than these; publishers make a few dozen."""
_MANIFEST_NAME = re.compile(r"manifest-([0-9]{1,19}\.[0-9]{1,19})-([0-9a-f]{16})\.json", re.ASCII)
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
            WeightVersion.parse(latest.version)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, VersionFormatError) as error:
            raise ManifestError(
                f"{self.path / 'LATEST'} is malformed: {error!s:.500}; take it away (fastdeploy-rl retire) and publish "
                "again"
            ) from error
        if not _MANIFEST_NAME.fullmatch(latest.file):
            raise ManifestError(f"{self.path / 'LATEST'} names {latest.file[:80]!r}, which is no manifest of a channel")
        return latest

    def read_manifest(self, latest: Latest) -> Manifest:
        """The manifest that `latest` names, its bytes checked against
        the digest. FileNotFoundError when it was superseded."""
        return self._read_checked(latest.file, latest.file_digest, latest.version, "LATEST")

    def read_manifest_file(self, file: str) -> Manifest:
        """The manifest in a file that `manifest_files` found. FileNotFoundError when it is gone, ManifestError when its
        bytes or its version are not those of its name."""
        version, digest = _version_and_digest(file)
        return self._read_checked(file, digest, version, "its name")

    def _read_checked(self, file: str, digest: str, version: str, said_by: str) -> Manifest:
        """`digest`: the sha256 of the bytes, or how it begins."""
        data = self.read(file, manifests.MAX_BYTES)
        found = manifests.file_digest(data)
        if found[: len(digest)] != digest:
            raise ManifestError(f"{self.path / file} is not what was published: sha256 {found}, expected {digest}")
        manifest = manifests.decode(data)
        if manifest.version != version:
            raise ManifestError(f"{self.path / file} is version {manifest.version}, but {said_by} says {version}")
        return manifest

    def manifest_files(self) -> list[str]:
        """The names of all manifests, in no order; of a directory with more than 10,000 entries, of some."""
        return [name for name in self._names() if _is_manifest(name)]

    def read_version(self, version: WeightVersion) -> Manifest | None:
        """The manifest of a version, the latest or a former one; None when none is here."""
        for name in self.manifest_files():
            if _version_and_digest(name)[0] == str(version):
                try:
                    return self.read_manifest_file(name)
                except FileNotFoundError:
                    return None  # its memory is about to be used again
        return None

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
        if not text.isdigit() or len(text) > _MAX_EPOCH_DIGITS:
            raise SegmentError(f"{self.path / 'EPOCH'} holds {text!r}, not a number: use another channel")
        return int(text)

    def publishers(self) -> tuple[int, ...]:
        """Numbers above 0 of all processes that have, or left, a lease table here."""
        found = (_LEASES_OF.fullmatch(name) for name in self._names())
        return tuple(sorted(int(match[1]) for match in found if match))

    # --- writing: under the channel's lock ---------------------------------------------------------

    def take_epoch(self) -> int:
        """Counts `EPOCH` up, past that of the latest version, and returns it: the first is 1."""
        latest = self.read_latest()
        published = WeightVersion.parse(latest.version).epoch if latest else 0
        epoch = max(self.read_epoch(), published) + 1
        if len(str(epoch)) > _MAX_EPOCH_DIGITS:
            raise SegmentError(
                f"{self.path} is at epoch {epoch - 1}, which no publisher counted to: use another channel"
            )
        self.replace("EPOCH", f"{epoch}\n".encode())
        return epoch

    def write_manifest(self, manifest: Manifest) -> Latest:
        """Writes the file of a manifest, whole or not at all; what `LATEST` has to say for it to be the latest."""
        data = manifests.encode(manifest)
        digest = manifests.file_digest(data)
        latest = Latest(manifest.version, _manifest_name(manifest.version, digest), digest)
        self.replace(latest.file, data)
        return latest

    def write_latest(self, latest: Latest) -> None:
        """Makes a written manifest the latest. On an error LATEST stands as it was."""
        self.replace("LATEST", msgspec.json.encode(latest))

    def remove_superseded(self, kept: Collection[str]) -> None:
        """Removes every manifest but the `kept` files, and what an interrupted writer left. Publisher 0 only: it would
        take half written files from under the hands of another."""
        self._remove(lambda name: bool(_LEFTOVER.fullmatch(name)) or (_is_manifest(name) and name not in kept))

    def remove_file(self, file: str) -> None:
        """Removes one file, if it is there. SegmentError where somebody put what is no file in its place."""
        try:
            (self.path / file).unlink(missing_ok=True)
        except OSError as error:
            raise SegmentError(f"{self.path / file} cannot be removed: {error.strerror}; do it by hand") from error

    def remove_latest(self) -> None:
        """Takes the publication back: `LATEST` first, then the manifests, of former versions too."""
        self.remove_file("LATEST")
        sync_directory(self.path)
        self._remove(_is_manifest)

    def remove_leftovers_of(self, publisher: int) -> None:
        """Removes the offer of one of several publishers, and what it left half written. Under its lock."""
        self.remove_file(self.offer_of(publisher).name)
        names = (f".{self.offer_of(publisher).name}.", f".{self.leases_of(publisher).name}.")
        self._remove(lambda name: name.startswith(names) and name.endswith(".tmp"))

    def _remove(self, is_meant: Callable[[str], bool]) -> None:
        for name in [name for name in self._names() if is_meant(name)]:
            self.remove_file(name)

    def _names(self) -> Iterator[str]:
        with os.scandir(self.path) as entries:
            yield from (entry.name for entry in islice(entries, _MAX_ENTRIES))

    # --- files of a channel ------------------------------------------------------------------------

    def read(self, name: str, max_bytes: int) -> bytes:
        """A whole file. FileNotFoundError where there is none, ManifestError for what is no regular file or larger."""
        try:
            return read_regular(self.path / name, max_bytes, follows_links=False)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise ManifestError(f"{self.path / name} cannot be read: {error.strerror}") from error

    def replace(self, name: str, data: bytes) -> None:
        """Writes a file, whole or not at all. NoSpaceError where there is no room for it, SegmentError where it cannot
        be for another reason."""
        path = self.path / name
        with storing(path, "remove leftovers (fastdeploy-rl doctor --clean) or put the channel elsewhere"):
            write_whole(path, [data])


def order_of(file: str) -> tuple[int, int]:
    """Epoch and step in the name of a manifest's file: names sort by it as their versions do."""
    epoch, step = _version_and_digest(file)[0].split(".")
    return int(epoch), int(step)


def _manifest_name(version: str, digest: str) -> str:
    return f"manifest-{version}-{digest[:16]}.json"


def _is_manifest(name: str) -> bool:
    """A publisher names its manifests so."""
    return bool(_MANIFEST_NAME.fullmatch(name))


def _version_and_digest(file: str) -> tuple[str, str]:
    """In a manifest's name: the text of its version, and how its digest begins."""
    match = _MANIFEST_NAME.fullmatch(file)
    if match is None:
        raise ManifestError(f"{file[:80]!r} is no manifest of a channel")
    return match[1], match[2]


def _numbered(name: str, publisher: int) -> str:
    return f"{name}.{publisher}" if publisher else name
