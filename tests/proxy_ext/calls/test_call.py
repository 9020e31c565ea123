"""Calls under way: their callers always hear of their end."""

from __future__ import annotations

import asyncio

import pytest

from any_agent.completions.params.call import ParseSettings
from any_agent.completions.params.parse import parse_chat
from any_agent.errors import SessionClosed
from any_agent.types import GenerationHyperparameters, SessionMode
from tests.support.proxy import HELLO, Proxy


async def test_a_call_aborted_before_it_began_tells_its_caller(proxy: Proxy) -> None:
    service = proxy.service
    sampling = GenerationHyperparameters(max_new_tokens=8)
    chat = parse_chat({"messages": HELLO}, ParseSettings(SessionMode.EVAL, sampling, "m"))
    opened = await proxy.open()
    session = service.sessions.live[opened["session_id"]]
    prepared, place = service.completer.prepare(chat, None), service.calls.acquire_slot()
    listener = service.calls.start(prepared, session, stream=False, slot=place)
    # A finalize that was scheduled in the same moment: the call's task has not run at all.
    listener.call.abort("the session was ended")
    async with asyncio.timeout(60):
        with pytest.raises(SessionClosed):
            await listener.next()
    listener.slot = place
    await service.calls.release(listener)
    assert len(service.calls) == 0
    assert service.calls.concurrency.in_use == 0
    assert service.calls.stats.ended["train", "aborted"] == 1
    assert not session.calls
