"""Interactions and trajectories as bytes: msgpack with packed little-endian arrays.

Token data is int32 / float32 bytes, versions as runs of equal ones; messages, tools and other JSON
values are JSON text inside, because msgpack knows no integers beyond 64 bits. An interaction is a
list in the order of its fields: their names would be a fifth of a short turn. Unpacking trusts
nothing: every field is checked, and a wrong one is a ValueError that names it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

import msgpack
import numpy as np
import orjson

from any_agent.types import (
    Continuation,
    GenerationHyperparameters,
    IdArray,
    Interaction,
    Trajectory,
)

FORMAT = 4
"""The number of an interaction's format, which journals keep: it grows when these fields change,
and other numbers are refused. A trajectory's own fields are only on their way from a rank to a
trainer of the same version."""

T = TypeVar("T")
_INT, _FLOAT = np.dtype("<i4"), np.dtype("<f4")

_IDS = ("prompt_delta_ids", "output_ids")
_JSON = ("message_delta", "output_message", "tools", "request")
_PLAIN: dict[str, tuple[type, ...]] = {
    "id": (str,),
    "session_id": (str,),
    "parent_id": (str, type(None)),
    "finish_reason": (str,),
    "model": (str,),
    "branch_reason": (str, type(None)),
    "untrainable_reason": (str, type(None)),
    "reward": (float, int, type(None)),
    "created_at": (float, int),
}
_GCONFIG: dict[str, tuple[type, ...]] = {
    "max_new_tokens": (int,),
    "temperature": (float, int),
    "top_p": (float, int),
    "top_k": (int,),
    "ignore_eos": (bool,),
    "seed": (int, type(None)),
}
_GCONFIG_LISTS: dict[str, type] = {"stop": str, "stop_token_ids": int}
_BENDING: dict[str, tuple[type, ...]] = {
    "min_p": (float, int),
    "frequency_penalty": (float, int),
    "presence_penalty": (float, int),
    "repetition_penalty": (float, int),
    "logit_bias": (list,),
    "grammar": (str, type(None)),
}
_NEUTRAL = [getattr(GenerationHyperparameters(), name) for name in _BENDING]
FIELDS = (*_PLAIN, *_IDS, "output_logprobs", "output_versions", *_JSON, "continuation", "gconfig")
"""An interaction's fields in the order of their values."""
_GCONFIG_FIELDS = (*_GCONFIG, *_GCONFIG_LISTS)
_TRAJECTORY = {f.name for f in fields(Trajectory)}


def pack_interaction(interaction: Interaction) -> bytes:
    """Pack one interaction as a journal row."""
    return _pack({"format": FORMAT, "interaction": _interaction_to_list(interaction)})


def unpack_interaction(data: bytes) -> Interaction:
    """Invert :func:`pack_interaction`; ValueError names a missing, unknown or wrong field."""
    return _interaction(_unpack(data, "interaction"), "interaction")


def pack_trajectories(trajectories: list[Trajectory]) -> bytes:
    """Pack the body of a lease."""
    plain = [_trajectory_to_dict(t) for t in trajectories]
    return _pack({"format": FORMAT, "trajectories": plain})


def unpack_trajectories(data: bytes) -> list[Trajectory]:
    """Invert :func:`pack_trajectories`; ValueError names a missing, unknown or wrong field."""
    items = _typed(_unpack(data, "trajectories"), (list,), "trajectories")
    return [_trajectory_from_dict(t, f"trajectories[{i}]") for i, t in enumerate(items)]


def _interaction_to_list(interaction: Interaction) -> list[Any]:
    """Return plain values for msgpack, in the order of :data:`FIELDS`."""
    i = interaction
    return [
        *[getattr(i, name) for name in _PLAIN],
        *[np.asarray(getattr(i, name), _INT).tobytes() for name in _IDS],
        np.asarray(i.output_logprobs, _FLOAT).tobytes(),
        _runs(i.output_versions),
        *[_to_json(getattr(i, name)) for name in _JSON],
        i.continuation.value,
        _gconfig_to_list(i.gconfig),
    ]


def _gconfig_to_list(gconfig: GenerationHyperparameters) -> list[Any]:
    """Return the values in order; those that bend the distribution only if one of them does."""
    values = [getattr(gconfig, name) for name in _GCONFIG_FIELDS]
    bending = [getattr(gconfig, name) for name in _BENDING]
    return values if bending == _NEUTRAL else values + bending


