"""What the ages of files without a manifest say against their version: for the log, since nothing proves it.

Owns three signs that files are not what `version.yaml` says: one is newer than it; one stayed while others were
written for a newer version; one is much older than the others. Refuses to know formats, and to refuse: a trainer may
write what it likes, when it likes. Invariant: each is told once for each state of the files.
"""

import logging
from collections.abc import Sequence

from fastdeploy_rl.sources.version_file import WantedVersion
from fastdeploy_rl.transport.files import FileIdentity
from fastdeploy_rl.version import WeightVersion

_log = logging.getLogger(__name__)

_APART_NS = 600 * 10**9
"""Between the files of one version; a trainer writes all of them in one go."""


class FileAges:
    """What one rank saw of a set of files, as often as it looked. Not for several threads at a time."""

    def __init__(self) -> None:
        self._first: dict[FileIdentity, WeightVersion | None] = {}
        """Under which version each file was seen first; None where it was newer than that."""
        self._told: set[tuple[str, FileIdentity]] = set()

    def look(
        self, files: Sequence[FileIdentity], version: WeightVersion, wanted: WantedVersion, written_ns: int
    ) -> None:
        """`files`: those that are there, and of `version` as `wanted` says, which was written at `written_ns`."""
        self._told = {(event, file) for event, file in self._told if file in files}
        newest = max(files, key=lambda file: file.mtime_ns)
        if newest.mtime_ns > written_ns:
            self._tell("files_newer_than_version", newest, wanted, f"newer_than={wanted.path}")
        for file in files:
            self._first.setdefault(file, None if file.mtime_ns > written_ns else version)
        self._first = {file: self._first[file] for file in files}
        oldest = min(files, key=lambda file: file.mtime_ns)
        stayed = [file for file, first in self._first.items() if first not in (None, version)]
        if stayed and len(stayed) < len(files):
            self._tell("files_older_than_version", stayed[0], wanted, f"stayed_since={self._first[stayed[0]]}")
        elif newest.mtime_ns - oldest.mtime_ns > _APART_NS:
            apart_s = (newest.mtime_ns - oldest.mtime_ns) / 1e9
            self._tell("files_older_than_version", oldest, wanted, f"older_than={newest.name} by_seconds={apart_s:.0f}")

    def _tell(self, event: str, file: FileIdentity, wanted: WantedVersion, what: str) -> None:
        if (event, file) in self._told:
            return
        self._told.add((event, file))
        _log.warning(
            "version=%s event=%s file=%s %s reason='the files may be of another step, or of two; where the version is "
            "written last, update again when it was'",
            *(wanted.text, event, file.name, what),
        )
