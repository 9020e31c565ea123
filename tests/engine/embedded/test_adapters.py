"""Each row's log-probabilities are those of its own adapter, whatever shares its batch."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from any_agent.engine import SGLangEngine
from any_agent.engine.embedded import adapter_files, adapters
from any_agent.engine.embedded.engine import EmbeddedEngine, EngineOptions
from any_agent.engine.embedded.request import EngineRequest
from any_agent.engine.embedded.server import EngineServer, listen
from any_agent.errors import ConfigError, EngineUnavailable, InvalidRequest
from any_agent.types import GenerationChunk, ModelRequest
from tests.support.cut_link import CutLink
from tests.support.engine.adapters import ALL, by_peft, merged, with_settings, write_adapter
from tests.support.engine.embedded import LIMIT, Serve, fresh_logprobs, prompt, request, worst
from tests.support.errors import fails_with
from tests.support.waiting import until

KINDS: dict[str, dict[str, Any]] = {
    "low": {"r": 2, "lora_alpha": 3, "target_modules": ["q_proj", "v_proj"]},
    "high": {"r": 16, "lora_alpha": 8},
    "stable": {"r": 8, "use_rslora": True, "target_modules": ["down_proj", "lm_head"]},
}
"""Adapters of different ranks and layers: some layers have all of them, some one, some none."""
NAMES = (None, *KINDS)


@pytest.fixture(scope="session")
def folders(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: str(write_adapter(tiny_model_dir, root / name, seed=seed, **config))
        for seed, (name, config) in enumerate(KINDS.items())
    }


@pytest.fixture(scope="session")
def models(tiny_model_dir: Path, folders: dict[str, str]) -> dict[str | None, Any]:
    """What peft computes for each adapter, and the model without one."""
    from transformers import AutoModelForCausalLM

    plain: Any = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()
    found: dict[str | None, Any] = {None: plain}
    for name, folder in folders.items():
        found[name] = by_peft(tiny_model_dir, Path(folder))
    return found


@pytest.fixture
async def engine(tiny_model_dir: Path, folders: dict[str, str]) -> AsyncIterator[EmbeddedEngine]:
    options = EngineOptions(adapters=folders)
    async with EmbeddedEngine.load(str(tiny_model_dir), options) as engine:
        yield engine


def asked(rid: str, ids: list[int], adapter: str | None, **config: Any) -> ModelRequest:
    return replace(request(rid, ids, **config), adapter=adapter)


async def collect(
    engine: EmbeddedEngine | SGLangEngine, ask: ModelRequest, *, stream: bool = True
) -> list[GenerationChunk]:
    return [chunk async for chunk in engine.generate(ask, stream=stream)]


def sampled(chunks: list[GenerationChunk]) -> tuple[list[int], list[float], set[str | None]]:
    return (
        [i for chunk in chunks for i in chunk.output_ids],
        [p for chunk in chunks for p in chunk.logprobs],
        {chunk.adapter for chunk in chunks if chunk.output_ids},
    )


async def answered(engine: EmbeddedEngine, ask: ModelRequest) -> EngineRequest:
    generation = engine.submit(ask, stream=False)
    await asyncio.wait_for(generation.finished(), LIMIT)
    return generation.request


def error_of(models: dict[str | None, Any], out: EngineRequest, adapter: str | None) -> float:
    """How far a request is off from its adapter's fresh pass; the other models must be farther."""
    own, *others = (
        worst(out.logprobs, fresh_logprobs(models[name], out.input_ids, out.output_ids))
        for name in (adapter, *(name for name in NAMES if name != adapter))
    )
    assert min(others) > 1e-2, "models that agree prove nothing"
    return own


def test_peft_and_plain_sums_agree_on_what_an_adapter_is(
    tiny_model_dir: Path, folders: dict[str, str], models: dict[str | None, Any]
) -> None:
    for name, scaling in (("low", 3 / 2), ("high", 8 / 16), ("stable", 8 / 8**0.5)):
        whole = merged(tiny_model_dir, Path(folders[name]), scaling)
        ids, output = prompt(30), prompt(20, 5)
        error = fresh_logprobs(whole, ids, output) - fresh_logprobs(models[name], ids, output)
        assert error.abs().max() < 1e-4


