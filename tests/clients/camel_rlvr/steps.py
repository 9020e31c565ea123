"""What an agent of CAMEL-AI does on the direct client."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import Any

from camel.agents import ChatAgent
from camel.toolkits import FunctionTool
from pydantic import BaseModel

from any_agent import EngineOpenAI
from any_agent.camel import AnyAgentOpenAICompatibleModel
from any_agent.chat import ChatFormat, load_chat_format
from any_agent.engine import SGLangEngine

ASK = "What is 2 and 3?"


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a (int): One.
        b (int): The other.
    """
    return a + b


class Sum(BaseModel):
    total: int


@lru_cache
def chat() -> ChatFormat:
    return load_chat_format(os.environ["MODEL"], enable_thinking=False)


@asynccontextmanager
async def client() -> AsyncIterator[EngineOpenAI]:
    engine = SGLangEngine(os.environ["ENGINE"], decode=chat().decode)
    try:
        async with EngineOpenAI(engine, chat()) as client:
            yield client
    finally:
        await engine.close()


def agent(client: EngineOpenAI, *, tools: bool = False, **model: Any) -> ChatAgent:
    return ChatAgent(
        "You add.",
        model=AnyAgentOpenAICompatibleModel(openai_client=client, model_type="areal", **model),
        tools=[FunctionTool(add)] if tools else None,
        stream_accumulate=False,
    )


async def plain() -> dict[str, Any]:
    async with client() as ours:
        answer = await agent(ours).astep(ASK)
        ours.set_last_reward(0.5)
        exported = ours.export_interactions(style="individual")
    (one,) = exported.values()
    tensors = one.to_tensor_dict()
    return {
        "content": answer.msg.content,
        "reward": float(tensors["rewards"]),
        "trained": int(tensors["loss_mask"].sum()),
        "model": [interaction.model for interaction in ours.interactions],
    }


async def three_turns() -> dict[str, Any]:
    async with client() as ours:
        adder = agent(ours)
        said = [(await adder.astep(text)).msg.content for text in (ASK, "And 1?", "And 2?")]
        kinds = [str(interaction.continuation) for interaction in ours.interactions]
        ours.set_last_reward(1.0)
        applied = ours.apply_reward_discount(turn_discount=0.9)
        rewards = [one.reward for one in applied.values()]
        rows = len(ours.export_interactions(style="concat"))
    return {"said": said, "kinds": kinds, "rewards": rewards, "rows": rows}


async def thoughts() -> dict[str, Any]:
    async with client() as ours:
        adder = agent(ours)
        said = [(await adder.astep(text)).msg for text in (ASK, "And 1?")]
        kinds = [str(interaction.continuation) for interaction in ours.interactions]
    return {
        "said": [message.content for message in said],
        "thought": [message.reasoning_content for message in said],
        "kinds": kinds,
    }


async def tools() -> dict[str, Any]:
    async with client() as ours:
        answer = await agent(ours, tools=True).astep(ASK)
        kinds = [str(interaction.continuation) for interaction in ours.interactions]
    (call,) = answer.info["tool_calls"]
    return {"result": call.result, "content": answer.msg.content, "kinds": kinds}


async def stream() -> dict[str, Any]:
    async with client() as ours:
        streamed = await agent(ours, model_config_dict={"stream": True}).astep(ASK)
        parts = [part.msgs[0].content async for part in streamed if part.msgs]
        recorded = len(ours.interactions)
    parts = [part for part in parts if part]
    return {"content": "".join(parts), "parts": len(parts), "recorded": recorded}


async def structured() -> dict[str, Any]:
    async with client() as ours:
        answer = await agent(ours).astep(ASK, response_format=Sum)
    return {"total": answer.msg.parsed.total}


async def counted() -> dict[str, Any]:
    async with client() as ours:
        counter = agent(ours).model_backend.current_model.token_counter
    ids = counter.encode(ASK)
    message = {"role": "user", "content": ASK}
    parts = {"role": "user", "content": [{"type": "text", "text": ASK}, {"type": "image_url"}]}
    return {
        "text": counter.decode(ids),
        "around": counter.count_tokens_from_messages([message]) - len(ids),
        "in parts": counter.count_tokens_from_messages([parts]) - len(ids),
    }


async def synchronous() -> dict[str, Any]:
    async with client() as ours:
        try:
            agent(ours).step(ASK)
        except Exception as error:
            return {"kind": type(error).__name__, "said": str(error)}
    return {}


def not_recording() -> dict[str, Any]:
    from openai import AsyncOpenAI

    try:
        AnyAgentOpenAICompatibleModel(openai_client=AsyncOpenAI(api_key="none"))
    except TypeError as error:
        return {"said": str(error)}
    return {}
