"""The client of SGLang's contract: streams, weight updates, aborts, broken engines."""

from __future__ import annotations

import asyncio

import pytest

from any_agent.engine import SGLangEngine
from any_agent.engine.sglang.requests import slots_of
from any_agent.errors import EngineMismatch, EngineUnavailable, InvalidRequest
from tests.support.engine.sglang import (
    FORMULA,
    PROMPT,
    all_of,
    ask,
    at_token,
    client_of,
    held,
    joined,
    request,
    update,
)
from tests.support.errors import fails_with
from tests.support.scripted_engine import ScriptedEngine
from tests.support.scripted_run import FaultKind
from tests.support.waiting import until


async def test_every_kind_of_answer_reads_the_same(stream: bool, incremental: bool) -> None:
    scripted = ScriptedEngine(incremental=incremental)
    async with scripted.serve(), client_of(scripted) as client:
        chunks = await all_of(client, request(temperature=0.5), stream=stream)
    ids, logprobs, versions = joined(chunks)
    assert ids == [20 + (7 * (3 + k)) % 60 for k in range(10)]
    assert logprobs == [-0.5 - (i % 7) / 8 for i in ids]
    assert versions == [0] * 10
    assert [c.stop_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].stop_reason == "length"
    assert len(chunks) == (10 if stream else 1)
    (body,) = scripted.requests
    assert body["input_ids"] == PROMPT
    assert body["return_logprob"] is True
    assert body["sampling_params"] == {
        "max_new_tokens": 10,
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": -1,
        "ignore_eos": False,
    }
    assert scripted.aborted == []


