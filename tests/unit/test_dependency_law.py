"""The dependency law: each part of the package imports only itself and what stands to its left.

LAW -> board, memory, collectives -> transport, sources, publish, broadcast, update -> manager, model_group,
dispatch, control, observe -> engines -> cli, testing. Checked over the syntax trees, so that imports inside functions
count too.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fastdeploy_rl

PACKAGE = "fastdeploy_rl"
ROOT = Path(fastdeploy_rl.__file__).parent
LAW = [
    *("version", "lifecycle", "manifest", "coverage", "checksum", "dtypes", "errors", "plan", "config"),
    *("receipt", "report", "runner", "command_options", "board.layout"),
]
TIERS = [
    LAW,
    ["_native", "board", "memory", "collectives"],
    ["transport", "sources", "publish", "broadcast", "update"],
    ["manager", "model_group", "dispatch", "control", "observe"],
    ["engines"],
    ["cli", "testing"],
]
RANK = {name: rank for rank, names in enumerate(TIERS) for name in names}
EXCEPTIONS = {("runner", "memory.tensor_view")}  # the Protocol speaks of views; it moves no bytes
LAW_LIBRARIES = {*sys.stdlib_module_names, "numpy", "msgspec", "_typeshed"}
PADDLE_HOMES = ("memory.paddle_view", "collectives.paddle", "broadcast", "dispatch", "engines")


def module_name(path: Path) -> str:
    """Inside the package: `board.layout`; a package is called as its directory."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


TREES = {
    module_name(path): ast.parse(path.read_text(), str(path))
    for path in sorted(ROOT.rglob("*.py"))
    if path != ROOT / "__init__.py"
}


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Full dotted names; of `from a import b` both `a` and `a.b`, since b may be a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute, so that this test can read them"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(tree: ast.AST) -> set[str]:
    """Modules of the package, named from inside it."""
    inside = {name.removeprefix(f"{PACKAGE}.") for name in imported_names(tree) if name.startswith(f"{PACKAGE}.")}
    return {name for name in inside if name in TREES or name == "_native"}


def belongs_to(name: str, homes: tuple[str, ...]) -> bool:
    return any(name == home or name.startswith(f"{home}.") for home in homes)


def rank_of(name: str) -> int:
    """That of the longest entry of the law that the module belongs to."""
    while name not in RANK:
        assert "." in name, f"{name} has no place in the dependency law"
        name = name.rpartition(".")[0]
    return RANK[name]


def wrong_imports(name: str, tree: ast.AST) -> list[str]:
    """Imports of modules to the right. A package is not charged for the contents of its submodules."""
    found = own_imports(tree) - {name.rpartition(".")[0]}
    return [
        f"{name} imports {other}"
        for other in sorted(found)
        if rank_of(other) > rank_of(name) and (name, other) not in EXCEPTIONS and not is_parent(other, found)
    ]


def is_parent(name: str, found: set[str]) -> bool:
    """`from board import layout` names `board` too; what counts is the submodule."""
    return any(other.startswith(f"{name}.") for other in found)


@pytest.mark.parametrize("name", TREES)
def test_modules_import_only_to_the_left(name: str) -> None:
    assert wrong_imports(name, TREES[name]) == []


@pytest.mark.parametrize("name", [name for name in TREES if rank_of(name) == 0])
def test_law_modules_need_nothing_but_the_standard_library_numpy_and_msgspec(name: str) -> None:
    libraries = {imported.split(".")[0] for imported in imported_names(TREES[name])} - {PACKAGE}
    assert libraries <= LAW_LIBRARIES


def test_paddle_is_imported_only_where_tensors_become_paddle_tensors() -> None:
    users = {name for name, tree in TREES.items() if "paddle" in {n.split(".")[0] for n in imported_names(tree)}}
    assert {name for name in users if not belongs_to(name, PADDLE_HOMES)} == set()


def test_torch_is_imported_nowhere() -> None:
    assert {name for name, tree in TREES.items() if "torch" in {n.split(".")[0] for n in imported_names(tree)}} == set()


def reads_environment(tree: ast.AST) -> bool:
    names = {"environ", "environb", "getenv", "getenvb"}
    attributes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in names)
    is_read = any(isinstance(node.value, ast.Name) and node.value.id == "os" for node in attributes)
    return is_read or bool({f"os.{name}" for name in names} & set(imported_names(tree)))


def test_the_environment_is_read_only_in_config() -> None:
    assert {name for name, tree in TREES.items() if reads_environment(tree)} <= {"config"}


def test_nothing_that_executes_pickles_is_imported() -> None:
    banned = {"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve"}
    found = {name for name, tree in TREES.items() if banned & {n.split(".")[0] for n in imported_names(tree)}}
    assert found == set()


# --- the test itself can fail


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("version", "from fastdeploy_rl.memory.arena import ArenaPair"),
        ("version", "import fastdeploy_rl._native"),
        ("memory.arena", "def f():\n    from fastdeploy_rl.publish import publisher"),
        ("update.steps", "import fastdeploy_rl.manager"),
        ("manager", "from fastdeploy_rl import engines"),
    ],
)
def test_an_import_to_the_right_is_found(name: str, source: str) -> None:
    assert wrong_imports(name, ast.parse(source)) != []


def test_reads_of_the_environment_are_found() -> None:
    for source in ("import os\nos.environ['A']", "import os\nos.getenv('A')", "from os import environ"):
        assert reads_environment(ast.parse(source))


# --- what an import costs


def modules_after(statement: str) -> set[str]:
    """The top-level modules a fresh interpreter has loaded after `statement`."""
    code = f"import sys; {statement}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_importing_the_package_imports_no_framework_and_not_even_numpy() -> None:
    loaded = modules_after("import fastdeploy_rl")
    assert PACKAGE in loaded
    assert loaded & {"paddle", "torch", "numpy", "msgspec", "transformers"} == set()


@pytest.mark.parametrize("name", fastdeploy_rl.__all__)
def test_every_exported_name_comes_without_a_framework(name: str) -> None:
    """A trainer on torch alone, or on nothing but numpy, publishes and drives an engine."""
    loaded = modules_after(f"from fastdeploy_rl import {name}")
    assert loaded & {"paddle", "torch", "transformers"} == set()


def test_the_exported_names_are_listed_before_one_is_used() -> None:
    probe = "import fastdeploy_rl; print(set(fastdeploy_rl.__all__) <= set(dir(fastdeploy_rl)))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, check=True, text=True, timeout=60)
    assert done.stdout == "True\n"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        fastdeploy_rl.nothing  # noqa: B018 - the access is what is tested
