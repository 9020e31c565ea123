"""Keep the wording of all errors in one file that a person reads: ``python tools/errors.py``.

They are read from the source, not from a run: the class, status, code and parameter of each error
that is constructed, and its message with ``{…}`` for each value. ``--write`` writes
``tests/golden/errors.txt`` anew; without it the differences from the file are shown.
"""

from __future__ import annotations

import ast
import builtins
import difflib
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden" / "errors.txt"
FOLDERS = ("any_agent", "proxy_ext", "router", "trainer")
VALUE = "{…}"
Names = dict[str, list[ast.expr]]
"""The expressions that are assigned to a name."""
Facts = dict[str, tuple[str, str]]
"""The status and the code of an error, both empty where it is none of the project's."""


def keyword(node: ast.Call | ast.ClassDef, name: str) -> str:
    """Return the literal that is given by this name, or an empty text."""
    values = [each.value for each in node.keywords if each.arg == name]
    return str(values[0].value or "") if values and isinstance(values[0], ast.Constant) else ""


def last_name(node: ast.expr | None) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def facts(nodes: list[ast.AST]) -> Facts:
    """Return the status and the code of each class of errors, and of functions that return one."""
    found = {name: ("", "") for name in dir(builtins) if name.endswith(("Error", "Exception"))}
    found["AnyAgentError"], before = ("500", "internal_error"), {}
    classes = [node for node in nodes if isinstance(node, ast.ClassDef) and node.name not in found]
    while before != found:
        before = dict(found)
        for each in classes:
            if bases := [found[base] for base in map(last_name, each.bases) if base in found]:
                own = keyword(each, "status"), keyword(each, "code")
                found[each.name] = (own[0] or bases[0][0], own[1] or bases[0][1])
    functions = [each for each in nodes if isinstance(each, ast.FunctionDef)]
    its = {f.name: found[last_name(f.returns)] for f in functions if last_name(f.returns) in found}
    return its | found


def text(node: ast.expr, names: Names) -> str:
    """Return a message as a template; where there are alternatives, all of them."""
    match node:
        case ast.Constant(value=str(literal)):
            return literal.replace("\n", "\\n")
        case ast.JoinedStr(values=parts):
            return "".join(text(part, names) for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return text(left, names) + text(right, names)
        case ast.IfExp(body=yes, orelse=no):
            return f"({text(yes, names)} | {text(no, names)})"
        case ast.Name(id=name) if name in names:
            others = {key: value for key, value in names.items() if key != name}
            return " | ".join(dict.fromkeys(text(value, others) for value in names[name]))
    return VALUE


def assigned(body: list[ast.stmt]) -> Names:
    found: Names = {}
    for node in (each for statement in body for each in ast.walk(statement)):
        if isinstance(node, ast.Assign):
            found.setdefault(last_name(node.targets[0]), []).append(node.value)
    return found


def lines(scope: ast.AST, known: Facts, names: Names, owner: str = "") -> Iterator[str]:
    """Yield a line for each error that is constructed here and has words of its own."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.Call):
            name = owner if last_name(node.func) == "cls" else last_name(node.func)
            ends = isinstance(scope, ast.Raise) or (isinstance(scope, ast.Return) and name in known)
            says = " ".join(text(each, names) for each in node.args)
            made = ends or (name in known and name.lstrip("_")[:1].isupper())
            if made and any(map(str.isalpha, says)):
                status, code = known.get(name, ("", ""))
                head = [name, status, keyword(node, "code") or code, keyword(node, "param")]
                yield f"{' '.join(filter(None, head))}: {says}"
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        inner = names | assigned(node.body) if function else names
        yield from lines(node, known, inner, node.name if isinstance(node, ast.ClassDef) else owner)


def render() -> str:
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}
    known = facts([node for tree in trees.values() for node in ast.walk(tree)])
    result = ""
    for path, tree in trees.items():
        constants = assigned([each for each in tree.body if isinstance(each, ast.Assign)])
        if found := sorted(set(lines(tree, known, constants))):
            result += "\n    ".join([str(path.relative_to(ROOT)), *found]) + "\n\n"
    return result[:-1]


def main() -> int:
    new, old = render(), GOLDEN.read_text(encoding="utf-8") if GOLDEN.exists() else ""
    if "--write" in sys.argv[1:]:
        GOLDEN.write_text(new, encoding="utf-8")
        return 0
    changes = [*difflib.unified_diff(old.splitlines(), new.splitlines(), n=0, lineterm="")]
    if changes:
        print(*changes, "if you mean these sentences: python tools/errors.py --write", sep="\n")
    return int(bool(changes))


if __name__ == "__main__":
    sys.exit(main())
