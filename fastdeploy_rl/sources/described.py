"""Weights that come without a manifest: rank 0 makes one (sources/describing.py) and keeps it where the others find it.

    {channel}/described/                 0700
        manifest-{version}-{digest16}.json   as in a channel
        SET-{key32}                          JSON as `LATEST`: the manifest of the files whose identities make the key

Owns that directory, and which version files are. Refuses to know formats, and how files are read. Invariant: a
`SET` names a manifest whose checksums were made from exactly the files that its key was made from; files that change
have another key, so that their manifest is made anew, also where their version is the same.
"""

import contextlib
import hashlib
import logging
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from fastdeploy_rl import manifest as manifests
from fastdeploy_rl.errors import (
    ConfigurationError,
    DeadlineExceededError,
    ManifestError,
    NoPublicationError,
)
from fastdeploy_rl.manifest import Manifest, build_manifest
from fastdeploy_rl.memory.private_directory import check_private_directory, open_private_directory
from fastdeploy_rl.publish.channel import Channel, Latest
from fastdeploy_rl.sources.base import ResolvedPublication, SourceConfig
from fastdeploy_rl.sources.describing import FoundFiles, describe, identities
from fastdeploy_rl.sources.fetching import FetchingSource
from fastdeploy_rl.sources.version_file import UNCOUNTED_EPOCH, WantedVersion, version_written_ns, wanted_version
from fastdeploy_rl.transport.base import Offer
from fastdeploy_rl.transport.files import FileIdentity, FileTransport, OfferedFiles
from fastdeploy_rl.version import WeightVersion

_log = logging.getLogger(__name__)

_DIRECTORY = "described"
_SET_NAME = re.compile(r"SET-[0-9a-f]{32}", re.ASCII)
_MAX_RECORD_BYTES = 4096
_KEPT_SETS = 4


