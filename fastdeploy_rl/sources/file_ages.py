"""What the ages of files without a manifest say against their version.

Owns the signs that files are not what `version.yaml` says. Proof that a trainer is not done: since the last look some
files were replaced, after the version was written, and others were not. For the log alone, since a trainer may write
what it likes, when it likes: a file is newer than the version; one stayed while others were written for a newer one;
one is much older than the others. Refuses to know formats. Invariant: each is told once for each state of the files.
"""

import logging
from collections.abc import Sequence

from fastdeploy_rl.errors import NoPublicationError
from fastdeploy_rl.sources.version_file import WantedVersion
from fastdeploy_rl.transport.files import FileIdentity
from fastdeploy_rl.version import WeightVersion

_log = logging.getLogger(__name__)

_APART_NS = 600 * 10**9
"""Between the files of one version; a trainer writes all of them in one go."""


def _age(file: FileIdentity) -> int:
    return file.mtime_ns


class FileAges:
    """What one rank saw of a set of files, as often as it looked. Not for several threads at a time."""

    def __init__(self) -> None:
        self._first: dict[FileIdentity, WeightVersion | None] = {}
        """Under which version each file was seen first; None while it is newer than any."""
        self._half_replaced: set[FileIdentity] = set()
        self._told: set[tuple[str, FileIdentity]] = set()

    def look(
        self, files: Sequence[FileIdentity], version: WeightVersion, wanted: WantedVersion, written_ns: int
    ) -> None:
        """`files`: those that are there, and of `version` as `wanted` says, which was written at `written_ns`.
        NoPublicationError where their trainer is not done."""
        self._check_done(files, wanted, written_ns)
        self._told = {(event, file) for event, file in self._told if file in files}
        newest = max(files, key=_age)
        if newest.mtime_ns > written_ns:
            self._tell("files_newer_than_version", newest, wanted, f"newer_than={wanted.path}")
        now = {file: None if file.mtime_ns > written_ns else version for file in files}
        self._first = {file: self._first.get(file) or now[file] for file in files}
        oldest = min(files, key=_age)
        stayed = [file for file, first in self._first.items() if first not in (None, version)]
        if stayed and len(stayed) < len(files):
            self._tell("files_older_than_version", stayed[0], wanted, f"stayed_since={self._first[stayed[0]]}")
        elif newest.mtime_ns - oldest.mtime_ns > _APART_NS:
            apart_s = (newest.mtime_ns - oldest.mtime_ns) / 1e9
            self._tell("files_older_than_version", oldest, wanted, f"older_than={newest.name} by_seconds={apart_s:.0f}")

    def _check_done(self, files: Sequence[FileIdentity], wanted: WantedVersion, written_ns: int) -> None:
        stayed = [file for file in files if self._first.get(file) is not None]
        replaced = {file.name for file in files if file not in self._first}
        if replaced and self._first:
            self._half_replaced = {*files} if stayed and not replaced <= self._behind() else set()
        newest, oldest = max(files, key=_age), min(files, key=_age)
        if self._half_replaced == {*files} and newest.mtime_ns > written_ns:
            raise NoPublicationError(
                f"{newest.name} was replaced since {wanted.path} was written, {oldest.name} was not: their trainer is "
                "not done (yet); update again when it has written the version, which comes last"
            )

    def _behind(self) -> set[str]:
        """Files of an older version than others: when they are replaced, the set is whole."""
        seen = {file.name: first for file, first in self._first.items() if first is not None}
        return {name for name, first in seen.items() if first < max(seen.values())}

    def _tell(self, event: str, file: FileIdentity, wanted: WantedVersion, what: str) -> None:
        if (event, file) in self._told:
            return
        self._told.add((event, file))
        _log.warning(
            "version=%s event=%s file=%s %s reason='the files may be of another step, or of two; where the version is "
            "written last, update again when it was'",
            *(wanted.text, event, file.name, what),
        )
