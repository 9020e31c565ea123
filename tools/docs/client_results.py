"""Write compatibility.md by the findings of the suite `clients`.

It has the features of each client over each API, and the sessions of agents as they are shipped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[2] / "tests" / "clients" / "results.json"
WORKS = "works"
APIS = {
    "chat": "Chat Completions",
    "completions": "Completions",
    "responses": "Responses",
    "messages": "Messages",
}
ROUTES = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
FEATURES = {
    "plain": "A whole answer: its text, its finish reason, usage that adds up.",
    "streaming": "The answer in parts, as the model writes it.",
    "three turns": "A conversation that the client keeps; each call continues exactly where the "
    "last one ended, token by token.",
    "tools": "A tool call, its execution by the client, and its result; the next call continues "
    "exactly.",
    "streamed tools": "The same, where the call is streamed.",
    "accumulation": "The client's own sum of a stream is the whole answer.",
    "previous answer": "Three turns that send only new messages and name the previous answer.",
    "reasoning": "Reasoning is separate from the answer, and is sent back with it.",
    "structured output": "An answer of a given schema, parsed by the client.",
    "choices": "Several answers at once, with log-probabilities.",
    "stops": "The stop string, or the limit, that ended an answer.",
    "token counts": "A count before a call, equal to the call's usage.",
    "whole preset": "Claude Code's own prompt and all of its tools.",
    "errors": "A refused call raises the client's own error with the reason, and is not recorded.",
}

HEAD = """# Compatibility

<!-- Written by tools/docs/generate.py from tests/clients/results.json, which `make verify
SUITES=clients ARGS=--record` writes; run that. -->

This page shows what agents' client libraries, and
[agents as they are shipped](#agents-as-they-are-shipped), can do against a live service: router,
proxy, and an engine with scripted answers. Each client is the package from its registry at the
version below, in an environment of its own, with only a base URL and a session's key.

`make verify SUITES=clients` installs and tries them all, and fails where a cell differs from this
page. A test also checks the service's record: the number of interactions, and that each one after
the first continued its parent's tokens exactly.

In the tables, ✓ means that it works; – that the client has no such feature over this API, or that
it is not tested; a number is a reason below its table.
"""
FEATURES_HEAD = "## Features\n\n| feature | requirement |\n|---|---|"
AGENTS_HEAD = """## Agents as they are shipped

Each agent is the package from its registry, run by its lines in
[coding-agents.md](../how-to/connect/coding-agents.md) or
[more-frameworks.md](../how-to/connect/more-frameworks.md). It reads a question from a file, writes
the answer to another one with its own tools, and ends with a sentence; the model is scripted, all
else is real. The reward depends on the file, and the session is finalized for training.

*Exact* counts the calls whose recorded tokens, log-probabilities and weight versions are those that
the engine read and sampled, each going on from the call before it; *conversations* counts the
calls that begin anew; *trained* counts the calls that training may use.
"""
AGENTS_COLUMNS = (
    *("agent", "package", "registry", "version", "API", "tools it ran"),
    *("calls", "conversations", "exact", "trained"),
)
CLIENTS_HEAD = "## Clients\n\n| client | package | registry | version |\n|---|---|---|---|"


def render() -> str:
    """Return the document."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    clients, cells = results["clients"], results["cells"]
    parts = [HEAD, "\n".join([CLIENTS_HEAD, *map(_client, clients.values())]) + "\n"]
    for api, title in APIS.items():
        rows = {name: apis[api] for name, apis in cells.items() if api in apis}
        if rows:
            parts.append(f"## {title}: `{ROUTES[api]}`\n")
            parts.append(_table(clients, rows))
    tried = {feature for apis in cells.values() for row in apis.values() for feature in row}
    assert tried <= FEATURES.keys(), tried - FEATURES.keys()
    features = [f"| {name} | {text} |" for name, text in FEATURES.items() if name in tried]
    parts.append("\n".join([FEATURES_HEAD, *features]) + "\n")
    return "\n".join([*parts, AGENTS_HEAD, _agents(results["agents"].values())])


def _client(about: dict[str, Any]) -> str:
    cells = (_title(about), f"`{about['package']}`", about["registry"], about["version"])
    return f"| {' | '.join(cells)} |"


def _agents(agents: Iterable[dict[str, Any]]) -> str:
    head = f"| {' | '.join(AGENTS_COLUMNS)} |\n|{'---|' * len(AGENTS_COLUMNS)}"
    return "\n".join([head, *map(_agent, agents)]) + "\n"


def _agent(about: dict[str, Any]) -> str:
    cells = (about["title"], f"`{about['package']}`", about["registry"], about["version"])
    tools = ", ".join(f"`{tool}`" for tool in about["tools"])
    counts = (str(about[count]) for count in ("calls", "roots", "exact", "trained"))
    return f"| {' | '.join([*cells, APIS[about['api']], tools, *counts])} |"


def _title(about: dict[str, Any]) -> str:
    """Return a client's title, with what distinguishes packages of the same name."""
    if about["title"] != about["package"]:
        return str(about["title"])
    if about["registry"] == "npm":
        return f"{about['title']} (npm)"
    return f"{about['title']} {about['version'].partition('.')[0]}.x"


def _table(clients: dict[str, Any], rows: dict[str, dict[str, str]]) -> str:
    features = [f for f in FEATURES if any(f in row for row in rows.values())]
    names = list(rows)
    reasons: list[str] = []
    lines = [
        f"| | {' | '.join(_title(clients[name]) for name in names)} |",
        f"|---|{'---|' * len(names)}",
    ]
    for feature in features:
        cells = [_cell(rows[name].get(feature), reasons) for name in names]
        lines.append(f"| {feature} | {' | '.join(cells)} |")
    if reasons:
        lines += ["", *(f"{k}. {reason}" for k, reason in enumerate(reasons, 1))]
    return "\n".join(lines) + "\n"


def _cell(outcome: str | None, reasons: list[str]) -> str:
    if outcome is None:
        return "–"
    if outcome == WORKS:
        return "✓"
    if outcome not in reasons:
        reasons.append(outcome)
    return str(reasons.index(outcome) + 1)
