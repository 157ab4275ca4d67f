"""What memory each worker gives back when a tag is put to sleep: resident pages as the kernel counts them, its own and
those it has mapped, over what the tag held.

Weights hold their size. What the KV cache holds is what the worker grew by while requests filled it: an empty one has
address space only."""

from collections.abc import Callable

from bench_load import Load
from bench_loaded_updates import UPDATE_S, Scene
from bench_memory import Resident
from bench_row import Row, at_least

from fastdeploy_rl.lifecycle import Tag

LEAST = 0.9
FILLED = 48
"""Tokens of each request that fill the cache."""


def sleep_rows(engine: Scene, apply_mode: str) -> list[Row]:
    """Leaves the engine awake."""
    size = sum(engine.engine.weight_bytes)
    levels = [_given_back(engine, lambda level=level: _sleep(engine, Tag.WEIGHT, level)) for level in (1, 2)]
    given, held = _kv_cache(engine)
    return [
        *(
            _row(f"{apply_mode}: sleep of weights, level {level}", given, "the weights", size)
            for level, given in enumerate(levels, start=1)
        ),
        _row(f"{apply_mode}: sleep of the KV cache", given, "what it took", held),
    ]


def _row(name: str, given: int, what: str, held: int) -> Row:
    return at_least(name, given / 1e6, "MB", what, held / 1e6, LEAST * held / 1e6, f">= {LEAST:g}")


def _kv_cache(engine: Scene) -> tuple[int, int]:
    """(bytes given back, bytes held): filled in a fresh cache."""
    _sleep(engine, Tag.KV_CACHE, 1)
    engine.client.wake(deadline_s=UPDATE_S)
    empty = _resident(engine)
    with Load(engine.engine) as load:
        load.await_tokens(FILLED)
    held = _resident(engine) - empty
    return _given_back(engine, lambda: _sleep(engine, Tag.KV_CACHE, 1)), held


def _sleep(engine: Scene, tag: Tag, level: int) -> None:
    engine.client.sleep(tag.value, level=level, deadline_s=UPDATE_S)


def _given_back(engine: Scene, sleep: Callable[[], None]) -> int:
    """Over all workers; wakes it again."""
    before = _resident(engine)
    sleep()
    after = _resident(engine)
    engine.client.wake(deadline_s=UPDATE_S)
    return before - after


def _resident(engine: Scene) -> int:
    return sum(Resident.of(rank.pid).total for rank in engine.client.status().ranks)
