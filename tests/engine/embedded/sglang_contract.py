"""What a client relies on in SGLang's native API. Needs a URL only, so it can judge a real SGLang.

A test class that inherits :class:`SGLangContract` provides the fixture ``url``.
"""

from __future__ import annotations

import asyncio
import math
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


class SGLangContract:
    async def test_generate(self, url: str) -> None:
        status, answer = await call(url, "/generate", body() | {"rid": "contract-1"})
        assert status == 200
        check_answer(answer, 12)
        assert answer["meta_info"]["id"] == "contract-1"
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 12}
        assert answer["meta_info"]["e2e_latency"] > 0

    async def test_without_logprobs(self, url: str) -> None:
        _, answer = await call(url, "/generate", body() | {"return_logprob": False})
        assert "output_token_logprobs" not in answer["meta_info"]

    async def test_greedy_is_repeatable(self, url: str) -> None:
        (_, first), (_, again) = [
            await call(url, "/generate", body(temperature=t)) for t in (0, 0.0)
        ]
        assert first["output_ids"] == again["output_ids"]

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
            fresh = meta["completion_tokens"] - len(ids)
            ids += event["output_ids"][-fresh:] if fresh else []
            entries += meta["output_token_logprobs"][-fresh:] if fresh else []
            assert len(ids) == len(entries) == meta["completion_tokens"]
        assert meta["finish_reason"]["type"] == "length"
        assert ids == whole["output_ids"]
        assert [e[1] for e in entries] == ids
        expected = [e[0] for e in whole["meta_info"]["output_token_logprobs"]]
        assert [e[0] for e in entries] == pytest.approx(expected, abs=0.05)

    async def test_stop_token(self, url: str) -> None:
        _, free = await call(url, "/generate", body(temperature=0))
        token = free["output_ids"][5]
        params = body(temperature=0, stop_token_ids=[token], ignore_eos=False)
        _, answer = await call(url, "/generate", params)
        assert answer["output_ids"][-1] == token
        assert answer["meta_info"]["finish_reason"]["type"] == "stop"
        assert answer["meta_info"]["finish_reason"]["matched"] == token

    async def test_stop_string(self, url: str) -> None:
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
            {"input_ids": [5] * 1_000_000},
        ],
        ids=str,
    )
    async def test_bad_requests(self, url: str, change: dict[str, Any]) -> None:
        if "input_ids" in change:
            change = {"input_ids": [5] * 1_000_000}
        status, answer = await call(url, "/generate", body() | change)
        assert status == 400, answer
        assert (await call(url, "/health", method="GET"))[0] == 200

    async def test_pause_abort_gives_partials(self, url: str) -> None:
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

    async def test_in_place_update_keeps_the_request(self, url: str) -> None:
        _, info = await call(url, "/get_model_info", method="GET")
        stream = events(url, body(max_new_tokens=600))
        last = await anext(stream)
        await call(url, "/pause_generation", {"mode": "in_place"})
        try:
            assert (await call(url, "/health_generate", method="GET"))[0] == 503
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
        _, info = await call(url, "/get_model_info", method="GET")
        assert info["weight_version"] == "41"

    async def test_a_bad_update_says_so(self, url: str) -> None:
        update = {"model_path": "/no/such/checkpoint", "weight_version": "99"}
        status, answer = await call(url, "/update_weights_from_disk", update)
        assert status == 400
        assert answer["success"] is False
        assert answer["message"]

    async def test_abort_request(self, url: str) -> None:
        stream = events(url, body(max_new_tokens=1500) | {"rid": "to-abort"})
        last = await anext(stream)
        assert (await call(url, "/abort_request", {"rid": "to-abort"}))[0] == 200
        async for event in stream:
            last = event
        assert last["meta_info"]["finish_reason"]["type"] == "abort"

    async def test_health_and_cache(self, url: str) -> None:
        for path in ("/health", "/health_generate"):
            assert (await call(url, path, method="GET"))[0] == 200
        assert (await call(url, "/flush_cache"))[0] == 200
