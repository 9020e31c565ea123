"""A rank's use of LiteLLM's verdicts on its virtual keys, and what it tells of calls.

A judge of the test's own takes LiteLLM's place; `tests.proxy_ext.litellm.test_keys` has LiteLLM's.
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any, cast

import pytest

from any_agent.completions.params.call import ChatCall
from any_agent.errors import Forbidden, TooManyRequests, Unauthenticated
from proxy_ext.litellm_app import ConfiguredLiteLLMApp
from proxy_ext.litellm_events import PolicyEvents
from proxy_ext.litellm_keys import hash_in
from proxy_ext.litellm_policy import PolicyEvent
from tests.support import implicit
from tests.support.frozen import refused
from tests.support.proxy import HELLO, Proxy, until
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
        self.barred: set[str] = set()
        self.asked: list[str] = []
        self.charged: list[PolicyEvent] = []
        self.hangs = False

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
        if model is not None and key in self.barred:
            raise Forbidden("this key may not call policy")

    async def require_allowed(self, call: ChatCall) -> None:
        pass

    async def charge(self, event: PolicyEvent, input_cost: float, output_cost: float) -> None:
        if self.hangs:
            raise TimeoutError
        self.charged.append(event)


async def judged(start: Start, *keys: str, settings: tuple[str, ...] = ()) -> tuple[Proxy, Judge]:
    """A proxy whose foreign keys a judge knows."""
    proxy, judge = await start(f"server.admin_key={ADMIN}", *settings), Judge(*keys)
    await proxy.admit(100)
    service, app = proxy.service, cast(ConfiguredLiteLLMApp, judge)
    service.litellm = service.auth._litellm = service.opening._litellm = app
    service.events = PolicyEvents(service.config, part="rank-0", tells=False, charge=judge.charge)
    service.sessions.listeners = (service.events,)
    service.events.start()
    return proxy, judge


async def call(proxy: Proxy, key: str, **fields: Any) -> Any:
    body = {"model": "policy", "messages": HELLO, "max_tokens": 4, **fields}
    return await proxy.post("/v1/chat/completions", body, key)


async def test_a_key_opens_sessions_of_its_own(start: Start) -> None:
    proxy, judge = await judged(start, "sk-one", "sk-two")
    opened = await proxy.post(START, {"mode": "eval"}, "sk-one")
    assert opened.status_code == 200, opened.text
    id, own = opened.json()["session_id"], opened.json()["api_key"]
    shown = (await proxy.http.get(f"/rl/v1/sessions/{id}")).json()
    assert shown["tenant"] == hash_of("sk-one")
    assert shown["opened_by"] == f"LiteLLM key {hash_of('sk-one')[:8]}"
    answer = await call(proxy, own)
    assert answer.status_code == 200, answer.text
    for key, status in (("sk-one", 200), (own, 200), ("sk-two", 404), ("sk-three", 401)):
        path = f"/rl/v1/sessions/{id}"
        headers = {"Authorization": f"Bearer {key}"}
        assert (await proxy.http.get(path, headers=headers)).status_code == status
    headers = {"Authorization": "Bearer sk-one"}
    refused(await proxy.http.get("/rl/v1/capacity", headers=headers), 403, "forbidden")
    # Of the service's own keys nobody is asked, nor of requests without one.
    assert set(judge.asked) == {"sk-one", "sk-two", "sk-three"}


async def test_each_call_is_charged_once_it_is_durable(start: Start) -> None:
    proxy, judge = await judged(start, "sk-one")
    key = (await proxy.post(START, {"mode": "eval"}, "sk-one")).json()["api_key"]
    answers = [await call(proxy, key, stream=stream) for stream in (False, True)]
    others = await proxy.open(mode="eval")
    assert (await call(proxy, others["api_key"])).status_code == 200
    await until(lambda: len(judge.charged) == 2, "both calls are charged")
    ids = [answer.headers["x-any-agent-interaction"] for answer in answers]
    assert [event.id for event in judge.charged] == ids
    assert {event.tenant for event in judge.charged} == {hash_of("sk-one")}
    usage = answers[0].json()["usage"]
    assert judge.charged[0].prompt_tokens == usage["prompt_tokens"]
    assert judge.charged[0].output_tokens == usage["completion_tokens"]
    judge.hangs = True
    assert (await call(proxy, key)).status_code == 200
    events = proxy.service.events
    assert events is not None
    await until(lambda: events.outcomes["uncharged"] == 1, "the failure is counted")
    assert events.outcomes["charged"] == 2


async def test_a_key_over_its_budget_ends_what_it_has_opened(start: Start) -> None:
    proxy, judge = await judged(start, "sk-one")
    opened = (await proxy.post(START, {"mode": "train"}, "sk-one")).json()
    key = opened["api_key"]
    assert (await call(proxy, key)).status_code == 200
    judge.spent.add("sk-one")
    for stream in (False, True):
        said = refused(await call(proxy, key, stream=stream), 429, "budget_exceeded")
        assert said == "Budget has been exceeded!"
    again = {"mode": "eval", "api_key": key}
    refused(await proxy.post(START, {"mode": "eval"}, "sk-one"), 429, "budget_exceeded")
    reward = {"reward": 1.0, "session_id": opened["session_id"]}
    assert (await proxy.post("/rl/v1/set_reward", reward, "sk-one")).status_code == 200
    assert (await proxy.post("/rl/v1/finalize", {}, key)).status_code == 200
    # Nor does the operator open one for it.
    refused(await proxy.post(START, again, ADMIN), 429, "budget_exceeded")
    slots = await proxy.capacity()
    judge.spent.clear()
    assert (await proxy.post(START, {"mode": "train"}, "sk-one")).status_code == 200
    assert (await proxy.capacity()) != slots


async def test_a_key_that_may_not_call_the_policy(start: Start) -> None:
    proxy, judge = await judged(start, "sk-one")
    judge.barred.add("sk-one")
    key = (await proxy.post(START, {"mode": "eval"}, "sk-one")).json()["api_key"]
    assert "policy" in refused(await call(proxy, key), 403, "forbidden")


async def test_a_key_calls_without_sessions_where_they_are_implicit(start: Start) -> None:
    proxy, judge = await judged(start, "sk-one", settings=implicit.settings())
    answer = await call(proxy, "sk-one")
    assert answer.status_code == 200, answer.text
    await until(lambda: len(judge.charged) == 1, "the call is charged")
    judge.spent.add("sk-one")
    other = [{"role": "user", "content": "Something else."}]
    refused(await call(proxy, "sk-one", messages=other), 429, "budget_exceeded")
    assert len(proxy.service.sessions.live) == 1


async def test_calls_that_wait_for_litellm_have_a_bound(start: Start) -> None:
    proxy, _ = await judged(start, "sk-one", settings=("litellm.max_waiting_events=1",))
    events = proxy.service.events
    assert events is not None and events._charging is not None
    events._charging.cancel()
    await asyncio.wait([events._charging])
    key = (await proxy.post(START, {"mode": "eval"}, "sk-one")).json()["api_key"]
    for _ in range(3):
        assert (await call(proxy, key)).status_code == 200
    assert events.outcomes["uncharged"] == 2
