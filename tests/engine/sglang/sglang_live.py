"""The contract, and our client, against a real SGLang: ``make verify SUITES=engines``.

The fakes and the embedded engine keep the same contract in the ordinary tests.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from any_agent import RemoteSGLangEngine
from any_agent.engine import Capabilities, SGLangEngine, agenerate
from any_agent.errors import InvalidRequest
from tests.engine.sglang.real_sglang import OPTIONS, VARIABLES, python
from tests.support.engine.sglang import all_of, joined, request
from tests.support.engine.sglang_contract import IDS, SamplingContract, body, call, check_answer
from tests.support.engine.updates_contract import UpdatesContract, load
from tests.support.proxy import until
from tests.support.trials import save_trial
from tests.support.true_logprobs import TrueModel

ROUNDING = 0.1
"""SGLang computes in bfloat16 here."""


@pytest.fixture
async def url(servers: list[str], models: list[Path]) -> str:
    await load(servers[0], models[0], 0)
    return servers[0]


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

    def penalised_counts(self, token: int, output: list[int]) -> range:
        """Its overlapped scheduler may miss the newest token, and count the prompt's last one.

        The latter where the first token of the output is not known yet at the second step.
        """
        return range(output[:-1].count(token), output.count(token) + (token == IDS[-1]) + 1)


class TestUpdates(UpdatesContract):
    rounding = ROUNDING


async def test_sglangs_capabilities_and_limits_are_read(client: SGLangEngine) -> None:
    assert await client.capabilities() == Capabilities(seed=False)
    assert await client.context_length() > 1000
    assert (await client.slots() or 0) > 1


async def has(url: str) -> int:
    """Requests that it runs or keeps for later."""
    _, told = await call(url, "/v1/loads", method="GET")
    return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in told["loads"])


async def until_it_has(url: str, work: asyncio.Task[Any]) -> None:
    """Until a call is at the engine, or has ended."""

    async def it_has() -> bool:
        return work.done() or await has(url) > 0

    await until(it_has)


TRIES = 10
"""Of what must come amid a call, whose pace nobody knows."""


async def test_an_update_is_survived_exactly(
    client: SGLangEngine, url: str, models: list[Path], stream: bool
) -> None:
    for attempt in range(TRIES):
        await load(url, models[0], 0)
        ask = request(f"r{stream}{attempt}", max_new_tokens=400, ignore_eos=True)
        work = asyncio.create_task(all_of(client, ask, stream=stream))
        await until_it_has(url, work)
        await client.pause()
        await load(url, models[1], 1)
        await client.resume(1)
        ids, logprobs, versions = joined(await work)
        cut = versions.count(0)
        assert versions == [0] * cut + [1] * (400 - cut)
        for model, part in ((models[0], slice(0, cut)), (models[1], slice(cut, 400))):
            table = TrueModel(model).logprobs(ask.input_ids, ids, {})[part]
            expected = table.gather(-1, torch.tensor(ids[part])[:, None])[:, 0].tolist()
            assert logprobs[part] == pytest.approx(expected, abs=ROUNDING)
        if 0 < cut < 400:
            return
    raise AssertionError("no update came amid a call")


async def test_a_queued_call_survives_an_update(client: SGLangEngine, url: str) -> None:
    """Many more than fit at once: those that wait are aborted without a token."""
    asks = [request(f"q{i}", max_new_tokens=30, ignore_eos=True) for i in range(30)]
    works = [asyncio.create_task(all_of(client, ask, stream=True)) for ask in asks]
    await until_it_has(url, works[-1])
    await client.pause()
    await client.resume(0)
    for work in works:
        assert len(joined(await work)[0]) == 30


async def test_a_call_under_a_grammar_is_drained(client: SGLangEngine, url: str) -> None:
    grammar = json.dumps({"regex": "[ab]{60}"})
    for attempt in range(TRIES):
        ask = request(f"g{attempt}", max_new_tokens=200, grammar=grammar)
        work = asyncio.create_task(all_of(client, ask, stream=True))
        await until_it_has(url, work)
        early = work.done()
        await client.pause()
        assert work.done()
        await client.resume(0)
        assert (await work)[-1].stop_reason == "stop"
        if not early:
            return
    raise AssertionError("no pause came amid a call")


async def test_a_bad_grammar_is_refused_also_in_a_stream(client: SGLangEngine) -> None:
    with pytest.raises(InvalidRequest):
        await all_of(client, request("bad", grammar='{"regex": "("}'), stream=True)


async def test_a_client_that_leaves_frees_it(client: SGLangEngine, url: str) -> None:
    chunks = client.generate(request("gone", max_new_tokens=1500, ignore_eos=True), stream=True)
    await anext(chunks)
    await chunks.aclose()

    async def free() -> bool:
        return not await has(url)

    await until(free)


async def test_in_place_versions_are_right_in_a_whole_answer(url: str, models: list[Path]) -> None:
    client = SGLangEngine(url, decode=lambda ids: "", update_mode="in_place")
    try:
        for attempt in range(TRIES):
            await load(url, models[0], 0)
            client.release(0)
            ask = request(f"p{attempt}", max_new_tokens=300, ignore_eos=True)
            work: asyncio.Task[Any] = asyncio.create_task(agenerate(client, ask))
            await until_it_has(url, work)
            await client.pause()
            await load(url, models[0], 1, flush=False)
            await client.resume(1)
            versions = (await work).output_versions
            assert versions == sorted(versions)
            if set(versions) == {0, 1}:
                return
    finally:
        await client.close()
    raise AssertionError("no update came amid a call")


async def test_an_engine_object_starts_one_of_its_own(models: list[Path], tmp_path: Path) -> None:
    """Of a trial that SGLang served, by the interpreter that it is told; it ends with it."""
    settings = ["engine.kind=sglang", "engine.device=cpu", "model.dtype=bfloat16"]
    settings += [f"engine.arguments={' '.join(OPTIONS)}"]
    settings += [f"engine.environment={json.dumps(VARIABLES)}"]
    save_trial(tmp_path, {(10, 11): models[1]}, *settings, base=models[0])
    engine = RemoteSGLangEngine()
    # It takes a minute, and the event loop of these tests goes on meanwhile.
    await asyncio.to_thread(
        engine.initialize, "exp", "one", user="me", root=tmp_path, python=str(python())
    )
    async with engine:
        response = await engine.agenerate(prompt="hi", max_tokens=20, ignore_eos=True)
        assert response.output_versions == [11] * 20
        table = TrueModel(models[1]).logprobs(response.input_tokens, response.token_ids, {})
        ids = torch.tensor(response.token_ids)[:, None]
        expected = table.gather(-1, ids)[:, 0].tolist()
        assert response.logprobs == pytest.approx(expected, abs=ROUNDING)
        chunks = [chunk async for chunk in engine.agenerate_stream(prompt="hi", max_tokens=20)]
        assert chunks[-1].stop_reason is not None
        before = {child.pid for child in psutil.Process().children(recursive=True)}
    gone = before - {child.pid for child in psutil.Process().children(recursive=True)}
    assert gone, "its processes are ended"
