"""Build the documents as a site: ``python tools/docs/build_site.py [--out FOLDER]``.

The pages are those that GitHub shows. `stage` copies them, and every file of the repository that
one of them links, as the generator (Material for MkDocs) wants them: a link to a file becomes one
to a page, lists and nested blocks are spelled as Python-Markdown reads them, and each
`<!-- signature: NAME -->` becomes what mkdocstrings makes of NAME. The navigation is the index of
docs/README.md. The build is strict: a link or an anchor that leads nowhere ends it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import yaml

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = Path(__file__).with_name("mkdocs.yml")
WORKER = Path(__file__).with_name("iframe-worker.js")
HOME = "README.md"
INDEX = "docs/README.md"
FIXED = {HOME: "index.md", INDEX: "contents.md"}
"""Paths of the repository, and of the site, whose pages are not where their names say."""
PROJECT = ("CHANGELOG.md", "CONTRIBUTING.md", "examples/README.md", "benchmarks/README.md")
Nav: TypeAlias = list[Any]
"""Entries of a navigation: the place of a page, or a title with a place or a navigation."""
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".sh": "bash", ".json": "json"}
LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:)([^)#\s]*)(#[^)\s]*)?(?=\))")
IN_CODE = re.compile(r"(`+)(?:(?!\1).)+?\1(?!`)", re.DOTALL)


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the documents as a site.")
    parser.add_argument("--out", type=Path, default=ROOT / "site", help="the folder of the site")
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder:
        pages = stage(Path(folder))
        built = build(Path(folder))
        if built.returncode:
            print(built.stdout, file=sys.stderr)
            return built.returncode
        shutil.rmtree(arguments.out, ignore_errors=True)
        shutil.copytree(Path(folder, "html"), arguments.out)
    print(f"{pages} pages: {arguments.out / 'index.html'}")
    return 0


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    """Build the staged pages strictly; what was wrong is in the output."""
    # Not with --quiet: what is not logged does not count as a warning, and --strict is void.
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict"],
        cwd=folder,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},  # of the generator's future
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def stage(folder: Path) -> int:
    """Write the pages and the settings of the site; return the number of pages."""
    waiting = [HOME, INDEX, *_documents()]
    staged: set[str] = set()
    pages = 0
    while waiting:
        path = waiting.pop()
        if path in staged:
            continue
        staged.add(path)
        target = folder / "pages" / place(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.suffix != ".md":
            shutil.copyfile(ROOT / path, target)
            continue
        pages += 1
        text, linked = page(path)
        waiting += linked
        target.write_text(text, encoding="utf-8")
    (folder / "mkdocs.yml").write_text(_settings(), encoding="utf-8")
    (folder / "pages" / "assets").mkdir()
    shutil.copy(WORKER, folder / "pages" / "assets")
    return pages


def _documents() -> list[str]:
    return sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "docs").rglob("*.md"))


def place(path: str) -> str:
    """Return the place in the site of a file of the repository."""
    if path in FIXED:
        return FIXED[path]
    own = PurePosixPath(path)
    if own.name == "README.md":
        own = own.with_name("index.md")
    if own.parts[0] == "docs":
        return str(own.relative_to("docs"))
    images = own.suffix in (".png", ".svg")
    return str(own) if own.suffix == ".md" or images else f"{own}.md"


def page(path: str) -> tuple[str, list[str]]:
    """Return a page of the site, and the files of the repository that it links."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if not path.endswith(".md"):
        language = LANGUAGES.get(Path(path).suffix, "text")
        fence = "`" * 6
        return f"# `{path}`\n\n{fence}{language}\n{text.rstrip()}\n{fence}\n", []
    linked: list[str] = []

    def moved(link: re.Match[str]) -> str:
        name, anchor = link[1], link[2] or ""
        if not name:
            return anchor
        target = _target(path, name)
        linked.append(target)
        here = PurePosixPath(place(path)).parent
        return os.path.relpath(place(target), here) + anchor

    text = outside_code(text, lambda part: LINK.sub(moved, part))
    return "\n".join(python_markdown(text.splitlines())) + "\n", linked


