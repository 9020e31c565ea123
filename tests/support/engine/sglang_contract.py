"""What a client relies on in SGLang's native API. Needs a URL only, so it can judge a real SGLang.

A test class that inherits :class:`SGLangContract` provides the fixture ``url``.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson
import pytest

IDS = [5, 6, 7, 8, 9, 10, 11]
LIMIT = aiohttp.ClientTimeout(total=60)


async def call(url: str, path: str, body: Any = None, method: str = "POST") -> tuple[int, Any]:
    """Status and JSON (or text) of one call."""
    data = body if isinstance(body, bytes) or body is None else orjson.dumps(body)
    headers = {"Content-Type": "application/json"}
    async with (
        aiohttp.ClientSession(timeout=LIMIT) as session,
        session.request(method, url + path, data=data, headers=headers) as response,
    ):
        raw = await response.read()
        is_json = response.content_type == "application/json"
        return response.status, orjson.loads(raw) if is_json else raw.decode()


async def events(url: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The events of a stream, which must end with [DONE]."""
    async with (
        aiohttp.ClientSession(timeout=LIMIT) as session,
        session.post(url + "/generate", json=body | {"stream": True}) as response,
    ):
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        async for line in response.content:
            data = line.removeprefix(b"data: ").strip()
            if data == b"[DONE]":
                return
            if data:
                yield orjson.loads(data)
        raise AssertionError("the stream ended without [DONE]")


def newest(event: dict[str, Any], seen: int, name: str = "output_token_logprobs") -> list[Any]:
    """What an event tells of the tokens behind those that were seen; it may tell of them again."""
    meta = event["meta_info"]
    fresh = meta["completion_tokens"] - seen
    told: list[Any] = meta[name][-fresh:] if fresh else []
    return told


def body(**sampling: Any) -> dict[str, Any]:
    values = {"max_new_tokens": 12, "temperature": 1.0, "ignore_eos": True} | sampling
    return {"input_ids": IDS, "sampling_params": values, "return_logprob": True}


def check_answer(answer: dict[str, Any], tokens: int) -> None:
    meta = answer["meta_info"]
    assert len(answer["output_ids"]) == tokens == meta["completion_tokens"]
    assert [entry[1] for entry in meta["output_token_logprobs"]] == answer["output_ids"]
    assert all(math.isfinite(e[0]) and e[0] <= 1e-4 for e in meta["output_token_logprobs"])
    assert meta["prompt_tokens"] == len(IDS)
    assert isinstance(meta["cached_tokens"], int)
    spans = meta["weight_versions"]
    assert spans[0]["start"] == 0
    assert spans[-1]["end"] == tokens
    assert spans[-1]["version"] == meta["weight_version"]
    assert isinstance(answer["text"], str)


def check_likeliest(meta: dict[str, Any], tokens: int) -> None:
    assert len(meta["output_top_logprobs"]) == tokens
    for chosen, top in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True):
        logprobs = [entry[0] for entry in top]
        assert len({entry[1] for entry in top}) == 3
        assert logprobs == sorted(logprobs, reverse=True)
        same = [entry[0] for entry in top if entry[1] == chosen[1]]
        assert same in ([], [pytest.approx(chosen[0], abs=1e-4)])


