"""Likeliest tokens of whole answers, streams and replays; and long answers."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from any_agent.completions import parsed_request as completions_asked
from any_agent.completions.encoders.chat import ChatEncoder
from tests.support.proxy import Proxy
from tests.support.retries import left_with_an_answer, stream_of
from tests.support.scripted_engine import ScriptedEngine


async def test_likeliest_tokens_are_told_whole_streamed_and_replayed(
    proxy: Proxy, engine: ScriptedEngine
) -> None:
    agent = await left_with_an_answer(
        proxy, engine, stream=True, logprobs=True, top_logprobs=3, max_tokens=5
    )
    events, _ = await stream_of(agent, 1)
    told = [
        entry
        for event in events
        for choice in event["choices"]
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    assert len(told) == 5
    for entry in told:
        assert len(entry["top_logprobs"]) == 3
        assert bytes(entry["bytes"]).decode(errors="replace") == entry["token"]
        ranked = [each["logprob"] for each in entry["top_logprobs"]]
        assert ranked == sorted(ranked, reverse=True)
    whole = await proxy.complete(agent.key, logprobs=True, top_logprobs=3, max_tokens=5)
    assert whole["choices"][0]["logprobs"]["content"] == told


async def test_a_long_answer_is_written_off_the_loop(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = (await proxy.open(mode="eval"))["api_key"]
    fields = {"logprobs": True, "top_logprobs": 3, "temperature": 0}
    at_once = await proxy.complete(key, **fields)
    threads: list[threading.Thread] = []
    whole = ChatEncoder.whole

    def noted(*args: Any) -> bytes:
        threads.append(threading.current_thread())
        return whole(*args)

    monkeypatch.setattr(completions_asked, "MANY_ENTRIES", 8 * 4 - 1)
    monkeypatch.setattr(ChatEncoder, "whole", noted)
    later = await proxy.complete(key, **fields)
    assert later["choices"] == at_once["choices"]
    await proxy.complete(key, max_tokens=7, **fields)
    assert [thread is threading.main_thread() for thread in threads] == [False, True]