def _runs(values: IdArray) -> bytes:
    """Encode the values as pairs: the length of a run of equal values, and the value."""
    v = np.asarray(values, _INT)
    n, plain = len(v), v.tobytes()
    if plain == plain[:4] * n:
        # The usual case: weights seldom change during a call.
        return n.to_bytes(4, "little") + plain[:4] if n else b""
    starts = np.flatnonzero(v[1:] != v[:-1]) + 1
    lengths = np.diff(starts, prepend=0, append=n)
    return np.stack([lengths, v[[0, *starts]]], axis=1).astype(_INT).tobytes()


def _from_runs(value: Any, length: int, where: str) -> IdArray:
    runs = _array(value, _INT, where)
    if len(runs) % 2:
        raise ValueError(f"{where}: the last length has no value")
    lengths, values = runs[::2].astype(np.int64), runs[1::2].astype(np.int32)
    if (lengths < 1).any() or lengths.sum() != length:
        raise ValueError(f"{where}: one value per output token is needed")
    if (values[1:] == values[:-1]).any():
        raise ValueError(f"{where}: two adjacent runs have the same value")
    return np.repeat(values, lengths)


def _interaction(plain: Any, where: str) -> Interaction:
    """Invert :func:`_interaction_to_list`; ValueError names the field."""
    plain = _by_name(plain, FIELDS, where)
    values: dict[str, Any] = {
        name: _typed(plain[name], types, f"{where}.{name}") for name, types in _PLAIN.items()
    }
    for name in _IDS:
        values[name] = _array(plain[name], _INT, f"{where}.{name}").astype(np.int32)
    logprobs = _array(plain["output_logprobs"], _FLOAT, f"{where}.output_logprobs")
    values["output_logprobs"] = logprobs.astype(np.float32)
    length = len(values["output_ids"])
    if len(logprobs) != length:
        raise ValueError(f"{where}.output_logprobs: one value per output token is needed")
    at = f"{where}.output_versions"
    values["output_versions"] = _from_runs(plain["output_versions"], length, at)
    for name in _JSON:
        values[name] = _from_json(plain[name], f"{where}.{name}")
    _list_of(values["message_delta"], dict, f"{where}.message_delta")
    _typed(values["output_message"], (dict,), f"{where}.output_message")
    _typed(values["request"], (dict,), f"{where}.request")
    _typed(values["request"].get("role", ""), (str,), f"{where}.request.role")
    if values["tools"] is not None:
        _list_of(values["tools"], dict, f"{where}.tools")
    for name in ("reward", "created_at"):
        _finite(values[name], f"{where}.{name}")
    values["continuation"] = _checked(
        lambda: Continuation(plain["continuation"]), f"{where}.continuation"
    )
    values["gconfig"] = _gconfig(plain["gconfig"], f"{where}.gconfig")
    return Interaction(**values)


def _trajectory_to_dict(t: Trajectory) -> dict[str, Any]:
    return {
        "session_id": t.session_id,
        "group_id": t.group_id,
        "task_id": t.task_id,
        "final_reward": t.final_reward,
        "metadata": _to_json(t.metadata),
        "named_rewards": dict(t.named_rewards),
        "interactions": [_interaction_to_list(i) for i in t.interactions],
    }


def _trajectory_from_dict(plain: Any, where: str) -> Trajectory:
    plain = _fields(plain, _TRAJECTORY, where)
    items = _typed(plain["interactions"], (list,), f"{where}.interactions")
    metadata = _from_json(plain["metadata"], f"{where}.metadata")
    reward = _typed(plain["final_reward"], (float, int, type(None)), f"{where}.final_reward")
    _finite(reward, f"{where}.final_reward")
    named = _typed(plain["named_rewards"], (dict,), f"{where}.named_rewards")
    for name, value in named.items():
        at = f"{where}.named_rewards[{_typed(name, (str,), f'{where}.named_rewards')!r}]"
        _finite(_typed(value, (float, int), at), at)
    return Trajectory(
        session_id=_typed(plain["session_id"], (str,), f"{where}.session_id"),
        group_id=_typed(plain["group_id"], (str,), f"{where}.group_id"),
        task_id=_typed(plain["task_id"], (str, type(None)), f"{where}.task_id"),
        final_reward=reward,
        metadata=_typed(metadata, (dict,), f"{where}.metadata"),
        named_rewards=named,
        interactions=[_interaction(p, f"{where}.interactions[{i}]") for i, p in enumerate(items)],
    )


