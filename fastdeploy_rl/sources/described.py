"""Weights that come without a manifest: rank 0 reads every byte once and writes the manifest that the others find.

    {channel}/described/                 0700
        manifest-{version}-{digest16}.json   as in a channel
        SET-{key32}                          JSON as `LATEST`: the manifest of the files whose identities make the key

Owns that directory, and the reading. Refuses to know formats: who found the files says what lies in them. Invariant: a
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from fastdeploy_rl import _native
from fastdeploy_rl import manifest as manifests
from fastdeploy_rl.checksum import ZERO, Fletcher4, add
from fastdeploy_rl.errors import (
    ConfigurationError,
    DeadlineExceededError,
    ManifestError,
    NoPublicationError,
    TrainerError,
)
from fastdeploy_rl.manifest import Manifest, Part, Segment, Tensor, build_manifest
from fastdeploy_rl.memory.private_directory import check_private_directory, open_private_directory
from fastdeploy_rl.plan.byte_range import ByteRange
from fastdeploy_rl.plan.part_rows import PartRows, pieces_of
from fastdeploy_rl.publish.channel import Channel, Latest
from fastdeploy_rl.sources.base import ResolvedPublication, SourceConfig
from fastdeploy_rl.sources.fetching import FetchingSource
from fastdeploy_rl.sources.version_file import UNCOUNTED_EPOCH, WantedVersion, version_written_ns, wanted_version
from fastdeploy_rl.transport.base import Offer
from fastdeploy_rl.transport.files import FileFetch, FileIdentity, FileTransport, OfferedFiles, identity_of
from fastdeploy_rl.version import WeightVersion

_log = logging.getLogger(__name__)

_DIRECTORY = "described"
_SET_NAME = re.compile(r"SET-[0-9a-f]{32}", re.ASCII)
_MAX_RECORD_BYTES = 4096
_KEPT_SETS = 4
_BATCH_BYTES = 32 << 20
"""Read, then summed up, before the next is read: what rank 0 needs beside its own weights."""


class FileLayout(NamedTuple):
    """What lies in a set of files: `layout` and `aliases` as in a manifest, `tensors` without checksums, whose parts
    count the files as segments. `twins`: other places where all the bytes of a tensor lie too."""

    layout: str
    tensors: Sequence[Tensor]
    twins: Sequence[tuple[str, Part]] = ()
    aliases: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class FoundFiles:
    """Files that together are one version, found and not read. `read_layout` reads their headers; it raises
    TrainerError or CheckpointError where they are not what they should be. `how`: what the layout depends on beside the
    files, as text."""

    directory: Path
    names: tuple[str, ...]
    read_layout: Callable[[], FileLayout]
    how: str


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
        files = _identities(found)
        own = self._version_of(found, files)
        if version is not None and version != own:
            raise NoPublicationError(f"version {version} is not to be had: {found.directory} has {own}")
        # Nobody reads all bytes beside another who does.
        if not self._describing.acquire(timeout=max(deadline_ns - time.monotonic_ns(), 0) / 1e9):
            raise DeadlineExceededError(f"no time left to look at {found.directory}, which is being described")
        try:
            manifest, digest = self._described(found, files, own, deadline_ns)
        finally:
            self._describing.release()
        return OfferedFiles(Offer(own, manifest, digest), found.directory, files)

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
        for directory in (found.directory, self._config.model_dir):
            written_ns = version_written_ns(directory)  # looked at first: it may be replaced in between
            wanted = wanted_version(directory)
            if wanted is not None:
                if written_ns < newest.mtime_ns:
                    self._warn(newest, wanted)
                return wanted.in_epoch(UNCOUNTED_EPOCH)
        return WeightVersion(UNCOUNTED_EPOCH, newest.mtime_ns)

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
        try:
            known = _read_known(store, name)
        except ManifestError as error:
            if self._config.rank:
                raise
            _log.warning("event=described_anew file=%s reason=%r", store.path / name, str(error))
            known = None
        if known is not None and known[0].weight_version == version:
            return known
        if self._config.rank:
            raise NoPublicationError(
                f"rank 0 has not described version {version} of {found.directory} (yet), or the files changed since; "
                "update again"
            )
        manifest = known[0] if known is not None else _describe(found, files, version, self._config, deadline_ns)
        if manifest.weight_version != version:
            # The same files under another version: their bytes are known.
            manifest = build_manifest(version, manifest.layout, manifest.segments, manifest.tensors, manifest.aliases)
        return manifest, _keep(store, name, manifest).file_digest

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


def _identities(found: FoundFiles) -> tuple[FileIdentity, ...]:
    files = []
    for name in found.names:
        try:
            files.append(identity_of(found.directory / name))
        except OSError as error:
            raise NoPublicationError(f"{found.directory / name}: {error.strerror}; update again") from error
    return tuple(files)


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


def _keep(store: Channel, name: str, manifest: Manifest) -> Latest:
    record = store.write_manifest(manifest)
    store.replace(name, msgspec.json.encode(record))
    _prune(store, name)
    return record


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


# --- reading --------------------------------------------------------------------------------------


class _Piece(NamedTuple):
    """Some rows of a part, or some bytes of one row, which is number `part` of all parts and twins; in a scratch
    memory they lie from `target_offset` on."""

    part: int
    segment: int
    rows: PartRows
    total_bytes: int
    target_offset: int = 0


def _describe(
    found: FoundFiles, files: Sequence[FileIdentity], version: WeightVersion, config: SourceConfig, deadline_ns: int
) -> Manifest:
    """Reads every byte. TrainerError where twins differ."""
    begun = time.monotonic()
    layout = found.read_layout()
    totals = _totals(found, files, layout, config.num_threads, deadline_ns)
    if _identities(found) != tuple(files):
        raise NoPublicationError(f"files in {found.directory} changed while they were read; update again")
    segments = [
        Segment(kind="file", locator=file.name, num_bytes=file.num_bytes, arena=0, generation=0) for file in files
    ]
    summed = [msgspec.structs.replace(tensor, checksum=totals[tensor.name].hex()) for tensor in layout.tensors]
    manifest = build_manifest(version, layout.layout, segments, summed, layout.aliases)
    _log.info(
        "event=described version=%s directory=%s files=%d bytes=%d seconds=%.3f",
        *(version, found.directory, len(files), sum(file.num_bytes for file in files), time.monotonic() - begun),
    )
    return manifest


def _totals(
    found: FoundFiles, files: Sequence[FileIdentity], layout: FileLayout, num_threads: int, deadline_ns: int
) -> dict[str, Fletcher4]:
    """The checksum of each whole tensor."""
    tensors = {tensor.name: tensor for tensor in layout.tensors}
    parts = [(tensor, part) for tensor in layout.tensors for part in tensor.parts]
    twins = [(tensors[name], part) for name, part in layout.twins]
    sums = _sum_up(found.directory, files, [*parts, *twins], num_threads, deadline_ns)
    totals = dict.fromkeys(tensors, ZERO)
    for (tensor, _), value in zip(parts, sums, strict=False):
        totals[tensor.name] = add(totals[tensor.name], value)
    for (tensor, part), value in zip(twins, sums[len(parts) :], strict=True):
        if value != totals[tensor.name]:
            raise TrainerError(
                f"{tensor.name!r} has different values in {found.names[tensor.parts[0].segment]} and in "
                f"{found.names[part.segment]}: it is not split over ranks, so they must be equal; files of two "
                "versions may be mixed"
            )
    return totals


def _sum_up(
    directory: Path,
    files: Sequence[FileIdentity],
    parts: Sequence[tuple[Tensor, Part]],
    num_threads: int,
    deadline_ns: int,
) -> list[Fletcher4]:
    """Of each part: its share in the checksum of the whole tensor."""
    sums = [ZERO] * len(parts)
    pieces = [
        _Piece(number, part.segment, rows, tensor.num_bytes)
        for number, (tensor, part) in enumerate(parts)
        for rows in pieces_of(tensor, part, _BATCH_BYTES)
    ]
    scratch = _native.Mapping.private(max((end for _, end in _batches(pieces)), default=1))
    done, total = 0, sum(piece.rows.num_bytes for piece in pieces)
    for batch, _ in _batches(pieces):
        try:
            _fetch(directory, files, [_wanted(piece) for piece in batch], scratch, num_threads, deadline_ns)
        except DeadlineExceededError as late:
            raise DeadlineExceededError(
                f"{late}; to describe them takes reading all of their {total} bytes, of which {done} were: give the "
                "update a later deadline"
            ) from late
        for piece, value in zip(batch, _sums_of(batch, scratch, num_threads), strict=True):
            sums[piece.part] = add(sums[piece.part], value)
        done += sum(piece.rows.num_bytes for piece in batch)
    scratch.close()
    return sums


def _fetch(
    directory: Path,
    files: Sequence[FileIdentity],
    ranges: Sequence[ByteRange],
    scratch: _native.Mapping,
    num_threads: int,
    deadline_ns: int,
) -> None:
    with contextlib.closing(FileFetch(directory, files, ranges, scratch, num_threads, deadline_ns)) as fetch:
        for _ in fetch.arrivals():
            pass


def _sums_of(batch: Sequence[_Piece], scratch: _native.Mapping, num_threads: int) -> Iterator[Fletcher4]:
    regions = [
        _native.Region(
            source=scratch,
            source_offset=piece.target_offset,
            source_stride=piece.rows.row_bytes,
            rows=piece.rows.rows,
            row_bytes=piece.rows.row_bytes,
            read_place=_native.Place(piece.rows.place_offset, piece.rows.place_stride, piece.total_bytes),
        )
        for piece in batch
    ]
    try:
        return iter([Fletcher4(*(read or ZERO)) for read, _ in _native.transfer(regions, num_threads)])
    finally:
        regions.clear()


def _batches(pieces: Sequence[_Piece]) -> Iterator[tuple[list[_Piece], int]]:
    """Pieces with their places in a scratch memory that every batch uses anew, and how much of it they need."""
    batch: list[_Piece] = []
    end = 0
    for piece in pieces:
        if batch and end + piece.rows.num_bytes > _BATCH_BYTES:
            yield batch, end
            batch, end = [], 0
        batch.append(piece._replace(target_offset=end))
        end = manifests.aligned(end + piece.rows.num_bytes)
    if batch:
        yield batch, end


def _wanted(piece: _Piece) -> ByteRange:
    """Rows that follow each other in the file are one run for whoever reads it."""
    size = piece.rows.num_bytes
    return ByteRange(piece.segment, piece.rows.source_offset, size, 1, size, piece.target_offset)


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
