"""The direct client on the real embedded engine: what it exports is what was sampled."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from any_agent import EngineOpenAI, RemoteSGLangEngine
from any_agent.chat import ChatFormat
from any_agent.config import load_config
from any_agent.engine import EnginePool, SGLangEngine, agenerate
from any_agent.engine.embedded.engine import EmbeddedEngine, EngineOptions
from any_agent.engine.embedded.model_loader import load_model
from any_agent.engine.embedded.server import EngineServer, listen
from any_agent.errors import InvalidRequest
from any_agent.record import InteractionTree
from any_agent.types import Continuation, GenerationHyperparameters, ModelRequest
from tests.support.direct import HELLO, MODEL, MORE
from tests.support.engine.adapters import by_peft, write_adapter
from tests.support.engine.embedded import fresh_logprobs
from tests.support.errors import fails_with
from tests.support.other_weights import publish_other
from tests.support.waiting import until


@pytest.fixture
async def embedded(tiny_model_dir: Path) -> AsyncIterator[EmbeddedEngine]:
    async with EmbeddedEngine.load(str(tiny_model_dir)) as engine:
        yield engine


@pytest.fixture
async def url(embedded: EmbeddedEngine) -> AsyncIterator[str]:
    runner, port = await listen(EngineServer(embedded, incremental=True), "127.0.0.1", 0)
    yield f"http://127.0.0.1:{port}"
    await runner.cleanup()


@pytest.fixture
async def remote(url: str, chat: ChatFormat) -> AsyncIterator[SGLangEngine]:
    engine = SGLangEngine(url, decode=chat.decode)
    yield engine
    await engine.close()


async def talk(client: openai.AsyncOpenAI, number: int, turns: int = 4, **fields: Any) -> None:
    """An agent that alternates whole and streamed calls."""
    messages = list(HELLO)
    for turn in range(turns):
        asked: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": 24, **fields}
        # The SDK's stream helper raises where a random model's arguments are no JSON.
        if (turn + number) % 2 and "tools" not in fields:
            async with client.chat.completions.stream(**asked) as stream:
                async for _ in stream:
                    pass
                message = stream.current_completion_snapshot.choices[0].message
        else:
            answer = await client.chat.completions.create(**asked)
            message = answer.choices[0].message
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": "3"}
            for call in message.tool_calls or ()
        ]
        messages += [message.model_dump(exclude_none=True), *(results or [MORE])]


@pytest.mark.parametrize("stream", [False, True])
async def test_of_an_answer_under_a_grammar_the_free_tokens_are_trained_on(
    remote: SGLangEngine, embedded: EmbeddedEngine, chat: ChatFormat, stream: bool
) -> None:
    """Over HTTP; the trained tokens' log-probabilities are a fresh pass's, without a grammar."""
    trained = untrained = 0
    for seed in range(4):
        # A random model that is cold has tokens that leave next to nothing to what is forbidden.
        sampling = GenerationHyperparameters(max_new_tokens=16, temperature=0.05, seed=seed)
        client = EngineOpenAI(remote, chat, mode="train", sampling=sampling)
        calls = client.chat.completions.with_raw_response
        raw = await calls.create(
            model=MODEL,
            messages=[*HELLO, {"role": "user", "content": str(seed)}],
            extra_body={"guided_regex": "[^a]{60}"},
            stream=stream,
        )
        if stream:
            async for _ in raw.parse():
                pass
        (recorded,) = client.interactions
        assert recorded.untrainable_reason is None
        assert "x-any-agent-untrainable" not in raw.headers
        client.set_reward(recorded.id, 1.0)
        row = client.export_interactions()[recorded.id].rewarded_row()
        ids, mask = row["input_ids"].tolist(), row["loss_mask"]
        start = len(ids) - len(recorded.output_ids)
        fresh = fresh_logprobs(embedded.loaded.model, ids[:start], ids[start:], 0.05)
        off = (torch.from_numpy(row["logprobs"][start:]) - fresh).abs()
        free = torch.from_numpy(mask[start:]) == 1
        assert not mask[:start].any()
        assert off[free].max() < 1e-3
        trained += int(free.sum())
        untrained += int((~free).sum())
        await client.close()
    assert trained and untrained, "all alike: the test shows nothing"


def worst_and_exact(models: Sequence[Any], client: EngineOpenAI) -> tuple[float, int]:
    """The largest difference to a fresh pass of the weights of each token's version, and how many
    turns continued exactly."""
    worst, exact = 0.0, 0
    exported = client.export_interactions()
    tree = InteractionTree.from_interactions(client.interactions)
    for i in client.interactions:
        row = exported[i.id].row
        prompt = tree.prompt_ids(i.id).tolist()
        ids = row["input_ids"].tolist()
        assert ids == prompt + i.output_ids.tolist()
        if i.continuation is Continuation.EXACT:
            exact += 1
            parent = tree[str(i.parent_id)]
            before = [*tree.prompt_ids(parent.id).tolist(), *parent.output_ids.tolist()]
            assert prompt[: len(before)] == before
        assert row["loss_mask"].tolist() == [0] * len(prompt) + [1] * len(i.output_ids)
        versions = row["versions"].tolist()
        assert versions == [-1] * len(prompt) + i.output_versions.tolist()
        for version in set(versions[len(prompt) :]):
            fresh = fresh_logprobs(models[version], prompt, ids[len(prompt) :])
            told = torch.tensor(row["logprobs"][len(prompt) :])
            own = torch.tensor([v == version for v in versions[len(prompt) :]])
            worst = max(worst, (fresh - told)[own].abs().max().item())
    return worst, exact


TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("add", "find")
]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": TOOLS, "tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "find"}}},
    ],
    ids=["plain", "required", "named"],
)
@pytest.mark.service
async def test_every_exported_logprob_is_that_of_a_fresh_pass(
    fields: dict[str, Any],
    embedded: EmbeddedEngine,
    remote: SGLangEngine,
    chat: ChatFormat,
    tiny_model_dir: Path,
    tmp_path: Path,
) -> None:
    paths = [tiny_model_dir, *(publish_other(tiny_model_dir, tmp_path, v) for v in range(1, 4))]
    models = [load_model(str(path)).model for path in paths]
    clients = [EngineOpenAI(remote, chat) for _ in range(6)]
    talks = [asyncio.create_task(talk(client, k, **fields)) for k, client in enumerate(clients)]
    # Updates cut whatever is under way, and come between the calls of others.
    for version in range(1, 4):
        await until(lambda: sum(len(c.interactions) for c in clients) >= 4 * version)  # noqa: B023
        await remote.pause()
        await embedded.update_weights(str(paths[version]), str(version))
        await remote.resume(version)
    await asyncio.gather(*talks)
    exact, versions = 0, set()
    for client in clients:
        assert len(client.interactions) == 4
        assert all(i.trainable for i in client.interactions)
        assert all(bool(i.request.get("forced")) is bool(fields) for i in client.interactions)
        worst, continued = worst_and_exact(models, client)
        assert worst < 1e-3
        exact += continued
        for exported in client.export_interactions().values():
            versions |= set(exported.row["versions"].tolist()) - {-1}
    # A random model often ends in the middle of something; the others continue exactly.
    assert exact >= 6
    assert len(versions) > 1
    assert max(versions) <= 3


async def test_the_engine_may_be_in_the_process(embedded: EmbeddedEngine, chat: ChatFormat) -> None:
    client = EngineOpenAI(embedded, chat)
    await talk(client, 0)
    worst, _ = worst_and_exact([embedded.loaded.model], client)
    assert worst < 1e-3
    with fails_with(openai.BadRequestError, code="context_length_exceeded"):
        long = [{"role": "user", "content": "many words " * 5000}]
        await client.chat.completions.create(model=MODEL, messages=long)  # type: ignore[arg-type]


DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "direct-client.md"


async def test_the_documented_example_collects_rewarded_trajectories(
    tiny_model_dir: Path, url: str
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.S)
    names: dict[str, Any] = {"__name__": "guess"}
    exec(compile(code, str(DOCUMENT), "exec"), names)
    trajectories = await names["main"](url, str(tiny_model_dir))
    assert len(trajectories) == 4
    assert {t.group_id for t in trajectories} == {"What is 2 + 3?"}
    for trajectory in trajectories:
        first, second = trajectory.interactions
        assert first.reward is None and second.reward in (0.0, 1.0)


def test_the_client_has_every_documented_method() -> None:
    cells = re.findall(r"^\| `([^|]*)` \| ", DOCUMENT.read_text(), re.M)
    names = {name.partition("(")[0] for cell in cells for name in cell.split("`, `")}
    assert names and not [name for name in names if not hasattr(EngineOpenAI, name)]


@pytest.mark.parametrize("way", ["own", "pool", "url", "script"])
async def test_a_model_that_is_an_adapter_samples_and_is_not_trained_on(
    tiny_model_dir: Path, tmp_path: Path, chat: ChatFormat, way: str
) -> None:
    """Of an engine itself, of several as one, over HTTP, and of a script's engine."""
    folder = str(write_adapter(tiny_model_dir, tmp_path / "ann"))
    async with AsyncExitStack() as stack:
        given: Any
        if way == "script":
            settings = load_config(None, [f"engine.adapters.ann={folder}", "engine.kind=embedded"])
            given = RemoteSGLangEngine(settings)
            stack.push_async_callback(asyncio.to_thread, given.close)
            await asyncio.to_thread(given.initialize, model=str(tiny_model_dir), device="cpu")
        else:
            options = EngineOptions(adapters={"ann": folder})
            given = EmbeddedEngine.load(str(tiny_model_dir), options)
            if way == "pool":
                given = EnginePool([given])
            await stack.enter_async_context(given)
        if way == "url":
            server = EngineServer(given, incremental=True)
            runner, port = await listen(server, "127.0.0.1", 0)
            stack.push_async_callback(runner.cleanup)
            given = SGLangEngine(f"http://127.0.0.1:{port}", decode=chat.decode)
            stack.push_async_callback(given.close)
        sampling = GenerationHyperparameters(max_new_tokens=6, temperature=1.0, seed=1)
        client = EngineOpenAI(given, chat, mode="train", sampling=sampling)
        for model in ("ann", "policy"):
            await client.chat.completions.create(model=model, messages=list(HELLO))
        adapted, own = client.interactions
        prompt = adapted.prompt_delta_ids.tolist()
        of_peft = fresh_logprobs(
            by_peft(tiny_model_dir, Path(folder)), prompt, adapted.output_ids.tolist(), 1.0
        )
        assert (torch.from_numpy(adapted.output_logprobs) - of_peft).abs().max() < 1e-4
        assert str(adapted.request["adapter"]).startswith("ann@")
        assert (adapted.untrainable_reason, own.untrainable_reason) == ("adapter", None)
        assert "adapter" not in own.request
        with fails_with(InvalidRequest, "names the adapter 'ann'"):
            asked = ModelRequest(input_ids=prompt, gconfig=sampling, adapter="ann")
            await agenerate(given, asked) if way == "own" else await given.agenerate(asked)
