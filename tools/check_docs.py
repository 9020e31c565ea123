"""Compare the documents with the code: ``python tools/check_docs.py`` prints every finding.

Links, paths, modules, commands, settings, routes, codes, metrics and tests that a page names exist,
and each promise names what proves it. ``docs/generate.py --check`` compares what is generated.
"""

from __future__ import annotations

import ast
import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from contextlib import redirect_stderr
from functools import cache
from io import StringIO
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import any_agent  # noqa: E402
from any_agent.cli.main import read  # noqa: E402
from any_agent.completions.params.table import PARAMETERS  # noqa: E402
from any_agent.config import known_keys, load_config  # noqa: E402
from any_agent.types import SessionState  # noqa: E402
from proxy_ext.sessions.state_machine import Event  # noqa: E402

HEADS = ["README.md", "AGENTS.md", "CONTRIBUTING.md", "benchmarks/README.md", "examples/README.md"]
PAGES = HEADS + sorted(str(file.relative_to(ROOT)) for file in (ROOT / "docs").rglob("*.md"))
EXAMPLES = [str(file.relative_to(ROOT)) for file in (ROOT / "examples").glob("*/README.md")]
PACKAGES = ("any_agent", "proxy_ext", "router", "trainer")
FOLDERS = (*PACKAGES, "tests", "docs", "tools", "benchmarks", "examples", "deploy")
STANDARD_LIBRARY = {"venv", "http.server", "pip", "build", "pytest"}
AREALS_OWN = {"examples/agent_workflow", "examples/openclaw"}


@cache
def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def reference(name: str) -> str:
    return text_of(f"docs/reference/{name}.md")


@cache
def defined_in(file: Path) -> set[str]:
    """Return the names that a Python file or a package defines, imports or exports."""
    file = file / "__init__.py" if file.is_dir() else file
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())) if file.exists() else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # A package that imports lazily lists its names as texts.
            names.add(node.value)
    return names


def is_defined(dotted: str) -> bool:
    """Return True for a module of this repository, or a name that one defines."""
    path, parts = ROOT, dotted.split(".")
    for k, part in enumerate(parts):
        if (path / part).is_dir():
            path /= part
        elif (path / f"{part}.py").is_file():
            path /= f"{part}.py"
            return k + 1 == len(parts) or parts[k + 1] in defined_in(path)
        else:
            return part in defined_in(path)
    return True


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}


def links(page: str) -> Iterator[str]:
    for link, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", text_of(page)):
        target = (ROOT / page).parent / link if link else ROOT / page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield f"the link {link}#{anchor} leads nowhere"


def paths(page: str) -> Iterator[str]:
    """Yield files and folders, with a function's name behind a colon or without, that are not."""
    pattern = rf"`((?:{'|'.join(FOLDERS)})/[\w/.-]*)(?:::?(\w+))?`"
    for path, function in re.findall(pattern, text_of(page)):
        file = ROOT / path
        known = file.exists() and (not function or function in defined_in(file))
        if not known and path not in AREALS_OWN:
            yield f"there is no {path} {function}".rstrip()


def modules(page: str) -> Iterator[str]:
    """Yield dotted names of prose, code and commands that nothing defines."""
    text = text_of(page)
    dotted = r"(?<![\w./-])((?:any_agent|proxy_ext|router)(?:\.\w+)+)(?![\w/-])"
    named = {each for each in re.findall(dotted, text) if not each.endswith(".jsonl")}
    named |= set(re.findall(r"python -m ([\w.]+)", text)) - STANDARD_LIBRARY
    for module, names in re.findall(r"^from (\S+) import (?!\()(.+)$", text, re.M):
        if module.split(".")[0] in PACKAGES:
            named |= {f"{module}.{each.split()[0]}" for each in names.split(",")}
    return (f"there is no {each}" for each in sorted(named) if not is_defined(each))


def commands(page: str) -> Iterator[str]:
    """Yield the commands of blocks for a shell that the command line does not take."""
    for block in re.findall(r"^ *```(?:bash|sh)\n(.*?)^ *```", text_of(page), re.M | re.S):
        whole = ""
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            whole = f"{whole}\n{line}" if whole else line.strip()
            try:
                words = shlex.split(whole, comments=True)
            except ValueError:  # a quotation goes on in the next line
                continue
            at = next((k for k, word in enumerate(words) if Path(word).name == "any-agent"), None)
            if (
                at is not None
                and words[0] not in ("git", "cd")
                and (said := refusal(words[at + 1 :]))
            ):
                yield f"{whole}: {said}"
            whole = ""


def refusal(words: list[str]) -> str:
    with redirect_stderr(StringIO()) as said:
        try:
            read(list(takewhile(lambda word: word not in "|&>;", words)))
        except SystemExit as stopped:
            return said.getvalue() if stopped.code else ""
    return ""


# -- pages of one subject -----------------------------------------------------------------------


def differing(what: str, told: Iterable[str], wanted: Iterable[str]) -> Iterator[str]:
    told, wanted = set(told), set(wanted)
    yield from (f"{what} {name} is not told of" for name in sorted(wanted - told))
    yield from (f"there is no {what} {name}" for name in sorted(told - wanted))


