"""Pages that repeat what the code says are held to it."""

import json
import re
from pathlib import Path

import docs_tables
import msgspec
import pytest

from fastdeploy_rl import errors, lifecycle, manifest
from fastdeploy_rl.cli.dispatch import VERBS
from fastdeploy_rl.config import APPLY_MODES, ROLLBACKS
from fastdeploy_rl.coverage import Coverage
from fastdeploy_rl.sources import registry

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = docs_tables.pages()
VERB_NAMES = [verb.__name__.rpartition(".")[2].replace("_", "-") for verb in VERBS]


def rows_of(page: str) -> list[list[str]]:
    """The cells of every table line of a page."""
    lines = (line for line in page.splitlines() if line.startswith("|"))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_lifecycle_page_shows_the_tables_of_the_code() -> None:
    (diagram,) = re.findall(r"```mermaid\n(.*?)```", (DOCS / "lifecycle.md").read_text(), re.DOTALL)
    assert diagram.strip() == lifecycle.mermaid().strip()


def test_every_link_of_readme_and_docs_leads_somewhere() -> None:
    for page in PAGES:
        targets = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
        assert [target for target in targets if not (page.parent / target).exists()] == [], page


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_link_into_a_page_names_one_of_its_headings() -> None:
    for page in PAGES:
        links = re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text())
        targets = [((page.parent / file).resolve() if file else page, anchor) for file, anchor in links]
        assert [f"{file.name}#{anchor}" for file, anchor in targets if anchor not in anchors(file)] == [], page


def test_the_strategies_page_tells_every_load_strategy() -> None:
    page = (DOCS / "strategies.md").read_text()
    assert [name for name in registry.load_strategies() if f"| `{name}`" not in page] == []


def test_the_index_lists_every_page() -> None:
    index = (DOCS / "README.md").read_text()
    assert [
        page.name for page in DOCS.glob("*.md") if f"]({page.name})" not in index and page.name != "README.md"
    ] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_made_from_the_code_are_as_the_code_says_now(page: Path) -> None:
    text = page.read_text()
    assert text == docs_tables.filled(text), "run: python tests/unit/docs_tables.py"


def test_every_table_that_can_be_made_stands_on_some_page() -> None:
    shown = {name for page in PAGES for name in docs_tables.names_in(page.read_text())}
    assert shown == set(docs_tables.TABLES)


def test_the_board_page_knows_every_offset_of_the_layout() -> None:
    assert docs_tables.missing_offsets() == []


# --- the operator's page and the README ------------------------------------------------------------


def test_the_operators_page_lists_every_route_and_the_readme_every_verb() -> None:
    sources = [path.read_text() for path in (ROOT / "fastdeploy_rl/control").glob("*.py")]
    routes = {path for text in sources for path in re.findall(r'@routes\.(?:get|post)\(\s*"([^"]+)"', text)}
    assert len(routes) > 20
    page = (DOCS / "operator.md").read_text()
    assert [route for route in routes if route not in page] == []
    readme = (ROOT / "README.md").read_text()
    assert [name for name in VERB_NAMES if f"fastdeploy-rl {name}" not in readme and name != "retire"] == []


def test_the_readme_names_every_folder_of_the_package() -> None:
    readme = (ROOT / "README.md").read_text()
    folders = [path.parent.name for path in (ROOT / "fastdeploy_rl").glob("*/__init__.py")]
    assert [name for name in folders if f"`{name}/`" not in readme] == []


def test_the_concepts_explain_every_apply_mode_and_kind_of_coverage() -> None:
    page = (DOCS / "concepts.md").read_text()
    assert [mode for mode in APPLY_MODES if f"| `{mode}` |" not in page] == []
    assert [kind.value for kind in Coverage if f"*{kind.value}*" not in page] == []


def test_the_operators_page_says_what_every_rollback_costs() -> None:
    page = (DOCS / "operator.md").read_text()
    assert [policy for policy in ROLLBACKS if f"| `{policy}`" not in page] == []


def test_the_operators_page_tells_every_section_of_the_doctor(tmp_path: Path) -> None:
    from fastdeploy_rl.observe.doctor.examination import examine

    page = (DOCS / "operator.md").read_text()
    titles = [section.title for section in examine(tmp_path / "channel").sections]
    assert [title for title in titles if f"| {title} |" not in page] == []


