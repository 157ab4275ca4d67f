"""Manifests made to cost a reader its time or its memory: each is a bound error of a process that goes on."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "fuzz_bombs.py"
CASES = [
    "a-million-tensors",
    "tensors-up-to-the-bound",
    "tensors-one-above-the-bound",
    "dimensions",
    "large-dimensions",
    "aliases",
    "aliases-that-look-few",
    "segments",
    "parts",
    "runs-up-to-the-bound",
    "long-number",
    "long-name",
    "deep-lists",
    "deep-aliases",
    "keys-again",
    "one-byte-too-many",
]
"""Those that came near a bound once; `scripts/fuzz --bombs` has more, and says how long each takes."""


@pytest.mark.parametrize("cases", [CASES[::2], CASES[1::2]], ids=["some", "others"])
def test_a_manifest_that_is_a_bomb_is_an_error_of_the_tree(cases: list[str]):
    """One process takes them one after another: its memory is bounded, and each has a deadline."""
    done = subprocess.run([sys.executable, str(SCRIPT), *cases], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr[-2000:])
    answers = {line.split()[0]: line.split()[3] for line in done.stdout.splitlines()}
    assert answers == dict.fromkeys(cases, "ManifestError")
