"""What episodes return, checked, and as the rows that a trainer eats.

A dictionary of tensors has, padded on the right:

================  =========  =======  =========================================================
field             shape      dtype
================  =========  =======  =========================================================
input_ids         [B, T]     int32    required: prompt and output, or a whole conversation
attention_mask    [B, T]     bool     required: True on tokens, False on padding
loss_mask         [B, T]     int32    1 on the outputs to train on
logprobs          [B, T]     float32  of the sampled tokens, in nats; 0 on prompts
versions          [B, T]     int32    of the weights that sampled the token; -1 on prompts
rewards           [B]        float32
temperatures      [B]        float32  what the outputs were sampled at, where not as the run says
================  =========  =======  =========================================================

Everything is unshifted: entry t speaks of token t. Training needs all but the last one; without
``loss_mask`` and what follows it, a batch can be collected, but not trained on. Other tensors
whose first dimension is B are handed on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from any_agent.errors import InvalidTrajectory
from any_agent.protocol import MAX_REWARD
from any_agent.record import (
    InteractionTree,
    InteractionWithTokenLogpReward,
    individual_rows,
    propagate_rewards,
)
from any_agent.types import Row, Trajectory
from any_agent.workflow.base import EpisodeResult, TensorDict

if TYPE_CHECKING:
    import torch

Kind: TypeAlias = Literal["tensors", "interactions", "trajectories"]
Arrays: TypeAlias = dict[str, npt.NDArray[Any]]

PER_TOKEN: Mapping[str, Any] = {
    "input_ids": np.int32,
    "attention_mask": np.bool_,
    "loss_mask": np.int32,
    "logprobs": np.float32,
    "versions": np.int32,
}
"""Fields of the shape [B, T]."""
PER_ROW: Mapping[str, Any] = {"rewards": np.float32, "temperatures": np.float32}
"""Fields of the shape [B]."""
REQUIRED = ("input_ids", "attention_mask")
TRAINED_ON = (*REQUIRED, "loss_mask", "logprobs", "versions", "rewards")
PADDING: Mapping[str, int] = {"versions": -1}
"""Elsewhere it is 0."""


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
    raise InvalidTrajectory(
        f"arun_episode returned {_shown(result)}: it must return a dictionary of tensors, of "
        "interactions (as EngineOpenAI.export_interactions gives them), a list of trajectories, or "
        "None to reject the episode"
    )


def trajectories_of(result: EpisodeResult | None) -> list[Trajectory]:
    """It, if it is a list of recorded sessions, and none if it is None; else InvalidTrajectory."""
    if result is None:
        return []
    if isinstance(result, list):
        return result
    raise InvalidTrajectory(f"trajectories are wanted, not {_shown(result)}")


def tensors_of(result: EpisodeResult, *, discount: float = 1.0) -> TensorDict:
    """It as one checked batch of tensors, padded; ``discount`` as in :func:`rows_of`."""
    if kind_of(result) == "tensors":
        return checked_tensors(cast(Mapping[str, Any], result))
    return padded([row for row, _ in rows_of(result, discount=discount)])


def checked_tensors(result: Mapping[str, Any]) -> TensorDict:
    """The fields of an episode's tensors; what came as numpy arrays becomes tensors of torch.

    Raises InvalidTrajectory, which names the field, what it is and what it must be.
    """
    import torch

    checked_arrays(result)
    return {
        name: value if isinstance(value, torch.Tensor) else torch.from_numpy(np.array(value))
        for name, value in result.items()
    }


def checked_arrays(result: Mapping[str, Any]) -> Arrays:
    """The same checks; the fields as numpy arrays."""
    for name in REQUIRED:
        if name not in result:
            raise _wrong(name, f"is missing; there are {', '.join(map(str, result)) or 'none'}")
    arrays = {name: _array(name, value) for name, value in result.items()}
    shape = arrays["input_ids"].shape
    if len(shape) != 2 or 0 in shape:
        raise _wrong(
            "input_ids",
            f"has the shape {list(shape)}: it must be [batch, length], neither of them 0"
            + ("; one sequence is ids.unsqueeze(0)" if len(shape) == 1 and shape[0] else ""),
        )
    for name, values in arrays.items():
        if name in PER_TOKEN:
            _check(name, values, PER_TOKEN[name], shape)
        elif name in PER_ROW:
            _check(name, values, PER_ROW[name], shape[:1])
        elif values.shape[:1] != shape[:1]:
            raise _wrong(
                name,
                f"has the shape {list(values.shape)}: what you add must have a first dimension of "
                f"{shape[0]}, the batch's",
            )
    _check_values(arrays)
    return arrays


def rows_of(result: EpisodeResult, *, discount: float = 1.0) -> list[tuple[Row, float | None]]:
    """An episode as the trainer's rows, without padding, each with its temperature, if known.

    Rewards of tensors and interactions are taken as they are (r); through trajectories they run
    back here, with ``discount``. Raises InvalidTrajectory.
    """
    kind = kind_of(result)
    if kind == "trajectories":
        return [r for t in cast(list[Trajectory], result) for r in _recorded(t, discount)]
    if kind == "interactions":
        values = cast(Mapping[str, InteractionWithTokenLogpReward], result).values()
        return [(_checked_row(i), i.temperature) for i in values]
    arrays = checked_arrays(cast(Mapping[str, Any], result))
    for name in TRAINED_ON:
        if name not in arrays:
            raise _wrong(name, "is missing: without it an episode cannot be trained on")
    return _unpadded(arrays)


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
            raise _wrong(min(odd), "is in some of the batches only: all need the same fields")
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


def _recorded(t: Trajectory, discount: float) -> list[tuple[Row, float | None]]:
    rewards = propagate_rewards(t.interactions, discount=discount, final_reward=t.final_reward)
    tree = InteractionTree.from_interactions(t.interactions)
    rows = individual_rows(tree, rewards)
    return [(row, tree[id].gconfig.temperature) for id, row in rows.items()]


def _checked_row(interaction: InteractionWithTokenLogpReward) -> Row:
    row = interaction.row
    batch = {name: values[None] for name, values in row.items()}
    try:
        checked_arrays(batch)
    except InvalidTrajectory as error:
        raise InvalidTrajectory(
            f"interaction {interaction.interaction_id}: {error.message}", param=error.param
        ) from None
    return row


def _unpadded(arrays: Arrays) -> list[tuple[Row, float | None]]:
    lengths = arrays["attention_mask"].sum(axis=1)
    temperatures = arrays.get("temperatures")
    out: list[tuple[Row, float | None]] = []
    for k, length in enumerate(lengths):
        row = {name: np.array(arrays[name][k, :length]) for name in PER_TOKEN}
        row["rewards"] = np.asarray(arrays["rewards"][k])
        out.append((row, None if temperatures is None else float(temperatures[k])))
    return out


def _array(name: object, value: Any) -> npt.NDArray[Any]:
    if not isinstance(name, str):
        raise InvalidTrajectory(f"a field is called {_shown(name)}: names must be strings")
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)
    if not (hasattr(value, "detach") and hasattr(value, "numpy")):
        raise _wrong(name, f"is {_shown(value)}: it must be a tensor")
    return np.asarray(value.detach().cpu().numpy())


def _check(name: str, values: npt.NDArray[Any], dtype: Any, shape: tuple[int, ...]) -> None:
    if values.shape != shape:
        raise _wrong(name, f"has the shape {list(values.shape)}: it must be {list(shape)}")
    if values.dtype != dtype:
        wanted = "bool" if dtype is np.bool_ else np.dtype(dtype).name
        raise _wrong(
            name, f"is {values.dtype.name}: it must be {wanted}; write .to(torch.{wanted})"
        )


def _check_values(arrays: Arrays) -> None:
    ids, attention = arrays["input_ids"], arrays["attention_mask"]
    if (attention[:, 1:] & ~attention[:, :-1]).any():
        raise _wrong("attention_mask", f"has a gap or padding on the left{_at(attention, ids)}")
    if not attention[:, 0].all():
        raise _wrong("attention_mask", "has a row without any token")
    if (bad := (ids < 0) & attention).any():
        raise _wrong("input_ids", f"has the negative token id {_first(ids, bad)}")
    loss = arrays.get("loss_mask")
    if loss is not None:
        _check_loss(loss, attention)
        trained = loss == 1
    else:
        trained = np.zeros_like(attention)
    logprobs = arrays.get("logprobs")
    if logprobs is not None:
        if (bad := ~np.isfinite(logprobs) & attention).any():
            raise _wrong("logprobs", f"has {_first(logprobs, bad)}: they must be finite")
        if (bad := (logprobs > 1e-4) & attention).any():
            raise _wrong(
                "logprobs", f"has {_first(logprobs, bad)}: a log-probability is never above 0"
            )
    versions = arrays.get("versions")
    if versions is not None and (bad := (versions < 0) & trained).any():
        raise _wrong(
            "versions",
            f"has {_first(versions, bad)} where loss_mask is 1: take the output's versions from "
            "the response (output_versions)",
        )
    _check_rows(arrays)


def _check_loss(loss: npt.NDArray[Any], attention: npt.NDArray[Any]) -> None:
    if (bad := (loss != 0) & (loss != 1)).any():
        raise _wrong("loss_mask", f"has {_first(loss, bad)}: it must be 0 or 1")
    if (loss[:, 0] == 1).any():
        raise _wrong("loss_mask", "is 1 on a row's first token, which nothing predicts")
    if (bad := (loss == 1) & ~attention).any():
        raise _wrong("loss_mask", f"is 1 on padding{_where(bad)}")


def _check_rows(arrays: Arrays) -> None:
    rewards = arrays.get("rewards")
    if rewards is not None and (bad := ~(np.abs(rewards) <= MAX_REWARD)).any():
        raise _wrong(
            "rewards",
            f"has {_first(rewards, bad)}: they must be numbers between -{MAX_REWARD:g} and "
            f"{MAX_REWARD:g}",
        )
    temperatures = arrays.get("temperatures")
    if (
        temperatures is not None
        and (bad := ~((temperatures > 0) & np.isfinite(temperatures))).any()
    ):
        raise _wrong(
            "temperatures",
            f"has {_first(temperatures, bad)}: what is sampled to be trained on needs one above 0",
        )


def _first(values: npt.NDArray[Any], bad: npt.NDArray[np.bool_]) -> str:
    place = tuple(int(i) for i in np.argwhere(bad)[0])
    value = values[place].item()
    text = f"{value:g}" if isinstance(value, float) and math.isfinite(value) else str(value)
    return text + _where(bad)


def _where(bad: npt.NDArray[np.bool_]) -> str:
    row, *position = (int(i) for i in np.argwhere(bad)[0])
    return f" in row {row}" + (f", position {position[0]}" if position else "")


def _at(attention: npt.NDArray[np.bool_], ids: npt.NDArray[Any]) -> str:
    return _where(np.pad(attention[:, 1:] & ~attention[:, :-1], ((0, 0), (1, 0))))


def _wrong(field: str, what: str) -> InvalidTrajectory:
    return InvalidTrajectory(f"{field} {what}", param=field)


def _shown(value: Any) -> str:
    kind = type(value).__name__
    if isinstance(value, Mapping | list | tuple | set):
        return f"a {kind} of {len(value)}" + (
            f" ({', '.join(sorted({type(v).__name__ for v in value.values()})[:3])})"
            if isinstance(value, Mapping) and value
            else ""
        )
    return f"{kind} {str(value)[:60]!r}"
