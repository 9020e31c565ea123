"""Log-probabilities are those of a fresh forward pass, whatever the batch did meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from any_agent.engine.embedded.engine import EmbeddedEngine, EngineOptions
from any_agent.engine.embedded.model_loader import LoadedModel, load_model
from any_agent.engine.embedded.sampler import BatchSampler
from any_agent.errors import StartupError
from any_agent.types import GenerationHyperparameters, ModelRequest
from tests.support.engine.embedded import error_of, fresh_logprobs, prompt, request, worst
from tests.support.errors import fails_with


async def collect(
    engine: EmbeddedEngine, ask: ModelRequest, started: asyncio.Event | None = None
) -> tuple[list[int], list[float]]:
    """Its ids and log-probabilities; ``started`` is set with the second token."""
    ids: list[int] = []
    logprobs: list[float] = []
    async for chunk in engine.generate(ask):
        ids += chunk.output_ids
        logprobs += chunk.logprobs
        if started is not None and len(ids) >= 2:
            started.set()
    return ids, logprobs


async def ragged_worst(engine: EmbeddedEngine, n: int) -> float:
    """Requests of different lengths that join one by one, each when the last has two tokens."""
    results: list[tuple[Any, list[int], list[float]]] = []

    async def one(i: int, started: asyncio.Event) -> None:
        config = {"temperature": (0.4, 0.7, 1, 2)[i % 4], "max_new_tokens": 3 + 5 * (i % 5)}
        config |= [{}, {"top_p": 0.8}, {"top_k": 5}, {"top_p": 0.9, "top_k": 20}][i % 4]
        ask = request(f"r{i}", prompt(1 + 13 * (i % 6), seed=i), **config)
        results.append((ask, *await collect(engine, ask, started)))

    async with asyncio.TaskGroup() as group:
        for i in range(n):
            started = asyncio.Event()
            group.create_task(one(i, started))
            if i % 3:  # some join alone, some together
                await started.wait()
    model = engine.loaded.model
    assert len(results) == n
    assert all(len(ids) == ask.gconfig.max_new_tokens for ask, ids, _ in results)
    return max(
        worst(lps, fresh_logprobs(model, ask.input_ids, ids, ask.gconfig.temperature))
        for ask, ids, lps in results
    )


async def test_requests_that_join_at_any_time_equal_a_fresh_pass(engine: EmbeddedEngine) -> None:
    assert await ragged_worst(engine, 14) < 1e-5


SHAPE: dict[str, Any] = {
    "vocab_size": 380,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


@pytest.mark.parametrize("kind", ["llama", "qwen2_tied"])
async def test_other_architectures_give_exact_logprobs(
    kind: str, loaded: LoadedModel, tmp_path: Any
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    model: Any
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=True))
    model.save_pretrained(tmp_path)
    loaded.tokenizer.save_pretrained(tmp_path)
    async with EmbeddedEngine.load(str(tmp_path)) as engine:
        assert await ragged_worst(engine, 6) < 1e-5
        # A tied weight is stored once, and is still a complete checkpoint.
        await engine.update_weights(str(tmp_path), "1")
        assert engine.version == 1


def test_models_that_cannot_be_served_exactly_are_refused(
    loaded: LoadedModel, tiny_model_dir: Any, tmp_path: Any
) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    with fails_with(StartupError, tmp_path):
        load_model(str(tmp_path))
    with fails_with(StartupError, "context length"):
        load_model(str(tiny_model_dir), context_length=1 << 20)
    config = MistralConfig(**SHAPE, sliding_window=16)
    MistralForCausalLM(config).save_pretrained(tmp_path)
    loaded.tokenizer.save_pretrained(tmp_path)
    with fails_with(StartupError, "DynamicSlidingWindowLayer"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("temperature", [0, 1e-6])
async def test_greedy_answers_are_the_likeliest(engine: EmbeddedEngine, temperature: float) -> None:
    ask = request("g", prompt(9), temperature=temperature, top_p=0.5, max_new_tokens=12)
    ids, logprobs = await collect(engine, ask)
    with torch.inference_mode():
        logits = engine.loaded.model(input_ids=torch.tensor([[*ask.input_ids, *ids]])).logits
    assert logits[0, len(ask.input_ids) - 1 : -1].argmax(-1).tolist() == ids
    assert worst(logprobs, fresh_logprobs(engine.loaded.model, ask.input_ids, ids)) < 1e-5


def test_sampling_follows_each_rows_distribution() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 12) * 2
    configs = [
        GenerationHyperparameters(temperature=0.7),
        GenerationHyperparameters(temperature=1.3, top_k=3),
        GenerationHyperparameters(temperature=1.0, top_p=0.6),
        GenerationHyperparameters(temperature=0.0),
    ]
    n = 4000
    sampler = BatchSampler([c for c in configs for _ in range(n)], torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    ids, logprobs, _ = sampler.sample(logits.repeat_interleave(n, 0), generator)
    for row, config in enumerate(configs):
        temperature = config.temperature or 1.0
        reference = torch.log_softmax(logits[row] / temperature, -1)
        mine = torch.tensor(ids[row * n : (row + 1) * n])
        assert worst(logprobs[row * n : (row + 1) * n], reference[mine]) < 1e-6
        probs = reference.exp()
        order = probs.argsort(descending=True)
        before = probs[order].cumsum(0) - probs[order]
        allowed = order[before <= config.top_p] if config.top_p < 1 else order
        allowed = allowed[: config.top_k] if config.top_k > 0 else allowed
        allowed = allowed[:1] if config.temperature == 0 else allowed
        expected = torch.zeros(12).index_put_((allowed,), probs[allowed])
        expected /= expected.sum()
        seen = torch.bincount(mine, minlength=12) / n
        assert (seen - expected).abs().max() < 0.035
        assert set(mine.tolist()) <= set(allowed.tolist())


async def test_key_value_budget_bounds_the_batch(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    held: list[int] = []
    cache = loaded.new_cache(60)
    monkeypatch.setattr(LoadedModel, "new_cache", lambda *_: cache)
    options = EngineOptions(max_running_requests=8, max_total_tokens=60)
    async with EmbeddedEngine(loaded, options) as engine:

        async def one(i: int) -> None:
            ask = request(f"r{i}", prompt(10, i), max_new_tokens=10)
            seen.extend([engine.loop.load[0] async for _ in engine.generate(ask)])

        await asyncio.gather(*(one(i) for i in range(7)))
        assert max(seen) == 3
        # One long row after three short ones: the buffers change their shape, not their size.
        for length in (40, 5):
            ask = request("long", prompt(length), max_new_tokens=20)
            ids, logprobs = await collect(engine, ask)
            assert error_of(loaded.model, ask.input_ids, ids, logprobs) < 1e-5
            keys = cache.kv.layers[0].keys
            held.append(keys.shape[0] * keys.shape[2])
    assert max(held) <= 60


async def test_half_precision_is_near_a_fresh_forward_pass(tiny_model_dir: Any) -> None:
    options = EngineOptions(dtype="bfloat16")
    async with EmbeddedEngine.load(str(tiny_model_dir), options) as engine:
        ids, logprobs = await collect(engine, request("h", prompt(20), max_new_tokens=20))
        assert error_of(engine.loaded.model, prompt(20), ids, logprobs) < 0.15
