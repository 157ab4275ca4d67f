"""Which version an engine wants that was given none: what FastDeploy's trainers write beside the model.

Owns the two files, `version.yaml` (`step`, else `version`; https://github.com/PaddlePaddle/FastDeploy writes both) and
the older `version.txt`, and their bounds. Refuses to know where weights come from and which versions there are. They
are read as plain `key: value` lines: a number needs no YAML.
"""

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from fastdeploy_rl.errors import VersionFormatError
from fastdeploy_rl.memory.regular_file import read_regular
from fastdeploy_rl.publish.channel import Channel
from fastdeploy_rl.version import WeightVersion

UNCOUNTED_EPOCH = 1
"""Of steps where nobody counts epochs: every rank, and every engine, must come to the same one."""
_MAX_BYTES = 64 << 10
_YAML, _TEXT = "version.yaml", "version.txt"
_LINE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)[ \t]*:(?:[ \t]+(.*?))?[ \t]*", re.ASCII)
_VALUE = re.compile(r"(?:\"([^\"]*)\"|'([^']*)'|([^#\"']*?))[ \t]*(?:#.*)?", re.ASCII)
_STEP = re.compile(r"([0-9]+)(?:\.0*)?", re.ASCII)
_BARE = re.compile(r"[0-9]+", re.ASCII)


def uncounted_epoch(channel: Path) -> int:
    """Of steps that come without one: the channel's present epoch, so that a trainer may change over from publishing
    there to files of its own; UNCOUNTED_EPOCH where nobody published there. SegmentError where its file is damaged."""
    return max(Channel(channel).read_epoch(), UNCOUNTED_EPOCH)


class WantedVersion(NamedTuple):
    """`text`: "3.1200", or FastDeploy's plain "1200"; `path`: who says so."""

    text: str
    path: Path

    @property
    def needs_epoch(self) -> bool:
        """A plain step, of whichever epoch is the current one."""
        return _BARE.fullmatch(self.text) is not None

    def in_epoch(self, current_epoch: int) -> WeightVersion:
        """The version that is meant. VersionFormatError, naming the file, where it is none."""
        try:
            return WeightVersion.parse(self.text, current_epoch=current_epoch)
        except VersionFormatError as error:
            raise VersionFormatError(f"{self.path}: {error}") from error


def wanted_version(model_dir: Path | None) -> WantedVersion | None:
    """What `version.yaml`, or where there is none `version.txt`, of the directory says; None where neither is there, so
    that the newest is meant. VersionFormatError for a file that names no version, is too large or is no file."""
    if model_dir is None:
        return None
    for name, find in ((_YAML, _in_yaml), (_TEXT, str.strip)):
        path = model_dir / name
        text = _read(path)
        if text is not None:
            return _wanted(path, text, find)
    return None


def _wanted(path: Path, text: str, find: Callable[[str], str]) -> WantedVersion:
    try:
        wanted = WantedVersion(find(text), path)
    except VersionFormatError as error:
        raise VersionFormatError(f"{path}: {error}") from error
    wanted.in_epoch(0)
    return wanted


def version_written_ns(model_dir: Path | None) -> int:
    """When the file that `wanted_version` reads was written, by the clock of its file system; 0 where there is none."""
    if model_dir is None:
        return 0
    for name in (_YAML, _TEXT):
        with contextlib.suppress(OSError):
            return os.stat(model_dir / name).st_mtime_ns
    return 0


def _in_yaml(text: str) -> str:
    """The value of `step`, else that of `version`, at the outermost level; "" where there is neither. Of a key that is
    there twice the last one counts, as for the YAML reader that FastDeploy uses.

    FastDeploy's `step` is a plain number, and `8.0` is the number 8 as well: only `version` may have an epoch.
    VersionFormatError for a step that is none."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        match = _LINE.fullmatch(line)
        value = match and _VALUE.fullmatch(match[2] or "")
        if match and value:
            found[match[1]] = next((group for group in value.groups() if group is not None), "")
    step = found.get("step")
    if not step:
        return found.get("version") or ""
    match = _STEP.fullmatch(step)
    if match is None:
        raise VersionFormatError(f"{step!r:.80} is no step, but a plain number is; write EPOCH.STEP as `version`")
    return match[1]


def _read(path: Path) -> str | None:
    try:
        return read_regular(path, _MAX_BYTES).decode("utf-8-sig", "replace")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise VersionFormatError(f"{path} cannot be read: {error.strerror}") from error
