"""What the kernel says about this process and its container: /proc and /sys, parsed.

Owns the formats of those files. Refuses to judge. Every parser takes text and gives records, so that a test needs no
other machine; `Kernel` reads the files below a root, and a file that is missing or closed to us reads as empty.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

_MAX_BYTES = 4 << 20
_UNLIMITED = 1 << 60
"""cgroup v1 writes "no limit" as a number of this order."""

INITIAL_NAMESPACES: Mapping[str, int] = {"ipc": 4026531839, "user": 4026531837, "pid": 4026531836}
"""Inode numbers of the machine's first namespaces (include/linux/proc_ns.h)."""

_CONTAINER_FILES = {
    "/var/run/secrets/kubernetes.io": "kubernetes",
    "/run/.containerenv": "podman",
    "/.dockerenv": "docker",
}
_CONTAINER_CGROUPS = {"kubepods": "kubernetes", "docker": "docker", "libpod": "podman", "containerd": "containerd"}


class Mount(NamedTuple):
    """One line of mountinfo: `root` of the file system that is seen at `point`, and its options, mount and file
    system together."""

    root: str
    point: str
    kind: str
    options: tuple[str, ...]

    def option(self, name: str) -> str | None:
        """The value of `name=value`; None where it is not set."""
        values = [option.partition("=")[2] for option in self.options if option.partition("=")[0] == name]
        return values[-1] if values else None


class FileIdentity(NamedTuple):
    """Two paths lead to one file where both numbers agree; of a mount's root, to one file system."""

    device: int
    inode: int


class MemoryLimit(NamedTuple):
    """Of the memory cgroups above this process, the tightest: bytes allowed, and in use there."""

    limit_bytes: int
    used_bytes: int


class Kernel:
    """The files of one machine."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    def read(self, path: str) -> str:
        try:
            with open(self._at(path), "rb") as file:
                return file.read(_MAX_BYTES).decode("utf-8", "replace")
        except OSError:
            return ""

    def exists(self, path: str) -> bool:
        return self._at(path).exists()

    def link(self, path: str) -> str:
        """Where a link leads; empty where there is none, or it is not for us to see."""
        try:
            return os.readlink(self._at(path))
        except OSError:
            return ""

    def names(self, directory: str) -> list[str] | None:
        """Entries of a directory; None where there is none, or it is not for us to see."""
        try:
            return os.listdir(self._at(directory))
        except OSError:
            return None

    def identity(self, path: str) -> FileIdentity | None:
        """Which file a path leads to, over links and into other processes' mounts; None where we cannot follow."""
        try:
            status = os.stat(self._at(path))
        except OSError:
            return None
        return FileIdentity(status.st_dev, status.st_ino)

    def processes(self) -> list[int]:
        """All that this /proc shows."""
        return sorted(int(name) for name in self.names("/proc") or [] if name.isdecimal())

    def is_open_to_us(self, process: str) -> bool:
        """May we see namespaces, environment and mounts of a process?"""
        return bool(self.link(f"/proc/{process}/ns/pid"))

    def environ(self, process: str = "self") -> dict[str, str]:
        """The environment that a process was started with; what it set for itself later does not show. Empty where it
        is not for us to see."""
        return parse_environ(self.read(f"/proc/{process}/environ"))

    def arguments(self, process: str) -> list[str]:
        """Its command line; empty for a thread of the kernel, and for a process that has ended."""
        text = self.read(f"/proc/{process}/cmdline")
        return text.removesuffix("\0").split("\0") if text else []

    def user(self, process: str = "self") -> int | None:
        """The user that a process acts as."""
        return parse_user(self.read(f"/proc/{process}/status"))

    def mount_at(self, point: str, process: str = "self") -> Mount | None:
        """What is mounted there now: of several, the last one hides the others."""
        mounts = [mount for mount in parse_mounts(self.read(f"/proc/{process}/mountinfo")) if mount.point == point]
        return mounts[-1] if mounts else None

    def namespace(self, kind: str, process: str = "self") -> int | None:
        """Inode number of a namespace; None where it cannot be seen."""
        return parse_namespace(self.link(f"/proc/{process}/ns/{kind}"))

    def container(self) -> str:
        """Which kind of container this is, as far as it shows; empty for none."""
        found = [kind for path, kind in _CONTAINER_FILES.items() if self.exists(path)]
        return found[0] if found else container_of_cgroup(self.read("/proc/1/cgroup"))

    def memory_limit(self) -> MemoryLimit | None:
        """None where no memory cgroup limits this process."""
        paths = parse_cgroups(self.read("/proc/self/cgroup"))
        limits = [
            limit
            for mount in parse_mounts(self.read("/proc/self/mountinfo"))
            for directory in cgroup_directories(mount, paths)
            if (limit := self._limit_in(directory, mount.kind)) is not None
        ]
        return min(limits, default=None)

    def available_bytes(self) -> int | None:
        """Memory that can be had without swapping."""
        match = re.search(r"^MemAvailable:\s*(\d+) kB$", self.read("/proc/meminfo"), re.MULTILINE)
        return int(match[1]) * 1024 if match else None

    def _limit_in(self, directory: str, kind: str) -> MemoryLimit | None:
        names = ("memory.max", "memory.current")
        if kind == "cgroup":
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        limit, used = (self.read(f"{directory}/{name}").strip() for name in names)
        if not limit.isdigit() or int(limit) >= _UNLIMITED:
            return None
        return MemoryLimit(int(limit), int(used) if used.isdigit() else 0)

    def _at(self, path: str) -> Path:
        return self._root / path.lstrip("/")


