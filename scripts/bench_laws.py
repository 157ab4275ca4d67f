"""What is paid before the first byte moves: importing the package, and planning for a publication."""

import statistics
import subprocess
import sys

from bench_row import Row, at_most, seconds_of

from fastdeploy_rl.checksum import Fletcher4
from fastdeploy_rl.coverage import ParameterSpec
from fastdeploy_rl.manifest import Manifest, Part, Segment, Tensor, build_manifest
from fastdeploy_rl.plan.planner import make_plan

NUM_TENSORS, RANKS, SIDE = 1000, 3, 96
_IMPORT = "import time; t = time.perf_counter(); import fastdeploy_rl; {more}; print(time.perf_counter() - t)"
_NOTHING, _USED = "0", "fastdeploy_rl.WeightPublisher, fastdeploy_rl.EngineController"


def law_rows(runs: int) -> list[Row]:
    imported, used = _import_seconds(_NOTHING, runs), _import_seconds(_USED, runs)
    manifest, specs = _publication(), _model()
    planned = statistics.median(seconds_of(lambda: make_plan(manifest, specs, 1, RANKS)) for _ in range(runs))
    return [
        at_most("import fastdeploy_rl", imported, "s", "0.3 s", 0.3, 0.3, "< 0.3 s"),
        at_most("the same, publisher and controller loaded", used, "s", "0.3 s", 0.3, 0.3, "< 0.3 s"),
        at_most("plan of 1,000 tensors, one of 3 ranks", planned, "s", "50 ms", 0.050, 0.050, "< 50 ms"),
    ]


def _import_seconds(more: str, runs: int) -> float:
    """In a fresh interpreter each time; its own start is not counted."""
    command = [sys.executable, "-c", _IMPORT.format(more=more)]
    return statistics.median(float(subprocess.check_output(command, text=True)) for _ in range(runs))


def _model() -> list[ParameterSpec]:
    """Split along rows, along columns, and not at all, in turn."""
    axes = (0, 1, None)
    return [ParameterSpec(f"layers.{i}.weight", "F32", (SIDE, SIDE), axes[i % 3]) for i in range(NUM_TENSORS)]


def _publication() -> Manifest:
    """The same tensors in BF16, cut for as many ranks: a third where the model cuts them, a third along the other axis,
    a third that the model leaves whole."""
    part_bytes = SIDE * SIDE * 2 // RANKS
    aligned = -(-part_bytes // 512) * 512
    share = SIDE // RANKS
    tensors = [
        Tensor(
            name=f"layers.{i}.weight",
            dtype="BF16",
            shape=(SIDE, SIDE),
            shard_axis=i % 2,
            parts=tuple(
                Part(0, (i * RANKS + rank) * aligned, rank * share, (rank + 1) * share) for rank in range(RANKS)
            ),
            checksum=Fletcher4(0, 0, 0, i).hex(),
        )
        for i in range(NUM_TENSORS)
    ]
    segment = Segment("shm", "bench", NUM_TENSORS * RANKS * aligned, 0, 0)
    return build_manifest("1.1", f"tp:{RANKS}", [segment], tensors, {})
