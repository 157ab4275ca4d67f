"""Pages that repeat what the code says are held to it."""

import re
from pathlib import Path

from fastdeploy_rl import lifecycle
from fastdeploy_rl.cli.dispatch import VERBS

ROOT = Path(__file__).parents[2]


def test_the_lifecycle_page_shows_the_tables_of_the_code() -> None:
    (diagram,) = re.findall(r"```mermaid\n(.*?)```", (ROOT / "docs/lifecycle.md").read_text(), re.DOTALL)
    assert diagram.strip() == lifecycle.mermaid().strip()


def test_every_link_of_readme_and_docs_leads_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        targets = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
        assert [target for target in targets if not (page.parent / target).exists()] == [], page


def test_the_operators_page_lists_every_route_and_the_readme_every_verb() -> None:
    app = (ROOT / "fastdeploy_rl/control/http_app.py").read_text()
    routes = set(re.findall(r'@app\.(?:get|post)\("([^"]+)"\)', app))
    page = (ROOT / "docs/operator.md").read_text()
    assert [route for route in routes if route not in page] == []
    names = [verb.__name__.rpartition(".")[2] for verb in VERBS]
    readme = (ROOT / "README.md").read_text()
    assert [name for name in names if f"fastdeploy-rl {name}" not in readme and name != "retire"] == []
