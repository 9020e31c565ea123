"""Tools that only their provider runs: left out of the prompt, recorded, and named as ignored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from any_agent.completions.params.schema_check import shown
from any_agent.completions.params.unknown_fields import UnknownFields
from any_agent.errors import UnsupportedParameter

MAX_KIND = 64
"""Characters of a kind's name that are recorded."""


def leave_out(
    left_out: Mapping[str, Sequence[Any]],
    rest: UnknownFields,
    *,
    refuse: bool,
    alone: bool = False,
) -> None:
    """Note tools, by kind, as ignored in ``rest``.

    ``alone``: the request was made for nothing but what these do, so that an answer would be made
    up: UnsupportedParameter. So is any tool where ``refuse``.
    """
    for kind, tools in left_out.items():
        if alone:
            raise UnsupportedParameter(
                f"tools has {shown(kind)}, which only its provider runs, and nothing that the "
                "model could call here: give it a function that does the same",
                param="tools",
            )
        without_effect(f"tools.{kind}", tools, rest, refuse=refuse)


def without_effect(name: str, value: Any, rest: UnknownFields, *, refuse: bool) -> None:
    """Note a part of `tools`, such as `tools.mcp`, as ignored; UnsupportedParameter to refuse."""
    if refuse:
        raise UnsupportedParameter(
            f"tools: {shown(name.partition('.')[2])} has no effect here, and "
            "server.unknown_parameters refuses such; give the model a function that does the same",
            param="tools",
        )
    rest.ignore(name, value)
