"""The reference of the HTTP API, from `/openapi.json` as a service answers it."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from textwrap import fill
from typing import Any

HEAD = """# HTTP API

<!-- Written by tools/docs/generate.py from /openapi.json; change the routes of proxy_ext/api, the
models of any_agent/protocol or proxy_ext/api/openapi/description.json, then run it. -->

Every route with its parameters, body, answer and errors, as `/openapi.json` of a running service
describes them. [routes.md](routes.md) says in a line what each is for, [keys.md](keys.md) which key
opens it, [sessions.md](sessions.md) its effect in every state of a session.

{description}
"""
ERRORS_HEAD = """## Errors

A body has `error` with `message`, `type`, `param` and `code`, as OpenAI's SDKs show it; the routes
of Anthropic's API have Anthropic's form. The message says what to do.

| status | meaning |
|---|---|"""
TAGS = {
    "model calls": ("Model calls", "Each also works without `/v1`, and behind `/<api_key>`."),
    "agents": ("Sessions", ""),
    "trainer": (
        "Trainer and operator",
        "`x-any-agent-epoch` is the number of the trainer's start: an earlier start gets 409.",
    ),
    "operations": ("Operations", ""),
    "as AReaL has it": ("As AReaL has it", "[from-areal.md](from-areal.md) compares them."),
}
_CALLS = (
    *("ChatRequest", "CompletionRequest", "ResponsesRequest"),
    *("MessagesRequest", "CountTokensRequest"),
)
"""Bodies of model calls: parameters.md has their fields, and what becomes of each."""


def render() -> str:
    """Return the document."""
    app: Any = importlib.import_module("tests.support.proxy").our_app()
    schema: dict[str, Any] = app.openapi()
    schemas: dict[str, Any] = schema["components"]["schemas"]
    operations = [
        (f"{method.upper()} {path}", operation)
        for path, methods in schema["paths"].items()
        for method, operation in methods.items()
    ]
    parts = [HEAD.format(description=fill(schema["info"]["description"], 100))]
    for tag, (title, about) in TAGS.items():
        parts.append(f"## {title}\n")
        if about:
            parts.append(f"{about}\n")
        parts += [_operation(*each) for each in operations if each[1]["tags"] == [tag]]
    parts += [_errors(operations), "## Bodies\n"]
    parts += [_schema(name, schemas[name]) for name in sorted(schemas, key=str.lower)]
    return "\n".join(parts)


def _operation(route: str, operation: dict[str, Any]) -> str:
    lines = [f"### `{route}`\n"]
    if operation.get("description"):
        lines.append(f"{_line(operation['description'])}\n")
    parameters = [p for p in operation.get("parameters", []) if p["in"] != "path"]
    if parameters:
        lines += ["| parameter | in | type | meaning |", "|---|---|---|---|"]
        for parameter in parameters:
            own = parameter["schema"]
            meaning = _cell(parameter.get("description") or own.get("description") or "")
            lines.append(
                f"| `{parameter['name']}` | {parameter['in']} | {_type(own)} | {meaning} |"
            )
        lines.append("")
    body = operation.get("requestBody")
    facts = [f"body: {_type(_content(body))}"] if body else []
    answers = operation["responses"]
    good = [s for s in answers if s < "300"]
    facts += [f"{status}: {_answer(answers[status])}" for status in good]
    facts.append(f"errors: {', '.join(s for s in answers if s not in good)}")
    return "\n".join([*lines, *(f"- {fact}" for fact in facts), ""])


def _answer(answer: dict[str, Any]) -> str:
    content = _content(answer)
    text = answer["description"].rstrip(".")
    kind = _type(content) if content else ""
    if text == "Successful Response":
        return kind or "no body"
    return f"{kind}: {text}" if kind else text


def _content(of: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a body as JSON, or {} if it has none."""
    schema: dict[str, Any] = of.get("content", {}).get("application/json", {}).get("schema", {})
    return schema


def _errors(operations: list[tuple[str, dict[str, Any]]]) -> str:
    texts: dict[str, str] = {}
    for _, operation in operations:
        for status, answer in operation["responses"].items():
            if status >= "300":
                texts.setdefault(status, _cell(answer["description"]))
    return "\n".join([ERRORS_HEAD, *(f"| {s} | {texts[s]} |" for s in sorted(texts)), ""])


def _schema(name: str, schema: dict[str, Any]) -> str:
    lines = [f"### {name}\n"]
    if schema.get("description"):
        lines.append(f"{_line(schema['description'])}\n")
    fields = schema.get("properties", {})
    if name in _CALLS:
        lines.append("[parameters.md](parameters.md) has its fields.\n")
    elif fields:
        lines += ["| field | type | default | meaning |", "|---|---|---|---|"]
        needed = set(schema.get("required", ()))
        for field, own in fields.items():
            default = "required" if field in needed else _default(own)
            meaning = _cell(own.get("description", ""))
            lines.append(f"| `{field}` | {_type(own)} | {default} | {meaning} |")
        lines.append("")
    for example in schema.get("examples", ()):
        lines += ["```json", json.dumps(example, ensure_ascii=False), "```", ""]
    return "\n".join(lines)


def _default(field: dict[str, Any]) -> str:
    return f"`{json.dumps(field['default'])}`" if "default" in field else ""


def _type(schema: dict[str, Any]) -> str:
    """Return a type in words, with its limits."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return " or ".join(dict.fromkeys(map(_type, schema[key])))
    if "enum" in schema:
        return " or ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    kind = schema.get("type")
    if isinstance(kind, list):
        return " or ".join(kind)
    match kind:
        case "array":
            return f"array of {_type(schema.get('items', {}))}"
        case "object" if isinstance(schema.get("additionalProperties"), dict):
            return f"object of {_type(schema['additionalProperties'])}"
        case None:
            return "any"
    return " ".join([kind, *_limits(schema)])


def _limits(schema: dict[str, Any]) -> Iterator[str]:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    for key, sign in signs.items():
        if key in schema:
            number = schema[key]
            yield f"{sign} {int(number):,}" if number == int(number) else f"{sign} {number}"
    if "maxLength" in schema:
        yield f"of at most {schema['maxLength']:,} characters"


def _line(text: str) -> str:
    """Return paragraphs with their lines joined."""
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("None", "null")
