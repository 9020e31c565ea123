"""Setting what an agent's ``run`` returned, as rewards of its session."""

from __future__ import annotations

from any_agent.errors import AgentFailed, NotFound, Unprocessable
from any_agent.returned_rewards import Rewards, no_such_completion
from any_agent.workflow.proxy_client import OpenAIProxyClient


async def give(client: OpenAIProxyClient, rewards: Rewards, name: str) -> None:
    """Set them; AgentFailed where the session has no such completion, or none at all."""
    id = None
    try:
        if isinstance(rewards, dict):
            for id, reward in rewards.items():
                await client.set_reward(id, reward)
        elif rewards is not None:
            await client.set_last_reward(rewards)
    except NotFound as error:
        raise no_such_completion(name, id) from error
    except Unprocessable as error:
        if error.code != "no_interactions":
            raise
        raise AgentFailed(
            f"{name} returned a reward, and none of its model calls came to the service: make "
            "the client with the base_url and api_key that run is given (in the mode subproc: in "
            "OPENAI_BASE_URL and OPENAI_API_KEY), inside run",
            code="no_model_call",
        ) from error
