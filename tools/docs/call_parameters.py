"""Write docs/reference/parameters.md: the parameters of model calls, from the table in code."""

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
ones are recorded and have no effect. Refused ones get 400 `unsupported_parameter`, because ignoring
them would answer, and train on, something else than the agent asked for. Null means that the
parameter is absent. A value of another form is a 400 `invalid_request`. Each error names the
parameter.

An unknown name, in none of these tables, is recorded and has no effect: the answer's header
`x-any-agent-ignored` and the interaction's `ignored` name it, and
`any_agent_ignored_parameters_total` counts it. A call may have at most 32 such names, each of at
most 64 characters; characters other than letters, digits, `.`, `_` and `-` become `_`. Their values
are recorded up to 16 KiB in all, and never where they look like a key. With
`server.unknown_parameters=refuse` such a call gets 400 `unsupported_parameter`; a name that has a
meaning at another route here always does, unless its value asks for nothing, such as `echo: false`,
`best_of: 1`, `n: 1` or `tools: []`, which is only recorded.

In train sessions the run's `sampling` replaces the agent's. The answer's header
`x-any-agent-overrides` lists the replaced parameters with the used values, as JSON; the interaction
keeps the requested ones. Eval sessions, and calls without a session, are sampled as they ask; the
run's `sampling.max_new_tokens` limits them, too.

A parameter by which tokens are not drawn from the plain distribution makes an interaction
untrainable, with the reason in the last column, unless the run replaces the parameter; a `grammar`
does so with [the tokens that it decides](calls.md#answers-under-a-grammar). The other
interactions of the session are trained on. The answer's header `x-any-agent-untrainable` has the
reason, and `any_agent_untrainable_interactions_total` counts untrainable interactions by reason.

A parameter that the engine does not support (`any-agent doctor` lists them) is a 400 that names it.
"""
ROUTE_TITLES: dict[tuple[str, ...], str] = {
    ("chat", "completions"): "Chat Completions and Completions",
    ("responses",): "Responses",
    ("messages",): "Messages",
}
TITLES = {
    "honoured": "Honoured",
    "harmless": "Harmless: recorded, without effect",
    "refused": "Refused, except for values that change nothing",
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
        "harmless": ["values", "reason"],
        "refused": ["accepted values", "instead"],
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
