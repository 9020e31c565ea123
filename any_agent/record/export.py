"""Rows for a trainer, made from interactions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from any_agent.errors import InvalidRequest, Unprocessable
from any_agent.record.interaction_tree import InteractionTree
from any_agent.record.reward_propagation import discarded
from any_agent.types import Continuation, Row

if TYPE_CHECKING:
    import torch

Style = Literal["individual", "concat"]


def interaction_row(tree: InteractionTree, interaction_id: str, reward: float) -> Row:
    """Return one interaction as a row; its output is masked out if it is not trainable."""
    node = tree[interaction_id]
    trained = {node.id} if node.trainable else set[str]()
    return _row(tree, interaction_id, reward, shown={node.id}, trained=trained)


def individual_rows(tree: InteractionTree, rewards: Mapping[str, float]) -> dict[str, Row]:
    """Return a row for each interaction, by id; a discarded one has an empty loss mask."""
    gone = discarded(tree)
    return {
        n.id: _row(
            tree,
            n.id,
            rewards[n.id],
            shown={n.id},
            trained={n.id} if n.trainable and n.id not in gone else set(),
        )
        for n in tree
    }


def concat_rows(tree: InteractionTree, rewards: Mapping[str, float]) -> dict[str, Row]:
    """Return a row for each leaf, by its id, with a loss mask on each trained output of its path.

    The row's reward is its leaf's. Discarded leaves are left out. Raises Unprocessable, naming the
    interaction and the reason, if a path is not token-exact.
    """
    gone = discarded(tree)
    going_on = {n.parent_id for n in tree if n.id not in gone}
    trained = {n.id for n in tree if n.trainable and n.id not in gone}
    rows = {}
    for leaf in tree:
        if leaf.id in gone or leaf.id in going_on:
            continue
        path = tree.path(leaf.id)
        root = path[0]
        if root.continuation is Continuation.BRANCH:
            raise Unprocessable(
                f"interaction {root.id} could not continue its conversation exactly "
                f"({root.branch_reason or 'no reason recorded'}), so its path is not one token "
                "sequence: export with style individual",
                details={"interaction_id": root.id},
            )
        shown = {n.id for n in path}
        rows[leaf.id] = _row(tree, leaf.id, rewards[leaf.id], shown=shown, trained=trained)
    return rows


def export_rows(tree: InteractionTree, rewards: Mapping[str, float], style: str) -> dict[str, Row]:
    """Return rows by interaction id in one of the two styles.

    Raises InvalidRequest for an unknown style, and Unprocessable as :func:`concat_rows`.
    """
    if style == "individual":
        return individual_rows(tree, rewards)
    if style == "concat":
        return concat_rows(tree, rewards)
    raise InvalidRequest(f"style is {style!r}: use individual or concat", param="style")


def to_tensors(row: Row) -> dict[str, torch.Tensor]:
    """Return the row as torch tensors of the same types."""
    import torch

    return {name: torch.from_numpy(np.array(values)) for name, values in row.items()}


def to_json(row: Row) -> dict[str, Any]:
    """Return the row as lists and a float."""
    return {name: values.tolist() for name, values in row.items()}


def _row(
    tree: InteractionTree, leaf_id: str, reward: float, *, shown: set[str], trained: set[str]
) -> Row:
    """Return the path to a leaf as a row: logprobs on ``shown`` outputs, loss on ``trained``."""
    path = tree.path(leaf_id)
    input_ids = np.concatenate(
        [a for n in path for a in (n.prompt_delta_ids, n.output_ids)], dtype=np.int32
    )
    length = len(input_ids)
    loss_mask = np.zeros(length, np.int32)
    logprobs = np.zeros(length, np.float32)
    versions = np.full(length, -1, np.int32)
    at = 0
    for n in path:
        at += len(n.prompt_delta_ids)
        end = at + len(n.output_ids)
        if n.id in shown:
            logprobs[at:end] = n.output_logprobs
            versions[at:end] = n.output_versions
            loss_mask[at:end] = n.loss_mask() if n.id in trained else 0
        at = end
    return {
        "input_ids": input_ids,
        "loss_mask": loss_mask,
        "logprobs": logprobs,
        "versions": versions,
        "attention_mask": np.ones(length, np.bool_),
        "rewards": np.asarray(reward, np.float32),
    }
