"""What episodes return as one batch of tensors, or as the rows that a trainer eats.

:mod:`any_agent.workflow.tensor_checks` says what the fields of such tensors are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import numpy as np

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
    Arrays,
    checked_arrays,
    shown,
    wrong,
)

if TYPE_CHECKING:
    import torch

Kind: TypeAlias = Literal["tensors", "interactions", "trajectories"]


def kind_of(result: Any) -> Kind:
    """Which of the forms it is that an episode may return; InvalidTrajectory for any other."""
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
        raise _nothing()
    raise InvalidTrajectory(
        f"arun_episode returned {shown(result)}: it must return a dictionary of tensors, of "
        "interactions (as EngineOpenAI.export_interactions gives them), a list of trajectories, or "
        "None to reject the episode"
    )


def trajectories_of(result: EpisodeResult | None) -> list[Trajectory]:
    """It, if it is a list of recorded sessions, and none if it is None; else InvalidTrajectory."""
    if result is None:
        return []
    if isinstance(result, list):
        return result
    raise InvalidTrajectory(f"trajectories are wanted, not {shown(result)}")


def tensors_of(result: EpisodeResult, *, discount: float = 1.0) -> TensorDict:
    """It as one checked batch of tensors, padded; ``discount`` as in :func:`rows_of`."""
    if kind_of(result) == "tensors":
        return checked_tensors(cast(Mapping[str, Any], result))
    rows = [row for row, _ in rows_of(result, discount=discount)]
    if not rows:
        raise _nothing()
    return padded(rows)


def checked_tensors(result: Mapping[str, Any]) -> TensorDict:
    """The fields of an episode's tensors, of the documented types; those that are come as they are.

    Raises InvalidTrajectory, which names the field, what it is and what it must be.
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
    """An episode as the trainer's rows, without padding, each with its temperature, if known.

    Rewards of tensors and interactions are taken as they are (r); through trajectories they run
    back here, with ``discount``. ``newest`` is the weight version that nothing can be newer than,
    ``vocab_size`` what every token id is below. Raises InvalidTrajectory.
    """
    kind = kind_of(result)
    if kind == "trajectories":
        rows = [r for t in cast(list[Trajectory], result) for r in _recorded(t, discount)]
    elif kind == "interactions":
        interactions = cast(Mapping[str, InteractionWithTokenLogpReward], result).values()
        rows = [
            (_checked_row(i.rewarded_row(), i.interaction_id), i.temperature) for i in interactions
        ]
    else:
        arrays = checked_arrays(cast(Mapping[str, Any], result))
        for name in TRAINED_ON:
            if name not in arrays:
                raise wrong(name, "is missing: without it an episode cannot be trained on")
        rows = _unpadded(arrays)
    if newest is not None:
        _check_versions(rows, newest)
    if vocab_size is not None:
        _check_ids(rows, vocab_size)
    return rows


def padded(rows: Sequence[Row]) -> TensorDict:
    """Rows as one batch of tensors, padded on the right: [rows, longest], per row [rows]."""
    import torch

    longest = max(len(row["input_ids"]) for row in rows)
    out = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        if values[0].ndim == 0:
            out[name] = torch.from_numpy(np.stack(values))
            continue
        whole = np.full((len(rows), longest), PADDING.get(name, 0), values[0].dtype)
        for k, value in enumerate(values):
            whole[k, : len(value)] = value
        out[name] = torch.from_numpy(whole)
    return out


def concat_padded_tensors(batches: Sequence[TensorDict]) -> TensorDict:
    """Batches one below the other, [sum of B, longest T]; shorter ones are padded on the right.

    All must have the same fields, and fields of more than one dimension the same further ones but
    the second. Raises InvalidTrajectory.
    """
    import torch
    from torch.nn import functional

    if not batches:
        return {}
    first, *others = batches
    for other in others:
        if odd := first.keys() ^ other.keys():
            raise wrong(min(odd), "is in some of the batches only: all need the same fields")
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


def _nothing() -> InvalidTrajectory:
    return InvalidTrajectory(
        "arun_episode returned nothing to train on: no model call was recorded. Return None to "
        "reject an episode"
    )


def _recorded(t: Trajectory, discount: float) -> list[tuple[Row, float | None]]:
    rewards = propagate_rewards(t.interactions, discount=discount, final_reward=t.final_reward)
    tree = InteractionTree.from_interactions(t.interactions)
    rows = individual_rows(tree, rewards)
    return [(_checked_row(row, id), tree[id].gconfig.temperature) for id, row in rows.items()]


def _checked_row(row: Row, interaction_id: str) -> Row:
    try:
        checked_arrays({name: values[None] for name, values in row.items()})
    except InvalidTrajectory as error:
        raise InvalidTrajectory(
            f"interaction {interaction_id}: {error.message}", param=error.param
        ) from None
    return row


def _check_versions(rows: list[tuple[Row, float | None]], newest: int) -> None:
    for row, _ in rows:
        sampled = row["versions"][row["loss_mask"] == 1]
        if sampled.size and sampled.max() > newest:
            raise wrong(
                "versions",
                f"has {sampled.max()} where loss_mask is 1, and the newest weights are {newest}: "
                "take the output's versions from the response (output_versions)",
            )


def _check_ids(rows: list[tuple[Row, float | None]], vocab_size: int) -> None:
    for row, _ in rows:
        if (most := int(row["input_ids"].max())) >= vocab_size:
            raise wrong(
                "input_ids", f"has the token id {most}: the model knows those below {vocab_size}"
            )


def _unpadded(arrays: Arrays) -> list[tuple[Row, float | None]]:
    lengths = arrays["attention_mask"].sum(axis=1)
    temperatures = arrays.get("temperatures")
    out: list[tuple[Row, float | None]] = []
    for k, length in enumerate(lengths):
        row = {name: np.array(arrays[name][k, :length]) for name in PER_TOKEN}
        row["rewards"] = np.asarray(arrays["rewards"][k])
        out.append((row, None if temperatures is None else float(temperatures[k])))
    return out
