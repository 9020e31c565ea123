"""Conversion of episodes' results into one batch of tensors, or into a trainer's rows.

:mod:`any_agent.workflow.tensor_checks` describes the fields of such tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from any_agent.errors import InvalidTrajectory
from any_agent.record import (
    InteractionTree,
    InteractionWithTokenLogpReward,
    individual_rows,
    propagate_rewards,
)
from any_agent.types import Row, Trajectory
from any_agent.workflow.base import EpisodeResult, TensorDict
from any_agent.workflow.tensor_checks import (
    PADDING,
    PER_TOKEN,
    TRAINED_ON,
    checked_arrays,
    shown,
    wrong,
)

if TYPE_CHECKING:
    import torch

Kind: TypeAlias = Literal["tensors", "interactions", "trajectories"]


def kind_of(result: Any) -> Kind:
    """Return the kind of an episode's result; InvalidTrajectory for any other value."""
    if isinstance(result, list) and result and all(isinstance(t, Trajectory) for t in result):
        return "trajectories"
    if isinstance(result, Mapping) and result:
        if all(isinstance(v, InteractionWithTokenLogpReward) for v in result.values()):
            return "interactions"
        if "input_ids" in result or not any(
            isinstance(v, InteractionWithTokenLogpReward) for v in result.values()
        ):
            return "tensors"
    if isinstance(result, Mapping | list) and not result:
        raise _empty_result()
    raise InvalidTrajectory(
        f"arun_episode returned {shown(result)}: it must return a dictionary of tensors, of "
        "interactions (as EngineOpenAI.export_interactions gives them), a list of trajectories, or "
        "None to reject the episode"
    )


def tensors_of(result: EpisodeResult, *, discount: float = 1.0) -> TensorDict:
    """Return a result as one checked, padded batch of tensors; ``discount`` as in
    :func:`rows_of`."""
    if kind_of(result) == "tensors":
        return checked_tensors(cast(Mapping[str, Any], result))
    rows = [row for row, _ in rows_of(result, discount=discount)]
    if not rows:
        raise _empty_result()
    return padded(rows)


def checked_tensors(result: Mapping[str, Any]) -> TensorDict:
    """Return the fields as tensors of the documented types, unchanged where they have them.

    Raises InvalidTrajectory with the field, its value and its requirement.
    """
    import torch

    arrays = checked_arrays(result)
    return {
        name: value
        if isinstance(value, torch.Tensor) and str(value.dtype) == f"torch.{arrays[name].dtype}"
        else torch.from_numpy(np.array(arrays[name]))
        for name, value in result.items()
    }


def rows_of(
    result: EpisodeResult,
    *,
    discount: float = 1.0,
    newest: int | None = None,
    vocab_size: int | None = None,
) -> list[tuple[Row, float | None]]:
    """Return an episode as the trainer's rows without padding, each with its temperature, if known.

    Rewards of tensors and interactions are final; those of trajectories are propagated here, with
    ``discount``. ``newest`` is the newest possible weight version, and token ids must lie below
    ``vocab_size``. Raises InvalidTrajectory.
    """
    kind = kind_of(result)
    if kind == "trajectories":
        rows = [r for t in cast(list[Trajectory], result) for r in _recorded(t, discount)]
    elif kind == "interactions":
        interactions = cast(Mapping[str, InteractionWithTokenLogpReward], result).values()
        rows = [
            (_checked_row(_marked(i.rewarded_row(), i.cut_tokens), i.interaction_id), i.temperature)
            for i in interactions
        ]
    else:
        arrays = checked_arrays(cast(Mapping[str, Any], result))
        for name in TRAINED_ON:
            if name not in arrays:
                raise wrong(name, "is missing: without it an episode cannot be trained on")
        unpadded = rows_in(arrays)
        temperatures = arrays.get("temperatures")
        known = [None] * len(unpadded) if temperatures is None else temperatures.tolist()
        rows = list(zip(unpadded, known, strict=True))
    for row, _ in rows:
        _check_row(row, newest, vocab_size)
    return rows


def roles_of(result: EpisodeResult) -> list[str]:
    """Return the role of each row of :func:`rows_of`; [] for tensors, which have none."""
    kind = kind_of(result)
    if kind == "trajectories":
        return [i.role for t in cast(list[Trajectory], result) for i in t.interactions]
    if kind == "interactions":
        given = cast(Mapping[str, InteractionWithTokenLogpReward], result).values()
        return [i.trained_role for i in given]
    return []


