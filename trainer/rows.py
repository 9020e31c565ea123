"""The rows that the trainer gets, and their trained tokens.

An interaction's tensors have shape [seq_len], a batch's [batch, seq_len], padded on the right:

================  =========  =========================================================
``input_ids``     int32      prompt, then output (possibly several outputs: concat rows)
``loss_mask``     int32      1 on the tokens to train on
``logprobs``      float32    behaviour log-probabilities, nats; 0 on prompts
``versions``      int32      the weights that sampled the token; -1 on prompts and padding
``attention_mask``  bool     False on padding
``rewards``       float32    scalar, per batch [batch]
``advantages``    float32    scalar, per batch [batch]
``temperatures``  float32    scalar, per batch [batch]; what the tokens were sampled at
================  =========  =========================================================

Everything is **unshifted**: entry t of every tensor is about token t. Only
:attr:`TrainedTokens.sources` shifts: token t is predicted at position t - 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from any_agent.workflow import tensors as tensors_of_workflows

Row: TypeAlias = dict[str, Tensor]
"""One interaction's tensors, [seq_len] or scalar."""
Batch: TypeAlias = dict[str, Tensor]
"""Padded rows: [batch, seq_len] or [batch]."""


@dataclass(frozen=True, slots=True)
class TrainedTokens:
    """The places of a batch's n trained tokens, row by row. All tensors int64, shape [n]."""

    rows: Tensor
    positions: Tensor
    labels: Tensor

    @property
    def sources(self) -> Tensor:
        """The positions whose hidden states predict the tokens: one before each."""
        return self.positions - 1

    def __len__(self) -> int:
        return self.rows.numel()

    def gather(self, per_token: Tensor) -> Tensor:
        """Return the tokens' entries [n] of an unshifted [batch, seq_len] tensor."""
        return per_token[self.rows, self.positions]

    def spread(self, per_row: Tensor) -> Tensor:
        """Return a [batch] tensor's entry for each token: [n]."""
        return per_row[self.rows]

    def place(self, k: int) -> str:
        """Return the place of token k for an error message."""
        return f"row {int(self.rows[k])}, position {int(self.positions[k])}"


def trained_tokens(batch: Batch) -> TrainedTokens:
    """Find the tokens that enter the loss: ``loss_mask`` is 1.

    Raises ValueError where a batch cannot be trained on: padding on the left or inside a row,
    a loss on padding, or on a row's first token, which nothing predicts.
    """
    mask, attention = batch["loss_mask"].bool(), batch["attention_mask"].bool()
    if bool((attention[:, 1:] & ~attention[:, :-1]).any()):
        raise ValueError("rows must be padded on the right only")
    if bool((mask & ~attention).any()):
        raise ValueError("the loss mask covers padding")
    if bool(mask[:, :1].any()):
        raise ValueError("a row's first token has no predecessor to be predicted from")
    rows, positions = mask.nonzero(as_tuple=True)
    return TrainedTokens(rows, positions, batch["input_ids"][rows, positions].long())


def count_trained(rows: Sequence[Row | Batch]) -> int:
    """Return the number of trained tokens, N of the loss."""
    return sum(int(row["loss_mask"].sum()) for row in rows)


def with_training_signal(row: Row, *, advantage: float, temperature: float) -> Row:
    """Return the row with its advantage and temperature, which the loss needs."""
    if not temperature > 0:
        raise ValueError(f"temperature {temperature}: greedy tokens have no behaviour probability")
    return row | {
        "advantages": torch.tensor(advantage, dtype=torch.float32),
        "temperatures": torch.tensor(temperature, dtype=torch.float32),
    }


def concat_padded_tensors(rows: Sequence[Row]) -> Batch:
    """Put interactions ([seq_len]) into one batch ([batch, seq_len]), padded right.

    Padding is 0, and -1 for ``versions``. Scalars become [batch]. Raises ValueError if nothing is
    given or if the keys differ.
    """
    if not rows:
        raise ValueError("nothing to concatenate")
    return tensors_of_workflows.concat_padded_tensors(
        [{key: tensor.unsqueeze(0) for key, tensor in row.items()} for row in rows]
    )


def mask_stale(row: Row, *, step_of_version: Mapping[int, int], step: int, eta: int) -> Row:
    """Take tokens older than ``eta`` train steps out of the loss; the row itself is kept.

    ``step`` counts the train steps made so far, ``step_of_version`` has the count at which each
    version was published: its tokens' age is the difference. Tokens of a later step than ``step``
    (sampled in a history that a resume abandoned) have a negative age and stay; their importance
    weight is capped as any other's.

    Call it after scores, baselines and advantages are computed, for rows or batches. Raises
    ValueError for a trained token whose version is not in ``step_of_version``.
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


def foreign_id(row: Row, vocabulary: int) -> int | None:
    """Return a token id that a model with so many does not have; None without any."""
    least, most = (int(bound) for bound in row["input_ids"].aminmax())
    if least < 0:
        return least
    return most if most >= vocabulary else None


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
