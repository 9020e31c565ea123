"""Structural tags as llguidance's own grammars: those of their parts that this service sends."""

from __future__ import annotations

import json
from typing import Any


def lark_of(tag: Any) -> str:
    """A structural tag (`{"type": "structural_tag", "format": ...}`) in llguidance's Lark form.

    Raises ValueError, KeyError or TypeError for a part that is none of those read here.
    """
    rules: list[str] = []
    try:
        start = _part(tag["format"], rules)
    except RecursionError:
        raise ValueError("the structural tag is nested too deep") from None
    return "\n".join([f"start: {start}", *rules])


def _part(part: Any, rules: list[str]) -> str:
    match part:
        case {"type": "const_string", "value": str(text)}:
            return json.dumps(text, ensure_ascii=False)
        case {"type": "token", "token": int(token)}:
            return f"<[{token}]>"
        case {"type": "json_schema", "json_schema": schema}:
            return f"%json {json.dumps(schema)}"
        case {"type": "regex", "pattern": str(pattern)}:
            return _rule(f": {_regex(pattern)}", rules)
        case {"type": "sequence", "elements": [*parts]}:
            return _rule(": " + " ".join(_part(each, rules) for each in parts), rules)
        case {"type": "or", "elements": [*parts]}:
            return _rule(": " + " | ".join(_part(each, rules) for each in parts), rules)
        case {"type": "optional", "content": content}:
            return _rule(f": ({_part(content, rules)})?", rules)
        case {"type": "star", "content": content}:
            return _rule(f": ({_part(content, rules)})*", rules)
        case {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": end}:
            return _rule(f": {_edge(begin, rules)} {_until(end, rules)}", rules)
    raise ValueError(f"a structural tag's part {str(part)[:80]} is not supported")


def _rule(body: str, rules: list[str]) -> str:
    """The name of a new rule: it keeps what is inside together."""
    name = f"part_{len(rules)}"
    rules.append(name + body)
    return name


def _edge(edge: Any, rules: list[str]) -> str:
    return json.dumps(edge, ensure_ascii=False) if isinstance(edge, str) else _part(edge, rules)


def _until(end: Any, rules: list[str]) -> str:
    """Any text, and the end that follows its first end."""
    if isinstance(end, str):
        return _rule(f"[suffix={json.dumps(end)}]: /(?s:.*)/", rules)
    return _rule(": /(?s:.*)/", rules) + " " + _part(end, rules)


def _regex(pattern: str) -> str:
    """Between slashes, in which none may stand unescaped."""
    out, escaped = [], False
    for char in pattern:
        out.append("\\/" if char == "/" and not escaped else char)
        escaped = char == "\\" and not escaped
    return "/" + "".join(out).replace("\n", "\\n") + "/"
