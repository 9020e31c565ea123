"""A rank's use of LiteLLM's verdicts on its virtual keys, and what it tells of calls.

A judge of the test's own takes LiteLLM's place; `tests.proxy_ext.litellm.test_keys` has LiteLLM's.
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import cast

import pytest

from any_agent.completions.params.call import ChatCall
from any_agent.errors import TooManyRequests, Unauthenticated
from proxy_ext.litellm_app import ConfiguredLiteLLMApp
from proxy_ext.litellm_events import PolicyEvents
from proxy_ext.litellm_keys import hash_in
from proxy_ext.litellm_policy import PolicyEvent
from tests.support import implicit
from tests.support.frozen import refused
from tests.support.proxy import Proxy, until
from tests.support.proxy_fixtures import Start

pytestmark = pytest.mark.service

ADMIN = "operator-secret"
START = "/rl/v1/start_session"


def hash_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


class Judge:
    """Knows the keys `sk-...` of its list; some are spent, and some may not call the policy."""

    problem = None

    def __init__(self, *keys: str) -> None:
        self.known = {hash_of(key): key for key in keys}
        self.spent: set[str] = set()
        self.asked: list[str] = []
        self.charged: list[PolicyEvent] = []
        self.hangs: asyncio.Event | None = None
        self.fails = False

    async def hash_of_key(self, key: str) -> str | None:
        self.asked.append(key)
        if not key.startswith("sk-"):
            return None
        if hash_of(key) not in self.known:
            raise Unauthenticated("not found in db")
        return hash_of(key)

    async def require_key(self, tenant: str | None, model: str | None = None) -> None:
        key = self.known.get(hash_in(tenant) or "")
        if key in self.spent:
            raise TooManyRequests("Budget has been exceeded!", code="budget_exceeded")

    async def require_allowed(self, call: ChatCall) -> None:
        pass

    async def charge(self, event: PolicyEvent, input_cost: float, output_cost: float) -> None:
        if self.hangs is not None:
            await self.hangs.wait()
        if self.fails:
            raise TimeoutError
        self.charged.append(event)


async def judged(start: Start, *keys: str, settings: tuple[str, ...] = ()) -> tuple[Proxy, Judge]:
    """A proxy whose foreign keys a judge knows."""
    proxy, judge = await start(f"server.admin_key={ADMIN}", *settings), Judge(*keys)
    await proxy.admit(100)
    service, app = proxy.service, cast(ConfiguredLiteLLMApp, judge)
    service.litellm = service.auth.litellm = service.opening.litellm = app
    service.events = PolicyEvents(service.config, part="rank-0", tells=False, charge=judge.charge)
    service.sessions.listeners = (service.events,)
    service.events.start()
    return proxy, judge


async def test_each_call_of_a_keys_session_is_charged_once_it_is_durable(start: Start) -> None:
    proxy, judge = await judged(start, "sk-one")
    opened = (await proxy.post(START, {"mode": "eval"}, "sk-one")).json()
    shown = (await proxy.http.get(f"/rl/v1/sessions/{opened['session_id']}")).json()
    assert shown["opened_by"] == f"LiteLLM key {hash_of('sk-one')[:8]}"
    key = opened["api_key"]
    answers = [await proxy.call(key, stream=stream) for stream in (False, True)]
    others = await proxy.open(mode="eval")
    assert (await proxy.call(others["api_key"])).status_code == 200
    await until(lambda: len(judge.charged) == 2, "both calls are charged")
    ids = [answer.headers["x-any-agent-interaction"] for answer in answers]
    assert [event.id for event in judge.charged] == ids
    assert {event.tenant for event in judge.charged} == {hash_of("sk-one")}
    usage = answers[0].json()["usage"]
    assert judge.charged[0].prompt_tokens == usage["prompt_tokens"]
    assert judge.charged[0].output_tokens == usage["completion_tokens"]
    # Of the service's own keys nobody is asked, nor of requests without one.
    assert set(judge.asked) == {"sk-one"}


async def test_a_key_over_its_budget_takes_no_slot_nor_does_the_operator_open_for_it(
    start: Start,
) -> None:
    proxy, judge = await judged(start, "sk-one")
    key = (await proxy.post(START, {"mode": "train"}, "sk-one")).json()["api_key"]
    assert (await proxy.call(key)).status_code == 200
    slots = await proxy.capacity()
    judge.spent.add("sk-one")
    refused(await proxy.post(START, {"mode": "train"}, "sk-one"), 429, "budget_exceeded")
    assert (await proxy.capacity()) == slots
    assert (await proxy.post("/rl/v1/finalize", {"final_reward": 1}, key)).status_code == 200
    again = {"mode": "eval", "api_key": key}
    refused(await proxy.post(START, again, ADMIN), 429, "budget_exceeded")


async def test_a_key_calls_without_sessions_where_they_are_implicit(start: Start) -> None:
    proxy, judge = await judged(start, "sk-one", settings=implicit.settings())
    answer = await proxy.call("sk-one")
    assert answer.status_code == 200, answer.text
    await until(lambda: len(judge.charged) == 1, "the call is charged")
    judge.spent.add("sk-one")
    other = [{"role": "user", "content": "Something else."}]
    refused(await proxy.call("sk-one", other), 429, "budget_exceeded")
    assert len(proxy.service.sessions.live) == 1


async def test_calls_that_wait_for_litellm_have_a_bound(start: Start) -> None:
    proxy, judge = await judged(start, "sk-one", settings=("litellm.max_waiting_events=1",))
    judge.hangs = asyncio.Event()
    events = proxy.service.events
    assert events is not None
    key = (await proxy.post(START, {"mode": "eval"}, "sk-one")).json()["api_key"]
    for _ in range(4):
        assert (await proxy.call(key)).status_code == 200
    # One is being charged, and one waits.
    await until(lambda: events.outcomes["uncharged"] == 2, "the others are counted")
    judge.fails = True
    judge.hangs.set()
    await until(lambda: events.outcomes["uncharged"] == 4, "failures are counted")
    assert not judge.charged
