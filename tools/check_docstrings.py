"""Flag docstrings that open with a fragment: ``python tools/check_docstrings.py [FOLDER ...]``.

A docstring opens with an imperative ("Return ...") or a noun phrase ("One training step."). The
check reads those of modules, classes and functions, and the strings under attributes.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("any_agent", "proxy_ext", "router", "trainer", "tools", "benchmarks")
OPENINGS = ("What", "Of", "Whether", "Those", "As", "That of", "Whoever", "Nobody")


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every string that stands alone as a statement."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.lineno, node.value.value


def fragments(folders: list[str]) -> list[str]:
    """Return a line for each docstring that opens with one of the flagged words."""
    found = []
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for line, text in docstrings(ast.parse(path.read_text(encoding="utf-8"))):
                first = text.strip().split("\n")[0]
                if any(first == word or first.startswith(f"{word} ") for word in OPENINGS):
                    found.append(f"{path.relative_to(ROOT)}:{line}: {first}")
    return found


def main() -> int:
    found = fragments(sys.argv[1:] or list(FOLDERS))
    for line in found:
        print(line)
    if found:
        print(f"{len(found)} docstrings open with a fragment: begin with a verb or a noun")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
