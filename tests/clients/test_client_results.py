"""results.json, the table of clients, the blocks of docs/how-to/connect and pins are in step."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.clients.connect.cases import CASES, HOW_A_CLASS_IS_RUN, PYTHON
from tests.clients.connect.pages import all_blocks, blocks
from tests.clients.environment import ENVIRONMENTS, ROOT, SUITES
from tests.clients.results import RESULTS, WORKS, Results
from tests.clients.sdks.table import TABLE
from tests.clients.shipped.agents import AGENTS
from tests.support.errors import fails_with
from tests.support.script_module import load_script

HERE = Path(__file__).parent
EACH = {"plain", "streaming", "three turns", "tools", "streamed tools", "errors"}
"""Tried with every client over every API that it speaks."""


def test_results_are_those_of_the_table_at_the_pinned_versions() -> None:
    recorded = Results.read()
    cells = {
        (c, a, f) for c, apis in recorded.cells.items() for a, row in apis.items() for f in row
    }
    wanted = {
        (client.name, api, feature)
        for tried in TABLE
        for client in tried.clients
        for step in tried.steps
        for api in step.apis or tried.apis
        for feature in step.fills
    }
    assert cells == wanted, "run make verify SUITES=clients ARGS=--record"
    versions = {name: about["version"] for name, about in recorded.clients.items()}
    clients = {client.name: client.version for tried in TABLE for client in tried.clients}
    assert versions == clients
    agents = {name: about["version"] for name, about in recorded.agents.items()}
    assert agents == {agent.name: agent.version for agent in AGENTS}
    # Prompts have no turns and no tools.
    least = {"completions": {"plain", "streaming"}}
    lacking = [
        (client, api)
        for client, apis in recorded.cells.items()
        for api, row in apis.items()
        if not least.get(api, EACH) <= row.keys()
    ]
    assert lacking == []


def test_every_package_is_pinned_and_every_pin_is_in_the_table() -> None:
    for pins in HERE.glob("*/*.txt"):
        assert all(re.fullmatch(r"\S+==\S+", line) for line in pins.read_text().splitlines()), pins
    for manifest in HERE.glob("*/package.json"):
        wanted = json.loads(manifest.read_text())["dependencies"]
        locked = json.loads(manifest.with_name("package-lock.json").read_text())["packages"]
        assert locked[""]["dependencies"] == wanted, manifest
        assert all("integrity" in package for name, package in locked.items() if name), manifest
    patterns = ("clients/*/*.txt", "clients/*/package.json", "examples/pins/*", "documents/*.txt")
    found = {file for pattern in patterns for file in (ROOT / "tests").glob(pattern)}
    found |= set((ROOT / "examples").glob("*/package.json"))
    assert {one.pins for one in ENVIRONMENTS.values()} == found
    assert all(one.stamp and set(one.suites) <= set(SUITES) for one in ENVIRONMENTS.values())
    assert {name for names in PYTHON.values() for name in names} <= ENVIRONMENTS.keys()


def test_every_block_of_connect_is_run(tmp_path: Path) -> None:
    shipped = {place for agent in AGENTS for place in agent.places}
    run = {*CASES, *shipped, HOW_A_CLASS_IS_RUN}
    assert set(all_blocks()) == run, "cases.py, or shipped/agents.py, says how each is run"
    assert set(PYTHON) <= {block.page for block in all_blocks().values()}
    for code in ("```python\nx = 1\n```\n", "  ~~~\nx\n  ~~~\n"):
        page = tmp_path / "page.md"
        page.write_text(f"<!-- test: one -->\n```bash\ntrue\n```\n\n{code}")
        with fails_with(AssertionError, "page.md", "2 blocks", "1 are named"):
            blocks(page)


def test_a_cell_that_does_not_work_is_told_and_shows_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools" / "docs")
    document = load_script("tools/docs/client_results.py")
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    client = next(iter(results["cells"]))
    results["cells"][client]["chat"] = {"plain": WORKS, "tools": "It calls home."}
    changed = tmp_path / "results.json"
    changed.write_text(json.dumps(results), encoding="utf-8")
    monkeypatch.setattr(document, "RESULTS", changed)
    chat = document.render().partition("## Chat Completions")[2].partition("\n## ")[0]
    assert re.search(r"^\| tools \|.* 1 \|", chat, re.M)
    assert chat.rstrip().endswith("\n1. It calls home.")
    recorded = Results(clients={"one": {"version": "1"}}, cells={"one": {"chat": {"plain": WORKS}}})
    assert not Results(cells={"one": {"chat": {"plain": WORKS}}}).differing(recorded)
    worse = Results(cells={"one": {"chat": {"plain": "fails"}}}).differing(recorded)
    assert worse == ["one: chat, plain: fails; recorded is works"]
    newer = Results(clients={"one": {"version": "2"}}).differing(recorded)
    assert newer == ["one: {'version': '2'}; recorded is {'version': '1'}"]
    over = Results(cells={"two": {"chat": {"plain": WORKS}}}).over(recorded)
    assert over.cells.keys() == {"one", "two"}