def settings() -> Iterator[str]:
    # The file of a cloud, behind them, has settings of its own.
    of_run = reference("configuration").partition("## The file of `any-agent cloud`")[0]
    rows = re.findall(r"^\| `([a-z0-9_.]+)` \| (.+?) \| `(.*?)` \| (.*) \|$", of_run, re.M)
    yield from differing("setting", (name for name, *_ in rows), known_keys())
    yield from (f"{name} is not explained" for name, *cells in rows if not all(cells))
    sections = {key.partition(".")[0] for key in known_keys() if "." in key}
    for page in ("deploy", "gpus", "slurm"):
        text = text_of(f"docs/how-to/{page}.md")
        found = re.findall(r"`((\w+)\.\w+)(?:[=:][^`]*)?`", text)
        asked = {name for name, section in found if section in sections} - {"train.py"}
        yield from (f"{page}.md: there is no setting {name}" for name in asked - set(known_keys()))
    given = [f"{name}={text}" for name, _, text, _ in rows if text != '""' and text[0] != "("]
    # Naming any of this section's settings switches it on.
    if load_config(None, given, environ={}) != load_config(None, ["train.lora={}"], environ={}):
        yield "the defaults of configuration.md are others"


def names() -> Iterator[str]:
    table = re.findall(r"^\| `([a-z_]+)` \| ", reference("parameters"), re.M)
    yield from differing("parameter", table, (each.name for each in PARAMETERS))
    public = re.findall(r"^\| `(\w+)` \|", reference("python"), re.M)
    yield from (f"{n} is not in python.md" for n in {*any_agent.__all__} - {*public, "__version__"})
    for name in (*SessionState, *Event):
        if f"`{name}`" not in reference("sessions"):
            yield f"sessions.md lacks {name}"
    routes = re.findall(r"`((?:GET|POST|PUT|DELETE) /[^`]*)`", reference("routes"))
    served = re.findall(r"^### `([A-Z]+ /.*)`$", reference("http-api"), re.M)
    yield from differing("route", routes, (r.replace("{session_id}", "{id}") for r in served))


def metrics() -> Iterator[str]:
    table = set(re.findall(r"^\| `(any_agent_\w+)` \|", reference("metrics"), re.M))
    head = reference("metrics").partition("## Ranks")[0]
    for place, text in (("metrics.md", head), ("runbook.md", text_of("docs/how-to/runbook.md"))):
        named = {re.sub("_(bucket|count)$", "", n) for n in re.findall(r"any_agent_[a-z_]+", text)}
        yield from (f"{place}: there is no metric {name}" for name in sorted(named - table))


def runbook() -> Iterator[str]:
    source = "\n".join(
        f.read_text() for package in PACKAGES for f in (ROOT / package).rglob("*.py")
    )
    codes = re.findall(r"^\| \d{3} `(\w+)`", text_of("docs/how-to/runbook.md"), re.M)
    yield from (f"there is no code {code}" for code in codes if f'code="{code}"' not in source)


def promises() -> Iterator[str]:
    """Yield promises of security.md and reliability.md without a test that proves them."""
    body = reference("security").partition("## What is promised")[2].partition("## What is not")[0]
    rows = re.findall(r"^\| (?!promise|---)(.+) \| (.+) \| (.+) \|$", body, re.M)
    for promise, code, proof in rows:
        if not proves(proof) or not re.search(r"`(\w+/)+", code):
            yield f"security.md: {promise}"
    body = reference("reliability").partition("## What is promised")[2]
    body, _, scenarios = body.partition(" scenarios\n")
    count = int(body.rpartition(" ")[2])
    kept = [row for row in re.findall(r"^\| (.+) \| (.+) \|$", body, re.M) if row[1] != "---"]
    named = re.findall(r"^\| (\d+) \| (.+?) \| (?:.+? \| ){2}(.+?) \|", scenarios, re.M)
    if [number for number, _, _ in named] != [str(k) for k in range(1, count + 1)]:
        yield f"reliability.md: the scenarios are not numbered 1 to {count}"
    for promise, proof in [*kept, *((what, proof) for _, what, proof in named)]:
        if proof != "shown by" and not proves(proof):
            yield f"reliability.md: {promise}"
    if min(len(rows), len(kept)) < 15:
        yield "a table of promises is not read"


def proves(proof: str) -> bool:
    files = re.findall(r"`(tests/(?:[\w/]+/)?test_\w+\.py)`", proof)
    found = [any(n.startswith("test_") for n in defined_in(ROOT / file)) for file in files]
    return bool(files) and all(found)


def indexes() -> Iterator[str]:
    for folder, pattern in (("docs", "*/*.md"), ("docs/how-to/connect", "[a-z]*.md")):
        index = text_of(f"{folder}/README.md")
        for page in sorted((ROOT / folder).glob(pattern)):
            if f"]({page.relative_to(ROOT / folder)})" not in index:
                yield f"{folder}/README.md lacks {page.name}"
    listed = re.findall(r"^\| \[(\w+)\]\(\1\) ", text_of("examples/README.md"), re.M)
    yield from differing("example", listed, (Path(each).parent.name for each in EXAMPLES))
    if len(text_of("README.md").splitlines()) > 150:
        yield "README.md is longer than 150 lines"


def findings() -> Iterator[str]:
    for page in (*PAGES, *EXAMPLES):
        for check in (links, paths, modules, commands) if page in PAGES else (links,):
            yield from (f"{page}: {found}" for found in check(page))
    for check in (settings, names, metrics, runbook, promises, indexes):
        yield from check()


def main() -> int:
    found = list(findings())
    for line in found[:50]:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