def rows_in(tensors: Mapping[str, Any]) -> list[Row]:
    """Return the rows of a batch of tensors without padding; missing fields get neutral values."""
    arrays = {name: np.asarray(value) for name, value in tensors.items()}
    ids, attention = arrays["input_ids"], arrays["attention_mask"]
    neutral = {"loss_mask": 0, "logprobs": 0, "versions": -1}
    for name, value in neutral.items():
        arrays.setdefault(name, np.full(ids.shape, value, PER_TOKEN[name]))
    rewards = arrays.get("rewards", np.full(len(ids), np.nan, np.float32))
    known = [name for name in PER_TOKEN if name in arrays]
    return [
        {name: np.array(arrays[name][k, : int(attention[k].sum())]) for name in known}
        | {"rewards": np.asarray(rewards[k])}
        for k in range(len(ids))
    ]


def padded(rows: Sequence[Row]) -> TensorDict:
    """Return rows as one batch of tensors, padded on the right: [rows, longest], per row [rows].

    Where only some rows have ``cut``, it is False in the others.
    """
    import torch

    if any("cut" in row for row in rows):
        rows = [{"cut": np.zeros(len(row["input_ids"]), np.bool_), **row} for row in rows]
    longest = max(len(row["input_ids"]) for row in rows)
    out = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        if values[0].ndim == 0:
            out[name] = torch.from_numpy(np.stack(values))
            continue
        filled = np.full((len(rows), longest), PADDING.get(name, 0), values[0].dtype)
        for k, value in enumerate(values):
            filled[k, : len(value)] = value
        out[name] = torch.from_numpy(filled)
    return out


def concat_padded_tensors(batches: Sequence[TensorDict]) -> TensorDict:
    """Concatenate batches, [sum of B, longest T]; shorter ones are padded on the right.

    All need the same fields but ``cut``, which is False in those without it, with equal dimensions
    after the second one. Raises InvalidTrajectory.
    """
    import torch
    from torch.nn import functional

    if not batches:
        return {}
    if any("cut" in batch for batch in batches):
        batches = [
            batch
            if "cut" in batch
            else batch | {"cut": torch.zeros_like(batch["input_ids"]).bool()}
            for batch in batches
        ]
    first, *others = batches
    for other in others:
        if odd := first.keys() ^ other.keys():
            raise wrong(min(odd), "is missing in some of the batches: all need the same fields")
    longest = {
        name: max(b[name].shape[1] for b in batches)
        for name, value in first.items()
        if value.dim() > 1
    }
    out: dict[str, torch.Tensor] = {}
    for name in first:
        parts = [b[name] for b in batches]
        if name in longest:
            parts = [
                functional.pad(
                    p,
                    (0, 0) * (p.dim() - 2) + (0, longest[name] - p.shape[1]),
                    value=PADDING.get(name, 0),
                )
                for p in parts
            ]
        out[name] = torch.cat(parts)
    return out


def _empty_result() -> InvalidTrajectory:
    return InvalidTrajectory(
        "arun_episode returned nothing to train on: no model call was recorded. Return None to "
        "reject an episode"
    )


def _recorded(t: Trajectory, discount: float) -> list[tuple[Row, float | None]]:
    rewards = propagate_rewards(t.interactions, discount=discount, final_reward=t.final_reward)
    tree = InteractionTree.from_interactions(t.interactions)
    rows = {
        id: _marked(row, (row["versions"] >= 0) & tree[id].cut)
        for id, row in individual_rows(tree, rewards).items()
    }
    return [(_checked_row(row, id), tree[id].gconfig.temperature) for id, row in rows.items()]


def _marked(row: Row, cut: npt.NDArray[np.bool_] | None) -> Row:
    """Return the row with the marks of outputs that were cut off, if these are known."""
    return row if cut is None else row | {"cut": cut}


def _checked_row(row: Row, interaction_id: str) -> Row:
    try:
        checked_arrays({name: values[None] for name, values in row.items()})
    except InvalidTrajectory as error:
        raise InvalidTrajectory(
            f"interaction {interaction_id}: {error.message}", param=error.param
        ) from None
    return row


def _check_row(row: Row, newest: int | None, vocab_size: int | None) -> None:
    sampled = row["versions"][row["loss_mask"] == 1]
    if newest is not None and sampled.size and sampled.max() > newest:
        raise wrong(
            "versions",
            f"has {sampled.max()} where loss_mask is 1, and the newest weights are {newest}: "
            "take the output's versions from the response (output_versions)",
        )
    if vocab_size is not None and (most := int(row["input_ids"].max())) >= vocab_size:
        raise wrong("input_ids", f"has the token id {most}: the model's ids are below {vocab_size}")
