"""Penalties, biases and grammars, against the model's own logits."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from any_agent.engine.base import agenerate
from any_agent.engine.embedded.engine import EmbeddedEngine, EngineOptions
from any_agent.engine.embedded.grammar import GrammarCompiler
from any_agent.engine.embedded.grammar_check import GrammarChecker
from any_agent.engine.embedded.model_loader import LoadedModel
from any_agent.engine.embedded.sampler import LogitsProcessor
from any_agent.errors import EngineMismatch, EngineUnavailable, InvalidRequest
from any_agent.types import GenerationHyperparameters, ModelResponse
from tests.support.engine.embedded import prompt, request
from tests.support.engine.sglang import joined
from tests.support.errors import fails_with

PENALTIES = {"frequency_penalty": 0.9, "presence_penalty": -0.6, "repetition_penalty": 1.4}


def logits_after(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].float()


def penalised(logits: torch.Tensor, output: list[int], **values: float) -> torch.Tensor:
    """Written out, a token at a time."""
    logits = logits.clone()
    for token in set(output):
        value = logits[token].item()
        value -= output.count(token) * values["frequency_penalty"] + values["presence_penalty"]
        factor = values["repetition_penalty"]
        logits[token] = value * factor if value < 0 else value / factor
    return logits


async def test_logprobs_are_of_the_bent_distribution(
    engine: EmbeddedEngine, loaded: LoadedModel
) -> None:
    ids, temperature = prompt(9), 0.8
    bias = ((40, 4.0), (41, 4.0), (42, -3.0))
    asked = request("r", ids, temperature=temperature, logit_bias=bias, seed=1, **PENALTIES)
    response = await agenerate(engine, asked)
    output = response.output_ids
    for k, token in enumerate(output):
        logits = penalised(logits_after(loaded.model, ids + output[:k]), output[:k], **PENALTIES)
        for biased, value in bias:
            logits[biased] += value
        expected = torch.log_softmax(logits / temperature, -1)[token].item()
        assert response.output_logprobs[k] == pytest.approx(expected, abs=1e-4)
    assert len(set(output)) < len(output), "no token came twice: the test shows nothing"


def test_penalties_do_not_count_tokens_of_the_prompt() -> None:
    logits = torch.randn(50)
    bent = logits.clone()
    LogitsProcessor(GenerationHyperparameters(**PENALTIES)).apply(bent)
    assert torch.equal(bent, logits)


async def test_parameters_of_one_request_do_not_change_its_neighbours(
    engine: EmbeddedEngine, loaded: LoadedModel
) -> None:
    """Rows of one batch, of which one alone has each parameter."""
    ids = prompt(7)
    plain = await agenerate(engine, request("plain", ids, temperature=0))
    odd: list[dict[str, Any]] = [
        {"logit_bias": ((50, 1000.0),)},
        {"grammar": json.dumps({"regex": "x{100}"})},
        {"min_p": 0.99, "temperature": 1.0},
    ]
    asked = [request(f"odd{i}", ids, **{"temperature": 0} | o) for i, o in enumerate(odd)]
    again = request("again", ids, temperature=0)
    *bent, same = await asyncio.gather(*(agenerate(engine, r) for r in [*asked, again]))
    assert same.output_ids == plain.output_ids
    assert same.output_logprobs == pytest.approx(plain.output_logprobs, abs=1e-4)
    assert bent[0].output_ids == [50] * 8
    assert set(text_of(loaded, bent[1])) == {"x"}


def text_of(loaded: LoadedModel, response: ModelResponse) -> str:
    return loaded.decoder(skip_special_tokens=True)(response.output_ids)


async def test_what_is_generated_follows_its_grammar(
    engine: EmbeddedEngine, loaded: LoadedModel
) -> None:
    async def answer(grammar: dict[str, Any], seed: int, **config: Any) -> ModelResponse:
        asked = request(f"r{seed}", prompt(5), grammar=json.dumps(grammar), seed=seed, **config)
        return await agenerate(engine, asked)

    async def text(grammar: dict[str, Any], seed: int) -> str:
        response = await answer(grammar, seed, max_new_tokens=600, ignore_eos=False)
        assert response.stop_reason == "stop"
        assert response.output_ids[-1] in loaded.eos_ids
        return text_of(loaded, response)

    for seed in range(3):
        assert re.fullmatch("[0-9]{2,4}(!|é)", await text({"regex": "[0-9]{2,4}(!|é)"}, seed))
        schema = {"enum": [{"a": "ü"}, [1, None], "x"]}
        assert json.loads(await text({"json_schema": schema}, seed)) in schema["enum"]
    # Its end is one also where ends of text are ignored.
    assert (await answer({"regex": "ab"}, 0, max_new_tokens=30)).stop_reason == "stop"
    # A random model ends no object in time, but never leaves the grammar.
    response = await answer({"json_object": True}, 5, max_new_tokens=40)
    assert text_of(loaded, response).lstrip().startswith("{")
    state = GrammarCompiler(loaded).compile(json.dumps({"json_object": True}))
    for token in response.output_ids:
        assert not state.forbidden()[token]
        state.push(token)


async def test_answers_mark_the_tokens_that_a_grammar_decided(
    engine: EmbeddedEngine, loaded: LoadedModel
) -> None:
    """Judged by a fresh pass over the whole context, of the model without any grammar."""
    text = json.dumps({"regex": "[^a]{40}"})
    told: list[bool] = []
    for seed in range(4):
        # The colder, the less of the probability is what the grammar forbids.
        ids, temperature = prompt(5 + seed), 0.05
        config = {"temperature": temperature, "max_new_tokens": 12, "seed": seed}
        response = [
            chunk async for chunk in engine.generate(request("r", ids, grammar=text, **config))
        ]
        bound = [b for chunk in response for b in chunk.bound or ()]
        output, logprobs, _ = joined(response)
        assert len(bound) == len(output) > 0
        state = GrammarCompiler(loaded).compile(text)
        for k, token in enumerate(output):
            plain = torch.softmax(logits_after(loaded.model, ids + output[:k]) / temperature, -1)
            forbidden = torch.from_numpy(state.forbidden()[: len(plain)])
            lost = plain[forbidden].sum().item()
            assert bound[k] == (lost > 1e-4) or lost == pytest.approx(1e-4, rel=0.05)
            if not bound[k]:
                assert logprobs[k] == pytest.approx(plain[token].log().item(), abs=3e-4)
            state.push(token)
        told += bound
    assert 0 < sum(told) < len(told), "all alike: the test shows nothing"
    plain_row = [chunk async for chunk in engine.generate(request("p", prompt(5)))]
    assert all(chunk.bound is None for chunk in plain_row)


@pytest.mark.parametrize(
    "grammar",
    [
        '{"regex": "("}',
        '{"regex": 3}',
        '{"json_schema": {"type": "nope"}}',
        '{"json_schema": {"$ref": "http://127.0.0.1:1/x"}}',
        '{"json_schema": 7}',
        "{}",
        "nonsense",
    ],
)
async def test_a_text_that_is_no_grammar_is_refused(engine: EmbeddedEngine, grammar: str) -> None:
    with fails_with(InvalidRequest, param="grammar"):
        await agenerate(engine, request("r", prompt(5), grammar=grammar))


def _exploding() -> str:
    """No string ends in all of these; llguidance looks for one for minutes, and takes gigabytes."""
    patterns = [f".*{letter}.{{10}}" for letter in "abcdefghijklmnopqrstuvwxyz"]
    schema = {"allOf": [{"type": "string", "pattern": pattern} for pattern in patterns]}
    return json.dumps({"json_schema": schema})


@pytest.mark.service
async def test_a_grammar_that_explodes_harms_nobody(engine: EmbeddedEngine) -> None:
    engine.checks = GrammarChecker(seconds=1)
    beats, others = 0, []
    bad = asyncio.create_task(
        engine.make_processor(request("bad", prompt(5), grammar=_exploding()))
    )
    while not bad.done():
        others.append(await agenerate(engine, request(f"r{beats}", prompt(5), max_new_tokens=2)))
        beats += 1
    with fails_with(InvalidRequest, "1 s", param="grammar"):
        await bad
    assert beats > 2
    assert all(other.stop_reason == "length" for other in others)
    # Its place is free again, and so is a crowd's.
    crowd = [
        engine.make_processor(request(f"c{k}", prompt(5), grammar=_exploding())) for k in range(40)
    ]
    tasks = [asyncio.create_task(each) for each in crowd]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert any(isinstance(each, EngineUnavailable) for each in ended)
    asked = request("r", prompt(5), grammar='{"regex": "ab"}', max_new_tokens=30)
    assert (await agenerate(engine, asked)).stop_reason == "stop"


@pytest.mark.parametrize("ends", [False, True])
async def test_a_grammar_that_loses_its_way_is_an_error_and_no_end(
    engine: EmbeddedEngine, loaded: LoadedModel, ends: bool
) -> None:
    """A text so far must not pass for the whole, nor an end where the text goes on."""
    asked = request("r", prompt(5), grammar='{"regex": "[ab]{50}"}', ignore_eos=False)
    processor = await engine.make_processor(asked)
    assert processor is not None and processor.grammar is not None
    if ends:
        all_but_the_end = np.arange(loaded.vocab_size) != min(loaded.eos_ids)
        processor.grammar.forbidden = lambda: all_but_the_end  # type: ignore[method-assign]
    else:
        processor.grammar.push(200)
        # It allows an end of text then.
        assert not processor.grammar.forbidden()[sorted(loaded.eos_ids)].any()
    generation = engine.submit(asked, processor=processor)
    with fails_with(EngineMismatch, "grammar"):
        await generation.finished()
    assert ends or generation.request.output_ids == []


async def test_a_grammar_that_is_too_complex_to_follow_is_the_callers(
    engine: EmbeddedEngine,
) -> None:
    grammar = json.dumps({"regex": "(a|aa|aaa){500,5000}b{5000}"})
    for stream in (False, True):
        asked = request(f"r{stream}", prompt(5), grammar=grammar, max_new_tokens=50)
        with fails_with(InvalidRequest, "complex", param="grammar"):
            [chunk async for chunk in engine.generate(asked, stream=stream)]


async def test_likeliest_tokens_are_those_of_the_bent_distribution(loaded: LoadedModel) -> None:
    ids = prompt(6)
    async with EmbeddedEngine(loaded, EngineOptions(max_running_requests=2)) as engine:
        asked = replace(request("r", ids, temperature=0.5, max_new_tokens=4), top_logprobs=5)
        chunks = [chunk async for chunk in engine.generate(asked)]
    output, _, _ = joined(chunks)
    tops = [top for chunk in chunks for top in chunk.top_logprobs or []]
    assert len(tops) == len(output) == 4
    for k, top in enumerate(tops):
        row = torch.log_softmax(logits_after(loaded.model, ids + output[:k]) / 0.5, -1)
        assert [token for token, _ in top] == row.topk(5).indices.tolist()
        assert [p for _, p in top] == pytest.approx(row.topk(5).values.tolist(), abs=1e-4)
