"""Every block of docs/how-to/connect is run by the suite `clients`; every page is in its index."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.clients.connect.cases import CASES, HOW_A_CLASS_IS_RUN, PYTHON
from tests.clients.connect.pages import FOLDER, all_blocks, blocks, pages
from tests.clients.shipped.agents import AGENTS
from tests.support.errors import fails_with


def test_every_block_has_a_case_and_every_case_a_block() -> None:
    shipped = {place for agent in AGENTS for place in agent.places}
    run = {*CASES, *shipped, HOW_A_CLASS_IS_RUN}
    assert set(all_blocks()) == run, "cases.py, or shipped/agents.py, says how each is run"
    assert set(PYTHON) <= {block.page for block in all_blocks().values()}


@pytest.mark.parametrize("code", ["```python\nx = 1\n```\n", "  ~~~\nx\n  ~~~\n"])
def test_a_block_without_a_name_is_found(code: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"<!-- test: one -->\n```bash\ntrue\n```\n\n{code}")
    with fails_with(AssertionError, "page.md", "2 blocks", "1 are named"):
        blocks(page)


def test_the_index_has_every_page() -> None:
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"^\| \[[^]]+\]\(([\w-]+\.md)\) \|", index, re.M))
    assert linked == {page.name for page in pages()} - {"README.md"}


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_links_of_the_pages_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert not [link for link in links if not (page.parent / link).exists()]