class SGLangContract:
    async def test_an_answer_has_its_id_length_and_logprobs(self, url: str) -> None:
        status, answer = await call(url, "/generate", body() | {"rid": "contract-1"})
        assert status == 200
        check_answer(answer, 12)
        assert answer["meta_info"]["id"] == "contract-1"
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 12}
        assert answer["meta_info"]["e2e_latency"] > 0

    async def test_a_seed_repeats(self, url: str) -> None:
        """A real SGLang heeds seeds only with --enable-deterministic-inference."""
        answers = [await call(url, "/generate", body(sampling_seed=s)) for s in (3, 3, 2**40)]
        assert [status for status, _ in answers] == [200] * 3
        for _, answer in answers:
            check_answer(answer, 12)
        assert answers[0][1]["output_ids"] == answers[1][1]["output_ids"]

    async def test_a_stream_agrees_with_the_whole_answer(self, url: str) -> None:
        _, whole = await call(url, "/generate", body(temperature=0))
        ids: list[int] = []
        entries: list[Any] = []
        async for event in events(url, body(temperature=0)):
            meta = event["meta_info"]
            fresh = newest(event, len(ids))
            ids += event["output_ids"][len(event["output_ids"]) - len(fresh) :]
            entries += fresh
            assert len(ids) == len(entries) == meta["completion_tokens"]
        assert meta["finish_reason"]["type"] == "length"
        assert ids == whole["output_ids"]
        assert [e[1] for e in entries] == ids
        expected = [e[0] for e in whole["meta_info"]["output_token_logprobs"]]
        assert [e[0] for e in entries] == pytest.approx(expected, abs=0.05)

    async def test_likeliest_tokens_are_told_only_where_asked_for(self, url: str) -> None:
        ask = body() | {"top_logprobs_num": 3}
        _, answer = await call(url, "/generate", ask)
        check_likeliest(answer["meta_info"], 12)
        seen = 0
        async for event in events(url, ask):
            names = ("output_token_logprobs", "output_top_logprobs")
            fresh = {name: newest(event, seen, name) for name in names}
            check_likeliest(fresh, len(fresh["output_top_logprobs"]))
            seen = event["meta_info"]["completion_tokens"]
        assert seen == 12
        assert "output_top_logprobs" not in (await call(url, "/generate", body()))[1]["meta_info"]

    async def test_penalties_biases_and_min_p_are_accepted(self, url: str) -> None:
        params = body(
            min_p=0.01,
            frequency_penalty=0.5,
            presence_penalty=-0.5,
            repetition_penalty=1.2,
            logit_bias={"30": 1.5, "31": -2},
        )
        status, answer = await call(url, "/generate", params)
        assert status == 200
        check_answer(answer, 12)

    async def test_a_stop_token_ends_the_answer_and_is_named(self, url: str) -> None:
        _, free = await call(url, "/generate", body(temperature=0))
        token = free["output_ids"][5]
        params = body(temperature=0, stop_token_ids=[token], ignore_eos=False)
        _, answer = await call(url, "/generate", params)
        assert answer["output_ids"][-1] == token
        assert answer["meta_info"]["finish_reason"]["type"] == "stop"
        assert answer["meta_info"]["finish_reason"]["matched"] == token

    async def test_a_stop_string_ends_the_answer_and_is_cut_from_its_text(self, url: str) -> None:
        _, free = await call(url, "/generate", body(temperature=0, max_new_tokens=48))
        text = free["text"]
        at = next(i for i in range(2, len(text)) if "\ufffd" not in text[i : i + 2])
        stop = text[at : at + 2]
        params = body(temperature=0, max_new_tokens=48, stop=stop)
        _, answer = await call(url, "/generate", params)
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
        assert answer["text"] == text[: text.index(stop)]
        n = len(answer["output_ids"])
        assert answer["output_ids"] == free["output_ids"][:n]

    @pytest.mark.parametrize(
        "change",
        [
            {"sampling_params": {"no_such_parameter": 1}},
            {"sampling_params": {"temperature": -1}},
            {"sampling_params": {"top_p": 0}},
            {"sampling_params": {"top_k": -2}},
            {"sampling_params": {"sampling_seed": "3"}},
            {"sampling_params": {"min_p": 1.5}},
            {"sampling_params": {"frequency_penalty": -2.5}},
            {"sampling_params": {"presence_penalty": 3}},
            {"sampling_params": {"repetition_penalty": 0}},
            {"sampling_params": {"logit_bias": {"-1": 1}}},
            {"sampling_params": {"json_schema": "{"}},
            {"sampling_params": {"json_schema": "{}", "regex": "a"}},
            {"input_ids": [5]},
        ],
        ids=str,
    )
    async def test_a_bad_request_is_refused_and_the_engine_lives(
        self, url: str, change: dict[str, Any]
    ) -> None:
        if "input_ids" in change:
            change = {"input_ids": [5] * 1_000_000}
        status, answer = await call(url, "/generate", body() | change)
        assert status == 400, answer
        assert (await call(url, "/health", method="GET"))[0] == 200

    async def test_a_pause_with_abort_gives_partial_answers(self, url: str) -> None:
        stream = events(url, body(max_new_tokens=1500))
        last = await anext(stream)
        status, _ = await call(url, "/pause_generation", {"mode": "abort"})
        try:
            assert status == 200
            async for event in stream:
                last = event
            assert last["meta_info"]["finish_reason"]["type"] == "abort"
            assert 0 < last["meta_info"]["completion_tokens"] < 1500
            late = asyncio.create_task(call(url, "/generate", body()))
        finally:
            await call(url, "/continue_generation", {})
        assert (await late)[0] == 200

    async def test_an_in_place_update_keeps_a_running_request(self, url: str) -> None:
        _, info = await call(url, "/model_info", method="GET")
        stream = events(url, body(max_new_tokens=600))
        last = await anext(stream)
        await call(url, "/pause_generation", {"mode": "in_place"})
        try:
            # SGLang calls itself healthy for as long as tokens come out that it had already.
            for _ in range(20):
                health, _ = await call(url, "/health_generate", method="GET")
                if health == 503:
                    break
            assert health == 503
            update = {
                "model_path": info["model_path"],
                "weight_version": "41",
                "flush_cache": False,
            }
            status, answer = await call(url, "/update_weights_from_disk", update)
            assert status == 200
            assert answer["success"] is True
            assert "num_paused_requests" in answer
        finally:
            await call(url, "/continue_generation", {})
        async for event in stream:
            last = event
        meta = last["meta_info"]
        assert meta["completion_tokens"] == 600
        before, after = meta["weight_versions"]
        assert (before["start"], before["end"]) == (0, after["start"])
        assert after == {"version": "41", "start": before["end"], "end": 600}
        _, info = await call(url, "/model_info", method="GET")
        assert info["weight_version"] == "41"

    async def test_an_update_from_a_missing_folder_is_refused_with_a_message(
        self, url: str
    ) -> None:
        update = {"model_path": "/no/such/checkpoint", "weight_version": "99"}
        status, answer = await call(url, "/update_weights_from_disk", update)
        assert status == 400
        assert answer["success"] is False
        assert answer["message"]

    async def test_health_answers_and_the_cache_can_be_flushed(self, url: str) -> None:
        for path in ("/health", "/health_generate"):
            assert (await call(url, path, method="GET"))[0] == 200
        assert (await call(url, "/flush_cache"))[0] == 200

    async def test_aborting_a_request_ends_its_stream(self, url: str) -> None:
        stream = events(url, body(max_new_tokens=1500) | {"rid": "to-abort"})
        last = await anext(stream)
        assert (await call(url, "/abort_request", {"rid": "to-abort"}))[0] == 200
        async for event in stream:
            last = event
        assert last["meta_info"]["finish_reason"]["type"] == "abort"


