"""Weights that come without a manifest: rank 0 makes one (sources/describing.py) and keeps it where the others find it.

    {channel}/described/                 0700
        manifest-{version}-{digest16}.json   as in a channel
        SET-{key32}                          JSON as `LATEST`: the manifest of the files whose identities make the key

Owns that directory, and which version files are. Refuses to know formats, and how files are read. Invariant: a
`SET` names a manifest whose checksums were made from exactly the files that its key was made from; files that change
have another key, so that their manifest is made anew, also where their version is the same. Where that manifest is
gone, it was forgotten: then only its number counts, which nothing else is given.
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
from functools import partial
from pathlib import Path

import msgspec

from fastdeploy_rl import manifest as manifests
from fastdeploy_rl.errors import (
    ConfigurationError,
    DeadlineExceededError,
    ManifestError,
    NoPublicationError,
    TrainerError,
    VersionFormatError,
)
from fastdeploy_rl.manifest import Manifest, build_manifest
from fastdeploy_rl.memory.private_directory import check_private_directory, open_private_directory
from fastdeploy_rl.publish.channel import Channel, Latest
from fastdeploy_rl.sources.base import ResolvedPublication, SourceConfig
from fastdeploy_rl.sources.describing import FoundFiles, check_unchanged, describe, identities
from fastdeploy_rl.sources.fetching import FetchingSource
from fastdeploy_rl.sources.file_ages import FileAges
from fastdeploy_rl.sources.version_file import WantedVersion, uncounted_epoch, version_written_ns, wanted_version
from fastdeploy_rl.transport.base import Offer
from fastdeploy_rl.transport.files import FileIdentity, FileTransport, OfferedFiles
from fastdeploy_rl.version import WeightVersion

_log = logging.getLogger(__name__)

_DIRECTORY = "described"
_SET_NAME = re.compile(r"SET-[0-9a-f]{32}", re.ASCII)
_MAX_RECORD_BYTES = 4096
_KEPT_SETS = 4


class DescribedFiles:
    """One rank's view of files that others write. `find`: those that are there now, until a deadline;
    None: there are none.
    From any thread."""

    def __init__(self, config: SourceConfig, find: Callable[[int], FoundFiles | None], where: str) -> None:
        """`where`: the places that were looked at, for the message that nothing is there."""
        self._config = config
        self._find = find
        self._where = where
        self._describing = threading.Lock()
        self._ages = FileAges()
        self._just_read: WeightVersion | None = None

    def offer(self, version: WeightVersion | None, deadline_ns: int) -> OfferedFiles:
        """The files that are there, with their manifest: rank 0 makes it, where it is not known, the others take it.
        NoPublicationError when there are no files, none of that version, or no manifest of them (yet);
        DeadlineExceededError when not all bytes could be read."""
        found = self._find(deadline_ns)
        if found is None:
            raise NoPublicationError(f"nothing is published in {self._where}")
        check_not_open_to_all(found.directory, found.names)
        files = identities(found)
        if found.memory is None:
            stated = self._stated(found)
            own = stated or self._newest(files)
            if version is not None and version != own:
                raise _not_to_be_had(version, found, own)
        # Nobody reads all bytes beside another who does.
        if not self._describing.acquire(timeout=max(deadline_ns - time.monotonic_ns(), 0) / 1e9):
            raise DeadlineExceededError(f"no time left to look at {found.directory}, which is being described")
        try:
            if found.memory is None:
                manifest, digest = self._described(found, files, stated, deadline_ns)
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
        self._just_read = None
        store = self._store()
        kept = store.manifest_files()
        for name in _sets(store):
            record = _record(store, name)
            if record is None:
                store.remove_file(name)
            elif record.version == str(version) and record.file in kept:
                store.remove_file(record.file)  # its number stays, so that nothing else is given it

    def _newest(self, files: Sequence[FileIdentity]) -> WeightVersion:
        """Where nothing says which version files are: when the newest of them was written, so that newer files are a
        newer version."""
        return WeightVersion(self._epoch(), max(file.mtime_ns for file in files))

    def _stated(self, found: FoundFiles) -> WeightVersion | None:
        """What a version file says, beside the files or in the model directory."""
        wanted = self._wanted(found)[0]
        return wanted.in_epoch(self._epoch()) if wanted is not None else None

    def _wanted(self, found: FoundFiles) -> tuple[WantedVersion | None, int]:
        """And when that was written."""
        for directory in (found.directory, self._config.model_dir):
            written_ns = version_written_ns(directory)  # looked at first: it may be replaced in between
            wanted = wanted_version(directory)
            if wanted is not None:
                return wanted, written_ns
        return None, 0

    def _epoch(self) -> int:
        return uncounted_epoch(self._config.channel)

    def _tell_ages(self, found: FoundFiles, files: Sequence[FileIdentity], version: WeightVersion) -> None:
        wanted, written_ns = self._wanted(found)
        if wanted is not None and not self._config.rank:
            self._ages.look(files, version, wanted, written_ns)

    def _check_stated(self, found: FoundFiles, stated: WeightVersion | None) -> None:
        """After the files were read, and are those that they were before: so they were there with that version."""
        now = self._stated(found)
        if now != stated:
            raise NoPublicationError(
                f"the version of the files in {found.directory} changed from {stated or 'none'} to {now or 'none'} "
                "while they were looked at: they may be of either; update again"
            )

    def _described(
        self, found: FoundFiles, files: Sequence[FileIdentity], stated: WeightVersion | None, deadline_ns: int
    ) -> tuple[Manifest, str]:
        version = stated or self._newest(files)
        store, name = self._store(), f"SET-{_key(found, files)}"
        known = self._known(store, name)
        is_known = known is not None and known[0].weight_version == version
        if self._config.rank and not is_known:
            raise _not_described(found, version)
        if not is_known:
            _check_steps(found, stated)
        self._tell_ages(found, files, version)
        if known is not None and is_known:
            return known
        if known is not None:
            manifest = known[0]
        else:
            manifest = describe(found, files, version, self._config.num_threads, deadline_ns)
        check_unchanged(found, files)
        self._check_stated(found, stated)
        # Of the same files under another version the bytes are known.
        return _keep(store, name, _as_version(manifest, version))

    def _described_memory(
        self, found: FoundFiles, files: Sequence[FileIdentity], version: WeightVersion | None, deadline_ns: int
    ) -> tuple[Manifest, str]:
        """Rank 0 reads it for whoever asks, since nothing but its bytes says whether it is another version; but not
        again for its own part in the update that it was just read for."""
        store, name = self._store(), f"SET-{_key(found, files)}"
        known = self._known(store, name)
        just_read, self._just_read = self._just_read, None
        if known is not None and version == known[0].weight_version and (self._config.rank or version == just_read):
            return known
        if known is not None and version is None and self._config.rank:
            return known
        if self._config.rank:
            raise _not_described(found, version)
        stated, newest = self._stated(found), self._newest(files)
        own = stated or (known[0].weight_version if known is not None else newest)
        if version not in (None, own):
            raise _not_to_be_had(version, found, own)
        manifest = describe(found, files, stated or newest, self._config.num_threads, deadline_ns)
        self._check_stated(found, stated)
        former = known[0] if known is not None else None
        manifest = self._counted(store, manifest, former) if stated is None else manifest
        if former is not None and stated == former.weight_version and not _is_same(manifest, former):
            raise _same_number(stated, self._wanted(found)[0])
        kept = _keep(store, name, manifest)
        if version not in (None, manifest.weight_version):
            raise _not_to_be_had(version, found, manifest.weight_version)
        self._just_read = manifest.weight_version
        return kept

    def _counted(self, store: Channel, manifest: Manifest, former: Manifest | None) -> Manifest:
        """The same bytes have the same number, others the next, also after `forget`."""
        version = manifest.weight_version
        if former is not None and _is_same(manifest, former) and former.weight_version.epoch == version.epoch:
            return _as_version(manifest, former.weight_version)
        given = [WeightVersion.parse(record.version) for record in map(partial(_record, store), _sets(store)) if record]
        return _as_version(manifest, max([version, *(_after(each) for each in given)]))

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


def _after(version: WeightVersion) -> WeightVersion:
    return WeightVersion(version.epoch, version.step + 1)


def _is_same(manifest: Manifest, other: Manifest) -> bool:
    return manifest.content_digest == other.content_digest


def _check_steps(found: FoundFiles, stated: WeightVersion | None) -> None:
    """NoPublicationError where files say themselves that they are of several steps, or of another than is stated."""
    steps = found.read_steps()
    said = {name: step for name, step in steps.items() if step is not None}
    if not said:
        return
    expected = stated.step if stated is not None else next(iter(said.values()))
    for name, step in steps.items():
        if step != expected:
            source = "its version file" if stated is not None else next(iter(said))
            text = "does not say its step" if step is None else f"says that it is step {step}"
            _log.warning("event=mixed_steps file=%s step=%s expected=%s", found.directory / name, step, expected)
            raise NoPublicationError(
                f"{found.directory / name} {text}, {source} says {expected}: files of two versions are mixed, or their "
                "trainer is not done (yet); update again when it is"
            )


def _same_number(stated: WeightVersion, wanted: WantedVersion | None) -> TrainerError:
    path = wanted.path if wanted is not None else "version.yaml"
    return TrainerError(
        f"{path} still says version {stated}, but the tensors have other bytes than those that were given that number: "
        "let the trainer write the step before it updates engines, or remove that file, and versions are counted"
    )


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


def _record(store: Channel, name: str) -> Latest | None:
    """None for a record that says nothing."""
    with contextlib.suppress(ManifestError, VersionFormatError):
        record = _read_record(store, name)
        if record is not None:
            WeightVersion.parse(record.version)
        return record
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

    def __init__(self, config: SourceConfig, find: Callable[[int], FoundFiles | None], where: str) -> None:
        """As `DescribedFiles`."""
        self._files = DescribedFiles(config, find, where)
        # Which version is wanted and which there is say the same files: what is there is what is wanted.
        super().__init__(FileTransport(self._files.offer, config.num_threads), replace(config, model_dir=None))

    def discredit(self, resolved: ResolvedPublication) -> None:
        """The files are read anew when next asked for: they changed in a way that their identities do not show."""
        super().discredit(resolved)
        self._files.forget(resolved.version)
