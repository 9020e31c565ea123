"""The rows that the trainer gets.

A row is one interaction's tensors, of shape [seq_len] or scalar, without padding:

================  =========  =========================================================
``input_ids``     int32      prompt, then output (possibly several outputs: concat rows)
``loss_mask``     int32      1 on the tokens to train on
``logprobs``      float32    behaviour log-probabilities, nats; 0 on prompts
``versions``      int32      the weights that sampled the token; -1 on prompts
``attention_mask``  bool     True
``rewards``       float32    scalar
``advantages``    float32    scalar, or [seq_len]
``temperatures``  float32    scalar; what the tokens were sampled at
``cut``           bool       True on outputs that the limit of tokens cut off; may be missing
================  =========  =========================================================

Every floating-point tensor is an input of the loss; a step adds more of them, as the reference's
log-probabilities. Everything is **unshifted**: entry t of every tensor is about token t, which is
predicted at position t - 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

Row: TypeAlias = dict[str, Tensor]


def trained_positions(row: Row) -> Tensor:
    """Return the positions of the tokens that enter the loss, [n] int64: ``loss_mask`` is 1.

    Raises ValueError for a row that cannot be trained on: one with padding, or with a loss on its
    first token, which nothing predicts.
    """
    if not bool(row["attention_mask"].all()):
        raise ValueError("a row must have no padding")
    positions = row["loss_mask"].nonzero()[:, 0]
    if len(positions) and int(positions[0]) == 0:
        raise ValueError("a row's first token has no predecessor to be predicted from")
    return positions


def is_trained(row: Row) -> bool:
    """Return True if a token of the row enters the loss."""
    return bool(row["loss_mask"].any())


def at_trained(row: Row, positions: Tensor) -> dict[str, Tensor]:
    """Return the row's floating-point tensors at these n positions: [n] each."""
    return {
        name: tensor[positions] if tensor.ndim else tensor.expand(len(positions))
        for name, tensor in row.items()
        if tensor.is_floating_point()
    }


def with_values(rows: Sequence[Row], name: str, values: Sequence[Tensor]) -> list[Row]:
    """Return the rows with one more tensor, 0 but for these values of their trained tokens."""
    out = []
    for row, own in zip(rows, values, strict=True):
        mask = row["loss_mask"].bool()
        out.append(row | {name: own.new_zeros(len(mask)).masked_scatter(mask, own)})
    return out


def count_trained(rows: Sequence[Row]) -> int:
    """Return the number of trained tokens, N of the loss."""
    return sum(int(row["loss_mask"].sum()) for row in rows)


def with_training_signal(row: Row, *, advantage: float = 0.0, temperature: float) -> Row:
    """Return the row with its advantage and temperature, which the loss needs."""
    if not temperature > 0:
        raise ValueError(f"temperature {temperature}: greedy tokens have no behaviour probability")
    return row | {
        "advantages": torch.tensor(advantage, dtype=torch.float32),
        "temperatures": torch.tensor(temperature, dtype=torch.float32),
    }


def written_row(ids: Sequence[int], mask: Sequence[int], *, advantage: float) -> Row:
    """Return a row that no engine sampled, with these token ids and this ``loss_mask``."""
    row = {
        "input_ids": torch.tensor(ids, dtype=torch.int32),
        "loss_mask": torch.tensor(mask, dtype=torch.int32),
        "logprobs": torch.zeros(len(ids)),
        "versions": torch.tensor(mask, dtype=torch.int32) - 1,
        "attention_mask": torch.ones(len(ids), dtype=torch.bool),
        "rewards": torch.tensor(0.0),
    }
    return with_training_signal(row, advantage=advantage, temperature=1.0)


def mask_stale(row: Row, *, step_of_version: Mapping[int, int], step: int, eta: int) -> Row:
    """Take tokens older than ``eta`` train steps out of the loss; the row itself is kept.

    ``step`` counts the train steps made so far, ``step_of_version`` has the count at which each
    version was published: its tokens' age is the difference. Tokens of a later step than ``step``
    (sampled in a history that a resume abandoned) have a negative age and stay; their importance
    weight is capped as any other's.

    Call it after scores, baselines and advantages are computed. Raises ValueError for a trained
    token whose version is not in ``step_of_version``.
    """
    mask, versions = row["loss_mask"], row["versions"]
    trained = mask.bool()
    stale = torch.zeros_like(trained)
    for version in sorted(set(versions[trained].tolist())):
        if version not in step_of_version:
            raise ValueError(f"no step is recorded for weight version {version}")
        if _too_old(step - step_of_version[version], eta):
            stale |= trained & (versions == version)
    return row | {"loss_mask": mask.masked_fill(stale, 0)}


def misfit(row: Row, vocabulary: int, context: int | None) -> tuple[str, str] | None:
    """Return why a model with so many token ids and positions cannot compute a row, and its words.

    `too_long`, or `unusable` for a token id that it lacks; None: it can.
    """
    ids = row["input_ids"]
    if context is not None and len(ids) > context:
        return "too_long", f"has {len(ids)} tokens, above the model's context of {context}"
    for id in map(int, ids.aminmax()):
        if not 0 <= id < vocabulary:
            return "unusable", (
                f"has the token id {id}, and the model's are 0 to {vocabulary - 1}: its engine, or "
                "its tokenizer, is another model's"
            )
    return None


def mask_cut(row: Row) -> Row:
    """Take outputs that the limit of tokens cut off out of the loss, as ``cut`` marks them, bool
    [seq_len].

    Call it after scores, baselines and advantages are computed.

    Source: DAPO's overlong filtering (arXiv 2503.14476).
    """
    if "cut" not in row:
        return row
    return row | {"loss_mask": row["loss_mask"].masked_fill(row["cut"], 0)}


def mark_fresh(row: Row, *, step_of_version: Mapping[int, int], step: int) -> Row:
    """Return the row with ``fresh`` [seq_len]: 1 for tokens whose age by :func:`mask_stale` is 0.

    The weights that sampled them are those of the step, so engine and trainer must agree on them.
    """
    fresh = torch.zeros_like(row["versions"], dtype=torch.float32)
    for version, published in step_of_version.items():
        if published == step:
            fresh[row["versions"] == version] = 1.0
    return row | {"fresh": fresh}


def _too_old(age: int, eta: int) -> bool:
    return age > eta