def _gconfig(plain: Any, where: str) -> GenerationHyperparameters:
    bent = isinstance(plain, list) and len(plain) > len(_GCONFIG_FIELDS)
    plain = _by_name(plain, (*_GCONFIG_FIELDS, *_BENDING) if bent else _GCONFIG_FIELDS, where)
    types = {k: t for k, t in (_GCONFIG | _BENDING).items() if k in plain}
    values = {k: _typed(plain[k], t, f"{where}.{k}") for k, t in types.items()}
    for name, kind in _GCONFIG_LISTS.items():
        values[name] = tuple(_list_of(plain[name], kind, f"{where}.{name}"))
    if "logit_bias" in values:
        values["logit_bias"] = _biases(values["logit_bias"], f"{where}.logit_bias")
    return GenerationHyperparameters(**values)


def _biases(pairs: list[Any], where: str) -> tuple[tuple[int, float], ...]:
    out = []
    for i, pair in enumerate(pairs):
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError(f"{where}[{i}] is not a pair")
        token, bias = _typed(pair[0], (int,), where), _typed(pair[1], (float, int), where)
        out.append((token, bias))
    return tuple(out)


def _pack(value: Mapping[str, Any]) -> bytes:
    packed: bytes = msgpack.packb(value, use_bin_type=True, unicode_errors="surrogatepass")
    return packed


def _unpack(data: bytes, name: str) -> Any:
    def read() -> Any:
        return msgpack.unpackb(data, raw=False, unicode_errors="surrogatepass")

    plain = _checked(read, "msgpack")
    if not isinstance(plain, dict) or plain.get("format") != FORMAT:
        raise ValueError(f"format: {FORMAT} is expected")
    return _fields(plain, {"format", name}, "msgpack")[name]


def _by_name(plain: Any, names: tuple[str, ...], where: str) -> dict[str, Any]:
    values = _typed(plain, (list,), where)
    if len(values) != len(names):
        raise ValueError(f"{where} has {len(values)} values instead of {len(names)}")
    return dict(zip(names, values, strict=True))


def _fields(plain: Any, names: set[str], where: str) -> dict[str, Any]:
    plain = _typed(plain, (dict,), where)
    if missing := names - plain.keys():
        raise ValueError(f"{where}.{min(missing)} is missing")
    if unknown := plain.keys() - names:
        raise ValueError(f"{where} has the unknown field {min(unknown, key=str)!r}")
    return plain  # type: ignore[no-any-return]


def _typed(value: Any, types: tuple[type, ...], where: str) -> Any:
    # isinstance takes a bool for an int.
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise ValueError(f"{where} is {type(value).__name__}")
    return value


def _list_of(value: Any, kind: type, where: str) -> list[Any]:
    items: list[Any] = _typed(value, (list,), where)
    for i, item in enumerate(items):
        _typed(item, (kind,), f"{where}[{i}]")
    return items


def _array(value: Any, dtype: Any, where: str) -> np.ndarray[Any, np.dtype[Any]]:
    return _checked(lambda: np.frombuffer(_typed(value, (bytes,), where), dtype), where)


def _finite(value: float | None, where: str) -> None:
    if value is not None and not math.isfinite(value):
        raise ValueError(f"{where} is {value}")


def _to_json(value: Any) -> str:
    if isinstance(value, Mapping):
        value = dict(value)
    try:
        return orjson.dumps(value).decode()
    except TypeError:
        # orjson takes no integer beyond 64 bits and no lone surrogate; json is five times slower.
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _from_json(value: Any, where: str) -> Any:
    return _checked(lambda: json.loads(_typed(value, (str,), where)), where)


def _checked(read: Callable[[], T], where: str) -> T:
    try:
        return read()
    except (ValueError, TypeError, RecursionError, OverflowError, msgpack.UnpackException) as e:
        if str(e).startswith(where):
            raise
        raise ValueError(f"{where}: {e}") from e