def _target(path: str, link: str) -> str:
    """Return the file of the repository that a link of a page leads to."""
    target = os.path.normpath(f"{PurePosixPath(path).parent}/{link}")
    return f"{target}/README.md" if (ROOT / target).is_dir() else target


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """Return a text in which all parts but code, in blocks or in lines, are changed."""
    parts, last = [], 0
    for code in IN_CODE.finditer(text):
        parts += [change(text[last : code.start()]), code.group()]
        last = code.end()
    return "".join([*parts, change(text[last:])])


def python_markdown(lines: list[str]) -> Iterator[str]:
    """Yield a page's lines as Python-Markdown reads what GitHub reads.

    It wants an empty line before a list, and four spaces before all that belongs to an item.
    """
    fence, shift, before = "", 0, ""
    for line in lines:
        inside = fence != ""
        mark = re.match(r" *(`{3,}|~{3,})", line)
        if mark and not inside:
            fence = mark[1]
        elif mark and line.strip() == fence:
            fence = ""
        item = None if inside or mark else re.match(r"(?:[-*]|\d+\.) +", line)
        if item:
            begins = item.group()[0] in "-*" or item.group().startswith("1.")
            if begins and before and not before.startswith(" ") and not shift:
                yield ""
            shift = 4 - len(item.group())
        elif line.startswith(" ") and shift:
            line = " " * shift + line
        elif line and not inside and (mark or not before):
            shift = 0  # Without an empty line before it, GitHub takes it as the item's text.
        signature = re.fullmatch(r"<!-- signature: (\S+) -->", line)
        yield from (f"::: {signature[1]}", "") if signature else (line,)
        before = line


def _settings() -> str:
    """Return the generator's settings, with all that is known only now."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    own = {
        "site_name": f"any-agent {project['version']}",
        "site_description": project["description"],
        "nav": navigation(),
    }
    text = SETTINGS.read_text(encoding="utf-8").replace("$ROOT", str(ROOT))
    return f"{text}\n{yaml.safe_dump(own, sort_keys=False, allow_unicode=True)}"


def navigation() -> Nav:
    """Return the sections of the index, each with its pages."""
    nav: Nav = [{"Home": place(HOME)}]
    index = (ROOT / INDEX).read_text(encoding="utf-8")
    for section in index.split("\n## ")[1:]:
        title, _, body = section.partition("\n")
        nav.append({title.partition(":")[0]: _entries(body)})
    project: Nav = [{"All pages": place(INDEX)}]
    for name in PROJECT:
        title = name.removesuffix("/README.md").removesuffix(".md").capitalize()
        project.append({title: place(name)})
    return [*nav, {"Project": project}]


def _entries(section: str) -> Nav:
    """Return a section's pages; those below a line that ends with a colon are a part of it."""
    pages: Nav = []
    here = pages
    for line in section.splitlines():
        if line.endswith(":"):
            here = []
            pages.append({line.removesuffix(":"): here})
        for name, link in re.findall(r"\[([^\]]+)\]\(([^)#]+\.md)\)", line):
            target = _target(INDEX, link)
            title = name.strip("`") if name.startswith("`") else name[:1].upper() + name[1:]
            alone = not target.endswith("/README.md")
            here.append({title: place(target) if alone else [place(target), *_beside(target)]})
    return pages


def _beside(index: str) -> Nav:
    """Return the other pages in the folder of a page, by their headings."""
    pages = sorted(p for p in (ROOT / index).parent.glob("*.md") if p.name != "README.md")
    headings = [p.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ") for p in pages]
    places = [place(p.relative_to(ROOT).as_posix()) for p in pages]
    return [{heading: there} for heading, there in zip(headings, places, strict=True)]


if __name__ == "__main__":
    sys.exit(main())
