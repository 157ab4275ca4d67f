"""Updates, pauses and sleep of an engine with eight requests in it, on the real model: stalls with KV cache, prefix
cache and graphs, what decoding loses to `stage`, what comes back late, what is captured anew, what memory returns.

Draws a chart of two updates as well. bench_loaded_updates.py plays the updates, bench_sleep.py the sleep."""

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from bench_chart import CHART, draw
from bench_load import AT_ONCE
from bench_loaded_updates import LoadedUpdate, Scene, Weights, scene
from bench_row import Row, at_least, at_most
from bench_sleep import sleep_rows
from bench_updates import WARM_UP, Limits

from fastdeploy_rl.config import ALIAS, COPY, KEEP, KV_POLICIES, REBUILD

KEEP_S, ALIAS_STALL_S = 0.010, 0.005
SHARE = 0.7
CHART_TOKENS = 24
"""Of each request before and after an update that is drawn."""


def lifecycle_rows(model_dir: Path, runs: int) -> list[Row]:
    weights = Weights(model_dir)
    limits = Limits(weights.num_bytes)
    with scene(model_dir, weights, ALIAS) as engine:
        by_alias = _updates(engine, runs, limits)
        paused = [engine.update_paused() for _ in range(runs)]
        drawn = {"by alias, KV kept": engine.update(KEEP, CHART_TOKENS, CHART_TOKENS)}
        rows = [
            *_alias_stalls(by_alias),
            *_keep_gaps(by_alias, paused),
            *_shares(ALIAS, by_alias),
            *_captures("alternating arenas", by_alias),
            _copied(by_alias),
            *sleep_rows(engine, ALIAS),
        ]
    limits.forget()
    with scene(model_dir, weights, COPY) as engine:
        by_copy = _updates(engine, runs, limits)
        drawn["by copy, KV rebuilt"] = engine.update(REBUILD, CHART_TOKENS, CHART_TOKENS)
        rows += [
            *_copy_stalls(by_copy, limits.median("copy")),
            *_shares(COPY, by_copy),
            *_captures(COPY, by_copy),
            *sleep_rows(engine, COPY),
        ]
    draw(drawn)
    print(f"chart of two updates: {CHART}")
    return rows


Updates = dict[str, list[LoadedUpdate]]
"""By what becomes of the KV cache."""


def _updates(engine: Scene, runs: int, limits: Limits) -> Updates:
    """By turns, so that both policies meet the same machine; limits are taken when no request runs."""
    found: Updates = {kv: [] for kv in KV_POLICIES}
    for run in range(WARM_UP // len(found) + runs):
        for kv, updates in found.items():
            updates.append(engine.update(kv))
        if run >= WARM_UP // len(found):
            limits.take()
    return {kv: updates[WARM_UP // len(found) :] for kv, updates in found.items()}


def _median(updates: Sequence[LoadedUpdate], figure: Callable[[LoadedUpdate], float]) -> float:
    return statistics.median(map(figure, updates))


def _stall(kv: str, updates: Updates) -> float:
    return _median(updates[kv], lambda update: update.report.stall_seconds)


def _alias_stalls(found: Updates) -> list[Row]:
    limit = ALIAS_STALL_S
    return [
        at_most(f"{AT_ONCE} requests, alias, KV {kv}: stall", _stall(kv, found), "s", "5 ms", limit, limit, "<= 5 ms")
        for kv in found
    ]


def _copy_stalls(found: Updates, one_pass: float) -> list[Row]:
    allowed, target = 0.010 + 2.2 * one_pass, "<= 2.2 passes + 10 ms"
    return [
        at_most(
            f"{AT_ONCE} requests, copy, KV {kv}: stall",
            _stall(kv, found),
            "s",
            "memory pass",
            one_pass,
            allowed,
            target,
        )
        for kv in found
    ]


def _keep_gaps(found: Updates, paused: Sequence[LoadedUpdate]) -> list[Row]:
    """Beyond a decode step, which also lies between two tokens when nothing happens."""
    late, late_paused, late_rebuilt = (
        _median(updates, lambda update: update.gap_s - update.step_s)
        for updates in (found[KEEP], paused, found[REBUILD])
    )
    step = _median(found[KEEP], lambda update: update.step_s)
    to_know = "none: to know"
    return [
        at_most("alias, KV keep: next token late by", late, "s", "10 ms", KEEP_S, KEEP_S, "<= 10 ms"),
        at_most("alias, KV rebuild: next token late by", late_rebuilt, "s", "decode step", step, math.inf, to_know),
        at_most("pause, update, resume: next token late by", late_paused, "s", "decode step", step, math.inf, to_know),
    ]


def _shares(apply_mode: str, found: Updates) -> list[Row]:
    updates = [update for same in found.values() for update in same]
    alone = AT_ONCE / _median(updates, lambda update: update.step_s)
    beside = alone * _median(updates, lambda update: update.share_while_staging)
    name = f"{apply_mode}: decoding while it stages"
    return [at_least(name, beside, "tokens/s", "without an update", alone, SHARE * alone, f">= {SHARE:g}")]


def _captures(name: str, found: Updates) -> list[Row]:
    captured = sum(rank.graphs_captured for same in found.values() for update in same for rank in update.report.ranks)
    return [at_most(f"{name}: graphs captured after the first round", captured, "graphs", "none", 0, 0, "0")]


def _copied(found: Updates) -> Row:
    copied = sum(update.report.copied_bytes for same in found.values() for update in same)
    return at_most("alternating arenas: copied after the first round", copied, "bytes", "none", 0, 0, "0")