class DescribedFiles:
    """One rank's view of files that others write. `find`: those that are there now; None: there are none.
    From any thread."""

    def __init__(self, config: SourceConfig, find: Callable[[], FoundFiles | None], where: str) -> None:
        """`where`: the places that were looked at, for the message that nothing is there."""
        self._config = config
        self._find = find
        self._where = where
        self._describing = threading.Lock()
        self._warned: FileIdentity | None = None

    def offer(self, version: WeightVersion | None, deadline_ns: int) -> OfferedFiles:
        """The files that are there, with their manifest: rank 0 makes it, where it is not known, the others take it.
        NoPublicationError when there are no files, none of that version, or no manifest of them (yet);
        DeadlineExceededError when not all bytes could be read."""
        found = self._find()
        if found is None:
            raise NoPublicationError(f"nothing is published in {self._where}")
        check_not_open_to_all(found.directory, found.names)
        files = identities(found)
        if found.memory is None:
            own = self._version_of(found, files)
            if version is not None and version != own:
                raise _not_to_be_had(version, found, own)
        # Nobody reads all bytes beside another who does.
        if not self._describing.acquire(timeout=max(deadline_ns - time.monotonic_ns(), 0) / 1e9):
            raise DeadlineExceededError(f"no time left to look at {found.directory}, which is being described")
        try:
            if found.memory is None:
                manifest, digest = self._described(found, files, own, deadline_ns)
            else:
                manifest, digest = self._described_memory(found, files, version, deadline_ns)
        finally:
            self._describing.release()
        open_fetch = None if found.memory is None else found.memory.reader(files).open_only_fetch
        return OfferedFiles(Offer(manifest.weight_version, manifest, digest), found.directory, files, open_fetch)

    def forget(self, version: WeightVersion) -> None:
        """What was described as that version is read again when next asked for. Rank 0 only; others do nothing."""
        if self._config.rank:
            return
        store = self._store()
        for name in _sets(store):
            if _record_version(store, name) in (None, str(version)):
                store.remove_file(name)

    def _version_of(self, found: FoundFiles, files: Sequence[FileIdentity]) -> WeightVersion:
        """What a version file says, beside the files or in the model directory; else when the newest of them was
        written, so that newer files are a newer version."""
        newest = max(files, key=lambda file: file.mtime_ns)
        return self._stated(found, newest) or WeightVersion(UNCOUNTED_EPOCH, newest.mtime_ns)

    def _stated(self, found: FoundFiles, newest: FileIdentity | None = None) -> WeightVersion | None:
        """What a version file says. `newest`: a file that should not be newer."""
        for directory in (found.directory, self._config.model_dir):
            written_ns = version_written_ns(directory)  # looked at first: it may be replaced in between
            wanted = wanted_version(directory)
            if wanted is not None:
                if newest is not None and written_ns < newest.mtime_ns:
                    self._warn(newest, wanted)
                return wanted.in_epoch(UNCOUNTED_EPOCH)
        return None

    def _warn(self, newest: FileIdentity, wanted: WantedVersion) -> None:
        """Once for each state of the files: whoever writes the version last is not done, and some may be older ones."""
        if self._config.rank or newest == self._warned:
            return
        self._warned = newest
        _log.warning(
            "version=%s event=files_newer_than_version file=%s newer_than=%s reason='the files may be of another step, "
            "or of two; where the version is written last, update again when it was'",
            *(wanted.text, newest.name, wanted.path),
        )

    def _described(
        self, found: FoundFiles, files: Sequence[FileIdentity], version: WeightVersion, deadline_ns: int
    ) -> tuple[Manifest, str]:
        store, name = self._store(), f"SET-{_key(found, files)}"
        known = self._known(store, name)
        if known is not None and known[0].weight_version == version:
            return known
        if self._config.rank:
            raise _not_described(found, version)
        if known is not None:
            manifest = known[0]
        else:
            manifest = describe(found, files, version, self._config.num_threads, deadline_ns)
        # Of the same files under another version the bytes are known.
        return _keep(store, name, _as_version(manifest, version))

    def _described_memory(
        self, found: FoundFiles, files: Sequence[FileIdentity], version: WeightVersion | None, deadline_ns: int
    ) -> tuple[Manifest, str]:
        """Whoever asks for the newest has it read, since nothing but its bytes says whether it is another. That version
        is then known by its number; without a version file, other bytes have the next."""
        store, name = self._store(), f"SET-{_key(found, files)}"
        known, stated = self._known(store, name), self._stated(found)
        if known is not None and (known[0].weight_version == version or (version is None and self._config.rank)):
            return known
        if self._config.rank:
            raise _not_described(found, version)
        newest = WeightVersion(UNCOUNTED_EPOCH, max(file.mtime_ns for file in files))
        if version is not None and version != stated:
            raise _not_to_be_had(version, found, stated or (known[0].weight_version if known is not None else newest))
        manifest = describe(found, files, stated or newest, self._config.num_threads, deadline_ns)
        if stated is None and known is not None:
            is_same = manifest.content_digest == known[0].content_digest
            manifest = _as_version(manifest, known[0].weight_version if is_same else _next(known[0], newest))
        return _keep(store, name, manifest)

    def _known(self, store: Channel, name: str) -> tuple[Manifest, str] | None:
        """What rank 0 wrote down before. ManifestError for another rank where that is damaged."""
        try:
            return _read_known(store, name)
        except ManifestError as error:
            if self._config.rank:
                raise
            _log.warning("event=described_anew file=%s reason=%r", store.path / name, str(error))
            return None

    def _store(self) -> Channel:
        store = Channel(self._config.channel / _DIRECTORY)
        if self._config.rank:
            try:
                check_private_directory(store.path)
            except FileNotFoundError:
                raise NoPublicationError(f"rank 0 has described nothing in {store.path} (yet)") from None
            return store
        try:
            open_private_directory(store.path)
        except ConfigurationError as error:
            raise ConfigurationError(f"{error} (rank 0 keeps there what it reads about files of others)") from error
        return store


def _not_to_be_had(version: WeightVersion, found: FoundFiles, own: WeightVersion) -> NoPublicationError:
    return NoPublicationError(f"version {version} is not to be had: {found.directory} has {own}")


def _not_described(found: FoundFiles, version: WeightVersion | None) -> NoPublicationError:
    which = "the newest version" if version is None else f"version {version}"
    return NoPublicationError(
        f"rank 0 has not described {which} of {found.directory} (yet), or the files changed since; update again"
    )


