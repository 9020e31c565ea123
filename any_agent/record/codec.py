"""Interactions and trajectories as bytes: msgpack with packed little-endian arrays.

Token data is int32 / float32 bytes; messages, tools and other JSON values are JSON text inside,
because msgpack knows neither integers beyond 64 bits nor lone surrogates. Unpacking trusts
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

from any_agent.types import Continuation, GenerationHyperparameters, Interaction, Trajectory

FORMAT = 2
"""Raised when the fields change; other numbers are refused."""

T = TypeVar("T")

_IDS = ("prompt_delta_ids", "output_ids", "output_versions")
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
_INTERACTION = {f.name for f in fields(Interaction)}
_GCONFIG: dict[str, tuple[type, ...]] = {
    "max_new_tokens": (int,),
    "temperature": (float, int),
    "top_p": (float, int),
    "top_k": (int,),
    "ignore_eos": (bool,),
    "seed": (int, type(None)),
}
_GCONFIG_LISTS: dict[str, type] = {"stop": str, "stop_token_ids": int}
_TRAJECTORY = {f.name for f in fields(Trajectory)}


def pack_interaction(interaction: Interaction) -> bytes:
    """One interaction as a journal row."""
    return _pack({"format": FORMAT, "interaction": interaction_to_dict(interaction)})


def unpack_interaction(data: bytes) -> Interaction:
    """The inverse of :func:`pack_interaction`.

    Raises:
        ValueError: naming the field that is missing, unknown or wrong.
    """
    return interaction_from_dict(_unpack(data, "interaction"), "interaction")


def pack_trajectories(trajectories: list[Trajectory]) -> bytes:
    """A lease's body."""
    plain = [_trajectory_to_dict(t) for t in trajectories]
    return _pack({"format": FORMAT, "trajectories": plain})


def unpack_trajectories(data: bytes) -> list[Trajectory]:
    """The inverse of :func:`pack_trajectories`.

    Raises:
        ValueError: naming the field that is missing, unknown or wrong.
    """
    items = _typed(_unpack(data, "trajectories"), (list,), "trajectories")
    return [_trajectory_from_dict(t, f"trajectories[{i}]") for i, t in enumerate(items)]


def interaction_to_dict(interaction: Interaction) -> dict[str, Any]:
    """Plain values that msgpack takes."""
    out: dict[str, Any] = {name: getattr(interaction, name) for name in _PLAIN}
    for name in _IDS:
        out[name] = np.asarray(getattr(interaction, name), "<i4").tobytes()
    out["output_logprobs"] = np.asarray(interaction.output_logprobs, "<f4").tobytes()
    for name in _JSON:
        out[name] = _to_json(getattr(interaction, name))
    out["continuation"] = interaction.continuation.value
    out["gconfig"] = {f.name: getattr(interaction.gconfig, f.name) for f in fields(_G)}
    return out


_G = GenerationHyperparameters


def interaction_from_dict(plain: Any, where: str = "interaction") -> Interaction:
    """The inverse of :func:`interaction_to_dict`; ValueError names the field."""
    plain = _fields(plain, _INTERACTION, where)
    values: dict[str, Any] = {
        name: _typed(plain[name], types, f"{where}.{name}") for name, types in _PLAIN.items()
    }
    for name in _IDS:
        values[name] = _array(plain[name], "<i4", f"{where}.{name}").astype(np.int32)
    logprobs = _array(plain["output_logprobs"], "<f4", f"{where}.output_logprobs")
    values["output_logprobs"] = logprobs.astype(np.float32)
    for name in ("output_logprobs", "output_versions"):
        if len(values[name]) != len(values["output_ids"]):
            raise ValueError(f"{where}.{name}: one value per output token is needed")
    for name in _JSON:
        values[name] = _from_json(plain[name], f"{where}.{name}")
    _list_of(values["message_delta"], dict, f"{where}.message_delta")
    _typed(values["output_message"], (dict,), f"{where}.output_message")
    _typed(values["request"], (dict,), f"{where}.request")
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
        "interactions": [interaction_to_dict(i) for i in t.interactions],
    }


def _trajectory_from_dict(plain: Any, where: str) -> Trajectory:
    plain = _fields(plain, _TRAJECTORY, where)
    items = _typed(plain["interactions"], (list,), f"{where}.interactions")
    metadata = _from_json(plain["metadata"], f"{where}.metadata")
    reward = _typed(plain["final_reward"], (float, int, type(None)), f"{where}.final_reward")
    _finite(reward, f"{where}.final_reward")
    return Trajectory(
        session_id=_typed(plain["session_id"], (str,), f"{where}.session_id"),
        group_id=_typed(plain["group_id"], (str,), f"{where}.group_id"),
        task_id=_typed(plain["task_id"], (str, type(None)), f"{where}.task_id"),
        final_reward=reward,
        metadata=_typed(metadata, (dict,), f"{where}.metadata"),
        interactions=[
            interaction_from_dict(p, f"{where}.interactions[{i}]") for i, p in enumerate(items)
        ],
    )


def _gconfig(plain: Any, where: str) -> GenerationHyperparameters:
    plain = _fields(plain, set(_GCONFIG) | set(_GCONFIG_LISTS), where)
    values = {k: _typed(plain[k], types, f"{where}.{k}") for k, types in _GCONFIG.items()}
    for name, kind in _GCONFIG_LISTS.items():
        values[name] = tuple(_list_of(plain[name], kind, f"{where}.{name}"))
    return GenerationHyperparameters(**values)


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


def _fields(plain: Any, names: set[str], where: str) -> dict[str, Any]:
    plain = _typed(plain, (dict,), where)
    if missing := names - plain.keys():
        raise ValueError(f"{where}.{min(missing)} is missing")
    if unknown := plain.keys() - names:
        raise ValueError(f"{where} has the unknown field {min(unknown, key=str)!r}")
    return plain  # type: ignore[no-any-return]


def _typed(value: Any, types: tuple[type, ...], where: str) -> Any:
    # bool is an int to isinstance, but not to us.
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise ValueError(f"{where} is {type(value).__name__}")
    return value


def _list_of(value: Any, kind: type, where: str) -> list[Any]:
    items: list[Any] = _typed(value, (list,), where)
    for i, item in enumerate(items):
        _typed(item, (kind,), f"{where}[{i}]")
    return items


def _array(value: Any, dtype: str, where: str) -> np.ndarray[Any, np.dtype[Any]]:
    return _checked(lambda: np.frombuffer(_typed(value, (bytes,), where), dtype), where)


def _finite(value: float | None, where: str) -> None:
    if value is not None and not math.isfinite(value):
        raise ValueError(f"{where} is {value}")


def _to_json(value: Any) -> str:
    return json.dumps(dict(value) if isinstance(value, Mapping) else value)


def _from_json(value: Any, where: str) -> Any:
    return _checked(lambda: json.loads(_typed(value, (str,), where)), where)


def _checked(read: Callable[[], T], where: str) -> T:
    try:
        return read()
    except (ValueError, TypeError, RecursionError, OverflowError, msgpack.UnpackException) as e:
        if str(e).startswith(where):
            raise
        raise ValueError(f"{where}: {e}") from e
