"""The documents say what the code says."""

from __future__ import annotations

import ast
import re
import shlex
from contextlib import redirect_stderr
from functools import cache
from io import StringIO
from itertools import takewhile
from pathlib import Path
from types import ModuleType

import pytest

import any_agent
from any_agent.cli.main import _parser
from any_agent.completions.params.table import PARAMETERS
from any_agent.config import known_keys, load_config
from any_agent.runtime.command_line import parse
from any_agent.types import SessionState
from proxy_ext.sessions.state_machine import Event
from tests.support.proxy import our_app
from tests.support.script_module import load_script

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "benchmarks/README.md", "examples/README.md"]
DOCUMENTS += sorted(str(file.relative_to(ROOT)) for file in (ROOT / "docs").rglob("*.md"))

PACKAGES = ("any_agent", "proxy_ext", "router", "trainer")
FOLDERS = (*PACKAGES, "tests", "docs", "tools", "benchmarks", "examples", "deploy")
STANDARD_LIBRARY = {"venv", "http.server", "pip", "build", "pytest"}


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
    path = ROOT
    parts = dotted.split(".")
    for k, part in enumerate(parts):
        if (path / part).is_dir():
            path /= part
        elif (path / f"{part}.py").is_file():
            path /= f"{part}.py"
            return k + 1 == len(parts) or parts[k + 1] in defined_in(path)
        else:
            return part in defined_in(path)
    return True


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    return load_script("tools/docs/generate.py", "docs_generate")


def test_configuration_is_up_to_date(generate: ModuleType) -> None:
    text = generate.render(generate.settings_source())
    assert generate.TARGET.read_text() == text, "run python tools/docs/generate.py"


def test_configuration_names_every_setting_with_a_meaning() -> None:
    text = (ROOT / "docs" / "reference" / "configuration.md").read_text()
    rows = re.findall(r"^\| `([a-z_.]+)` \| (.+?) \| (.*?) \| (.*) \|$", text, re.M)
    assert sorted(name for name, *_ in rows) == sorted(known_keys())
    assert not [name for name, *cells in rows if not all(cells)]


def test_configuration_shows_the_defaults() -> None:
    text = (ROOT / "docs" / "reference" / "configuration.md").read_text()
    rows = re.findall(r"^\| `([a-z_.]+)` \| .+? \| `(.*?)` \|", text, re.M)
    given = [f"{name}={text}" for name, text in rows if text != '""' and text[0] != "("]
    # Naming any of this section's settings switches it on.
    assert load_config(None, given, environ={}) == load_config(None, ["train.lora={}"], environ={})
    assert load_config(None, environ={}).train.lora is None


def test_parameters_are_up_to_date(generate: ModuleType) -> None:
    text = generate.PARAMETERS_TARGET.read_text()
    assert text == generate.call_parameters.render(), "run python tools/docs/generate.py"
    rows = re.findall(r"^\| `([a-z_]+)` \| ", text, re.M)
    assert sorted(rows) == sorted(parameter.name for parameter in PARAMETERS)


def test_metrics_are_up_to_date(generate: ModuleType) -> None:
    assert generate.METRICS_TARGET.read_text() == generate.render_metrics(), (
        "run python tools/docs/generate.py"
    )


def test_sessions_are_up_to_date(generate: ModuleType) -> None:
    assert generate.SESSIONS_TARGET.read_text() == generate.session_states.render(), (
        "run python tools/docs/generate.py"
    )


def test_keys_are_up_to_date(generate: ModuleType) -> None:
    assert generate.KEYS_TARGET.read_text() == generate.route_scopes.render(), (
        "run python tools/docs/generate.py"
    )


def test_the_http_api_is_up_to_date(generate: ModuleType) -> None:
    text = generate.HTTP_API_TARGET.read_text()
    assert text == generate.http_api.render(), "run python tools/docs/generate.py"
    paths = our_app().openapi()["paths"]
    served = {f"{m.upper()} {path}" for path, methods in paths.items() for m in methods}
    assert {*re.findall(r"^### `([A-Z]+ /.*)`$", text, re.M)} == served


def test_the_python_api_is_up_to_date(generate: ModuleType) -> None:
    text = generate.PYTHON_API_TARGET.read_text()
    assert text == generate.python_api.render(), "run python tools/docs/generate.py"
    named = {*re.findall(r"^\| `(\w+)` \|", text, re.M)}
    assert {*any_agent.__all__} - {"__version__"} <= named


def test_sessions_name_every_state_and_event() -> None:
    text = (ROOT / "docs" / "reference" / "sessions.md").read_text()
    for name in (*SessionState, *Event):
        assert f"`{name}`" in text
    matrix = text.partition("## Every event in every state")[2].partition("##")[0]
    rows = re.findall(r"^\| `\w+` \| (.+) \|$", matrix, re.M)
    assert len(rows) > 10
    assert all(len(row.split(" | ")) == len(SessionState) for row in rows)


