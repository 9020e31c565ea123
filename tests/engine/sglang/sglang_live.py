"""The contract, and our client, against a real SGLang: ``make test-engines``.

The fakes and the embedded engine keep the same contract in the ordinary tests.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from any_agent.engine import Capabilities, SGLangEngine, agenerate
from any_agent.errors import InvalidRequest
from any_agent.ports import reserve
from any_agent.types import GenerationChunk, ModelRequest
from tests.engine.embedded.sglang_contract import SamplingContract, body, call, check_answer
from tests.engine.embedded.updates_contract import UpdatesContract, load
from tests.engine.sglang.real_sglang import sglang
from tests.engine.sglang_lab import all_of, joined, request, until
from tests.fakes.true_logprobs import TrueModel

ROUNDING = 0.1
"""SGLang computes in bfloat16 here."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Of one shape, with different weights."""
    from any_agent.demo.model import save_tiny_model

    folder = tmp_path_factory.mktemp("models")
    return [save_tiny_model(folder / str(seed), seed=seed) for seed in range(2)]


@pytest.fixture(scope="module")
def server(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with reserve("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
    with sglang(models[0], port, tmp_path_factory.mktemp("sglang")) as url:
        yield url


@pytest.fixture
async def url(server: str, models: list[Path]) -> str:
    await load(server, models[0], 0)
    return server


@pytest.fixture
async def client(url: str) -> AsyncIterator[SGLangEngine]:
    client = SGLangEngine(url, decode=lambda ids: "")
    try:
        await client.info()
        yield client
    finally:
        await client.close()


class TestContract(SamplingContract):
    async def test_a_seed_repeats(self, url: str) -> None:
        """It does not on a CPU, whose attention has no deterministic inference."""
        status, answer = await call(url, "/generate", body(sampling_seed=2**40))
        assert status == 200
        check_answer(answer, 12)


class TestUpdates(UpdatesContract):
    rounding = ROUNDING


def check_logprobs(model: TrueModel, ask: ModelRequest, chunks: list[GenerationChunk]) -> None:
    ids, logprobs, _ = joined(chunks)
    table = model.logprobs(ask.input_ids, ids, {"temperature": ask.gconfig.temperature})
    expected = table.gather(-1, torch.tensor(ids)[:, None])[:, 0].tolist()
    assert logprobs == pytest.approx(expected, abs=ROUNDING)


async def test_what_it_can(client: SGLangEngine) -> None:
    assert await client.capabilities() == Capabilities(seed=False)
    assert await client.context_length() > 1000
    assert (await client.slots() or 0) > 1


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_logprobs_are_scaled_by_the_temperature(
    client: SGLangEngine, models: list[Path], stream: bool
) -> None:
    ask = replace(request(temperature=0.6, max_new_tokens=40, ignore_eos=True), top_logprobs=3)
    chunks = await all_of(client, ask, stream=stream)
    check_logprobs(TrueModel(models[0]), ask, chunks)
    assert chunks[-1].stop_reason == "length"
    assert (len(chunks) > 5) == stream
    tops = [top for chunk in chunks for top in chunk.top_logprobs or []]
    assert [len(top) for top in tops] == [3] * 40


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_an_update_is_survived_exactly(
    client: SGLangEngine, url: str, models: list[Path], stream: bool
) -> None:
    ask = request(f"r{stream}", max_new_tokens=400, ignore_eos=True)
    chunks: list[GenerationChunk] = []
    take = chunks.append

    async def generate() -> None:
        async for chunk in client.generate(ask, stream=stream):
            take(chunk)

    work = asyncio.create_task(generate())
    if stream:
        await until(lambda: len(chunks) > 20)
    else:
        await asyncio.sleep(0.5)
    await client.pause()
    await load(url, models[1], 1)
    await client.resume(1)
    await work
    ids, logprobs, versions = joined(chunks)
    cut = versions.index(1)
    assert versions == [0] * cut + [1] * (400 - cut)
    assert 0 < cut < 400
    for model, part in ((models[0], slice(0, cut)), (models[1], slice(cut, 400))):
        table = TrueModel(model).logprobs(ask.input_ids, ids, {})[part]
        expected = table.gather(-1, torch.tensor(ids[part])[:, None])[:, 0].tolist()
        assert logprobs[part] == pytest.approx(expected, abs=ROUNDING)


async def test_a_queued_call_survives_an_update(client: SGLangEngine) -> None:
    """Many more than fit at once: those that wait are aborted without a token."""
    asks = [request(f"q{i}", max_new_tokens=30, ignore_eos=True) for i in range(30)]
    works = [asyncio.create_task(all_of(client, ask, stream=True)) for ask in asks]
    await asyncio.sleep(0.05)
    await client.pause()
    await client.resume(0)
    for work in works:
        assert len(joined(await work)[0]) == 30


async def test_a_call_under_a_grammar_is_drained(client: SGLangEngine) -> None:
    grammar = json.dumps({"regex": "[ab]{60}"})
    ask = request("g", max_new_tokens=200, grammar=grammar)
    work = asyncio.create_task(all_of(client, ask, stream=True))
    await asyncio.sleep(0.2)
    await client.pause()
    assert work.done()
    await client.resume(0)
    assert (await work)[-1].stop_reason == "stop"


async def test_a_bad_grammar_is_refused_also_in_a_stream(client: SGLangEngine) -> None:
    with pytest.raises(InvalidRequest):
        await all_of(client, request("bad", grammar='{"regex": "("}'), stream=True)


async def test_a_client_that_leaves_frees_it(client: SGLangEngine, url: str) -> None:
    chunks = client.generate(request("gone", max_new_tokens=1500, ignore_eos=True), stream=True)
    await anext(chunks)
    await chunks.aclose()

    async def running() -> int:
        _, told = await call(url, "/v1/loads", method="GET")
        return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in told["loads"])

    for _ in range(200):
        if not await running():
            return
        await asyncio.sleep(0.1)
    raise AssertionError("it runs on")


async def test_in_place_versions_are_right_in_a_whole_answer(url: str, models: list[Path]) -> None:
    client = SGLangEngine(url, decode=lambda ids: "", update_mode="in_place")
    try:
        ask = request("p", max_new_tokens=300, ignore_eos=True)
        work: asyncio.Task[Any] = asyncio.create_task(agenerate(client, ask))
        await asyncio.sleep(0.5)
        await client.pause()
        update = {"model_path": str(models[0]), "weight_version": "1", "flush_cache": False}
        assert (await call(url, "/update_weights_from_disk", update))[0] == 200
        await client.resume(1)
        versions = (await work).output_versions
    finally:
        await client.close()
    assert set(versions) == {0, 1}
    assert versions == sorted(versions)
