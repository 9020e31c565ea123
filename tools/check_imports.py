"""Check who may import whom: ``python tools/check_imports.py`` prints every breach.

Lazy imports and those for type checkers count. The layers are those of docs/reference/code-map.md.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
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
DOORS = {f"proxy_ext.litellm_{door}" for door in ("shim", "proxy", "policy", "keys")}
OF_SHARDS = tuple(f"torch.distributed.{part}" for part in ("fsdp", "tensor"))
"""A second of imports each: a process that trains alone starts without them."""


@cache
def modules() -> dict[str, Path]:
    """Return every module of ours by its dotted name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports(name: str, *, at_import: bool = False) -> tuple[str, ...]:
    """Return the modules that a module imports; ``at_import``: only at its own import."""
    found: list[str] = []
    todo: list[ast.AST] = [ast.parse(modules()[name].read_text(encoding="utf-8"))]
    while todo:
        node = todo.pop()
        if at_import and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if at_import and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo += node.orelse
            continue
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [each if each in modules() else str(node.module) for each in names]
        todo += ast.iter_child_nodes(node)
    return tuple(found)


def breach(name: str, target: str) -> bool:
    """Return True if this module may not import that one."""
    package, other = name.split(".")[0], target.split(".")[0]
    if other in ("tests", "benchmarks", "examples"):
        return True
    if other == "litellm":
        return name not in DOORS
    if other not in PACKAGES:
        return False
    if package != other:
        # Packages meet over HTTP and in the run's folder only.
        return package == "any_agent" or other != "any_agent"
    within = package == "any_agent" and "." in name and "." in target
    return within and LEVEL.get(part(target), 0) > LEVEL.get(part(name), 0)


def part(name: str) -> str:
    return name.split(".")[1]


def circles(arrows: dict[str, set[str]]) -> Iterator[str]:
    """Yield each circle of a graph as its members in one line."""
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> Iterator[str]:
        if name in path:
            yield " -> ".join([*path[path.index(name) :], name])
        elif name not in done:
            for target in sorted(arrows[name]):
                yield from visit(target, (*path, name))
            done.add(name)

    for name in sorted(arrows):
        yield from visit(name, ())


def package_of(name: str) -> str:
    """Return a module's package; a module beside packages is one of them."""
    of_init = modules()[name].name == "__init__.py"
    return name if of_init or name.count(".") == 1 else name.rpartition(".")[0]


def related(one: str, other: str) -> bool:
    """Return True for a package and itself or one that lies in it: together they are one."""
    return one == other or one.startswith(f"{other}.") or other.startswith(f"{one}.")


def findings() -> Iterator[str]:
    files: dict[str, set[str]] = {}
    packages: dict[str, set[str]] = {package_of(name): set() for name in modules()}
    for name in modules():
        yield from (f"{name} imports {each}" for each in imports(name) if breach(name, each))
        # A package's __init__ gathers its own modules; they do not import it back.
        files[name] = {each for each in imports(name) if each in modules()} - {name}
        near = {package_of(each) for each in files[name]}
        mine = package_of(name)
        packages[mine] |= {each for each in near if not related(mine, each)}
        heavy = [e for e in imports(name, at_import=True) if e.startswith(OF_SHARDS)]
        yield from (f"{name} imports {each} at its own start" for each in heavy)
    parts = {part(name) for name in modules() if name.startswith("any_agent.")}
    yield from (f"LAYERS: {each}" for each in sorted(parts ^ LEVEL.keys()))
    yield from circles(files)
    yield from circles(packages)


def main() -> int:
    found = list(findings())
    for line in found[:50]:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
