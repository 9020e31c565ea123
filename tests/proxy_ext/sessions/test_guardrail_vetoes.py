"""A session with an answer that a guardrail vetoes ends as rejected, also after a restart."""

from __future__ import annotations

from typing import Any

import pytest

from any_agent.completions.params.call import ChatCall
from any_agent.completions.untrainable import GUARDRAIL_VETO, UntrainableReason
from any_agent.types import Message
from tests.support.proxy import Proxy
from tests.support.proxy_fixtures import Start

pytestmark = pytest.mark.service

REASON = "vetoed: a guardrail refused an answer (litellm.policy_vetoes)"


async def refuses(call: ChatCall, answer: Message, *, trainable: bool) -> UntrainableReason | None:
    return GUARDRAIL_VETO if "veto me" in str(call.messages) else None


async def called(proxy: Proxy, *texts: str, **fields: Any) -> dict[str, Any]:
    """A session with a call for each text."""
    proxy.service.sessions.refuses = refuses
    session = await proxy.open()
    for text in texts:
        talk = [{"role": "user", "content": text}]
        answer = await proxy.call(session["api_key"], messages=talk, **fields)
        assert answer.status_code == 200, answer.text
    return session


async def finalized(proxy: Proxy, session: dict[str, Any]) -> tuple[str, str | None]:
    body = {"final_reward": 1.0}
    answer = await proxy.post("/rl/v1/finalize", body, session["api_key"])
    assert answer.status_code == 200, answer.text
    again = await proxy.post("/rl/v1/finalize", body, session["api_key"])
    assert again.status_code == 200 and again.json()["state"] == answer.json()["state"]
    return answer.json()["state"], answer.json()["reason"]


async def test_one_vetoed_answer_rejects_its_session(proxy: Proxy) -> None:
    vetoed = await called(proxy, "hello", "veto me", "hello again")
    other = await called(proxy, "hello")
    assert await finalized(proxy, vetoed) == ("rejected", REASON)
    assert await finalized(proxy, other) == ("finalized", None)
    leased = await proxy.lease()
    assert [each.session_id for each in leased] == [other["session_id"]]


async def test_it_outlives_a_restart(proxy: Proxy, start: Start) -> None:
    session = await called(proxy, "veto me", "hello")
    # No guardrail has seen this process's calls.
    later = await start()
    assert await finalized(later, session) == ("rejected", REASON)
    last = await start()
    shown = (await last.http.get(f"/rl/v1/sessions/{session['session_id']}")).json()
    assert (shown["state"], shown["reason"], shown["final_reward"]) == ("rejected", REASON, 1.0)


async def test_a_session_that_awaits_its_reward_is_vetoed_too(proxy: Proxy) -> None:
    session = await called(proxy, "veto me")
    body = {"await_reward": True}
    answer = await proxy.post("/rl/v1/finalize", body, session["api_key"])
    assert answer.json()["state"] == "awaiting_reward"
    assert await finalized(proxy, session) == ("rejected", REASON)


async def test_an_answer_that_is_untrainable_anyway_vetoes(proxy: Proxy) -> None:
    session = await called(proxy, "veto me", temperature=0)
    assert await finalized(proxy, session) == ("rejected", REASON)


@pytest.mark.parametrize("settings", [(), ("sessions.store_content=false",)])
async def test_an_answer_that_nobody_received_vetoes(
    start: Start, settings: tuple[str, ...]
) -> None:
    proxy = await start(*settings)
    await proxy.admit(10)
    opened = await called(proxy, "hello", "veto me")
    session = proxy.service.sessions.live[opened["session_id"]]
    last = list(session.tree)[-1]
    await proxy.service.sessions.mark_undelivered(session, last)
    assert last.untrainable_reason == "undelivered"
    later = await start(*settings)
    assert await finalized(later, opened) == ("rejected", REASON)


async def test_an_eval_session_ends_as_any_other(proxy: Proxy) -> None:
    proxy.service.sessions.refuses = refuses
    session = await proxy.open(mode="eval")
    talk = [{"role": "user", "content": "veto me"}]
    assert (await proxy.call(session["api_key"], messages=talk)).status_code == 200
    assert (await finalized(proxy, session))[0] == "evaluated"
