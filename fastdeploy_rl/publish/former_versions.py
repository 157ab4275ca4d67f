"""The versions before the latest that engines can still take: for a rollback, or for a rank that was restarted.

Owns which manifest files beside that of `LATEST` stay, and which memory each names. A file goes before any memory that
it names is written again or given up. Refuses to know tensors. Invariant: what is found here was the latest once, and
`is_standing` says whether its bytes are still what they were; leases by generation are what readers are safe by.
"""

import logging
from collections.abc import Sequence
from contextlib import ExitStack

from fastdeploy_rl.errors import ManifestError, NoPublicationError, SegmentError
from fastdeploy_rl.manifest import Segment
from fastdeploy_rl.publish.channel import Channel, Latest, order_of
from fastdeploy_rl.publish.leases import NUM_ARENAS, LeaseTable

_log = logging.getLogger(__name__)


class FormerVersions:
    """What one publisher knows of them: every publication that it saw become a former one, and those it found."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._segments: dict[str, tuple[Segment, ...]] = {}
        """By manifest file; the newest last."""

    def load(self, latest: Latest | None) -> None:
        """Those that earlier publishers left intact. Of more files than versions can be intact, the newest are read."""
        self._segments = {}
        if latest is None:
            return
        files = [file for file in self._channel.manifest_files() if order_of(file) < order_of(latest.file)]
        for file in sorted(files, key=order_of)[-NUM_ARENAS:]:
            try:
                segments = self._channel.read_manifest_file(file).segments
            except (FileNotFoundError, ManifestError) as error:
                _log.warning("channel=%s file=%s event=not_readable reason=%s", self._channel.path, file, error)
                continue
            if is_standing(self._channel, segments):
                self._segments[file] = segments

    def add(self, file: str, segments: tuple[Segment, ...]) -> None:
        """One that has just been followed by another."""
        self._segments[file] = segments

    def clear(self) -> None:
        """Nothing is published any more, so nothing is former."""
        self._segments = {}

    def rows_of_newest(self, publisher: int) -> frozenset[int]:
        """The rows of that publisher's table which the version before the latest names, if it can still be taken."""
        newest = next(reversed(self._segments.values()), ())
        return frozenset(segment.arena for segment in newest if segment.publisher == publisher)

    def withdraw(self, publisher: int, row: int) -> None:
        """No version that names this memory is to be found any more: it is about to change, or to go."""
        for file, segments in list(self._segments.items()):
            if any((segment.publisher, segment.arena) == (publisher, row) for segment in segments):
                self._channel.remove_file(file)
                del self._segments[file]

    def sweep(self, latest: Latest | None) -> None:
        """Removes the manifests of all versions that cannot be taken any more, and what interrupted writers left. Only
        by publisher 0, which alone writes them."""
        self._segments = {
            file: segments for file, segments in self._segments.items() if is_standing(self._channel, segments)
        }
        self._channel.remove_superseded([*self._segments, *([latest.file] if latest else [])])


def is_standing(channel: Channel, segments: Sequence[Segment]) -> bool:
    """Every arena still has the contents that the manifest with these segments names; a lease makes them stay."""
    with ExitStack() as stack:
        tables: dict[int, LeaseTable] = {}
        try:
            for segment in segments:
                if segment.publisher not in tables:
                    table = LeaseTable(channel.leases_of(segment.publisher), channel.holders_dir)
                    tables[segment.publisher] = stack.enter_context(table)
                if not _holds(tables[segment.publisher], segment):
                    return False
        except (NoPublicationError, SegmentError):
            return False  # no such table, or no such row in it
    return True


def _holds(table: LeaseTable, segment: Segment) -> bool:
    return table.generation(segment.arena) == segment.generation and table.segment(segment.arena) == segment.locator
