"""How much memory this process could still take without the system killing somebody for it.

Owns the reading of what the kernel says, of the machine and of the control groups (version 2 and 1) that bound this
process. Refuses to know what the memory is for. Invariant: reading changes nothing, and what the kernel does not say
bounds nothing."""

import sys
from collections.abc import Iterator
from pathlib import Path

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_MAX_TEXT = 1 << 16


def free_memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Bytes: the least of what the machine has available and what each control group above this process still allows.
    Page cache that can be given up counts as free. A guess: others take memory too."""
    available = _field(_text(proc / "meminfo"), "MemAvailable:")
    bounds = [room for directory in _groups(proc, cgroups) if (room := _room(directory)) is not None]
    known = [bound for bound in (available and available << 10, *bounds) if bound is not None]
    return max(min(known, default=sys.maxsize), 0)


def _groups(proc: Path, cgroups: Path) -> Iterator[Path]:
    """Directories of the groups that bound memory, this process's own first, then those above it."""
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        root = cgroups / "memory" if controllers else cgroups
        own = root / path.lstrip("/")
        yield from (place for place in (own, *own.parents) if place == root or root in place.parents)


def _room(directory: Path) -> int | None:
    """What one group still allows; None where it has no bound."""
    for limit_name, usage_name in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit, usage = _text(directory / limit_name).strip(), _text(directory / usage_name).strip()
        if limit.isdigit() and usage.isdigit():
            return int(limit) - int(usage) + (_field(_text(directory / "memory.stat"), "inactive_file") or 0)
    return None


def _field(text: str, name: str) -> int | None:
    for line in text.splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == name and words[1].isdigit():
            return int(words[1])
    return None


def _text(path: Path) -> str:
    """Empty where there is no such file, or none that this process may read."""
    try:
        with path.open(encoding="ascii", errors="replace") as file:
            return file.read(_MAX_TEXT)
    except OSError:
        return ""
