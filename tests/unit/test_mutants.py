"""scripts/mutants itself, on a program of a few lines; and that its list still fits this tree."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

import mutants_run
from mutants_list import MUTANTS, Mutant
from mutants_tree import Break, Copy, MutantsError, broken_texts

ROOT = Path(__file__).parents[2]
SOURCE = "fastdeploy_rl/__init__.py"
FILES = {
    SOURCE: "def is_allowed(n):\n    return n < 3\n\n\ndef also(n):\n    return n < 5\n",
    "tests/test_limit.py": "from fastdeploy_rl import is_allowed\n\n\ndef test_below():\n    assert is_allowed(2)\n"
    "\n\ndef test_at():\n    assert not is_allowed(3)\n",
}
LIMIT = Break(SOURCE, "n < 3", "n <= 3")
TESTS = ("tests/test_limit.py",)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository of its own; nothing of it is committed yet."""
    root = tmp_path / "tree"
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "ignored.py").write_text("")
    (root / ".gitignore").write_text("ignored.py\n")
    subprocess.run(["git", "init", "-q", str(root)], check=True, timeout=60)
    return root


@pytest.fixture
def copy(tree: Path) -> Iterator[Copy]:
    with Copy(tree) as copy:
        yield copy


def contents(place: Path) -> dict[str, str]:
    return {name: (place / name).read_text() for name in FILES}


def test_a_break_that_tests_notice_is_killed_by_the_test_that_failed_first(copy: Copy, tree: Path) -> None:
    """The tests ran on the copy; afterwards it is whole again, and the tree was never touched."""
    assert not copy.run(TESTS, 30).is_killed
    with copy.planted([LIMIT]):
        verdict = copy.run(TESTS, 30)
        assert contents(tree) == FILES
    assert verdict.killed_by == "tests/test_limit.py::test_at"
    assert "assert not True" in verdict.reason
    assert contents(copy.path) == FILES
    assert not copy.run(TESTS, 30).is_killed
    assert not (copy.path / "ignored.py").exists()


def test_a_break_that_no_test_notices_survives(copy: Copy) -> None:
    with copy.planted([Break(SOURCE, "n < 5", "n < 6")]):
        verdict = copy.run(TESTS, 30)
    assert (verdict.killed_by, set(verdict.test_seconds)) == ("", {f"{TESTS[0]}::test_below", f"{TESTS[0]}::test_at"})


@pytest.mark.parametrize(
    ("text", "instead", "reason"),
    [
        pytest.param("n < 4", "n < 5", "has 0 times, not once", id="stale"),
        pytest.param("return n", "return 1 or n", "has 2 times, not once", id="ambiguous"),
        pytest.param("n < 3", "n <", "is no Python", id="no syntax"),
    ],
)
def test_a_text_that_cannot_be_planted_is_the_scripts_error(copy: Copy, text: str, instead: str, reason: str) -> None:
    with pytest.raises(MutantsError, match=reason), copy.planted([LIMIT._replace(text=text, instead=instead)]):
        pass
    assert contents(copy.path) == FILES


@pytest.mark.parametrize(
    ("each", "reason"),
    [
        pytest.param(Break(SOURCE, "n < 3", "m < 3"), "NameError in .*test_below", id="no program"),
        pytest.param(Break(SOURCE, "def is_allowed", "def is_forbidden"), "pytest ended with 2", id="no import"),
        pytest.param(Break(TESTS[0], "test_", "_"), "has 2 times", id="no test"),
    ],
)
def test_what_is_no_failure_of_a_test_is_no_kill(copy: Copy, each: Break, reason: str) -> None:
    with pytest.raises(MutantsError, match=reason), copy.planted([each]):
        copy.run(TESTS, 30)


def test_a_test_that_is_not_there_is_the_scripts_error(copy: Copy) -> None:
    with pytest.raises(MutantsError, match="pytest ended with 4"):
        copy.run(["tests/test_limit.py::test_nowhere"], 30)


def test_the_table_tells_who_killed_what_and_what_survived() -> None:
    mutant = Mutant("no_limit", "three is too many", (LIMIT,), TESTS)
    killed = mutants_run.Row(mutant, mutants_run.Verdict("tests/test_limit.py::test_at", "assert", 1.5, {}))
    survived = mutants_run.Row(mutant, mutants_run.Verdict("", "", 1.0, {}))
    stale = mutants_run.Row(mutant, None, "no such text")
    table = mutants_run._table([killed, survived, stale]).splitlines()
    assert [line.split()[0] for line in table[::2]] == ["killed", "SURVIVED", "error"]
    assert [line.strip() for line in table[1::2]] == [f"{TESTS[0]}::test_at", f"passed: {TESTS[0]}", "no such text"]
    told = mutants_run._summary([killed, survived, stale], 3.0)
    assert (told["mutants"], told["killed"], told["survived"], told["errors"]) == (3, 1, 1, 1)


# --- the list --------------------------------------------------------------------------------------


def test_every_mutant_has_a_name_of_its_own_and_tests_that_are_there() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names) >= 40
    for mutant in MUTANTS:
        assert mutant.tests
        for test in mutant.tests:
            file, _, name = test.partition("::")
            assert (ROOT / file).is_file(), (mutant.name, test)
            own = [path.read_text() for path in (ROOT / file).parent.glob("*.py")]  # it may be inherited
            assert any(name.partition("[")[0].rpartition("::")[2] in text for text in own), (mutant.name, test)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_can_be_planted_in_this_tree(mutant: Mutant) -> None:
    """Where this fails the package was changed: write the same break of that law down anew."""
    former = {each.file: (ROOT / each.file).read_text() for each in mutant.breaks}
    broken = broken_texts(former, mutant.breaks)
    assert all(broken[file] != text for file, text in former.items())
