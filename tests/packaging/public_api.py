"""A user's program as type checkers see it; pyright reads it in strict mode, nothing runs it.

`assert_type` says what each public name of the light SDK gives. An unknown type anywhere is an
error, so a name without types fails here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, assert_type

import anthropic
import openai

import any_agent
from any_agent import (
    AgentRunner,
    AgentSession,
    AnyAgentError,
    Config,
    GenerationHyperparameters,
    GRPOConfig,
    Interaction,
    LLMRequest,
    ModelRequest,
    ModelResponse,
    RLClient,
    Trajectory,
    load_config,
    load_expr_config,
)
from any_agent.protocol.rl import RewardSet, SessionInfo, SessionStarted
from any_agent.protocol.training import RunInfo
from any_agent.sdk import AsyncSession, RunProgress, RunResult, RunResults, Session
from any_agent.sdk.results import Summary


async def with_a_session() -> None:
    async with AgentSession("task", group_size=2, mode="eval", metadata={"a": 1}) as session:
        assert_type(session, AsyncSession)
        assert_type(session.openai(max_retries=2), openai.AsyncOpenAI)
        assert_type(session.anthropic(), anthropic.AsyncAnthropic)
        assert_type(session.env(), dict[str, str])
        assert_type(session.base_url, str)
        assert_type(session.session_id, str)
        assert_type(await session.set_reward(1.0), RewardSet)
        assert_type(await session.set_final_reward({"correct": 1.0}), RewardSet)
        assert_type(await session.info(), SessionInfo)
        assert_type(await session.finalize(await_reward=True), SessionInfo)
        assert_type(session.blocking, Session)


def with_a_blocking_session() -> None:
    with AgentSession() as session:
        assert_type(session, Session)
        assert_type(session.openai(), openai.OpenAI)
        assert_type(session.set_reward(1.0), RewardSet)
        assert_type(session.finalize(), SessionInfo)


async def with_the_client() -> None:
    async with RLClient("http://127.0.0.1:8000", admin_key="key") as client:
        started = await client.start_session(task_id="task")
        assert_type(started, SessionStarted)
        assert_type(await client.session_info(started.session_id), SessionInfo)
        assert_type(await client.run_info(), RunInfo)


def with_the_runner() -> None:
    async def agent(item: dict[str, Any]) -> float:
        return float(item["answer"])

    def show(progress: RunProgress) -> None:
        assert_type(progress.mean, float | None)

    runner = AgentRunner(concurrency=8, group_size=2, progress=show)
    # Inside an event loop `run` gives a coroutine, which a type cannot know.
    either = runner.run(agent, [{"answer": "1"}])
    assert_type(either, RunResults | Coroutine[Any, Any, RunResults])
    results = asyncio.run(runner.arun(agent, [{"answer": "1"}]))
    assert_type(results, RunResults)
    assert_type(results.rewards, list[float])
    assert_type(results.summary(), Summary)
    for result in results:
        assert_type(result, RunResult)


def with_settings() -> None:
    config = load_config("settings.yaml", ["train.lr=1e-6"])
    assert_type(config, Config)
    assert_type(config.train.lr, float)
    assert_type(config.server.public_url, str | None)
    script, path = load_expr_config(["--config", "settings.yaml"], GRPOConfig)
    assert_type(script, GRPOConfig)
    print(path)


def with_values(response: ModelResponse, interaction: Interaction) -> None:
    assert_type(LLMRequest(input_ids=[1]), ModelRequest)
    assert_type(response.output_tokens, list[int])
    assert_type(response.output_logprobs, list[float])
    assert_type(interaction.reward, float | None)
    assert_type(GenerationHyperparameters().temperature, float)
    assert_type(Trajectory.__name__, str)


def with_errors(error: AnyAgentError) -> None:
    assert_type(error.code, str)
    assert_type(error.status, int)
    assert_type(any_agent.__version__, str)