class SamplingContract(SGLangContract):
    """Of an engine that really samples."""

    async def test_a_large_bias_decides_every_token(self, url: str) -> None:
        _, answer = await call(url, "/generate", body(logit_bias={"30": 1000}))
        assert answer["output_ids"] == [30] * 12
        assert all(e[0] == pytest.approx(0, abs=1e-3) for e in logprobs_of(answer))

    async def test_a_large_negative_bias_forbids_its_tokens(self, url: str) -> None:
        _, free = await call(url, "/generate", body(temperature=0))
        ban = {str(token): -1000 for token in free["output_ids"]}
        _, answer = await call(url, "/generate", body(logit_bias=ban))
        assert not set(answer["output_ids"]) & set(free["output_ids"])

    async def test_min_p_cuts_and_leaves_logprobs_alone(self, url: str) -> None:
        _, greedy = await call(url, "/generate", body(temperature=0))
        _, answer = await call(url, "/generate", body(min_p=1))
        assert answer["output_ids"] == greedy["output_ids"]
        expected = [entry[0] for entry in logprobs_of(greedy)]
        assert [e[0] for e in logprobs_of(answer)] == pytest.approx(expected, abs=0.05)

    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    async def test_additive_penalties_count_the_output(self, url: str, temperature: float) -> None:
        """Between any two tokens, the odds are the plain ones, penalised, then scaled."""
        few = {str(token): 6 for token in (30, 31)}
        frequency, presence = 1.5, -0.75
        ask = body(
            max_new_tokens=6,
            temperature=temperature,
            logit_bias=few,
            frequency_penalty=frequency,
            presence_penalty=presence,
        )
        _, answer = await call(url, "/generate", ask | {"top_logprobs_num": 100})
        ids = answer["output_ids"]
        for k, top in enumerate(answer["meta_info"]["output_top_logprobs"]):
            plain = body(max_new_tokens=1, logit_bias=few) | {"input_ids": IDS + ids[:k]}
            _, one = await call(url, "/generate", plain | {"top_logprobs_num": 100})
            row = {e[1]: e[0] for e in one["meta_info"]["output_top_logprobs"][0]}
            bent = {e[1]: e[0] * temperature for e in top}
            assert {30, 31} <= row.keys() & bent.keys()
            lowered = {t: row[t] - bent[t] for t in row.keys() & bent.keys()}
            shifts = [lowered.pop(t) for t in lowered.keys() - {*ids[:k], IDS[-1]}]
            free = shifts[0]
            for token, by in lowered.items():
                counts = self.penalised_counts(token, ids[:k])
                plain = [by - frequency * n - presence * (n > 0) for n in counts]
                shifts.append(min(plain, key=lambda shift: abs(shift - free)))
            assert max(shifts) - min(shifts) < 0.1

    def penalised_counts(self, token: int, output: list[int]) -> range:
        """Return how often ``token`` may count for the token after ``output``."""
        return range(output.count(token), output.count(token) + 1)

    async def test_an_answer_under_a_schema_follows_the_schema(self, url: str) -> None:
        properties = {"a": {"enum": ["x", "yz"]}, "b": {"type": "boolean"}}
        schema = {
            "type": "object",
            "properties": properties,
            "required": ["a", "b"],
            "additionalProperties": False,
        }
        params = body(max_new_tokens=1000, ignore_eos=False, json_schema=json.dumps(schema))
        _, answer = await call(url, "/generate", params)
        assert answer["meta_info"]["finish_reason"]["type"] == "stop"
        value = json.loads(answer["text"])
        assert value["a"] in ("x", "yz")
        assert isinstance(value["b"], bool)

    async def test_logprobs_under_a_regular_expression_are_of_allowed_tokens(
        self, url: str
    ) -> None:
        params = body(max_new_tokens=50, ignore_eos=False, regex="[ab]{3}(c|de)")
        _, answer = await call(url, "/generate", params | {"top_logprobs_num": 20})
        assert answer["meta_info"]["finish_reason"]["type"] == "stop"
        assert re.fullmatch("[ab]{3}(c|de)", answer["text"])
        for chosen, top in zip(
            logprobs_of(answer), answer["meta_info"]["output_top_logprobs"], strict=True
        ):
            # Normalised over what the grammar allows.
            allowed = [entry[0] for entry in top if entry[0] is not None and entry[0] > -1e30]
            assert sum(map(math.exp, allowed)) == pytest.approx(1, abs=0.02)
            assert chosen[0] in [pytest.approx(logprob, abs=1e-4) for logprob in allowed]

    @pytest.mark.parametrize("bad", [{"regex": "("}, {"json_schema": '{"type": "nope"}'}], ids=str)
    async def test_bad_grammars_are_refused(self, url: str, bad: dict[str, Any]) -> None:
        status, answer = await call(url, "/generate", body(**bad))
        assert status == 400, answer


def logprobs_of(answer: dict[str, Any]) -> list[Any]:
    entries: list[Any] = answer["meta_info"]["output_token_logprobs"]
    return entries