def test_the_benchmarks_page_tells_every_group() -> None:
    groups = re.findall(r'^    "([a-z-]+)": lambda', (ROOT / "scripts/bench_run.py").read_text(), re.MULTILINE)
    page = (DOCS / "benchmarks.md").read_text()
    assert groups != []
    assert [group for group in groups if f"| {group} |" not in page] == []


def test_figures_are_shown_with_limit_ratio_and_machine(tmp_path: Path) -> None:
    row = {"name": "publish", "value": 0.25, "unit": "s", "limit": "pass", "limit_value": 0.2, "ratio": 1.25}
    bench = tmp_path / "bench.json"
    bench.write_text(json.dumps({"rows": [row | {"target": "<= 1.5", "met": True}], "machine": {"cores": 2}}))
    assert "| publish | 0.25 s | pass: 0.2 s | 1.25 | <= 1.5 |" in docs_tables.figures(bench)
    assert "cores 2" in docs_tables.figures(bench)


# --- errors ----------------------------------------------------------------------------------------


def tree(root: type[errors.FastDeployRLError]) -> list[type[errors.FastDeployRLError]]:
    return [
        root,
        *(cls for child in root.__subclasses__() if child.__module__ == errors.__name__ for cls in tree(child)),
    ]


def test_the_errors_page_has_every_class_in_its_branch_with_its_codes() -> None:
    page = (DOCS / "errors.md").read_text()
    branches = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    shown = {
        cells[0].strip("`"): (branch.partition(":")[0], cells[1], cells[2])
        for branch in branches
        for cells in rows_of(branch)
        if cells[0].startswith("`")
    }
    expected = {
        cls.__name__: (root.__name__.removesuffix("Error"), str(cls.exit_code), str(cls.http_status))
        for root in errors.FastDeployRLError.__subclasses__()
        if root.__module__ == errors.__name__
        for cls in tree(root)
    }
    assert shown == expected


def test_every_error_of_the_page_says_what_to_do() -> None:
    rows = [cells for cells in rows_of((DOCS / "errors.md").read_text()) if cells[0].startswith("`")]
    assert [cells[0] for cells in rows if not cells[3]] == []
    assert [cells[0] for cells in rows if not cells[4] and cells[3] != "root of these"] == []


def test_the_tree_drawn_in_the_code_has_every_class() -> None:
    drawn = set(re.findall(r"\w+Error\b", errors.__doc__ or ""))
    assert {cls.__name__ for cls in tree(errors.FastDeployRLError)} == drawn


# --- channel and manifest --------------------------------------------------------------------------


def test_the_manifest_page_has_every_field_and_says_which_may_be_left_out() -> None:
    structs = {
        "manifest": manifest.Manifest,
        "segment": manifest.Segment,
        "tensor": manifest.Tensor,
        "part": manifest.Part,
        "fused": manifest.Fused,
        "run": manifest.Run,
    }
    shown: dict[str, list[str]] = {}
    of = ""
    for cells in rows_of((DOCS / "channel-and-manifest.md").read_text()):
        if len(cells) == 3 and (cells[0] in structs or (of and cells[0] == "")):
            of = cells[0] or of
            shown.setdefault(of, []).append(cells[1].replace("`", ""))
    assert shown == {name: list(map(written, msgspec.structs.fields(cls))) for name, cls in structs.items()}


def written(field: msgspec.structs.FieldInfo) -> str:
    return field.name if field.required else f"{field.name} *"


def test_the_manifest_page_has_the_limits_of_the_code() -> None:
    page = (DOCS / "channel-and-manifest.md").read_text()
    for limit in (
        f"at most {manifest.MAX_BYTES >> 20} MiB",
        f"at most {manifest.MAX_TENSORS:,}",
        f"at most {manifest.MAX_SEGMENTS}",
        f"1 to {manifest.MAX_NAME_BYTES} bytes",
        f"at most {manifest.MAX_DIMENSIONS} dimensions",
        f"at most {manifest.MAX_RUNS}",
        f"at most {manifest.MAX_PIECES:,}",
        f"a multiple of {manifest.ALIGNMENT}",
        f"`{manifest.FORMAT}`",
    ):
        assert limit in page


def test_the_channel_page_has_every_file_that_the_code_describes() -> None:
    from fastdeploy_rl.publish import channel

    page = (DOCS / "channel-and-manifest.md").read_text()
    described = (channel.__doc__ or "").partition("Owns")[0]
    files = set(re.findall(r"\b[A-Z]{4,}(?:\.\{i\})?", described)) - {"JSON"}
    assert len(files) >= 8
    assert [name for name in files if f"`{name}`" not in page] == []
