"""The value that an agent's function returns, as rewards of its session."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

from any_agent.errors import AgentFailed, NotFound, Unprocessable
from any_agent.protocol.rl import MAX_REWARD

Rewards: TypeAlias = float | dict[str, float] | None
"""The last completion's reward, rewards by completion id, or None: the agent has set them."""


def rewards_of(returned: Any, name: str) -> Rewards:
    """Return the returned value as plain numbers; AgentFailed for a value that is no reward."""
    if returned is None:
        return None
    if not isinstance(returned, Mapping):
        return _number(returned, name, "")
    for id in returned:
        if not isinstance(id, str):
            raise _invalid(name, f"a dict with the key {short(id)}, which is no completion id")
    return {id: _number(one, name, f" for {id}") for id, one in returned.items()}


async def give_rewards(
    rewards: Rewards,
    name: str,
    set_reward: Callable[[float, str | None], Awaitable[object]],
    *,
    no_call: str,
) -> None:
    """Set the rewards by ``set_reward(reward, completion id or None for the last one)``.

    Raise AgentFailed where the session has no such completion, or none at all (with the message
    ``no_call``).
    """
    by_id = rewards if isinstance(rewards, dict) else {None: rewards}
    id = None
    try:
        for id, reward in by_id.items():
            if reward is not None:
                await set_reward(reward, id)
    except NotFound as error:
        raise AgentFailed(
            f"{name} rewards the completion {short(id)}, but no call of its session has that "
            "id: use the `id` of a response that this run has received",
            code="invalid_reward",
        ) from error
    except Unprocessable as error:
        if error.code != "no_interactions":
            raise
        raise AgentFailed(no_call, code="no_model_call") from error


def no_reward(returned: Any, name: str) -> AgentFailed:
    """Return the error of a run that has made calls and has no reward."""
    return AgentFailed(
        f"{name} returned {short(returned)} and gave no reward: return a number, or post "
        "/rl/v1/set_reward",
        code="no_reward",
    )


def _number(value: Any, name: str, where: str) -> float:
    """Return a number of Python, numpy or torch, or a bool, as a float."""
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise _invalid(name, f"{short(value)} ({type(value).__name__}){where}") from None
    if not abs(number) <= MAX_REWARD:
        raise _invalid(name, f"{number}{where}")
    return number


def _invalid(name: str, value: str) -> AgentFailed:
    return AgentFailed(
        f"{name} returned {value}: it must return a number between -{MAX_REWARD:g} and "
        f"{MAX_REWARD:g} (the reward of its last completion), a dict of them by completion id, or "
        "None where it has set its rewards itself",
        code="invalid_reward",
    )


def short(value: Any) -> str:
    """Return a value as a message shows it."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