async def test_rows_of_adapters_and_of_the_base_share_batches_exactly(
    engine: EmbeddedEngine, models: dict[str | None, Any]
) -> None:
    """Requests of all lengths that join and leave at different times; one adapter has most rows."""
    order = random.Random(3).choices((*NAMES, "high", "high"), k=24)
    assert set(order) == set(NAMES)
    results: list[tuple[ModelRequest, list[GenerationChunk]]] = []

    async def one(i: int, begun: asyncio.Event) -> None:
        ids = prompt((1, 14, 40, 333)[i % 4], seed=i)
        config = {"temperature": (0.5, 1.0, 1.5)[i % 3], "max_new_tokens": 3 + 5 * (i % 5)}
        ask, chunks = asked(f"r{i}", ids, order[i], **config), []
        async for chunk in engine.generate(ask):
            chunks.append(chunk)
            begun.set()
        results.append((ask, chunks))

    async with asyncio.TaskGroup() as group:
        for i in range(len(order)):
            begun = asyncio.Event()
            group.create_task(one(i, begun))
            if i % 3 == 0:  # some join alone, some together
                await begun.wait()
    assert len(results) == len(order)
    for ask, chunks in results:
        ids, logprobs, by = sampled(chunks)
        assert by == {engine.adapters.get(str(ask.adapter))}
        assert len(ids) == ask.gconfig.max_new_tokens
        temperature = ask.gconfig.temperature
        fresh = fresh_logprobs(models[ask.adapter], list(ask.input_ids), ids, temperature)
        assert worst(logprobs, fresh) < 1e-4, ask.adapter


async def test_a_prompt_is_shared_by_the_calls_of_one_adapter_only(
    engine: EmbeddedEngine, models: dict[str | None, Any]
) -> None:
    for together in (True, False):
        ids = prompt(25, seed=together)
        if together:
            await engine.pause("in_place")
        running = [
            engine.submit(asked(f"{name}{i}", ids, name, max_new_tokens=6 + i), stream=False)
            for i in range(3)
            for name in NAMES
        ]
        if together:
            await engine.resume()
        for generation in running:
            await asyncio.wait_for(generation.finished(), LIMIT)
        outs = [generation.request for generation in running]
        assert [out.cached_tokens for out in outs] == [0] * 4 + [25] * 8
        for out, name in zip(outs, NAMES * 3, strict=True):
            assert error_of(models, out, name) < 1e-4
        # So it is with what is kept when nothing runs.
        for name in NAMES:
            again = await answered(engine, asked("again", ids, name))
            assert again.cached_tokens == 25
            assert error_of(models, again, name) < 1e-4
    assert await engine.clear_cache()
    first = [await answered(engine, asked("r", prompt(25), name)) for name in NAMES]
    assert [out.cached_tokens for out in first] == [0] * 4


async def test_one_adapter_continues_what_another_sampled(
    engine: EmbeddedEngine, models: dict[str | None, Any]
) -> None:
    ids = prompt(12)
    for turn, name in enumerate((*NAMES, None, "low", "high")):
        out = await answered(engine, asked(f"turn{turn}", ids, name, max_new_tokens=10))
        assert error_of(models, out, name) < 1e-4
        ids = [*ids, *out.output_ids, *prompt(3, turn)]


async def test_adapters_stay_beside_weights_that_change(
    engine: EmbeddedEngine, other_model_dir: Path, folders: dict[str, str]
) -> None:
    before = engine.submit(asked("before", prompt(9), "high", max_new_tokens=400), stream=True)
    await before.progress()
    await engine.pause("in_place")
    assert await engine.update_weights(str(other_model_dir), "1") == 1
    after = engine.submit(asked("after", prompt(9), "high"), stream=False)
    await engine.resume()
    await asyncio.wait_for(after.finished(), LIMIT)
    before.close()
    other = by_peft(other_model_dir, Path(folders["high"]))
    out = after.request
    assert out.cached_tokens == 0, "the prompt's states are of the earlier weights"
    assert worst(out.logprobs, fresh_logprobs(other, out.input_ids, out.output_ids)) < 1e-4
    assert out.adapter == engine.adapters["high"]