async def test_a_long_answer_reads_as_a_short_one(
    client: SGLangEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read in a thread."""
    at_once = await all_of(client, request(), stream=False)
    monkeypatch.setattr("any_agent.engine.sglang.client.LONG_REPLY", 100)
    assert await all_of(client, request(), stream=False) == at_once


async def test_a_stop_names_what_matched(
    client: SGLangEngine, scripted: ScriptedEngine, stream: bool
) -> None:
    scripted.say([30, 31, 32, 33])
    chunks = await all_of(client, request(stop_token_ids=(32,)), stream=stream)
    assert (chunks[-1].stop_reason, chunks[-1].matched_stop) == ("stop", 32)
    assert joined(chunks)[0] == [30, 31, 32]
    scripted.say([30, 31, 32, 33])
    text = scripted.decode([31, 32])
    chunks = await all_of(client, request(stop=(text,)), stream=stream)
    assert (chunks[-1].stop_reason, chunks[-1].matched_stop) == ("stop", text)


@pytest.mark.parametrize("at", [0, 4])
async def test_an_update_is_survived_with_what_was_sampled(
    stream: bool, incremental: bool, at: int
) -> None:
    """And a second one."""
    scripted = ScriptedEngine(incremental=incremental)
    async with scripted.serve(), client_of(scripted) as client:
        work = await held(client, scripted, at, stream=stream)
        scripted.hold(3)
        await update(client, scripted, 3)
        await at_token(scripted, 3, work)
        await update(client, scripted, 4)
        chunks = await work
    ids, logprobs, versions = joined(chunks)
    assert ids == FORMULA[:10]
    assert len(logprobs) == 10
    assert versions == [0] * at + [3] * 3 + [4] * (7 - at)
    assert [c.stop_reason for c in chunks if c.stop_reason] == ["length"]
    first, second, third = scripted.requests
    assert second["input_ids"] == PROMPT + ids[:at]
    assert third["input_ids"] == PROMPT + ids[: at + 3]
    assert second["sampling_params"]["max_new_tokens"] == 10 - at
    assert len({first["rid"], second["rid"], third["rid"]}) == 3
    assert scripted.pauses == ["abort"] * 2
    assert client.version == 4
    assert client.resubmitted == {"update": 2}


async def test_a_budget_spent_at_the_seam_ends_the_call(
    client: SGLangEngine, scripted: ScriptedEngine, stream: bool
) -> None:
    """The engine reports the abort before it noticed that the last token had come."""
    scripted.hold(3)
    work = ask(client, request(max_new_tokens=4), stream=stream)
    await until(lambda: any(running.held for running in scripted.running.values()))
    (running,) = scripted.running.values()
    running.ids.append(77)
    running.logprobs.append(-1.0)
    running.versions.append("0")
    await client.pause()
    await client.resume(1)
    chunks = await work
    ids, _, _ = joined(chunks)
    assert (len(ids), ids[-1], chunks[-1].stop_reason) == (4, 77, "length")
    # No request for zero tokens follows.
    assert len(scripted.requests) == 1


async def test_a_stop_string_across_an_update_is_found(
    client: SGLangEngine, scripted: ScriptedEngine, stream: bool
) -> None:
    """The resumed request sees its own output only, so it misses what began before."""
    tokens = [30, 31, 32, 33, 34, 35]
    stop = scripted.decode([31, 32, 33])
    scripted.say(tokens)
    scripted.say(tokens[2:])
    work = await held(client, scripted, 2, request(stop=(stop,)), stream=stream)
    await update(client, scripted, 1)
    chunks = await work
    ids, _, versions = joined(chunks)
    assert ids == tokens[:4]
    assert versions == [0, 0, 1, 1]
    assert (chunks[-1].stop_reason, chunks[-1].matched_stop) == ("stop", stop)


async def test_in_place_updates_keep_the_request(scripted: ScriptedEngine) -> None:
    async with client_of(scripted, update_mode="in_place") as client:
        go_on = scripted.hold(3)
        work = ask(client, request(), stream=True)
        await at_token(scripted, 3, work)
        await update(client, scripted, 7)
        go_on.set()
        _, _, versions = joined(await work)
    assert versions == [0] * 3 + [7] * 7
    assert len(scripted.requests) == 1
    assert scripted.pauses == ["in_place"]


async def test_what_sglang_tells_late_of_a_kept_call_is_sampled_again(
    scripted: ScriptedEngine,
) -> None:
    """A chunk from before the pause, told in it: under the name that is no version's."""
    async with client_of(scripted, update_mode="in_place") as client:
        go_on = scripted.hold(3)
        work = ask(client, request(), stream=True)
        await at_token(scripted, 3, work)
        await client.hold()
        scripted.weight_version = "loading-7"
        go_on.set()
        await until(lambda: scripted.aborted)
        scripted.weight_version = "7"
        await client.resume(7)
        ids, _, versions = joined(await work)
    assert ids == FORMULA[:10]
    assert versions == [0] * 3 + [7] * 7
    assert scripted.requests[1]["input_ids"] == PROMPT + FORMULA[:3]
    assert client.resubmitted == {"update": 1}


async def test_calls_that_come_during_an_update_wait(
    scripted: ScriptedEngine, stream: bool
) -> None:
    async with client_of(scripted) as client:
        await client.pause()
        assert client.paused
        work = ask(client, request(), stream=stream)
        await client.info()
        assert scripted.requests == []
        scripted.weight_version = "2"
        await client.resume(2)
        assert joined(await work)[2] == [2] * 10
    async with client_of(scripted, update_wait=0.05) as client:
        await client.pause()
        with fails_with(EngineUnavailable, "weight update") as raised:
            await all_of(client, request(), stream=stream)
        assert raised.value.retry_after
        assert len(scripted.requests) == 1
        await client.resume(2)
        await all_of(client, request(), stream=stream)


async def test_cancelling_tells_the_engine(
    client: SGLangEngine, scripted: ScriptedEngine, stream: bool
) -> None:
    work = await held(client, scripted, 2, request("gone"), stream=stream)
    work.cancel()
    await until(lambda: scripted.aborted == ["0-gone;"])
    await until(lambda: not scripted.running)


async def test_an_abort_ends_one_request_alone(
    client: SGLangEngine, scripted: ScriptedEngine, stream: bool
) -> None:
    """SGLang aborts every request whose id begins with the one that it is told."""
    holds = [scripted.hold(2) for _ in range(4)]
    works = [ask(client, request(rid), stream=stream) for rid in ("r", "r1", "r-1", "r.1")]
    await at_token(scripted, 2, *works)
    works[0].cancel()
    await until(lambda: len(scripted.running) == 3)
    await until(lambda: scripted.aborted)
    for hold in holds:
        hold.set()
    for work in works[1:]:
        assert joined(await work)[0] == FORMULA[:10]


async def test_an_abort_without_an_update_is_an_error(
    client: SGLangEngine, scripted: ScriptedEngine, stream: bool
) -> None:
    work = await held(client, scripted, 2, stream=stream)
    for running in scripted.running.values():
        running.aborted.set()
    with fails_with(EngineUnavailable, "aborted"):
        await work


@pytest.mark.parametrize("kind", ["nan", "null", "disagree", "garbage", "spans"])
async def test_a_broken_answer_fails_its_call_alone(
    client: SGLangEngine, scripted: ScriptedEngine, stream: bool, kind: FaultKind
) -> None:
    scripted.fail(kind, after=2)
    expected = EngineMismatch if kind in ("disagree", "spans") else EngineUnavailable
    with pytest.raises(expected):
        await all_of(client, request(), stream=stream)
    assert joined(await all_of(client, request("another"), stream=stream))[0]


async def test_an_engines_refusal_keeps_its_kind(
    client: SGLangEngine, scripted: ScriptedEngine, stream: bool
) -> None:
    with fails_with(InvalidRequest, "context"):
        await all_of(client, request(ids=[5] * 5000), stream=stream)
    for status in (429, 500, 503):
        scripted.fail("status", status=status)
        with fails_with(EngineUnavailable, str(status)) as raised:
            await all_of(client, request(), stream=stream)
        assert raised.value.retry_after


async def test_control_calls_do_not_wait_for_an_engine_that_is_away() -> None:
    client = SGLangEngine("http://127.0.0.1:1", decode=lambda _: "")
    for call in (client.info(), client.pause(), client.resume(0)):
        with pytest.raises(EngineUnavailable) as raised:
            await asyncio.wait_for(call, 60)
        assert raised.value.retry_after
    await client.close()


async def test_a_silent_engine_is_given_up_and_its_request_aborted(
    scripted: ScriptedEngine, stream: bool
) -> None:
    scripted.hold(0)
    async with client_of(scripted, request_timeout=0.1) as client:
        with pytest.raises(EngineUnavailable):
            await all_of(client, request("silent"), stream=stream)
        await until(lambda: "0-silent;" in scripted.aborted)


async def test_context_and_slots_are_asked_of_the_engine(
    scripted: ScriptedEngine, client: SGLangEngine
) -> None:
    assert await client.context_length() == scripted.context_length
    scripted.like_sglang = True
    assert await client.context_length() == 2042
    assert await client.slots() is None
    scripted.slots = 3
    assert await client.slots() == 3
    await scripted.die()
    assert await client.slots() is None
    per_worker = {"effective_max_running_requests_per_dp": 24}
    for told, slots in (
        ({"max_running_requests": 16}, 16),
        ({"max_running_requests": None}, None),
        ({}, None),
        ({"internal_states": [{}], "max_running_requests": 8}, 8),
        ({"max_running_requests": None, "internal_states": [per_worker, per_worker]}, 48),
    ):
        assert slots_of(told) == slots
