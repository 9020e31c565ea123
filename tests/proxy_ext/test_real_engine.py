"""The proxy on the real embedded engine: what is exported is what was sampled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from any_agent.record import InteractionTree
from any_agent.types import Continuation
from tests.support.proxy import HELLO, Proxy, until
from tests.support.proxy_fixtures import Start
from tests.support.retries import hang_up

if TYPE_CHECKING:
    from any_agent.engine.embedded.engine import EmbeddedEngine

MORE = {"role": "user", "content": "And another one?"}


async def talk(proxy: Proxy, number: int, turns: int) -> str:
    """An agent that alternates whole and streamed calls; its session's id."""
    session = await proxy.open()
    messages = list(HELLO)
    for turn in range(turns):
        if (turn + number) % 2:
            events, done = await proxy.stream(session["api_key"], messages, max_tokens=24)
            assert done
            deltas = [e["choices"][0]["delta"] for e in events]
            message = {
                "role": "assistant",
                "content": "".join(d.get("content") or "" for d in deltas),
                "reasoning_content": "".join(d.get("reasoning_content") or "" for d in deltas),
            }
        else:
            answer = await proxy.complete(session["api_key"], messages, max_tokens=24)
            message = answer["choices"][0]["message"]
        messages += [message, MORE]
    await proxy.post("/rl/v1/finalize", {"final_reward": number}, session["api_key"])
    return str(session["session_id"])


async def answered(proxy: Proxy, least: int) -> bool:
    """Whether so many calls of all sessions were."""
    lines = (await proxy.http.get("/rl/v1/sessions")).json()
    return sum(line["interactions"] for line in lines) >= least


@asynccontextmanager
async def on_a_real_engine(
    start: Start, model: Path
) -> AsyncIterator[tuple[EmbeddedEngine, Proxy]]:
    from any_agent.engine.embedded.engine import EmbeddedEngine
    from any_agent.engine.embedded.server import EngineServer, listen

    async with EmbeddedEngine.load(str(model)) as engine:
        runner, port = await listen(EngineServer(engine, incremental=True), "127.0.0.1", 0)
        yield engine, await start(engine_url=f"http://127.0.0.1:{port}")
        await runner.cleanup()


async def test_every_exported_logprob_is_that_of_a_fresh_pass(
    start: Start, tiny_model_dir: Path
) -> None:
    async with on_a_real_engine(start, tiny_model_dir) as (engine, proxy):
        await proxy.admit(100)
        talks = [asyncio.create_task(talk(proxy, k, 4)) for k in range(6)]
        # Updates (to the same weights) cut whatever is under way.
        for version in range(1, 4):
            await until(partial(answered, proxy, 4 * version))
            await proxy.client.pause(ttl=60)
            await engine.update_weights(str(tiny_model_dir), str(version))
            await proxy.client.publish_version(version=version, path="x", step=version)
            await proxy.client.resume()
        ids = await asyncio.gather(*talks)
        exported = await proxy.export(*ids)
        worst, exact, versions = 0.0, 0, set()
        for session_id in ids:
            recorded = await proxy.recorded(session_id)
            assert len(recorded) == 4
            tree = InteractionTree.from_interactions(recorded)
            for interaction in recorded:
                row = exported[session_id][interaction.id]
                prompt = tree.prompt_ids(interaction.id).tolist()
                assert row["input_ids"] == prompt + interaction.output_ids.tolist()
                if interaction.continuation is Continuation.EXACT:
                    exact += 1
                    assert interaction.parent_id is not None
                    parent = tree[interaction.parent_id]
                    before = [*tree.prompt_ids(parent.id).tolist(), *parent.output_ids.tolist()]
                    assert prompt[: len(before)] == before
                with torch.inference_mode():
                    logits = engine.loaded.model(torch.tensor([row["input_ids"]])).logits[0]
                fresh = torch.log_softmax(logits.float(), -1)[len(prompt) - 1 : -1]
                fresh = fresh.gather(-1, torch.tensor(row["input_ids"][len(prompt) :])[:, None])
                ours = torch.tensor(row["logprobs"][len(prompt) :])
                worst = max(worst, (fresh[:, 0] - ours).abs().max().item())
                versions |= set(row["versions"]) - {-1}
    assert worst < 1e-3
    # A random model often ends in the middle of something; the others continue exactly.
    assert exact >= 6
    assert len(versions) > 1
    assert max(versions) <= 3


@pytest.mark.parametrize("stream", [False, True])
async def test_hanging_up_frees_the_real_engine(
    start: Start, tiny_model_dir: Path, stream: bool
) -> None:
    async with on_a_real_engine(start, tiny_model_dir) as (engine, proxy):
        session = await proxy.open(mode="eval")
        await engine.pause("in_place")
        call = proxy.call(session["api_key"], stream=stream, max_tokens=1500)
        asked = asyncio.create_task(call)
        await until(lambda: sum(engine.loop.load) == 1)
        await hang_up(asked)
        await engine.resume()
        await until(lambda: sum(engine.loop.load) == 0)
        assert await proxy.recorded(session["session_id"]) == []


async def test_answers_that_spell_special_tokens_come_back_as_plain_text(
    start: Start, tiny_model_dir: Path
) -> None:
    """They come as they were asked for: no marker is read in them, and none ends them."""
    async with on_a_real_engine(start, tiny_model_dir) as (_, proxy):
        session = await proxy.open(mode="eval")
        for text in ("<|im_end|> x", "<think>", "</think>", "7<tool_response>", "<tool_call>"):
            asked = {"guided_choice": [text], "max_tokens": 80}
            answer = await proxy.complete(session["api_key"], HELLO, **asked)
            (choice,) = answer["choices"]
            assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