@pytest.mark.parametrize("stream", [True, False])
async def test_an_interrupted_call_goes_on_under_its_adapter(
    engine: EmbeddedEngine, models: dict[str | None, Any], serve: Serve, stream: bool
) -> None:
    url = await serve(engine, incremental=True)
    client = SGLangEngine(url, decode=engine.loaded.tokenizer.decode)
    try:
        asks = [asked(f"r{name}", prompt(20), name, max_new_tokens=120) for name in NAMES]
        running = [asyncio.create_task(collect(client, ask, stream=stream)) for ask in asks]
        await until(lambda: engine.loop.steps > 30)
        await client.pause()
        await client.resume(1)
        every = await asyncio.wait_for(asyncio.gather(*running), LIMIT)
    finally:
        await client.close()
    assert client.resubmitted["update"] == len(NAMES)
    for ask, chunks in zip(asks, every, strict=True):
        ids, logprobs, by = sampled(chunks)
        assert len(ids) == 120
        assert by == {engine.adapters.get(str(ask.adapter))}
        fresh = fresh_logprobs(models[ask.adapter], list(ask.input_ids), ids)
        assert worst(logprobs, fresh) < 1e-4


async def test_an_engine_that_returns_with_other_files_does_not_continue_a_call(
    tiny_model_dir: Path, folders: dict[str, str]
) -> None:
    path = str(tiny_model_dir)
    before, after = (EngineOptions(adapters={"mine": folders[name]}) for name in ("low", "high"))
    async with EmbeddedEngine.load(path, before) as first, EmbeddedEngine.load(path, after) as then:
        runners = [await listen(EngineServer(each), "127.0.0.1", 0) for each in (first, then)]
        with CutLink(runners[0][1]) as link:
            url = f"http://127.0.0.1:{link.port}"
            client = SGLangEngine(url, decode=first.loaded.tokenizer.decode)
            ask = asked("r", prompt(20), "mine", max_new_tokens=400)
            call = asyncio.create_task(collect(client, ask))
            await until(lambda: first.loop.steps > 5)
            await client.pause()
            link.move(runners[1][1])
            client.release(1)
            with fails_with(EngineUnavailable, "mine", "other files"):
                await asyncio.wait_for(call, LIMIT)
            await client.close()
        for runner, _ in runners:
            await runner.cleanup()


async def test_requests_name_adapters_over_http(engine: EmbeddedEngine, serve: Serve) -> None:
    import aiohttp

    url = await serve(engine)
    body = {"input_ids": prompt(5), "sampling_params": {"max_new_tokens": 2}}
    async with aiohttp.ClientSession() as http:
        for name in KINDS:
            async with http.post(f"{url}/generate", json=body | {"lora_path": name}) as response:
                assert (await response.json())["meta_info"]["adapter"] == engine.adapters[name]
        async with http.post(f"{url}/generate", json=body) as response:
            assert "adapter" not in (await response.json())["meta_info"]
        async with http.post(f"{url}/generate", json=body | {"lora_path": "no"}) as response:
            error = (await response.json())["error"]
            assert (response.status, error["param"]) == (400, "lora_path")
            assert "'no'" in error["message"] and "low, high, stable" in error["message"]
        async with http.post(f"{url}/generate", json=body | {"lora_path": ["low"]}) as response:
            assert response.status == 400
        async with http.get(f"{url}/model_info") as response:
            assert (await response.json())["adapters"] == list(engine.adapters.values())


async def test_an_engine_without_adapters_is_as_it_was(own_engine: EmbeddedEngine) -> None:
    assert not any(module._forward_hooks for module in own_engine.loaded.model.modules())
    with fails_with(InvalidRequest, "'low'", "--adapter", param="lora_path"):
        own_engine.submit(asked("r", prompt(4), "low"))


