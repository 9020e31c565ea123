"""Adapters that change while they share an engine: each is an engine of its own to its run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from any_agent.engine import SGLangEngine
from any_agent.engine.embedded.engine import EmbeddedEngine, EngineOptions
from any_agent.engine.embedded.live_adapters import LiveAdapters
from any_agent.types import ModelRequest
from tests.support.engine.adapters import by_peft, with_settings, write_adapter
from tests.support.engine.embedded import LIMIT, Serve, fresh_logprobs, prompt, request
from tests.support.waiting import until

SMALL = {"r": 2, "target_modules": ["q_proj", "down_proj"]}
"""Settings of an adapter of other layers and another rank than the rest."""
Sampled = tuple[list[int], list[float], list[int]]
Control = Callable[..., Awaitable[tuple[int, dict[str, Any]]]]


@pytest.fixture(scope="session")
def folders(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters by the name of the run and their version."""
    root = tmp_path_factory.mktemp("live")
    settings = {"a1": {}, "a2": {}, "a3": SMALL, "b1": {"r": 8}, "b2": {"r": 8}}
    return {
        name: write_adapter(tiny_model_dir, root / name, seed=seed, **config)
        for seed, (name, config) in enumerate(settings.items())
    }


@pytest.fixture(scope="session")
def models(tiny_model_dir: Path, folders: dict[str, Path]) -> dict[str, Any]:
    return {name: by_peft(tiny_model_dir, folder) for name, folder in folders.items()}


@pytest.fixture
async def engine(tiny_model_dir: Path) -> AsyncIterator[EmbeddedEngine]:
    options = EngineOptions(live_adapters=2)
    async with EmbeddedEngine.load(str(tiny_model_dir), options) as engine:
        yield engine


@pytest.fixture
async def url(engine: EmbeddedEngine, serve: Serve) -> str:
    return await serve(engine, incremental=True)


