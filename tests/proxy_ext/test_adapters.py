"""Models that are the policy with an adapter: called by name, recorded as theirs, never trained."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from any_agent.record import InteractionTree
from any_agent.types import Interaction
from tests.support.engine.adapters import by_peft, write_adapter
from tests.support.engine.embedded import error_of
from tests.support.proxy import HELLO, Proxy
from tests.support.proxy_fixtures import Start

if TYPE_CHECKING:
    from any_agent.engine.embedded.engine import EmbeddedEngine

MORE = {"role": "user", "content": "And another one?"}


@pytest.fixture(scope="session")
def folders(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: write_adapter(tiny_model_dir, root / name, seed=seed, r=2 + seed)
        for seed, name in enumerate(("ann", "bob"))
    }


@pytest.fixture
async def real_engine(
    tiny_model_dir: Path, folders: dict[str, Path]
) -> AsyncIterator[tuple[EmbeddedEngine, str]]:
    from any_agent.engine.embedded.engine import EmbeddedEngine, EngineOptions
    from any_agent.engine.embedded.server import EngineServer, listen

    options = EngineOptions(adapters={name: str(path) for name, path in folders.items()})
    async with EmbeddedEngine.load(str(tiny_model_dir), options) as engine:
        runner, port = await listen(EngineServer(engine, incremental=True), "127.0.0.1", 0)
        yield engine, f"http://127.0.0.1:{port}"
        await runner.cleanup()


@pytest.fixture
def settings(folders: dict[str, Path]) -> list[str]:
    return [f"engine.adapters.{name}={folder}" for name, folder in folders.items()]


async def talk(proxy: Proxy, models: tuple[str, ...], **fields: Any) -> list[Interaction]:
    """A session with a turn of each of these models, streamed and whole by turns."""
    session = await proxy.open(mode="eval")
    messages: list[dict[str, Any]] = list(HELLO)
    for turn, model in enumerate(models):
        ask = {"model": model, "max_tokens": 16, "temperature": 1.0, **fields}
        if turn % 2:
            _, done = await proxy.stream(session["api_key"], messages, **ask)
            assert done
        else:
            answer = await proxy.complete(session["api_key"], messages, **ask)
            assert answer["model"] == model
        (*_, last) = await proxy.recorded(session["session_id"])
        messages += [last.output_message, MORE]
    return await proxy.recorded(session["session_id"])


async def test_each_call_is_sampled_by_the_model_that_it_names_and_says_so(
    start: Start,
    real_engine: tuple[EmbeddedEngine, str],
    settings: list[str],
    folders: dict[str, Path],
    tiny_model_dir: Path,
) -> None:
    engine, url = real_engine
    proxy = await start(*settings, engine_url=url, training=False)
    models: dict[str, Any] = {n: by_peft(tiny_model_dir, path) for n, path in folders.items()}
    from transformers import AutoModelForCausalLM

    models["policy"] = AutoModelForCausalLM.from_pretrained(tiny_model_dir).eval()
    orders = [("policy", "ann", "bob"), ("bob", "policy", "ann"), ("ann", "gpt-4o", "bob", "ann")]
    sessions = await asyncio.gather(*(talk(proxy, order) for order in orders * 2))
    for order, recorded in zip(orders * 2, sessions, strict=True):
        assert [one.model for one in recorded] == list(order)
        tree = InteractionTree.from_interactions(recorded)
        for one in recorded:
            prompt, output = tree.prompt_ids(one.id).tolist(), one.output_ids.tolist()
            logprobs = one.output_logprobs.tolist()
            by = one.model if one.model in folders else "policy"
            assert error_of(models[by], prompt, output, logprobs) < 1e-4
            others = [error_of(m, prompt, output, logprobs) for n, m in models.items() if n != by]
            assert min(others) > 1e-2, "models that agree prove nothing"
            # The record says which, and the trainer takes only the policy's own.
            assert one.request.get("adapter") == engine.adapters.get(one.model)
            assert one.untrainable_reason == ("adapter" if by in folders else None)
            assert one.loss_mask().sum() == (0 if by in folders else len(output))


async def test_in_a_train_session_the_policys_own_tokens_alone_are_trained_on(
    start: Start, real_engine: tuple[EmbeddedEngine, str], settings: list[str]
) -> None:
    """Also where texts are not kept, and for a turn of the policy after one of an adapter."""
    engine, url = real_engine
    proxy = await start(*settings, "sessions.store_content=false", engine_url=url, admit=9)
    session = await proxy.open()
    key, place = session["api_key"], f"/rl/v1/sessions/{session['session_id']}/interactions"
    messages: list[dict[str, Any]] = list(HELLO)
    for model, reason in (("ann", "adapter"), ("policy", None), ("bob", "adapter")):
        response = await proxy.call(key, messages, model=model)
        assert response.headers.get("x-any-agent-untrainable") == reason
        messages += [response.json()["choices"][0]["message"], MORE]
    recorded = await proxy.recorded(session["session_id"])
    adapters = [engine.adapters["ann"], None, engine.adapters["bob"]]
    assert [one.request.get("adapter") for one in recorded] == adapters
    shown = (await proxy.http.get(place)).json()["interactions"]
    assert [each["adapter"] for each in shown] == adapters
    done = await proxy.post("/rl/v1/finalize", {"final_reward": 1.0}, key)
    assert (done.json()["trainable_calls"], done.json()["untrainable_calls"]) == (1, {"adapter": 2})
    rows = (await proxy.export(session["session_id"]))[session["session_id"]]
    trained = {id: sum(row["loss_mask"]) for id, row in rows.items()}
    assert trained == {
        one.id: 0 if one.request.get("adapter") else len(one.output_ids) for one in recorded
    }


async def test_adapters_are_listed_and_known_by_name(
    start: Start, real_engine: tuple[EmbeddedEngine, str], settings: list[str]
) -> None:
    _, url = real_engine
    proxy = await start(*settings, "model.unknown_model=reject", engine_url=url, training=False)
    listed = (await proxy.http.get("/v1/models")).json()["data"]
    assert [(each["id"], each.get("parent")) for each in listed] == [
        ("policy", None),
        ("ann", "policy"),
        ("bob", "policy"),
    ]
    assert len({each["context_length"] for each in listed}) == 1
    assert (await proxy.http.get("/v1/models/bob")).json() == listed[2]
    for name in ("policy", "ann", "bob"):
        assert (await proxy.call(None, model=name)).status_code == 200
    refused = await proxy.call(None, model="ann2")
    assert refused.status_code == 404
    error = refused.json()["error"]
    assert error["code"] == "model_not_found"
    assert all(repr(name) in error["message"] for name in ("ann2", "policy", "ann", "bob"))
    counts = proxy.service.frozen.policy.calls
    assert counts == {"policy": 1, "ann": 1, "bob": 1}


async def test_every_api_and_every_choice_reaches_the_adapter(
    start: Start, real_engine: tuple[EmbeddedEngine, str], settings: list[str]
) -> None:
    engine, url = real_engine
    proxy = await start(*settings, engine_url=url, training=False)
    session = await proxy.open(mode="eval")
    key = session["api_key"]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": HELLO, "max_tokens": 4, "n": 2},
        "/v1/completions": {"prompt": ["one", "two"], "max_tokens": 4},
        "/v1/responses": {"input": "hello", "max_output_tokens": 16},
        "/v1/messages": {"messages": HELLO, "max_tokens": 4},
        "/openai/deployments/ann/chat/completions": {"messages": HELLO, "model": "policy"},
    }
    for path, body in bodies.items():
        response = await proxy.post(path, {"model": "ann", **body}, key)
        assert response.status_code == 200, (path, response.text)
    recorded = await proxy.recorded(session["session_id"])
    assert len(recorded) == 2 + 2 + 1 + 1 + 1
    assert {one.request.get("adapter") for one in recorded} == {engine.adapters["ann"]}


async def test_an_engine_that_ignores_the_adapter_gets_no_answer_recorded(
    start: Start, settings: list[str]
) -> None:
    proxy = await start(*settings, training=False)  # the scripted engine, as SGLang without any
    session = await proxy.open(mode="eval")
    response = await proxy.call(session["api_key"], model="ann")
    assert response.json()["error"]["code"] == "engine_mismatch"
    assert "'ann'" in response.json()["error"]["message"]
    assert not await proxy.recorded(session["session_id"])
    assert (await proxy.call(session["api_key"])).status_code == 200