def test_a_fingerprint_is_of_both_files(folders: dict[str, str], tmp_path: Path) -> None:
    from any_agent.engine.embedded.adapter_files import read_adapter

    source = Path(folders["low"])
    same = with_settings(source, tmp_path / "same")
    other = with_settings(source, tmp_path / "other", lora_alpha=4)
    changed = with_settings(source, tmp_path / "changed")
    weights = bytearray((changed / "adapter_model.safetensors").read_bytes())
    weights[-1] ^= 1
    (changed / "adapter_model.safetensors").write_bytes(weights)
    found = [read_adapter("a", folder).fingerprint for folder in (same, other, changed)]
    assert len(set(found)) == 3
    assert read_adapter("b", same).fingerprint == found[0]


def test_tiles_have_every_row_once_and_bounded_padding() -> None:
    """Against a loop over rows, in float64."""
    rng = random.Random(0)
    for trial in range(60):
        known, rows, tokens = rng.randint(1, 9), rng.randint(1, 40), rng.choice((1, 3))
        chosen = [rng.choice((None, *range(known))) for _ in range(rows)]
        if trial % 3 == 0:  # most rows have one adapter
            chosen = [0 if rng.random() < 0.8 else index for index in chosen]
        if trial % 10 == 0:
            chosen = list(range(rows))
            known = rows
        torch.manual_seed(trial)
        pairs = [
            (torch.randn(6, r).double(), torch.randn(r, 5).double())
            for r in (rng.randint(1, 4) for _ in range(known))
        ]
        layer = adapters._Layer(pairs)
        x, output = torch.randn(rows, tokens, 6).double(), torch.randn(rows, tokens, 5).double()
        expected = output.clone()
        for row, index in enumerate(chosen):
            if index is not None:
                expected[row] += x[row] @ pairs[index][0] @ pairs[index][1]
        tiles = adapters._tiles(chosen, known, torch.device("cpu"))
        if tiles is None:
            assert set(chosen) == {None}
            continue
        different = len({index for index in chosen if index is not None})
        assert tiles.count < 2 * different or different == tiles.count == 1
        places = rows if tiles.rows is None else len(tiles.rows)
        assert places < 2 * rows + 2 * different
        layer.add(x, output, tiles)
        torch.testing.assert_close(output, expected, atol=1e-12, rtol=1e-12)


