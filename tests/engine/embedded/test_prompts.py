"""A prompt that is known is not computed again, and never outlives its weights."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from any_agent.engine.embedded.engine import EmbeddedEngine, EngineOptions, Generation
from any_agent.engine.embedded.model_loader import LoadedModel, load_model
from any_agent.engine.embedded.request import EngineRequest
from any_agent.types import ModelRequest
from tests.support.engine.embedded import LIMIT, fresh_logprobs, prompt, request, worst


async def finished(*generations: Generation) -> None:
    await asyncio.gather(*(asyncio.wait_for(each.finished(), LIMIT) for each in generations))


async def answered(engine: EmbeddedEngine, asked: ModelRequest) -> EngineRequest:
    generation = engine.submit(asked)
    await finished(generation)
    return generation.request


def error_of(loaded: LoadedModel, out: EngineRequest) -> float:
    reference = fresh_logprobs(loaded.model, out.input_ids, out.output_ids)
    return worst(out.logprobs, reference)


async def test_the_shared_prompt_of_a_group_is_computed_once(loaded: LoadedModel) -> None:
    """Two groups and a single request join at once, ends move rows, and more members join later."""
    async with EmbeddedEngine(loaded, EngineOptions(max_running_requests=12)) as engine:
        prompts = [prompt(20, 1)] * 4 + [prompt(33, 2)] * 4 + [prompt(9, 3)]
        await engine.pause("in_place")
        running = [
            engine.submit(request(f"r{i}", ids, max_new_tokens=3 + 9 * (i % 4)))
            for i, ids in enumerate(prompts)
        ]
        await engine.resume()
        await running[0].progress()
        late = [engine.submit(request(f"late{i}", prompt(33, 2))) for i in range(3)]
        await finished(*running, *late)
        outputs = [generation.request for generation in running]
        assert sum(out.cached_tokens == len(out.input_ids) for out in outputs) == 3 + 3
        assert sum(out.cached_tokens == 0 for out in outputs) == 3
        assert all(g.request.cached_tokens == 33 for g in late)
        assert max(error_of(loaded, g.request) for g in (*running, *late)) < 1e-5
        # They are kept when their last request has ended, also when all rows are free.
        for ids in (prompt(20, 1), prompt(33, 2), prompt(9, 3)) * 2:
            again = await answered(engine, request("again", ids))
            assert again.cached_tokens == len(ids)
            assert error_of(loaded, again) < 1e-5
        assert await engine.clear_cache()
        assert (await answered(engine, request("cleared", prompt(20, 1)))).cached_tokens == 0


async def test_the_end_of_a_generation_can_be_read_twice(engine: EmbeddedEngine) -> None:
    generation = engine.submit(request("r", prompt(7), max_new_tokens=1))
    end = await asyncio.wait_for(generation.finished(), LIMIT)
    assert await asyncio.wait_for(generation.finished(), LIMIT) is end
    assert await asyncio.wait_for(generation.progress(), LIMIT) == (1, end)


async def test_new_weights_compute_a_running_prompt_again(
    own_engine: EmbeddedEngine, other_model_dir: Path
) -> None:
    old = own_engine.submit(request("old", prompt(12), max_new_tokens=200))
    await old.progress()
    await own_engine.pause("in_place")
    assert await own_engine.update_weights(str(other_model_dir), "1") == 1
    new = own_engine.submit(request("new", prompt(12)))
    more = own_engine.submit(request("more", prompt(12)))
    await own_engine.resume()
    await finished(new, more, old)
    other = load_model(str(other_model_dir))
    assert [new.request.cached_tokens, more.request.cached_tokens] == [0, 12]
    assert error_of(other, new.request) < 1e-5
    assert error_of(other, more.request) < 1e-5
    assert error_of(other, old.request) > 1e-3


async def test_the_oldest_cached_prompts_make_room_for_new_ones(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("any_agent.engine.embedded.prompts.MAX_KEPT_TOKENS", 40)
    async with EmbeddedEngine(loaded) as engine:
        cached = []
        for seed in (1, 2, 1, 3, 2, 3, 1):
            one = await answered(engine, request("r", prompt(20, seed), max_new_tokens=2))
            cached.append(one.cached_tokens)
            assert error_of(loaded, one) < 1e-5
        for _ in range(2):
            await answered(engine, request("long", prompt(41), max_new_tokens=1))
        assert cached == [0, 0, 20, 0, 0, 20, 0]
