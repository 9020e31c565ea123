"""The rules of who may import whom, read from the source of every module."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("any_agent", "proxy_ext", "router", "trainer")

LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("types", "model_calls", "keys", "stats_tracker", "custom_calls"),
    ("runtime",),
    ("config",),
    ("protocol", "rundir"),
    ("auth", "client", "rewards"),
    ("chat", "record", "engine", "data"),
    ("completions",),
    ("workflow",),
    ("direct", "rollout", "sdk", "camel", "launcher"),
    ("inference", "doctor"),
    ("demo",),
    ("cli",),
)
"""The packages and modules of `any_agent`, lowest first: none imports a later layer."""
LEVEL = {part: level for level, layer in enumerate(LAYERS) for part in layer}


@cache
def modules() -> dict[str, Path]:
    """Every module of ours by its dotted name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            parts = path.relative_to(REPOSITORY).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = path
    return found


@cache
def imports(name: str, *, at_import: bool = False) -> tuple[str, ...]:
    """Return the modules that a module imports; ``at_import``: only at its own import."""
    return tuple(_imports(name, at_import))


def _imports(name: str, at_import: bool) -> Iterator[str]:
    tree = ast.parse(modules()[name].read_text(encoding="utf-8"))
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        if at_import:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                continue
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                todo += node.orelse
                continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports relatively"
            assert node.module is not None
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in modules() else node.module
        todo += ast.iter_child_nodes(node)


def part(name: str) -> str:
    """The part of `any_agent` that a module belongs to."""
    return name.split(".")[1] if "." in name else "__init__"


def test_there_is_something_to_judge() -> None:
    assert {"any_agent.types", "any_agent.chat.conversation_hash", "proxy_ext.app"} <= set(
        modules()
    )


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_meet_over_http_only(package: str) -> None:
    others = set(PACKAGES) - {package, "any_agent"}
    if package == "any_agent":
        others = set(PACKAGES) - {"any_agent"}
    bad = [
        f"{name} imports {target}"
        for name in modules()
        if name.split(".")[0] == package
        for target in imports(name)
        if target.split(".")[0] in others
    ]
    assert not bad


def test_layers_of_any_agent() -> None:
    """Lazy imports and those for type checkers count."""
    parts = {part(name) for name in modules() if name.startswith("any_agent.")}
    assert parts == set(LEVEL), "LAYERS names every part of any_agent and nothing else"
    assert [
        f"{name} imports {target}"
        for name in modules()
        if name.startswith("any_agent.")
        for target in imports(name)
        if target.startswith("any_agent.") and LEVEL[part(target)] > LEVEL[part(name)]
    ] == []


def circles(arrows: dict[str, set[str]]) -> list[str]:
    """Return each circle of a graph as its members in one line."""
    found, done = [], set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            found.append(" -> ".join([*path[path.index(name) :], name]))
        elif name not in done:
            for target in sorted(arrows[name]):
                visit(target, (*path, name))
            done.add(name)

    for name in sorted(arrows):
        visit(name, ())
    return found


def test_no_circles_between_files() -> None:
    """Lazy imports and those for type checkers count."""
    # A package's __init__ gathers its own modules; they do not import it back.
    arrows = {name: {t for t in imports(name) if t in modules()} - {name} for name in modules()}
    assert circles(arrows) == []


def test_no_circles_between_packages() -> None:
    """Lazy imports and those for type checkers count; a module beside packages is one of them."""

    def package(name: str) -> str:
        return name if is_package(name) or name.count(".") == 1 else name.rpartition(".")[0]

    arrows: dict[str, set[str]] = {package(name): set() for name in modules()}
    for name in modules():
        for target in imports(name):
            if target in modules() and not related(package(name), package(target)):
                arrows[package(name)].add(package(target))
    assert circles(arrows) == []


def is_package(name: str) -> bool:
    return modules()[name].name == "__init__.py"


def related(one: str, other: str) -> bool:
    """Return True for a package and itself or one that lies in it: together they are one."""
    return one == other or one.startswith(f"{other}.") or other.startswith(f"{one}.")


def test_a_process_that_trains_alone_starts_without_what_several_need() -> None:
    """A second of imports each; only `shards`, which nobody imports at its own start, has them."""
    heavy = ("torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor")
    users = {
        name
        for name in modules()
        for target in imports(name, at_import=True)
        if target.startswith((*heavy, "trainer.sharded_optimizer"))
    }
    assert users == {"trainer.sharded_optimizer"}


def test_litellms_internals_have_four_doors() -> None:
    users = {
        name for name in modules() for target in imports(name) if target.split(".")[0] == "litellm"
    }
    doors = ("shim", "proxy", "policy", "keys")
    assert users == {f"proxy_ext.litellm_{door}" for door in doors}


def test_tests_and_benchmarks_are_not_imported() -> None:
    bad = [
        f"{name} imports {target}"
        for name in modules()
        for target in imports(name)
        if target.split(".")[0] in ("tests", "benchmarks", "examples")
    ]
    assert not bad


def loaded_by(code: str) -> set[str]:
    """The top-level modules that a fresh interpreter holds after running the code."""
    report = "import json, sys; print(json.dumps(sorted({n.split('.')[0] for n in sys.modules})))"
    out = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"],
        capture_output=True,
        text=True,
        check=True,
        cwd=REPOSITORY,
    )
    return set(json.loads(out.stdout.splitlines()[-1]))


HEAVY = {"torch", "litellm", "transformers", "fastapi", "numpy", "pydantic", "aiohttp", "openai"}
HEAVY |= {"prometheus_client"}


@pytest.mark.parametrize(
    ("code", "allowed"),
    [
        ("import any_agent, any_agent.cli", {"pydantic"}),
        ("from any_agent.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass", set()),
        ("import any_agent.client", {"pydantic"}),
        ("import any_agent.config", {"pydantic"}),
        ("import any_agent.launcher", {"pydantic"}),
        ("from any_agent import RLClient, AnyAgentError, load_config", {"pydantic"}),
        ("from any_agent import AgentRunner, AgentSession", {"pydantic"}),
        ("import any_agent.cli.eval, any_agent.sdk.evaluation", {"pydantic"}),
        ("import any_agent.engine, any_agent.workflow", HEAVY - {"torch", "litellm", "fastapi"}),
        ("import proxy_ext.app", HEAVY - {"torch", "litellm", "openai"}),
    ],
)
@pytest.mark.service
def test_imports_stay_light(code: str, allowed: set[str]) -> None:
    assert loaded_by(code) & HEAVY <= allowed


SLOW = {"asyncio", "concurrent", "ctypes", "email", "http", "multiprocessing", "ssl", "unittest"}
"""Of the standard library: what costs a tenth of a second together."""


@pytest.mark.parametrize(
    "code",
    [
        "import any_agent",
        "from any_agent.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass",
    ],
)
def test_a_light_start(code: str) -> None:
    """Milliseconds, whatever else is installed: nothing of anybody else is imported."""
    loaded = loaded_by(code) - loaded_by("pass")
    assert loaded - sys.stdlib_module_names == {"any_agent"}
    assert not loaded & SLOW
