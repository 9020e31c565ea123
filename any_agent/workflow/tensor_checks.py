"""Checks of the fields of an episode's tensors: shapes, types and values.

A dictionary of tensors has, padded on the right:

================  =========  =======  =========================================================
field             shape      dtype
================  =========  =======  =========================================================
input_ids         [B, T]     int32    required: prompt and output, or a whole conversation
attention_mask    [B, T]     bool     required: True on tokens, False on padding
loss_mask         [B, T]     int32    1 on the outputs to train on
logprobs          [B, T]     float32  natural logarithms for sampled tokens; 0 on prompts
versions          [B, T]     int32    the weight version of each sampled token; -1 on prompts
rewards           [B]        float32
temperatures      [B]        float32  the sampling temperature, where it is not the run's
cut               [B, T]     bool     True on outputs that the limit of tokens cut off
================  =========  =======  =========================================================

Integers of another width become int32, masks of 0 and 1 the mask's type, float64 and integers
float32, where every value fits; other values are refused. All fields are unshifted: entry t belongs
to token t. Training needs all fields but the last two; without ``loss_mask`` and the fields after
it a batch can be collected, but not trained on. Other tensors whose first dimension is B are
kept."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from any_agent.errors import InvalidTrajectory
from any_agent.protocol.rl import MAX_REWARD

Arrays: TypeAlias = dict[str, npt.NDArray[Any]]

PER_TOKEN: Mapping[str, Any] = {
    "input_ids": np.int32,
    "attention_mask": np.bool_,
    "loss_mask": np.int32,
    "logprobs": np.float32,
    "versions": np.int32,
    "cut": np.bool_,
}
"""Fields of the shape [B, T]."""
PER_ROW: Mapping[str, Any] = {"rewards": np.float32, "temperatures": np.float32}
"""Fields of the shape [B]."""
MASKS = ("attention_mask", "loss_mask", "cut")
REQUIRED = ("input_ids", "attention_mask")
TRAINED_ON = (*REQUIRED, "loss_mask", "logprobs", "versions", "rewards")
PADDING: Mapping[str, int] = {"versions": -1}  # the padding of a field, where it is not 0


def checked_arrays(result: Mapping[str, Any]) -> Arrays:
    """Return the fields as numpy arrays of the documented types.

    Raises InvalidTrajectory with the field, its value and its requirement.
    """
    for name in REQUIRED:
        if name not in result:
            raise wrong(name, f"is missing; the fields are {', '.join(map(str, result)) or 'none'}")
    arrays = {name: _array(name, value) for name, value in result.items()}
    shape = arrays["input_ids"].shape
    if len(shape) != 2 or 0 in shape:
        raise wrong(
            "input_ids",
            f"has the shape {list(shape)}: it must be [batch, length], neither of them 0"
            + ("; one sequence is ids.unsqueeze(0)" if len(shape) == 1 and shape[0] else ""),
        )
    for name, values in arrays.items():
        if name in PER_TOKEN:
            arrays[name] = _checked(name, values, PER_TOKEN[name], shape)
        elif name in PER_ROW:
            arrays[name] = _checked(name, values, PER_ROW[name], shape[:1])
        elif values.shape[:1] != shape[:1]:
            raise wrong(
                name,
                f"has the shape {list(values.shape)}: the first dimension of an additional field "
                f"must be {shape[0]}, the batch's",
            )
    _check_values(arrays)
    return arrays


def _array(name: object, value: Any) -> npt.NDArray[Any]:
    if not isinstance(name, str):
        raise InvalidTrajectory(f"a field is called {shown(name)}: names must be strings")
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)
    if not (hasattr(value, "detach") and hasattr(value, "numpy")):
        raise wrong(name, f"is {shown(value)}: it must be a tensor")
    try:
        return np.asarray(value.detach().cpu().numpy())
    except (TypeError, RuntimeError) as error:
        # Numpy has neither bfloat16 nor sparse tensors.
        raise wrong(name, f"is {value.dtype}, which numpy cannot read: {error}") from None


def _checked(
    name: str, values: npt.NDArray[Any], dtype: Any, shape: tuple[int, ...]
) -> npt.NDArray[Any]:
    if values.shape != shape:
        raise wrong(name, f"has the shape {list(values.shape)}: it must be {list(shape)}")
    if values.dtype == dtype:
        return values
    kind, wanted = values.dtype.kind, np.dtype(dtype).name
    if name in MASKS:
        if kind not in "biuf":
            raise wrong(name, f"is {values.dtype.name}: it must be {wanted}, of 0 and 1")
        if (bad := (values != 0) & (values != 1)).any():
            raise wrong(name, f"has {_first(values, bad)}: it must be 0 or 1")
    elif kind not in ("iu" if dtype is np.int32 else "iuf") or values.dtype == np.float16:
        # A float16 has lost half of the digits of a sampled value.
        raise wrong(name, f"is {values.dtype.name}: it must be {wanted}; write .to(torch.{wanted})")
    elif dtype is np.int32:
        known = np.iinfo(np.int32)
        if (bad := (values < known.min) | (values > known.max)).any():
            raise wrong(name, f"has {_first(values, bad)}, which does not fit into int32")
    with np.errstate(over="ignore"):  # the check of values finds infinite ones
        return values.astype(dtype)


def _check_values(arrays: Arrays) -> None:
    ids, attention = arrays["input_ids"], arrays["attention_mask"]
    gap = np.zeros_like(attention)
    gap[:, 1:] = attention[:, 1:] & ~attention[:, :-1]
    _refuse("attention_mask", attention, gap, "has a gap or padding on the left{where}")
    if not attention[:, 0].all():
        raise wrong("attention_mask", "has a row without any token")
    _refuse("input_ids", ids, (ids < 0) & attention, "has the negative token id {first}")
    trained = np.zeros_like(attention)
    if (loss := arrays.get("loss_mask")) is not None:
        trained = loss == 1
        _refuse("loss_mask", loss, (loss != 0) & ~trained, "has {first}: it must be 0 or 1")
        if trained[:, 0].any():
            raise wrong("loss_mask", "is 1 on a row's first token, which nothing predicts")
        _refuse("loss_mask", loss, trained & ~attention, "is 1 on padding{where}")
    if (logprobs := arrays.get("logprobs")) is not None:
        odd, above = ~np.isfinite(logprobs) & attention, (logprobs > 1e-4) & attention
        _refuse("logprobs", logprobs, odd, "has {first}: they must be finite")
        _refuse("logprobs", logprobs, above, "has {first}: a log-probability is never above 0")
    if (versions := arrays.get("versions")) is not None:
        _refuse(
            "versions",
            versions,
            (versions < 0) & trained,
            "has {first} where loss_mask is 1: take the output's versions from the response "
            "(output_versions)",
        )
    if (rewards := arrays.get("rewards")) is not None:
        limits = f"they must be numbers between -{MAX_REWARD:g} and {MAX_REWARD:g}"
        _refuse("rewards", rewards, ~(np.abs(rewards) <= MAX_REWARD), f"has {{first}}: {limits}")
    if (given := arrays.get("temperatures")) is not None:
        _refuse(
            "temperatures",
            given,
            ~((given > 0) & np.isfinite(given)),
            "has {first}: training needs a sampling temperature above 0",
        )


def _refuse(name: str, values: npt.NDArray[Any], bad: npt.NDArray[np.bool_], text: str) -> None:
    """Raise InvalidTrajectory if an entry is bad; the text may have the first one, and its
    place."""
    if bad.any():
        raise wrong(name, text.format(first=_first(values, bad), where=_where(bad)))


def _first(values: npt.NDArray[Any], bad: npt.NDArray[np.bool_]) -> str:
    place = tuple(int(i) for i in np.argwhere(bad)[0])
    value = values[place].item()
    text = f"{value:g}" if isinstance(value, float) and math.isfinite(value) else str(value)
    return text + _where(bad)


def _where(bad: npt.NDArray[np.bool_]) -> str:
    row, *position = (int(i) for i in np.argwhere(bad)[0])
    return f" in row {row}" + (f", position {position[0]}" if position else "")


def wrong(field: str, what: str) -> InvalidTrajectory:
    """Return the error for a field."""
    return InvalidTrajectory(f"{field} {what}", param=field)


def shown(value: Any) -> str:
    """Return a value as an error shows it: its type, and the beginning of its text."""
    kind = type(value).__name__
    if isinstance(value, Mapping | list | tuple | set):
        return f"a {kind} of {len(value)}" + (
            f" ({', '.join(sorted({type(v).__name__ for v in value.values()})[:3])})"
            if isinstance(value, Mapping) and value
            else ""
        )
    return f"{kind} {str(value)[:60]!r}"
