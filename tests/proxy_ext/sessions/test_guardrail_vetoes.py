"""A session with an answer that a guardrail vetoes ends as rejected, also after a restart."""

from __future__ import annotations

from typing import Any

import pytest

from any_agent.completions.params.call import ChatCall
from any_agent.completions.untrainable import GUARDRAIL_VETO, UntrainableReason
from any_agent.types import Message
from tests.support.proxy import Proxy
from tests.support.proxy_fixtures import Start
from tests.support.sessions import finalize, info

pytestmark = pytest.mark.service

REASON = "vetoed: a guardrail refused an answer (litellm.policy_vetoes)"


async def refuses(call: ChatCall, answer: Message, *, trainable: bool) -> UntrainableReason | None:
    return GUARDRAIL_VETO if "veto me" in str(call.messages) else None


async def called(proxy: Proxy, *texts: str, mode: str = "train", **fields: Any) -> dict[str, Any]:
    """A session with a call for each text."""
    proxy.service.sessions.refuses = refuses
    session = await proxy.open(mode=mode)
    for text in texts:
        await proxy.complete(session["api_key"], [{"role": "user", "content": text}], **fields)
    return session


async def finalized(proxy: Proxy, session: dict[str, Any]) -> tuple[str, str | None]:
    answer, again = [await finalize(proxy, session, final_reward=1) for _ in range(2)]
    assert again["state"] == answer["state"]
    return answer["state"], answer["reason"]


async def test_one_vetoed_answer_rejects_its_session(proxy: Proxy) -> None:
    vetoed = await called(proxy, "hello", "veto me", "hello again")
    other = await called(proxy, "hello")
    assert await finalized(proxy, vetoed) == ("rejected", REASON)
    assert await finalized(proxy, other) == ("finalized", None)
    leased = await proxy.lease()
    assert [each.session_id for each in leased] == [other["session_id"]]


async def test_a_veto_outlives_a_restart(proxy: Proxy, start: Start) -> None:
    session = await called(proxy, "veto me", "hello")
    # No guardrail has seen this process's calls.
    later = await start()
    assert await finalized(later, session) == ("rejected", REASON)
    last = await start()
    shown = await info(last, session)
    assert (shown["state"], shown["reason"], shown["final_reward"]) == ("rejected", REASON, 1.0)


async def test_every_end_of_a_session_rejects_it_and_none_of_an_eval_session(proxy: Proxy) -> None:
    session = await called(proxy, "veto me")
    assert (await finalize(proxy, session, await_reward=True))["state"] == "awaiting_reward"
    assert await finalized(proxy, session) == ("rejected", REASON)
    # Also by an answer that is untrainable anyway.
    session = await called(proxy, "veto me", temperature=0)
    assert await finalized(proxy, session) == ("rejected", REASON)
    session = await called(proxy, "veto me", mode="eval")
    assert (await finalized(proxy, session))[0] == "evaluated"


@pytest.mark.parametrize("settings", [(), ("sessions.store_content=false",)])
async def test_a_vetoed_answer_that_nobody_received_rejects_its_session(
    start: Start, settings: tuple[str, ...]
) -> None:
    proxy = await start(*settings, admit=10)
    opened = await called(proxy, "hello", "veto me")
    session = proxy.service.sessions.live[opened["session_id"]]
    last = list(session.tree)[-1]
    await proxy.service.sessions.mark_undelivered(session, last)
    assert last.untrainable_reason == "undelivered"
    later = await start(*settings)
    assert await finalized(later, opened) == ("rejected", REASON)