@pytest.fixture
async def control(url: str) -> AsyncIterator[Control]:
    async with aiohttp.ClientSession() as http:

        async def send(method: str, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
            async with http.request(method, url + path, json=body or None) as response:
                told = response.content_type == "application/json"
                return response.status, await response.json() if told else {}

        yield send


@pytest.fixture
async def run(engine: EmbeddedEngine, url: str) -> AsyncIterator[Callable[[str], SGLangEngine]]:
    """The client by which a rank of a run drives its engine: its adapter."""
    opened = []

    def connect(name: str) -> SGLangEngine:
        opened.append(SGLangEngine(f"{url}/adapters/{name}", decode=engine.loaded.tokenizer.decode))
        return opened[-1]

    yield connect
    for client in opened:
        await client.close()


async def publish(control: Control, name: str, folder: Path, version: int) -> None:
    path = f"/adapters/{name}/update_weights_from_disk"
    answer = await control("POST", path, model_path=str(folder), weight_version=str(version))
    assert answer[0] == 200, answer


async def update(client: SGLangEngine, control: Control, folder: Path, version: int) -> None:
    """Publish an adapter as a trainer does, by its run's proxy."""
    await client.pause()
    await publish(control, client.url.rpartition("/")[2], folder, version)
    await client.resume(version)


async def sample(client: SGLangEngine | EmbeddedEngine, ask: ModelRequest) -> Sampled:
    out: Sampled = ([], [], [])
    async for chunk in client.generate(ask, stream=True):
        assert chunk.adapter is None, "to its run, an adapter is the model"
        for all_, new in zip(out, (chunk.output_ids, chunk.logprobs, chunk.versions), strict=True):
            all_ += new
    return out


def error_of(models: dict[str, Any], name: str, ids: list[int], out: Sampled) -> float:
    """How far log-probabilities are off from a fresh pass of each token's version, at most."""
    output, logprobs, versions = out
    worst = 0.0
    for version in set(versions):
        fresh = fresh_logprobs(models[f"{name}{version}"], ids, output).numpy()
        gaps = np.abs(fresh - np.array(logprobs))[np.array(versions) == version]
        worst = max(worst, float(gaps.max()))
    return worst


async def test_adapters_that_are_updated_in_turn_share_batches_exactly(
    engine: EmbeddedEngine,
    control: Control,
    run: Callable[[str], SGLangEngine],
    folders: dict[str, Path],
    models: dict[str, Any],
    tiny_model_dir: Path,
) -> None:
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    models = {**models, "base0": base}
    clients = {"a": run("a"), "b": run("b")}
    for name, client in clients.items():
        await publish(control, name, folders[f"{name}1"], 1)
        client.release(1)

    async def calls(client: SGLangEngine | EmbeddedEngine, name: str) -> list[Any]:
        asks = [
            request(f"{k}", prompt(4 + 9 * k, k), max_new_tokens=150, temperature=(1, 0.7)[k % 2])
            for k in range(3)
        ]
        return [
            (name, ask, out)
            for ask, out in zip(
                asks, await asyncio.gather(*(sample(client, ask) for ask in asks)), strict=True
            )
        ]

    running = [asyncio.create_task(calls(client, name)) for name, client in clients.items()]
    running.append(asyncio.create_task(calls(engine, "base")))
    for number, (name, version) in enumerate((("a", 2), ("b", 2), ("a", 3)), 1):
        await until(lambda k=number: engine.loop.steps > 30 * k)
        await update(clients[name], control, folders[f"{name}{version}"], version)
    every = [one for task in running for one in await asyncio.wait_for(task, LIMIT)]
    assert {name: client.resubmitted["update"] for name, client in clients.items()} == {
        "a": 6,
        "b": 3,
    }
    seen: dict[str, set[int]] = {}
    for name, ask, out in every:
        assert len(out[0]) == 150
        temperature = ask.gconfig.temperature
        scaled = {k: _Scaled(model, temperature) for k, model in models.items()}
        assert error_of(scaled, name, list(ask.input_ids), out) < 1e-4
        seen.setdefault(name, set()).update(out[2])
    assert seen == {"a": {1, 2, 3}, "b": {1, 2}, "base": {0}}


class _Scaled:
    """A model whose logits are divided by a temperature."""

    def __init__(self, model: Any, temperature: float) -> None:
        self._model, self._temperature = model, temperature

    def __call__(self, **given: Any) -> Any:
        out = self._model(**given)
        out.logits = out.logits / self._temperature
        return out


async def test_an_update_of_one_adapter_changes_nothing_of_another(
    engine: EmbeddedEngine,
    control: Control,
    run: Callable[[str], SGLangEngine],
    folders: dict[str, Path],
) -> None:
    """Not its tokens, nor its versions, nor its calls under way, nor what is known of prompts."""
    await publish(control, "b", folders["b1"], 7)
    client, ask = run("b"), request("s", prompt(20), max_new_tokens=120, seed=5)
    alone = await sample(client, ask)
    assert set(alone[2]) == {7}
    task = asyncio.create_task(sample(client, ask))
    noise = run("a")
    for version in (1, 2, 3):
        steps = engine.loop.steps
        await update(noise, control, folders[f"a{version}"], version)
        await sample(noise, request(f"n{version}", prompt(9), max_new_tokens=4))
        await until(lambda s=steps: task.done() or engine.loop.steps > s + 20)
    await control("DELETE", "/adapters/a")
    assert not task.done(), "nothing was proven"
    together = await asyncio.wait_for(task, LIMIT)
    assert (together[0], together[2]) == (alone[0], alone[2])
    assert client.resubmitted["update"] == 0
    assert (await control("GET", "/adapters/b/model_info"))[1]["weight_version"] == "7"
    assert (await control("GET", "/model_info"))[1]["weight_version"] == "0"


async def test_a_prompt_of_an_earlier_version_is_not_reused(
    control: Control, folders: dict[str, Path], models: dict[str, Any], engine: EmbeddedEngine
) -> None:
    ids = prompt(30)

    async def ask(name: str, version: int) -> int:
        body = {"input_ids": ids, "return_logprob": True, "sampling_params": {"max_new_tokens": 8}}
        status, answer = await control("POST", f"/adapters/{name}/generate", **body)
        meta = answer["meta_info"]
        assert (status, meta["weight_version"]) == (200, str(version))
        logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
        out = (answer["output_ids"], logprobs, [version] * len(logprobs))
        assert error_of(models, name, ids, out) < 1e-4
        return int(meta["cached_tokens"])

    for name in ("a", "b"):
        await publish(control, name, folders[f"{name}1"], 1)
        assert [await ask(name, 1) for _ in range(2)] == [0, 30]
    await publish(control, "a", folders["a2"], 2)
    assert [await ask("b", 1), await ask("a", 2), await ask("a", 2)] == [30, 0, 30]
    assert (await control("POST", "/adapters/a/flush_cache"))[0] == 200
    assert [await ask("b", 1), await ask("a", 2)] == [30, 0]


async def test_a_long_queue_of_one_adapter_delays_another_by_a_turn(
    tiny_model_dir: Path, folders: dict[str, Path]
) -> None:
    options = EngineOptions(live_adapters=2, max_running_requests=1)
    async with EmbeddedEngine.load(str(tiny_model_dir), options) as engine:
        live = LiveAdapters(engine)
        for name in ("a", "b"):
            await live.find(name).update_weights(str(folders[f"{name}1"]), "1")
        ended: list[str] = []

        async def ask(name: str, number: int) -> None:
            # The same id for both: what one run calls its requests is nothing to another.
            call = request(f"r{number}", prompt(5, number), max_new_tokens=30)
            await sample(live.find(name), call)
            ended.append(name)

        async with asyncio.TaskGroup() as group:
            for number in range(6):
                group.create_task(ask("a", number))
            await asyncio.sleep(0)
            group.create_task(ask("b", 0))
        assert len(ended) == 7 and "b" in ended[:3], ended


async def test_a_wrong_adapter_harms_no_other_and_leaves_the_one_before(
    control: Control,
    run: Callable[[str], SGLangEngine],
    folders: dict[str, Path],
    models: dict[str, Any],
    tiny_model_dir: Path,
    tmp_path: Path,
) -> None:
    for name in ("a", "b"):
        await publish(control, name, folders[f"{name}1"], 1)
    poisoned = {kind: with_settings(folders["a1"], tmp_path / kind) for kind in ("nan", "huge")}
    for kind, value in (("nan", float("nan")), ("huge", 1e37)):
        file = poisoned[kind] / "adapter_model.safetensors"
        tensors = {name: torch.full_like(t, value) for name, t in load_file(file).items()}
        save_file(tensors, file)
    wide = write_adapter(tiny_model_dir, tmp_path / "wide", r=65)
    cases = {
        "not finite": poisoned["nan"],
        "--max-adapter-rank": wide,
        "use_dora": with_settings(folders["a1"], tmp_path / "dora", use_dora=True),
        "no folder": tmp_path / "nowhere",
    }
    for words, folder in cases.items():
        path, body = "/adapters/a/update_weights_from_disk", {"model_path": str(folder)}
        status, answer = await control("POST", path, **body, weight_version="2")
        assert (status, answer["success"]) == (400, False)
        assert words in answer["message"] and "adapter a" in answer["message"]
    ids = prompt(12)
    beside = asyncio.create_task(sample(run("b"), request("b", ids, max_new_tokens=100)))
    out = await sample(run("a"), request("a", ids))
    assert set(out[2]) == {1} and error_of(models, "a", ids, out) < 1e-4
    await publish(control, "a", poisoned["huge"], 2)
    for k in range(3):
        sampling = {"max_new_tokens": 4}
        body = {"input_ids": ids, "sampling_params": sampling}
        status, answer = await control("POST", "/adapters/a/generate", **body)
        assert status == 503 and "not finite" in answer["error"]["message"], k
    out = await asyncio.wait_for(beside, LIMIT)
    assert len(out[0]) == 100 and error_of(models, "b", ids, out) < 1e-4


async def test_a_full_engine_and_what_an_adapter_cannot_do_are_refused_by_name(
    engine: EmbeddedEngine,
    control: Control,
    run: Callable[[str], SGLangEngine],
    folders: dict[str, Path],
    other_model_dir: Path,
    own_engine: EmbeddedEngine,
    serve: Serve,
) -> None:
    call = {"input_ids": prompt(4), "sampling_params": {"max_new_tokens": 2}}
    # Before its first weights an adapter tells what it is, and takes no call.
    for path in ("model_info", "server_info", "get_weight_version"):
        told = (await control("GET", f"/adapters/a/{path}"))[1]
        assert told["weight_version"] == "unloaded"
    assert (await control("POST", "/adapters/a/generate", **call))[0] == 503
    client = run("a")
    await client.require_model()
    assert client.version == -1
    await client.pause()
    assert (await control("GET", "/server_info"))[1]["live_adapters"]["versions"] == {}
    for name in ("a", "b"):
        await publish(control, name, folders[f"{name}1"], 1)
    body = {"model_path": str(folders["a2"]), "weight_version": "1"}
    status, answer = await control("POST", "/adapters/c/update_weights_from_disk", **body)
    assert status == 400
    assert "(a, b)" in answer["message"] and "DELETE" in answer["message"]
    update_of = {"model_path": str(other_model_dir), "weight_version": "1"}
    status, answer = await control("POST", "/update_weights_from_disk", **update_of)
    assert status == 400 and "/adapters/NAME" in answer["message"]
    for path in ("", "/adapters/a"):
        status, answer = await control("POST", f"{path}/pause_generation", mode="in_place")
        assert status == 400 and "update_mode=resume" in answer["error"]["message"]
    named = await control("POST", "/adapters/a/generate", **call, lora_path="b")
    assert (named[0], named[1]["error"]["param"]) == (400, "lora_path")
    for name in ("a@b", "-a", "x" * 65, "a%2Fb"):
        assert (await control("GET", f"/adapters/{name}/model_info"))[0] in (400, 404), name
    assert (await control("DELETE", "/adapters/c"))[0] == 404
    # A call under way ends with its adapter, whose place another one takes.
    call["sampling_params"] = {"max_new_tokens": 900, "ignore_eos": True}
    task = asyncio.create_task(control("POST", "/adapters/a/generate", **call))
    await until(lambda: engine.loop.steps > 20)
    assert (await control("DELETE", "/adapters/a"))[0] == 200
    ended = (await asyncio.wait_for(task, LIMIT))[1]["meta_info"]
    assert ended["finish_reason"]["type"] == "abort" and ended["completion_tokens"] > 10
    await publish(control, "c", folders["a2"], 1)
    told = (await control("GET", "/server_info"))[1]["live_adapters"]
    assert told == {"places": 2, "versions": {"b": "1", "c": "1"}}
    without = await serve(own_engine)
    async with (
        aiohttp.ClientSession() as http,
        http.get(f"{without}/adapters/a/model_info") as response,
    ):
        error = (await response.json())["error"]
        assert response.status == 404 and "--live-adapters" in error["message"]
