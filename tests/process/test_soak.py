"""The soak itself: it passes on a sound engine, and each thing that it looks for makes it fail."""

import importlib
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fastdeploy_rl.config import APPLY_MODES
from fastdeploy_rl.sources import registry

SCRIPTS = Path(__file__).parents[2] / "scripts"
DEADLINE_S = 240.0


def soak(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(SCRIPTS / "soak_run.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports one of the soak's parts, which find each other as scripts do."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module


@pytest.mark.timeout(DEADLINE_S + 30)
def test_three_hundred_updates_answer_truly_and_leave_nothing_behind(tmp_path: Path):
    """Over every load strategy and apply mode, with rejects and clears."""
    done = soak("300", "--json", str(tmp_path / "soak.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "soak.json").read_text())
    assert (summary["wrong_answers"], summary["flat"], summary["failures"]) == (0, True, [])
    assert summary["updates"] >= 300
    assert min(summary["rejected"], summary["cleared"], summary["answers"]) > 0
    pairs = [(strategy, mode) for strategy in registry.load_strategies() for mode in APPLY_MODES]
    assert [(by["strategy"], by["mode"]) for by in summary["by"]] == pairs
    assert all(min(by["updates"], by["rejected"], by["cleared"]) > 0 for by in summary["by"])
    assert set(summary["slopes"]) == {
        *("descriptors", "mappings", "threads", "objects", "rss"),
        *("segments", "shm_bytes", "files"),
    }


@pytest.mark.parametrize("text", ["39", "many"])
def test_a_number_of_updates_that_shows_nothing_is_refused(text: str):
    done = soak("--", text)
    assert done.returncode == 2
    assert "40 to 1000000 updates" in done.stderr


@pytest.mark.parametrize("name", ["DESCRIPTORS", "MAPPINGS", "THREADS", "SEGMENTS", "FILES"])
def test_one_thing_leaked_an_update_is_told_from_noise(part: Any, name: str):
    """Also in a stretch of a soak of 300, most of which is warm-up. Noise within its bound is flat at any length."""
    gauges = part("soak_gauges")
    gauge = getattr(gauges, name)
    noise = random.Random(0)
    for num_updates in (40, 1250, 100_000):
        updates = [index * num_updates / 24 for index in range(25)]
        quiet = [100 + noise.uniform(0, gauge.noise / 2) for _ in updates]
        leaking = [value + update for value, update in zip(quiet, updates, strict=True)]
        assert gauges.slope("rank 0", gauge, updates, quiet).is_flat
        assert not gauges.slope("rank 0", gauge, updates, leaking).is_flat


def test_an_object_or_a_page_leaked_an_update_shows_in_a_soak_of_five_thousand(part: Any):
    gauges = part("soak_gauges")
    updates = [index * 1250 / 24 for index in range(25)]
    for gauge, leak in ((gauges.OBJECTS, 1), (gauges.RSS, 4)):
        assert not gauges.slope("rank 0", gauge, updates, [leak * update for update in updates]).is_flat


def test_what_grew_in_the_warm_up_only_is_flat(part: Any):
    gauges = part("soak_gauges")
    updates = list(range(30))
    values = [min(update, 10) * 100 for update in updates]
    assert gauges.slope("rank 0", gauges.OBJECTS, updates, values).per_1000 == 0


def test_an_answer_is_right_only_by_the_version_that_it_is_stamped_with(part: Any):
    """Another version's token, a token of no version and a version that nobody may have are wrong, and told."""
    answers = part("soak_scene").Answers()
    references = {"1.1": (11, 12), "1.2": (21, 22)}
    answers.judge(1, [12, "1.1"], references)
    answers.judge(1, None, references)
    assert (answers.right, answers.refused, answers.wrong) == (1, 1, 0)
    for wrong in ([12, "1.2"], [11, "1.1"], [12, "1.3"], [12, ""]):
        answers.judge(1, wrong, references)
    assert (answers.right, answers.refused, answers.wrong) == (1, 1, 4)
    assert answers.told[0] == "rank 1: stamped 1.2, made by ['1.1']"
    assert answers.told[1] == "rank 1: stamped 1.1, made by no version at all"


def test_a_fenced_engine_ends_the_soak(part: Any):
    scene, report = part("soak_scene"), importlib.import_module("fastdeploy_rl.report")
    entry = report.HistoryEntry("", 1, 7, "update", "fenced", "1.2", "1.1", 0.1, 0.1, reason="rank 2 is torn")
    counts = scene.Counts()
    with pytest.raises(scene.SoakError, match="command 7 fenced the engine: rank 2 is torn"):
        counts.add([entry])
    assert counts == scene.Counts()