def test_the_queries_are_of_metrics_that_exist(generate: ModuleType) -> None:
    text = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    table = set(re.findall(r"^\| `(any_agent_\w+)` \|", text, re.M))
    head = set(re.findall(r"any_agent_\w+", text.partition("## Ranks")[0]))
    assert len(table) > 50
    assert {re.sub("_(bucket|count)$", "", name) for name in head} <= table


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str) -> None:
    text = (ROOT / name).read_text()
    missing = []
    for link, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", text):
        target = (ROOT / name).parent / link if link else ROOT / name
        if not target.exists() or (anchor and anchor not in anchors(target)):
            missing.append(f"{link}#{anchor}")
    assert not missing


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_named_files_exist(name: str) -> None:
    """Files and folders of this repository, with a function's name behind a colon or without."""
    text = (ROOT / name).read_text()
    missing = []
    for path, _, function in re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w/.-]*)(:(\w+))?`", text):
        file = ROOT / path
        if not file.exists() or (function and function not in defined_in(file)):
            missing.append(f"{path}:{function}")
    # Those are AReaL's own examples.
    assert not {*missing} - {"examples/agent_workflow:", "examples/openclaw:"}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_named_modules_exist(name: str) -> None:
    """Dotted names in prose, in code and in commands."""
    text = (ROOT / name).read_text()
    dotted = r"(?<![\w./-])((?:any_agent|proxy_ext|router)(?:\.\w+)+)(?![\w/-])"
    named = {each for each in re.findall(dotted, text) if not each.endswith(".jsonl")}
    named |= set(re.findall(r"python -m ([\w.]+)", text)) - STANDARD_LIBRARY
    for module, names in re.findall(r"^from (\S+) import (?!\()(.+)$", text, re.M):
        if module.split(".")[0] in PACKAGES:
            named |= {f"{module}.{each.split()[0]}" for each in names.split(",")}
    assert not [each for each in sorted(named) if not is_defined(each)]


def commands(text: str) -> list[str]:
    """Return the commands of the blocks for a shell that begin with `any-agent`."""
    found: list[str] = []
    for block in re.findall(r"^ *```(?:bash|sh)\n(.*?)^ *```", text, re.M | re.S):
        whole = ""
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            whole = f"{whole}\n{line}" if whole else line.strip()
            try:
                shlex.split(whole, comments=True)
            except ValueError:  # a quotation goes on in the next line
                continue
            found += [whole] if whole.startswith("any-agent ") else []
            whole = ""
    return found


@pytest.mark.parametrize("name", DOCUMENTS)
def test_commands_are_those_of_the_command_line(name: str) -> None:
    """Every `any-agent ...` of a block can be parsed: its command, options and arguments."""
    for line in commands((ROOT / name).read_text()):
        words = list(takewhile(lambda w: w not in "|&>;", shlex.split(line, comments=True)))
        with redirect_stderr(StringIO()) as said:
            try:
                parse(_parser(), words[1:])
            except SystemExit as stopped:
                assert stopped.code == 0, f"{line}\n{said.getvalue()}"


def test_the_runbook_names_codes_and_metrics_that_exist() -> None:
    text = (ROOT / "docs" / "how-to" / "runbook.md").read_text()
    metrics = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    missing = [m for m in re.findall(r"any_agent_[a-z_]+", text) if f"`{m}`" not in metrics]
    source = "\n".join(
        path.read_text() for package in PACKAGES for path in (ROOT / package).rglob("*.py")
    )
    for code in re.findall(r"^\| \d{3} `(\w+)`", text, re.M):
        missing += [] if f'code="{code}"' in source else [code]
    assert len(re.findall(r"^\| \d{3} `\w+`", text, re.M)) > 10
    assert not missing


def test_each_promise_of_security_names_its_code_and_its_tests() -> None:
    text = (ROOT / "docs" / "reference" / "security.md").read_text()
    body = text.partition("## What is promised")[2].partition("## What is not")[0]
    rows = re.findall(r"^\| (.+) \| (.+) \| (.+) \|$", body, re.M)
    promises = [row for row in rows if row[0] != "promise" and set(row[0]) != {"-"}]
    assert len(promises) > 15
    bad = []
    for promise, code, proof in promises:
        files = re.findall(r"`(tests/[\w/]+/test_\w+\.py|tests/test_\w+\.py)`", proof)
        found = [any(n.startswith("test_") for n in defined_in(ROOT / f)) for f in files]
        if not files or not all(found) or not re.search(r"`(\w+/)+", code):
            bad.append(promise)
    assert not bad


def test_each_promise_names_its_tests() -> None:
    text = (ROOT / "docs" / "reference" / "reliability.md").read_text()
    body, _, scenarios = text.partition("## What is promised")[2].partition(" scenarios\n")
    promises = re.findall(r"^\| (.+) \| (.+) \|$", body, re.M)
    promises = [row for row in promises if row[1] not in ("shown by", "---")]
    named = re.findall(r"^\| (\d+) \| (.+?) \| (?:.+? \| ){2}(.+?) \|", scenarios, re.M)
    assert [number for number, _, _ in named] == [str(k) for k in range(1, 30)]
    promises += [(what, proof) for _, what, proof in named]
    assert len(promises) > 25
    bad = []
    for promise, proof in promises:
        files = re.findall(r"`(tests/[\w/]+/test_\w+\.py)`", proof)
        found = [any(n.startswith("test_") for n in defined_in(ROOT / f)) for f in files]
        if not files or not all(found):
            bad.append(promise)
    assert not bad


def test_the_reference_names_every_route() -> None:
    text = (ROOT / "docs" / "reference" / "routes.md").read_text()
    named = set(re.findall(r"`((?:GET|POST|PUT|DELETE) /[^`]*)`", text))
    paths = our_app().openapi()["paths"]
    served = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    assert named == {route.replace("{session_id}", "{id}") for route in served}


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_index_links_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    pages = {str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").glob("*/*.md")}
    assert not [page for page in sorted(pages) if f"]({page})" not in index]
