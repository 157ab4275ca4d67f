"""Tokens per second through updates, as a picture: one field an update, its stage, stall and commit marked."""

from collections.abc import Mapping
from pathlib import Path

import matplotlib
from bench_load import AT_ONCE
from bench_loaded_updates import LoadedUpdate
from matplotlib.axes import Axes
from matplotlib.figure import Figure

CHART = Path("build") / "throughput_update.png"
INK, STAGE, STALL = "#1f4e79", "#f2c14e", "#c0392b"


def draw(updates: Mapping[str, LoadedUpdate]) -> None:
    """Writes CHART, beside which the working directory is the repository's."""
    matplotlib.use("Agg")  # no window, wherever this runs
    figure = Figure(figsize=(11, 3.4 * len(updates)), layout="constrained")
    fields = figure.subplots(len(updates), squeeze=False)[:, 0]
    for axes, (name, update) in zip(fields, updates.items(), strict=True):
        _draw_one(axes, name, update)
    fields[-1].set_xlabel("seconds since the update was asked for")
    CHART.parent.mkdir(exist_ok=True)
    figure.savefig(CHART, dpi=120)


def _draw_one(axes: Axes, name: str, update: LoadedUpdate) -> None:
    """Each decode step as wide as it took, and as high as the tokens of all requests that it gave a second."""
    zero, steps = update.asked.begin, update.steps()
    edges = [steps[0].begin - zero, *(step.end - zero for step in steps)]
    axes.stairs([AT_ONCE / step.seconds for step in steps], edges, color=INK, fill=True, alpha=0.25)
    axes.stairs([AT_ONCE / step.seconds for step in steps], edges, color=INK, label="tokens/s, step by step")
    axes.axhline(AT_ONCE / update.step_s, color=INK, linestyle=":", label="without an update (median)")
    stage, stall = update.staging, update.stall
    axes.axvspan(stage.begin - zero, stage.end - zero, color=STAGE, alpha=0.4, label=f"stage, {_ms(stage.seconds)}")
    axes.axvspan(stall.begin - zero, stall.end - zero, color=STALL, alpha=0.5, label=f"stall, {_ms(stall.seconds)}")
    axes.axvline(stall.end - zero, color=STALL, label="commit")
    axes.set(title=f"{AT_ONCE} requests, update {name}", ylabel="tokens per second", xlim=(edges[0], edges[-1]))
    axes.set_ylim(bottom=0)
    axes.legend(loc="lower left", ncols=3, fontsize="small")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
