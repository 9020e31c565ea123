"""docs/reference/parameters.md: what a model call may ask for, from the table in code."""

from __future__ import annotations

import json
from typing import Any

from any_agent.completions.params.parameter import Parameter
from any_agent.completions.params.schema_check import words
from any_agent.completions.params.table import PARAMETERS

HEAD = """# Parameters of model calls

<!-- Written by tools/docs/generate.py from any_agent/completions/params; change the rows there,
then run it. -->

Each route of model calls knows three classes of parameters. Honoured ones shape the call. Harmless
ones are recorded and change nothing. Refused ones answer 400 `unsupported_parameter`, because
ignoring them would answer, and train on, something other than what was asked. Null is as if a
parameter were left out. A value of another form is a 400 `invalid_request`. Each error names the
parameter.

A name that is in none of these tables is recorded and has no effect: the answer's header
`x-any-agent-ignored` names it, so does the interaction's `ignored`, and
`any_agent_ignored_parameters_total` counts it. At most 32 such names are taken in one call, each
of at most 64 characters; what is no letter, digit, `.`, `_` or `-` in them becomes `_`. Their
values are recorded up to 16 KiB in all, and never where they look like a key. With
`server.unknown_parameters=refuse` such a call is a 400 `unsupported_parameter`, as is always a name
that means something at another route here.

In train sessions the run's `sampling` replaces what agents ask for. The answer's header
`x-any-agent-overrides` lists what was replaced, with what was used, as JSON; the interaction keeps
what was asked. Eval sessions, and calls without a session, are sampled as they ask; the run's
`sampling.max_new_tokens` limits them, too.

What takes the draw of tokens away from the plain distribution makes an interaction untrainable, for
the reason in the last column, unless the run replaces it. Its session's other interactions are
trained on. `any_agent_untrainable_interactions_total` counts them by reason.

What the engine cannot do (`any-agent doctor` lists it) is a 400 that names the parameter.
"""
ROUTE_TITLES: dict[tuple[str, ...], str] = {
    ("chat", "completions"): "Chat Completions and Completions",
    ("responses",): "Responses",
    ("messages",): "Messages",
}
TITLES = {
    "honoured": "Honoured",
    "harmless": "Harmless: recorded, without effect",
    "refused": "Refused, unless it asks for what is so anyway",
}
ROUTES: dict[tuple[str, ...], str] = {
    ("chat", "completions"): "both",
    ("chat",): "chat",
    ("completions",): "completions",
}


def render() -> str:
    parts = [HEAD]
    for apis, route in ROUTE_TITLES.items():
        rows = [p for p in PARAMETERS if set(p.apis) & set(apis)]
        if not rows:
            continue
        parts.append(f"## {route}\n")
        for kind, title in TITLES.items():
            parts.append(f"### {title}\n")
            table = [_row(p, apis) for p in rows if p.kind == kind]
            parts.append("\n".join([*_head(kind, apis), *table]) + "\n")
    return "\n".join(parts)


def _head(kind: str, apis: tuple[str, ...]) -> list[str]:
    columns = ["parameter", "route"] if len(apis) > 1 else ["parameter"]
    columns += {
        "honoured": ["values", "meaning", "in train sessions", "untrainable"],
        "harmless": ["values", "why it has no effect"],
        "refused": ["is so anyway", "instead"],
    }[kind]
    return [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]


def _row(p: Parameter, apis: tuple[str, ...]) -> str:
    cells = [f"`{p.name}`"]
    if len(apis) > 1:
        cells.append(ROUTES[p.apis])
    if p.kind == "refused":
        cells += [_values(p.schema.get("enum", [])), p.meaning]
    else:
        cells += [words(p.schema), p.meaning]
    if p.kind == "honoured":
        cells += [p.train, f"`{p.untrainable}`" if p.untrainable else ""]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _values(values: list[Any]) -> str:
    return ", ".join(f"`{json.dumps(value)}`" for value in values)