Refusal = tuple[dict[str, Any], tuple[str, ...]]
SETTINGS: dict[str, Refusal] = {
    "dora": ({"use_dora": True}, ("use_dora=true", "merge_and_unload")),
    "bias": ({"bias": "lora_only"}, ("bias=",)),
    "pissa": ({"init_lora_weights": "pissa"}, ("init_lora_weights=",)),
    "patterns": ({"alpha_pattern": {"q_proj": 2}}, ("alpha_pattern=",)),
    "modules": ({"modules_to_save": ["lm_head"]}, ("modules_to_save=",)),
    "of the future": ({"use_something": True}, ("use_something=true",)),
    "another kind": ({"peft_type": "IA3"}, ("'IA3'", "LORA only")),
    "no rank": ({"r": 0}, ("r in",)),
    "no alpha": ({"lora_alpha": None}, ("lora_alpha",)),
    "another rank": ({"r": 3}, ("shape [2, 64]", "[3, 64]")),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_an_adapter_that_is_more_than_lora_is_refused(
    case: str, folders: dict[str, str], tiny_model_dir: Path, tmp_path: Path
) -> None:
    changes, words = SETTINGS[case]
    folder = with_settings(Path(folders["low"]), tmp_path / "odd", **changes)
    with fails_with(ConfigError, "engine.adapters.odd", *words):
        load(tiny_model_dir, folder)


def load(model: Path, folder: Path, name: str = "odd") -> EmbeddedEngine:
    return EmbeddedEngine.load(str(model), EngineOptions(adapters={name: str(folder)}))


def test_an_adapter_that_does_not_fit_the_model_is_refused(
    tiny_model_dir: Path, folders: dict[str, str], tmp_path: Path
) -> None:
    from any_agent.demo.models.tiny import save_tiny_model

    wide = save_tiny_model(tmp_path / "wide", hidden_size=96)
    deep = save_tiny_model(tmp_path / "deep", layers=3)
    for model, words in ((wide, ("shape", "layers.")), (deep, ("lacks", "layers.2."))):
        folder = write_adapter(model, tmp_path / f"of-{model.name}")
        with fails_with(ConfigError, "engine.adapters.odd", "trained on", *words):
            load(tiny_model_dir, folder)
    embeddings = write_adapter(
        tiny_model_dir, tmp_path / "embeddings", target_modules=["embed_tokens", "q_proj"]
    )
    with fails_with(ConfigError, "engine.adapters.odd", "embedding"):
        load(tiny_model_dir, embeddings)
    with fails_with(ConfigError, "engine.adapters.odd", "no folder"):
        load(tiny_model_dir, tmp_path / "nowhere")
    with fails_with(ConfigError, "engine.adapters.odd", "adapter_config.json"):
        load(tiny_model_dir, tiny_model_dir)
    cut = with_settings(Path(folders["low"]), tmp_path / "cut")
    weights = cut / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with fails_with(ConfigError, "engine.adapters.odd", "cannot be read"):
        load(tiny_model_dir, cut)
    with fails_with(ConfigError, "'a@b'", "name"):
        load(tiny_model_dir, Path(folders["low"]), "a@b")


async def test_a_layer_that_sees_no_rows_is_refused(
    tiny_model_dir: Path, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a mixture's router and experts, which get the tokens of all rows in one list."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

    def flat(self: Any, x: Any) -> Any:
        y = x.reshape(-1, x.shape[-1])
        y = self.down_proj(self.act_fn(self.gate_proj(y)) * self.up_proj(y))
        return y.view(x.shape)

    monkeypatch.setattr(Qwen3MLP, "forward", flat)
    with fails_with(ConfigError, "down_proj", "one input for each row"):
        load(tiny_model_dir, Path(folders["stable"]))

    def unseen(self: Any, x: Any) -> Any:
        y = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return nn.functional.linear(y, self.down_proj.weight)

    monkeypatch.setattr(Qwen3MLP, "forward", unseen)
    with fails_with(ConfigError, "down_proj", "does not call"):
        load(tiny_model_dir, Path(folders["stable"]))


async def test_half_precision_is_near_peft(
    tiny_model_dir: Path, folders: dict[str, str], models: dict[str | None, Any]
) -> None:
    options = EngineOptions(dtype="bfloat16", adapters=folders)
    async with EmbeddedEngine.load(str(tiny_model_dir), options) as engine:
        for name in NAMES:
            out = await answered(engine, asked("h", prompt(20), name, max_new_tokens=20))
            fresh = fresh_logprobs(models[name], out.input_ids, out.output_ids)
            assert worst(out.logprobs, fresh) < 0.2


def test_all_layers_of_the_decoder_can_be_adapted(folders: dict[str, str]) -> None:
    from safetensors import safe_open

    with safe_open(Path(folders["high"]) / "adapter_model.safetensors", framework="pt") as opened:
        assert {name.split(".")[-3] for name in opened.keys()} == set(ALL)  # noqa: SIM118


def test_an_adapter_that_is_written_anew_meanwhile_is_served_as_it_was_checked(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other version's files come after each single read; settings and digest stay together."""
    folder = write_adapter(tiny_model_dir, tmp_path / "a", seed=1, r=2, lora_alpha=2)
    path = folder / adapter_files.CONFIG
    old, real = path.read_bytes(), Path.read_bytes

    def then_rewritten(file: Path) -> bytes:
        data = real(file)
        if file == path:
            path.write_text(json.dumps(json.loads(old) | {"lora_alpha": 8}))
        return data

    before = adapter_files.read_adapter("a", folder)
    monkeypatch.setattr(Path, "read_bytes", then_rewritten)
    during = adapter_files.read_adapter("a", folder)
    monkeypatch.undo()
    after = adapter_files.read_adapter("a", folder)
    assert during == before
    assert (during.config.scaling, after.config.scaling) == (1.0, 4.0)
    assert after.fingerprint != before.fingerprint
