"""What an agent's ``run`` returns, as rewards of its session."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from any_agent.errors import AgentFailed, NotFound, Unprocessable
from any_agent.protocol import MAX_REWARD
from any_agent.workflow.proxy_client import OpenAIProxyClient

Rewards: TypeAlias = float | dict[str, float] | None
"""Of the last completion; of completions by id; or as the agent has set them itself."""


def rewards_of(returned: Any, name: str) -> Rewards:
    """What ``name``'s run returned, as plain numbers; AgentFailed if it is no reward."""
    if returned is None:
        return None
    if not isinstance(returned, Mapping):
        return _number(returned, name, "")
    for id in returned:
        if not isinstance(id, str):
            raise _no_reward(name, f"a dict with the key {_short(id)}, which is no completion id")
    return {id: _number(one, name, f" for {id}") for id, one in returned.items()}


async def give(client: OpenAIProxyClient, rewards: Rewards, name: str) -> None:
    """Set them; AgentFailed where the session has no such completion, or none at all."""
    try:
        if isinstance(rewards, dict):
            for id, reward in rewards.items():
                await client.set_reward(id, reward)
        elif rewards is not None:
            await client.set_last_reward(rewards)
    except NotFound as error:
        raise AgentFailed(
            f"{name}.run rewards the completion {_short(id)}, and no call of its session has that "
            "id: use the `id` of the responses that the run has got itself",
            code="invalid_reward",
        ) from error
    except Unprocessable as error:
        if error.code != "no_interactions":
            raise
        raise AgentFailed(
            f"{name}.run returned a reward, and none of its model calls came to the service: make "
            "the client with the base_url and api_key that run is given (in the mode subproc: in "
            "OPENAI_BASE_URL and OPENAI_API_KEY), inside run",
            code="no_model_call",
        ) from error


def _number(value: Any, name: str, where: str) -> float:
    """Numbers of numpy and torch, and bools, too."""
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise _no_reward(name, f"{_short(value)} ({type(value).__name__}){where}") from None
    if not abs(number) <= MAX_REWARD:
        raise _no_reward(name, f"{number}{where}")
    return number


def _no_reward(name: str, what: str) -> AgentFailed:
    return AgentFailed(
        f"{name}.run returned {what}: it must return a number between -{MAX_REWARD:g} and "
        f"{MAX_REWARD:g} (the reward of its last completion), a dict of them by completion id, or "
        "None where it has set its rewards itself",
        code="invalid_reward",
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