def _as_version(manifest: Manifest, version: WeightVersion) -> Manifest:
    if manifest.weight_version == version:
        return manifest
    return build_manifest(version, manifest.layout, manifest.segments, manifest.tensors, manifest.aliases)


def _next(known: Manifest, newest: WeightVersion) -> WeightVersion:
    """After the one that is known, and no older than the files."""
    version = known.weight_version
    return max(newest, WeightVersion(version.epoch, version.step + 1))


def check_not_open_to_all(directory: Path, names: Sequence[str]) -> None:
    """ConfigurationError where every user of this machine may change the directory, a file in it, or (where nothing
    keeps them from renaming) a directory above. NoPublicationError where a file is gone."""
    for path in (directory, *(directory / name for name in names)):
        try:
            mode = stat.S_IMODE(os.stat(path).st_mode)
        except OSError as error:
            raise NoPublicationError(f"{path}: {error.strerror}") from error
        if mode & stat.S_IWOTH:
            raise ConfigurationError(
                f"{path} can be written by every user of this machine (mode {mode:04o}): weights are not taken from "
                f"there; chmod o-w {path}"
            )
    for parent in Path(os.path.realpath(directory)).parents:
        mode = stat.S_IMODE(os.stat(parent).st_mode)
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise ConfigurationError(
                f"{directory} can be replaced by every user of this machine: {parent} is open to them "
                f"(mode {mode:04o}); chmod o-w {parent}"
            )


def _key(found: FoundFiles, files: Sequence[FileIdentity]) -> str:
    described = [manifests.FORMAT, os.path.realpath(found.directory), found.how, files]
    return hashlib.sha256(msgspec.json.encode(described)).hexdigest()[:32]


# --- what was described ---------------------------------------------------------------------------


def _read_known(store: Channel, name: str) -> tuple[Manifest, str] | None:
    record = _read_record(store, name)
    if record is None:
        return None
    try:
        return store.read_manifest(record), record.file_digest
    except FileNotFoundError:
        return None


def _read_record(store: Channel, name: str) -> Latest | None:
    try:
        return msgspec.json.decode(store.read(name, _MAX_RECORD_BYTES), type=Latest)
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ManifestError(f"{store.path / name} is malformed: {error!s:.500}; remove it") from error


def _record_version(store: Channel, name: str) -> str | None:
    """None for a record that says nothing."""
    with contextlib.suppress(ManifestError):
        record = _read_record(store, name)
        return record.version if record is not None else None
    return None


def _keep(store: Channel, name: str, manifest: Manifest) -> tuple[Manifest, str]:
    """The manifest and its file digest."""
    record = store.write_manifest(manifest)
    store.replace(name, msgspec.json.encode(record))
    _prune(store, name)
    return manifest, record.file_digest


def _prune(store: Channel, newest: str) -> None:
    """A few sets stay: those of other engines, and what a trainer may go back to."""
    sets = sorted(_sets(store), key=lambda name: (name != newest, -_mtime_ns(store.path / name)))
    kept = set()
    for name in sets[:_KEPT_SETS]:
        with contextlib.suppress(ManifestError):
            record = _read_record(store, name)
            kept.add(record.file if record is not None else "")
    for name in sets[_KEPT_SETS:]:
        store.remove_file(name)
    for file in store.manifest_files():
        if file not in kept:
            store.remove_file(file)


def _sets(store: Channel) -> list[str]:
    return [name for name in os.listdir(store.path) if _SET_NAME.fullmatch(name)]


def _mtime_ns(path: Path) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


# --- as a source ----------------------------------------------------------------------------------


class DescribedSource(FetchingSource):
    """One engine rank as a reader of such files: its own bytes are read into memory of its own, so that whatever
    becomes of the files afterwards, its weights stay as they are."""

    def __init__(self, config: SourceConfig, find: Callable[[], FoundFiles | None], where: str) -> None:
        """As `DescribedFiles`."""
        self._files = DescribedFiles(config, find, where)
        # Which version is wanted and which there is say the same files: what is there is what is wanted.
        super().__init__(FileTransport(self._files.offer, config.num_threads), replace(config, model_dir=None))

    def discredit(self, resolved: ResolvedPublication) -> None:
        """The files are read anew when next asked for: they changed in a way that their identities do not show."""
        super().discredit(resolved)
        self._files.forget(resolved.version)
