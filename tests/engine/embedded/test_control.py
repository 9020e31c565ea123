"""Cancelling, pausing, dying: nobody hangs, and nobody gets what is not theirs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from any_agent.engine.embedded.engine import EmbeddedEngine, EngineOptions
from any_agent.engine.embedded.model_loader import LoadedModel
from any_agent.errors import EngineUnavailable, InvalidRequest
from tests.support.engine.embedded import (
    LIMIT,
    Gate,
    error_of,
    prompt,
    request,
    wrapped,
)
from tests.support.errors import fails_with


async def test_cancelling_a_request_takes_one_step(loaded: LoadedModel) -> None:
    gate = Gate()
    async with wrapped(loaded, gate.around) as engine:
        generation = engine.submit(request("a", prompt(5), max_new_tokens=100))
        gate.let(3)  # the prefill and two steps
        for _ in range(4):  # the fourth pass is under way
            await asyncio.to_thread(gate.wait_for_step)
        done = engine.abort("a")
        gate.let(1)
        finish = await asyncio.wait_for(generation.finished(), LIMIT)
        await asyncio.wrap_future(done)
        assert finish.type == "abort"
        assert len(generation.request.output_ids) == 4
        assert engine.loaded.model.calls == 4
        assert engine.loop.load == (0, 0)


async def test_aborting_one_request_leaves_the_others_exact(engine: EmbeddedEngine) -> None:
    """And so does a pause in place."""
    asks = [
        request(f"r{i}", prompt(5 + 3 * i, i), max_new_tokens=200 if i == 1 else 40)
        for i in range(4)
    ]
    generations = [engine.submit(ask) for ask in asks]
    await generations[3].progress()
    await engine.pause("in_place")
    count = len(generations[3].request.output_ids)
    assert not await engine.clear_cache()
    assert len(generations[3].request.output_ids) == count
    await engine.resume()
    engine.abort("r1")
    finishes = [await asyncio.wait_for(g.finished(), LIMIT) for g in generations]
    assert [f.type for f in finishes] == ["length", "abort", "length", "length"]
    for ask, generation in zip(asks, generations, strict=True):
        out = generation.request
        if out.output_ids:
            assert error_of(engine.loaded.model, ask.input_ids, out.output_ids, out.logprobs) < 1e-5
    assert await engine.clear_cache()


async def test_a_pause_with_abort_gives_partial_answers_and_queues_new_ones(
    engine: EmbeddedEngine,
) -> None:
    running = [engine.submit(request(f"r{i}", prompt(5), max_new_tokens=2000)) for i in range(4)]
    queued = engine.submit(request("queued", prompt(5)))
    for generation in running:
        await generation.progress()
    await engine.pause("abort")
    for generation in running:
        finish = await asyncio.wait_for(generation.finished(), LIMIT)
        assert finish.type == "abort"
        assert 0 < len(generation.request.output_ids) < 2000
    assert (await queued.finished()).type == "abort"
    assert not queued.request.output_ids

    steps = engine.loop.steps
    late = engine.submit(request("late", prompt(5)))
    cancelled = engine.submit(request("cancelled", prompt(5)))
    engine.abort("cancelled")
    assert (await cancelled.finished()).type == "abort"
    assert engine.loop.steps == steps  # nothing ran meanwhile
    await engine.resume()
    assert (await asyncio.wait_for(late.finished(), LIMIT)).type == "length"


async def test_a_request_beyond_the_bound_of_the_queue_is_refused(loaded: LoadedModel) -> None:
    options = EngineOptions(max_running_requests=1, max_queued_requests=2)
    async with EmbeddedEngine(loaded, options) as engine:
        await engine.pause("in_place")
        waiting = [engine.submit(request(f"r{i}", prompt(3))) for i in range(3)]
        with fails_with(EngineUnavailable, "queue"):
            engine.submit(request("r3", prompt(3)))
        with fails_with(InvalidRequest, "in use"):
            engine.submit(request("r0", prompt(3)))
        await engine.resume()
        for generation in waiting:
            await asyncio.wait_for(generation.finished(), LIMIT)
        engine.submit(request("r3", prompt(3)))


async def test_a_dead_loop_fails_running_and_posted_work(loaded: LoadedModel) -> None:
    gate = Gate()

    def die(forward: Callable[[], Any], call: int) -> Any:
        gate.around(lambda: None, call)
        raise RuntimeError("out of luck")

    async with wrapped(loaded, die) as engine:
        running = engine.submit(request("a", prompt(3)))
        await asyncio.to_thread(gate.wait_for_step)
        cancelled = engine.loop.pause(engine.variant, "abort")
        assert cancelled.cancel()  # its caller has left
        posted = [
            engine.loop.resume(engine.variant),
            engine.loop.update(engine.variant, lambda: None, "1"),
        ]
        late = engine.submit(request("b", prompt(3)))
        gate.let(1)
        for waiter in (running.finished(), late.finished(), *map(asyncio.wrap_future, posted)):
            with fails_with(EngineUnavailable, "out of luck"):
                await asyncio.wait_for(waiter, LIMIT)


async def test_an_update_whose_caller_left_is_dropped(loaded: LoadedModel) -> None:
    applied: list[int] = []
    async with EmbeddedEngine(loaded) as engine:
        generation = engine.submit(request("a", prompt(3), max_new_tokens=300))
        await generation.progress()
        left = engine.loop.update(engine.variant, lambda: applied.append(1), "1")
        assert left.cancel()
        kept = engine.loop.update(engine.variant, lambda: applied.append(2), "2")
        assert await asyncio.wait_for(asyncio.wrap_future(kept), LIMIT) == 0
        assert (await generation.finished()).type == "length"
        assert (applied, engine.version) == ([2], 2)


async def test_stopping_the_engine_ends_running_requests_with_an_error(loaded: LoadedModel) -> None:
    async with EmbeddedEngine(loaded) as engine:
        generation = engine.submit(request("a", prompt(3), max_new_tokens=2000))
        await generation.progress()
    with fails_with(EngineUnavailable, "stopped"):
        await asyncio.wait_for(generation.finished(), LIMIT)


async def test_logits_that_are_not_finite_end_only_their_request(loaded: LoadedModel) -> None:
    rows = {"spoilt": 0}

    def spoil(forward: Callable[[], Any], call: int) -> Any:
        output = forward()
        if call > 4 and output.logits.shape[0] == 3 and not rows["spoilt"]:
            output.logits[1] = float("nan")
            rows["spoilt"] += 1
        return output

    async with wrapped(loaded, spoil) as engine:
        asks = [request(f"r{i}", prompt(4 + i, i), max_new_tokens=30) for i in range(3)]
        await engine.pause("in_place")
        generations = [engine.submit(ask, stream=False) for ask in asks]
        await engine.resume()
        results = await asyncio.gather(
            *(asyncio.wait_for(g.finished(), LIMIT) for g in generations), return_exceptions=True
        )
        failed = [r for r in results if isinstance(r, EngineUnavailable)]
        assert len(failed) == 1
        assert "not finite" in failed[0].message
        for ask, generation, result in zip(asks, generations, results, strict=True):
            if not isinstance(result, BaseException):
                out = generation.request.output_ids
                assert (
                    error_of(loaded.model, ask.input_ids, out, generation.request.logprobs) < 1e-5
                )


BAD: dict[str, list[Any]] = {
    "input_ids": [[], [380], [-1], [True], [1.0], [4] * 2048],
    "temperature": [float("nan"), -1.0, float("inf")],
    "top_p": [0.0, 1.1],
    "top_k": [0, -2],
    "max_new_tokens": [-1],
    "stop": [("",), ("x",) * 65],
}


@pytest.mark.parametrize("name", BAD)
async def test_wrong_parameters_are_refused_before_the_model_runs(
    engine: EmbeddedEngine, name: str
) -> None:
    for value in BAD[name]:
        change = {name: value} if name != "input_ids" else {}
        with pytest.raises(InvalidRequest):
            engine.submit(request("a", value if name == "input_ids" else [4, 5], **change))
    assert engine.loop.steps == 0


async def test_the_output_is_clamped_to_the_context(engine: EmbeddedEngine) -> None:
    nothing = engine.submit(request("nothing", [4], max_new_tokens=0))
    assert (await nothing.finished()).type == "length"
    assert engine.loop.steps == 0
    generation = engine.submit(request("a", [4] * 2040, max_new_tokens=10**9), stream=False)
    finish = await asyncio.wait_for(generation.finished(), LIMIT)
    assert (finish.type, len(generation.request.output_ids)) == ("length", 8)
