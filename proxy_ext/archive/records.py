"""One session as one line of JSON: in archives, and as `any-agent export` writes it.

::

    number        its number in the order of creation on its rank
    session       id, mode, state, reason, task_id, group_id, group_size, tenant, opened_by,
                  pinned_version, metadata, created_at, ended_at (seconds since the epoch),
                  final_reward, step (the optimizer step that consumed it)
    rewards       every reward that was ever set, in order: interaction_id (null: the final one),
                  name, value (null: words alone), by, at, text (a user's words)
    interactions  the model calls in order, parents first: id, parent_id, continuation,
                  prompt_delta_ids, output_ids, output_logprobs, output_versions, message_delta,
                  output_message, tools, finish_reason, reward, gconfig, model, request,
                  branch_reason, untrainable_reason, created_at

A call's prompt is its parent's prompt + the parent's output + `prompt_delta_ids`; its messages are
the parent's messages + the parent's `output_message` + `message_delta`. The numbers of
`output_logprobs` are the shortest that give the same float32 again.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from any_agent.types import (
    Continuation,
    GenerationHyperparameters,
    Interaction,
    id_array,
    logprob_array,
)
from proxy_ext.journal.base import RewardRow, SessionRow

_SESSION = (
    *("id", "mode", "state", "reason", "task_id", "group_id", "group_size", "tenant", "opened_by"),
    *("pinned_version", "metadata", "created_at", "ended_at", "final_reward", "step"),
)
_ARRAYS = {
    "prompt_delta_ids": np.int32,
    "output_ids": np.int32,
    "output_logprobs": np.float32,
    "output_versions": np.int32,
}
_INTERACTION = tuple(
    field.name for field in dataclasses.fields(Interaction) if field.name != "session_id"
)


@dataclass(frozen=True, slots=True)
class ArchiveRecord:
    """One session with its rewards and interactions."""

    number: int
    session: Mapping[str, Any]
    rewards: Sequence[Mapping[str, Any]]
    interactions: Sequence[Interaction]


def record_line(
    number: int,
    row: SessionRow,
    rewards: Sequence[RewardRow],
    interactions: Sequence[Interaction],
) -> bytes:
    """Return a session's line, its line break included."""
    line = {
        # The number and the id come first: a reader that seeks a session parses no other.
        "number": number,
        "session": _json({name: getattr(row, name) for name in _SESSION}),
        "rewards": _json([dataclasses.asdict(reward) for reward in rewards]),
        "interactions": [_interaction(interaction) for interaction in interactions],
    }
    return orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)


def read_record(line: bytes) -> ArchiveRecord:
    """Parse a line of :func:`record_line`; ValueError for anything else."""
    try:
        plain = json.loads(line)
        session_id = plain["session"]["id"]
        return ArchiveRecord(
            number=int(plain["number"]),
            session=plain["session"],
            rewards=plain["rewards"],
            interactions=[_read_interaction(i, session_id) for i in plain["interactions"]],
        )
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"the line is not a record of a session: {error!r}") from error


def _interaction(interaction: Interaction) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name in _INTERACTION:
        value = getattr(interaction, name)
        if name in _ARRAYS:
            out[name] = np.ascontiguousarray(value, dtype=_ARRAYS[name])
        elif name == "gconfig":
            out[name] = _json(dataclasses.asdict(value))
        else:
            out[name] = _json(dict(value) if name == "request" else value)
    return out


def _read_interaction(plain: dict[str, Any], session_id: str) -> Interaction:
    values = {name: plain[name] for name in _INTERACTION}
    for name, kind in _ARRAYS.items():
        values[name] = id_array(plain[name]) if kind is np.int32 else logprob_array(plain[name])
    gconfig = plain["gconfig"]
    lists = {name: tuple(gconfig[name]) for name in ("stop", "stop_token_ids")}
    # Older archives lack it, as requests could not have it.
    lists["logit_bias"] = tuple((i, bias) for i, bias in gconfig.get("logit_bias", ()))
    values["gconfig"] = GenerationHyperparameters(**{**gconfig, **lists})
    values["continuation"] = Continuation(plain["continuation"])
    return Interaction(session_id=session_id, **values)


def _json(value: Any) -> orjson.Fragment:
    # orjson writes neither integers beyond 64 bits nor lone surrogates; agents send both.
    return orjson.Fragment(json.dumps(value))
