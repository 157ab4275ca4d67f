"""What processes and their shared memory hold, and whether that grows.

Owns the reading of /proc and /dev/shm, the fit, and the judgement. Invariant: what leaks one of anything an update is
told from noise, in a short run too: noise is a bounded number of things, whatever the number of updates."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SHM_DIR = Path("/dev/shm")


@dataclass(frozen=True)
class Gauge:
    """A kind of thing that is counted. `noise`: by so much (in `unit`) the fitted line may rise over the whole run and
    still be called flat, for caches, allocators and a command just under way make it rise a little."""

    name: str
    unit: str
    noise: float


DESCRIPTORS = Gauge("descriptors", "", 4)
MAPPINGS = Gauge("mappings", "", 8)
THREADS = Gauge("threads", "", 2)
OBJECTS = Gauge("objects", "", 250)
RSS = Gauge("rss", "KiB", 1536)
SEGMENTS = Gauge("segments", "", 4)
SHM_BYTES = Gauge("shm_bytes", "KiB", 64)
FILES = Gauge("files", "", 8)

Reading = Mapping[Gauge, float]


def read_process(pid: int, num_objects: int) -> Reading:
    """`num_objects`: what the process itself says, since nobody else can."""
    process = Path("/proc") / str(pid)
    resident_pages = int((process / "statm").read_text().split()[1])
    return {
        DESCRIPTORS: len(os.listdir(process / "fd")),
        MAPPINGS: (process / "maps").read_text(errors="replace").count("\n"),
        THREADS: len(os.listdir(process / "task")),
        OBJECTS: num_objects,
        RSS: resident_pages * os.sysconf("SC_PAGE_SIZE") / 1024,
    }


def read_memory(marks: Sequence[str], folders: Sequence[Path]) -> Reading:
    """Segments whose name has one of `marks`, and the files in `folders`. A history is no leak: it has bounds of its
    own, which no run reaches."""
    sizes = [_size(entry) for entry in SHM_DIR.iterdir() if any(mark in entry.name for mark in marks)]
    segments = [size for size in sizes if size is not None]
    files = [path for folder in folders for path in folder.rglob("*") if not path.name.startswith("history.jsonl")]
    return {SEGMENTS: len(segments), SHM_BYTES: sum(segments) / 1024, FILES: len(files)}


def _size(path: Path) -> int | None:
    """None for what was removed meanwhile, and for directories."""
    try:
        return path.stat().st_size if path.is_file() else None
    except FileNotFoundError:
        return None


@dataclass(frozen=True)
class Slope:
    """`per_1000`: how much of `unit` 1000 updates add; above `bound` it grows."""

    who: str
    gauge: str
    unit: str
    per_1000: float
    bound: float

    @property
    def is_flat(self) -> bool:
        return self.per_1000 <= self.bound

    @property
    def share_of_bound(self) -> float:
        """Above 1: it grows."""
        return self.per_1000 / self.bound

    def __str__(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        return f"{self.who}: {self.per_1000:+.1f}{unit} of {self.gauge} per 1000 updates (bound {self.bound:.1f})"


def slope(who: str, gauge: Gauge, updates: Sequence[float], values: Sequence[float]) -> Slope:
    """The least-squares line through (updates, value), after the warm-up."""
    kept = after_warm_up(updates)
    rise = float(np.polyfit(kept, after_warm_up(values), 1)[0])
    span = kept[-1] - kept[0]
    return Slope(who, gauge.name, gauge.unit, round(1000 * rise, 2) + 0.0, round(1000 * gauge.noise / span, 2))


def after_warm_up(readings: Sequence[float]) -> Sequence[float]:
    """Those that count: arenas, caches and the allocator's pools are filled by the first third."""
    return readings[len(readings) // 3 :]
