"""A session as rows to train on, or as conversations; rewards run back through its tree."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from any_agent.record import (
    InteractionTree,
    discarded,
    export_rows,
    is_frozen,
    propagate_rewards,
)
from any_agent.record import to_json as row_to_json
from proxy_ext.archive.records import ArchiveRecord


def rows(record: ArchiveRecord, style: str, discount: float) -> Iterator[bytes]:
    """Lines of one of the styles, a row each; of the policy's calls alone.

    The reward of each is null if nobody gave the session any: not that of one that was worth 0.

    Raises:
        Unprocessable: for `concat`, a path of it is no exact token sequence.
    """
    session = record.session
    calls = [call for call in record.interactions if not is_frozen(call)]
    tree = InteractionTree.from_interactions(calls)
    rewards = propagate_rewards(calls, discount=discount, final_reward=session["final_reward"])
    rewarded = session["final_reward"] is not None or any(call.reward is not None for call in calls)
    said = {name: session[name] for name in ("group_id", "task_id", "state", "step")}
    if style == "messages":
        found = _messages(tree, rewards)
    else:
        found = {id: row_to_json(row) for id, row in export_rows(tree, rewards, style).items()}
    for id, row in found.items():
        line = {"session_id": session["id"], "interaction_id": id, **said, **row}
        if not rewarded:
            line["reward" if style == "messages" else "rewards"] = None
        yield json.dumps(line).encode() + b"\n"


def _messages(tree: InteractionTree, rewards: dict[str, float]) -> dict[str, dict[str, Any]]:
    """Each conversation by its last call, with that one's reward; discarded ones are left out."""
    gone = discarded(tree)
    going_on = {node.parent_id for node in tree if node.id not in gone}
    out = {}
    for node in tree:
        if node.id not in gone and node.id not in going_on:
            out[node.id] = {
                "messages": [*tree.messages(node.id), node.output_message],
                "tools": tree.path(node.id)[0].tools,
                "reward": rewards[node.id],
            }
    return out
