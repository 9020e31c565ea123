"""Write docs/configuration.md from any_agent/config.py: ``python docs/generate.py [--check]``.

A setting's meaning is the docstring under its field, its section's the docstring of the class.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "any_agent" / "config.py"
TARGET = ROOT / "docs" / "configuration.md"
TREE = "Config"

HEAD = """# Configuration

<!-- Written by docs/generate.py from any_agent/config.py; change that file, then run it. -->

A setting has a dotted name. It is taken from, in this order:

1. the command line: `any-agent serve train.lr=1e-5`,
2. the environment: `ANY_AGENT_TRAIN__LR=1e-5` (two underscores for the dot),
3. the YAML file: `--config my.yaml`, with a mapping for each section,
4. its default.

`--model`, `--experiment`, `--trial`, `--host` and `--port` are short for `model.path`,
`experiment`, `trial`, `server.host` and `server.port`. Unknown names are refused with the nearest
known one. `any-agent config` prints what would be used. Without `--config`, `any-agent serve` and
`any-agent train` take up the settings that the same experiment and trial were last started with;
`server.admin_key` is never written to a file, so give it again.
"""


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of a section."""

    name: str
    type: str
    default: str
    meaning: str


def main() -> int:
    parser = argparse.ArgumentParser(description="Write docs/configuration.md.")
    parser.add_argument("--check", action="store_true", help="only say whether it is up to date")
    arguments = parser.parse_args()
    text = render(SOURCE.read_text(encoding="utf-8"))
    if not arguments.check:
        TARGET.write_text(text, encoding="utf-8")
        return 0
    if TARGET.exists() and TARGET.read_text(encoding="utf-8") == text:
        return 0
    print("docs/configuration.md is out of date: run python docs/generate.py", file=sys.stderr)
    return 1


def render(source: str) -> str:
    """The document for a ``config.py`` with this text."""
    classes = {n.name: n for n in ast.parse(source).body if isinstance(n, ast.ClassDef)}
    parts = [HEAD, "## Top level\n", _table(_settings(classes[TREE], classes))]
    for field in _fields(classes[TREE]):
        kind = ast.unparse(field.annotation)
        if kind in classes:
            section = classes[kind]
            parts.append(f"## `{_name(field)}`\n")
            about = ast.get_docstring(section)
            if about:
                parts.append(about + "\n")
            parts.append(_table(_settings(section, classes), prefix=f"{_name(field)}."))
    return "\n".join(parts)


def _settings(section: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> list[Setting]:
    """The fields that are no sections themselves, with the docstring that follows each."""
    followers = dict(zip(section.body, section.body[1:], strict=False))
    out = []
    for field in _fields(section):
        kind = ast.unparse(field.annotation)
        if kind in classes:
            continue
        default, limits = _default(field.value)
        meaning = " ".join(_text(followers.get(field)).split()).replace("None", "null")
        out.append(Setting(_name(field), " ".join([_type(kind), *limits]), default, meaning))
    return out


def _fields(section: ast.ClassDef) -> Iterator[ast.AnnAssign]:
    for node in section.body:
        if isinstance(node, ast.AnnAssign):
            yield node


def _name(field: ast.AnnAssign) -> str:
    assert isinstance(field.target, ast.Name)
    return field.target.id


def _text(node: ast.stmt | None) -> str:
    match node:
        case ast.Expr(value=ast.Constant(value=str(text))):
            return text
    return ""


def _default(value: ast.expr | None) -> tuple[str, list[str]]:
    """The default as YAML writes it, and the limits of a ``Field``."""
    limits: list[str] = []
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "Field":
        signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
        limits = [f"{signs[k.arg]} {_plain(k.value)}" for k in value.keywords if k.arg in signs]
        factory = next((k.value for k in value.keywords if k.arg == "default_factory"), None)
        if factory is not None:
            return f"({ast.unparse(factory).strip('_')})", limits
        value = value.args[0] if value.args else None
    return (_plain(value) if value is not None else ""), limits


def _plain(value: ast.expr) -> str:
    if isinstance(value, ast.Call):
        value = value.args[0]
    literal: Any = eval(compile(ast.Expression(value), "default", "eval"), {})
    match literal:
        case None:
            return "null"
        case bool():
            return str(literal).lower()
        case "":
            return '""'
        case tuple():
            return str(list(literal))
    return str(literal)


def _type(annotation: str) -> str:
    out = annotation.replace(" | None", "")
    if out.startswith("Literal["):
        return " / ".join(part.strip().strip("'\"") for part in out[8:-1].split(","))
    names = {"str": "text", "int": "integer", "float": "number", "bool": "true / false"}
    names |= {"Name": "name", "Path": "folder", "SecretStr": "secret"}
    names |= {"tuple[float, float]": "two numbers"}
    return names[out]


def _table(settings: list[Setting], prefix: str = "") -> str:
    rows = ["| setting | type | default | meaning |", "|---|---|---|---|"]
    for s in settings:
        meaning = s.meaning.replace("|", "\\|")
        rows.append(f"| `{prefix}{s.name}` | {s.type} | `{s.default}` | {meaning} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.exit(main())