def parse_mounts(mountinfo: str) -> list[Mount]:
    """The lines of /proc/PID/mountinfo; one that is not of its form is left out."""
    mounts = []
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        left, right = before.split(), after.split()
        if len(left) >= 6 and len(right) >= 3:
            options = tuple(",".join((left[5], right[2])).split(","))
            mounts.append(Mount(_unescape(left[3]), _unescape(left[4]), right[0], options))
    return mounts


def parse_cgroups(text: str) -> dict[str, str]:
    """Controller -> path, from /proc/PID/cgroup; the one tree of cgroup v2 stands under the empty name."""
    paths = {}
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for controller in controllers.split(","):
            paths[controller] = path
    return paths


def cgroup_directories(mount: Mount, paths: Mapping[str, str]) -> list[str]:
    """Directories of the memory controller, from this process's own group up to what is mounted here."""
    is_v1 = mount.kind == "cgroup" and "memory" in mount.options
    if not is_v1 and mount.kind != "cgroup2":
        return []
    path = paths.get("memory" if is_v1 else "", "")
    # Inside a container the mount shows a part of the tree, and the path may still count from the tree's root.
    inside = path.removeprefix(mount.root) if mount.root != "/" else path
    parts = [part for part in inside.split("/") if part not in ("", "..")]
    return ["/".join([mount.point, *parts[:count]]) for count in range(len(parts), -1, -1)]


def parse_environ(text: str) -> dict[str, str]:
    """Name -> value, of /proc/PID/environ; of a name that stands there twice, the first, as getenv has it."""
    pairs = (entry.partition("=") for entry in reversed(text.split("\0")))
    return {name: value for name, is_pair, value in pairs if is_pair}


def parse_user(status: str) -> int | None:
    """The effective user id in /proc/PID/status."""
    match = re.search(r"^Uid:\t\d+\t(\d{1,10})\t", status, re.MULTILINE)
    return int(match[1]) if match else None


def parse_namespace(link: str) -> int | None:
    """The number in `pid:[4026531836]`."""
    match = re.fullmatch(r"[a-z_]+:\[(\d{1,20})\]", link)
    return int(match[1]) if match else None


def container_of_cgroup(text: str) -> str:
    """The kind of container that the groups' names give away; empty for none."""
    return next((kind for word, kind in _CONTAINER_CGROUPS.items() if word in text), "")


def has_capability(status: str, number: int) -> bool:
    """Is a capability in force, by /proc/PID/status?"""
    match = re.search(r"^CapEff:\s*([0-9a-f]{1,16})$", status, re.MULTILINE)
    return match is not None and bool(int(match[1], 16) >> number & 1)


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
