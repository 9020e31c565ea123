"""The documents as a site: what the pages become, and a strict build of all of them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Literal

import pytest
from markdown_it import MarkdownIt

from tests.clients.environment import component
from tests.support.script_module import load_script

ROOT = Path(__file__).resolve().parents[2]
COUNTED = ("h1", "h2", "h3", "table", "tr", "li", "pre")


@pytest.fixture(scope="module")
def build() -> ModuleType:
    return load_script("tools/docs/build_site.py")


class Elements(HTMLParser):
    """Counts the elements of an article, and collects what its page loads."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.loads: list[str] = []
        self._depth = 0
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        inside = tag == "article" or self._depth > 0
        if inside and tag in COUNTED:
            self.counts[tag] += 1
        if tag == "article":
            self._depth += 1
        loaded = values.get("src") or (values.get("href") if tag == "link" else None)
        if loaded:
            self.loads.append(loaded)

    def handle_endtag(self, tag: str) -> None:
        self._depth -= tag == "article"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material")
    out = tmp_path_factory.mktemp("docs") / "site"
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "docs" / "build_site.py"), "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.mark.service
def test_pages_have_what_github_shows_and_load_nothing_from_elsewhere(
    site: Path, build: ModuleType
) -> None:
    """Each page has as many headings, tables, rows, items and blocks of code as GitHub shows."""
    github = MarkdownIt("commonmark").enable("table")
    different = []
    for path in sorted((ROOT / "docs").rglob("*.md")):
        name = str(path.relative_to(ROOT))
        html = (site / build.place(name)).with_suffix(".html").read_text(encoding="utf-8")
        found = Elements(html)
        foreign = [u for u in found.loads if u.startswith(("http:", "https:", "//"))]
        different += [f"{name} loads {each}" for each in foreign]
        if name == "docs/reference/python.md":
            # Its signatures are made by the generator.
            for public in ("AgentSession", "AgentRunner", "RolloutWorkflow", "GRPOTrainer"):
                assert re.search(rf'id="[\w.]+\.{public}"', html), public
            continue
        # GitHub shows what stands before a page, such as a skill's name, beside it.
        text = re.sub(r"\A---\n.*?\n---\n", "", path.read_text(encoding="utf-8"), flags=re.S)
        want = Elements(f"<article>{github.render(text)}</article>").counts
        counted = [(t, found.counts[t], want[t]) for t in COUNTED]
        different += [
            f"{name}: {t} {has}, not {wants}" for t, has, wants in counted if has != wants
        ]
    assert not different


@pytest.mark.service
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_searched_in_a_browser_without_a_server(
    site: Path, scheme: Literal["light", "dark"]
) -> None:
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=component("chromium"), args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        page = chromium.new_page(color_scheme=scheme)
        errors: list[str] = []
        asked: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto((site / "how-to" / "train.html").as_uri())
        page.click(".md-search__input")
        page.keyboard.type("journal_durability")
        page.wait_for_selector(".md-search-result__item", timeout=120_000)
        found = page.locator(".md-search-result__link").evaluate_all(
            "links => links.map(link => link.href)"
        )
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        chromium.close()
    assert found
    assert all(link.startswith(site.as_uri()) for link in found)
    assert not errors
    assert not [url for url in asked if not url.startswith(("file:", "data:", "about:"))]
    red = int(re.findall(r"\d+", background)[0])
    assert (red < 100) == (scheme == "dark")


@pytest.mark.service
def test_a_broken_link_ends_the_build(build: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("material")
    build.stage(tmp_path)
    page = tmp_path / "pages" / "how-to" / "run.md"
    links = "[nowhere](../none.md), [gone](train.md#no-such-heading)"
    page.write_text(f"{page.read_text(encoding='utf-8')}\n{links}\n")
    built = build.build(tmp_path)
    assert built.returncode != 0
    assert "none.md" in built.stdout and "no-such-heading" in built.stdout
