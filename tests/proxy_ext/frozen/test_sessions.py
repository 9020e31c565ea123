"""Frozen models' calls beside the policy's: records, no part of the tree, counted, and capped."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from any_agent.config import FrozenConfig
from any_agent.errors import ConfigError, SpendCapExceeded
from any_agent.types import Continuation
from proxy_ext.archive.records import read_record, record_line
from proxy_ext.export.reader import row_line, rows
from proxy_ext.frozen.frozen_models import require_prices
from proxy_ext.frozen.provider_responses import MessagesResponse, ids_in
from proxy_ext.frozen.spend_caps import SpendCaps
from tests.proxy_ext.test_metrics import scrape
from tests.proxy_ext.test_tenants import ADMIN, Tenants
from tests.support.errors import fails_with
from tests.support.frozen import ANSWER_USD, ScriptedProvider, chat_body, events_of, refused
from tests.support.proxy import HELLO, Proxy, turned_away, until
from tests.support.proxy_fixtures import Restart, Start
from tests.support.sessions import finalize, info

CHAT = "/v1/chat/completions"
CAP = "frozen.session_usd=1"
"""Three answers."""


@pytest.fixture
def provider() -> ScriptedProvider:
    return ScriptedProvider()


@pytest.fixture
async def proxy(start: Start, provider: ScriptedProvider) -> Proxy:
    proxy = await start(provider=provider, admit=100)
    return proxy


async def judged(proxy: Proxy, session: dict[str, Any], **fields: Any) -> httpx.Response:
    return await proxy.post(CHAT, chat_body(**fields), session["api_key"])


async def mixed(proxy: Proxy) -> tuple[dict[str, Any], list[str]]:
    """A session with two turns of the policy, and a judge's call before, between and after them."""
    session = await proxy.open(task_id="t", group_size=1)
    talk, ids = [*HELLO], []
    for _ in range(2):
        assert (await judged(proxy, session, messages=talk)).is_success
        answer = await proxy.complete(session["api_key"], talk)
        ids.append(answer["id"])
        talk += [answer["choices"][0]["message"], {"role": "user", "content": "Another."}]
    assert (await judged(proxy, session)).is_success
    return session, ids


async def test_frozen_calls_never_enter_the_tree_of_the_policy(proxy: Proxy) -> None:
    session, ids = await mixed(proxy)
    recorded = await proxy.recorded(session["session_id"])
    assert [i.untrainable_reason for i in recorded].count("frozen_model") == 3
    assert len(recorded) == 5
    second = next(i for i in recorded if i.id == ids[1])
    assert (second.parent_id, second.continuation) == (ids[0], Continuation.EXACT)
    assert (await info(proxy, session))["interactions"] == 2
    rewarded = await proxy.post("/rl/v1/set_reward", {"reward": 1.0}, session["api_key"])
    assert rewarded.json()["interaction_id"] == ids[1]
    judge = next(i.id for i in recorded if i.id not in ids)
    named = {"reward": 1.0, "interaction_id": judge}
    unknown = await proxy.post("/rl/v1/set_reward", named, session["api_key"])
    refused(unknown, 404, "completion_not_found")
    await finalize(proxy, session)
    (trajectory,) = await proxy.lease()
    assert [i.id for i in trajectory.interactions] == ids


async def test_frozen_calls_stay_recorded_and_out_of_training_after_a_restart(
    restart: Restart,
) -> None:
    proxy = await restart(provider=ScriptedProvider())
    session, ids = await mixed(proxy)
    before = await proxy.recorded(session["session_id"])
    proxy = await restart(provider=ScriptedProvider())
    after = await proxy.recorded(session["session_id"])
    assert [(i.id, i.request) for i in after] == [(i.id, i.request) for i in before]
    assert (await judged(proxy, session)).is_success
    await finalize(proxy, session, final_reward=1.0)
    exported = await proxy.export(session["session_id"], style="individual")
    assert sorted(exported[session["session_id"]]) == sorted(ids)


async def test_exports_for_training_leave_frozen_calls_out(proxy: Proxy) -> None:
    session, ids = await mixed(proxy)
    stored = await proxy.recorded(session["session_id"])
    row = (await proxy.service.sessions.by_id(session["session_id"])).row
    record = read_record(record_line(0, row, [], stored))
    assert len(record.interactions) == 5
    for style in ("individual", "concat", "messages"):
        lines = b"".join(map(row_line, rows(record, style, 1.0)))
        assert ids[-1].encode() in lines
        assert b"frozen" not in lines and b"Four it is." not in lines, style


async def test_a_session_of_frozen_calls_alone_has_no_interactions(proxy: Proxy) -> None:
    session, other = await proxy.open(task_id="t"), await proxy.open(task_id="t")
    assert (await judged(proxy, session)).is_success
    rewarded = await proxy.post("/rl/v1/set_reward", {"reward": 1.0}, session["api_key"])
    refused(rewarded, 422, "no_interactions")
    done, empty = [
        await proxy.post("/rl/v1/finalize", {"final_reward": 1.0}, one["api_key"])
        for one in (session, other)
    ]
    assert done.status_code == empty.status_code
    assert done.json().keys() == empty.json().keys()


async def test_without_stored_content_frozen_calls_keep_no_texts(
    start: Start, provider: ScriptedProvider
) -> None:
    proxy = await start("sessions.store_content=false", provider=provider, admit=10)
    session = await proxy.open(task_id="t")
    assert (await judged(proxy, session, user="somebody")).is_success
    (recorded,) = await proxy.recorded(session["session_id"])
    assert "Four" not in str(recorded) and "number" not in str(recorded)
    assert "somebody" not in str(recorded)
    assert recorded.request["frozen"]["cost_usd"] == ANSWER_USD


async def test_a_sessions_cap_refuses_further_frozen_calls(restart: Restart) -> None:
    proxy = await restart(CAP, provider=ScriptedProvider())
    session, other = await proxy.open(task_id="t"), await proxy.open(task_id="t")
    for _ in range(2):
        assert (await judged(proxy, session)).is_success
    provider = ScriptedProvider()
    proxy = await restart(CAP, provider=provider)
    # The third takes it over the cap: what one costs is known when it has ended.
    await events_of(proxy, CHAT, chat_body(), session["api_key"])
    for more in ({}, {"stream": True}):
        said = refused(await judged(proxy, session, **more), 402, "spend_cap_exceeded")
        assert "1.11 USD" in said and "frozen.session_usd" in said
    body = chat_body(max_tokens=8)
    response = await proxy.post("/v1/messages", body, session["api_key"])
    refused(response, 402, "spend_cap_exceeded")
    assert response.json()["error"]["type"] == "billing_error", "in Anthropic's shape"
    assert len(provider.judge.asked) == 1
    await proxy.complete(session["api_key"])
    assert (await judged(proxy, other)).is_success
    shown = await scrape(proxy)
    assert shown("any_agent_frozen_calls_refused_total", cap="session") == 3
    assert shown("any_agent_frozen_usd_total", model="judge") == pytest.approx(2 * ANSWER_USD)
    await finalize(proxy, session, final_reward=1.0)


async def test_a_tenants_cap_spans_its_sessions(restart: Restart) -> None:
    # Of two ranks each enforces its half.
    settings = (ADMIN, "frozen.tenant_usd=2", "server.ranks=2")
    proxy = await restart(*settings, provider=ScriptedProvider())
    tenants = Tenants(proxy)
    alice, bob = tenants.key("alice"), tenants.key("bob")
    for _ in range(3):
        session = (await tenants.open(alice)).json()
        assert (await judged(proxy, session)).is_success
        await proxy.http.delete(f"/rl/v1/sessions/{session['session_id']}")
    proxy = await restart(*settings, provider=ScriptedProvider())
    tenants = Tenants(proxy)
    session = (await tenants.open(alice)).json()
    said = refused(await judged(proxy, session), 402, "spend_cap_exceeded")
    assert "tenant alice has spent 1.11" in said
    await proxy.complete(session["api_key"])
    assert (await judged(proxy, (await tenants.open(bob)).json())).is_success


@pytest.mark.parametrize("cap", ["session", "tenant"])
async def test_a_cap_holds_without_sessions(restart: Restart, cap: str) -> None:
    """Nothing is trained, and nobody is a tenant."""

    async def again() -> Proxy:
        settings = (f"frozen.{cap}_usd=2", "server.ranks=2")
        return await restart(*settings, admit=None, training=False, provider=ScriptedProvider())

    proxy = await again()
    for _ in range(3):
        assert (await proxy.post(CHAT, chat_body())).is_success
    proxy = await again()
    said = refused(await proxy.post(CHAT, chat_body()), 402, "spend_cap_exceeded")
    assert "1.11 USD" in said and f"frozen.{cap}_usd, its share" in said


async def test_each_spend_cap_is_charged_with_its_own_calls(proxy: Proxy) -> None:
    journal, sessions = proxy.service.sessions.journal, proxy.service.sessions

    def spending(**caps: float) -> SpendCaps:
        return SpendCaps(journal, FrozenConfig(**caps), ranks=1)  # type: ignore[arg-type]

    opened = await proxy.open(task_id="t")
    session = await sessions.by_id(opened["session_id"])
    # A tenant's calls within sessions leave it what it has without one, and the other way round.
    spent = spending(session_usd=1)
    await spent.add(session, "t", 5.0)
    await spent.require(None, "t")
    await spent.add(None, "t", 5.0)
    with fails_with(SpendCapExceeded, "tenant t", "5"):
        await spent.require(None, "t")
    await spent.require(None, "other")
    await spent.require(None, None)
    # A tenant's cap sees both, and takes a session's place for those without one.
    spent = spending(session_usd=1, tenant_usd=12)
    await spent.require(None, "t")
    written = await spent.add(None, "t", 20.0)
    assert {each.key for each in written} == {"frozen_usd/t", "frozen_usd_without_session/t"}
    with fails_with(SpendCapExceeded, "tenant t", "20 USD"):
        await spent.require(None, "t")
    # Whoever is no tenant counts as one, within sessions, too.
    await spent.add(session, None, 13.0)
    with fails_with(SpendCapExceeded, "without a tenant", "13 USD"):
        await spent.require(None, "")


async def test_a_usage_without_prompt_tokens_is_estimated(
    start: Start, provider: ScriptedProvider
) -> None:
    counted: list[tuple[int, int]] = []

    def cost(api: str, usage: dict[str, Any]) -> float:
        counted.append((usage["prompt_tokens"], usage["completion_tokens"]))
        return 0.0

    provider.judge.cost = cost  # type: ignore[assignment,method-assign]
    provider.judge.usage = {"prompt_tokens": 0, "completion_tokens": 3, "total_tokens": 3}
    proxy = await start(provider=provider, admit=10)
    session = await proxy.open(task_id="t")
    assert (await judged(proxy, session)).is_success
    (recorded,) = await proxy.recorded(session["session_id"])
    assert recorded.request["frozen"]["estimated"]
    long = [{"role": "user", "content": "word " * 200_000}]
    assert (await judged(proxy, session, messages=long)).is_success
    assert counted[0][0] > 0 and counted[0][1] >= 3
    assert counted[1][0] >= 200_000


def test_cached_prompt_tokens_count_as_a_reported_prompt() -> None:
    answer = MessagesResponse("x")
    answer.usage = {"input_tokens": 0, "output_tokens": 1}
    assert not answer.reports_prompt()
    # All of it stood in the provider's cache.
    answer.usage["cache_read_input_tokens"] = 7
    assert answer.reports_prompt()
    assert ids_in([{"role": "user", "content": [[1, 2], [3]]}]) == 3
    assert ids_in([{"role": "user", "content": [1, 2]}, {"role": "user", "content": "a"}]) == 2


async def test_calls_without_a_price_are_counted_and_refuse_a_cap_at_the_start(
    start: Start, provider: ScriptedProvider
) -> None:
    provider.judge.price = None
    proxy = await start(provider=provider, admit=10)
    session = await proxy.open(task_id="t")
    assert (await judged(proxy, session)).is_success
    assert (await scrape(proxy))("any_agent_frozen_unpriced_calls_total", model="judge") == 1
    provider.judge.priced = False
    require_prices(FrozenConfig(), provider)  # type: ignore[call-arg]
    with fails_with(ConfigError, "frozen.tenant_usd", "judge"):
        require_prices(FrozenConfig(tenant_usd=1), provider)  # type: ignore[call-arg]


async def test_frozen_calls_are_bounded_apart_from_calls_of_the_policy(
    start: Start, provider: ScriptedProvider
) -> None:
    settings = ("frozen.max_calls=2", "server.max_inflight_calls=1")
    proxy = await start(*settings, provider=provider, admit=10)
    session = await proxy.open(task_id="t")
    provider.judge.may_answer.clear()
    asking = [asyncio.create_task(judged(proxy, session)) for _ in range(2)]
    await until(lambda: len(provider.judge.asked) == 2)
    turned_away(await judged(proxy, session), 429, "too_many_calls")
    # They take no places of the policy's.
    await proxy.complete(session["api_key"])
    shown = await scrape(proxy)
    assert shown("any_agent_frozen_calls_running") == 2
    assert shown("any_agent_frozen_calls_refused_total", cap="max_calls") == 1
    provider.judge.may_answer.set()
    assert all(each.is_success for each in await asyncio.gather(*asking))
    shown = await scrape(proxy)
    assert shown("any_agent_frozen_calls_total", model="judge", outcome="completed") == 2
    assert shown("any_agent_frozen_tokens_total", model="judge", kind="output") == 6
    assert shown("any_agent_frozen_call_seconds_count") == 2


async def test_the_policy_and_frozen_models_are_listed(proxy: Proxy) -> None:
    listed = (await proxy.http.get("/v1/models")).json()["data"]
    assert [model["id"] for model in listed] == ["policy", "judge"]
    assert (await proxy.http.get("/v1/models/judge")).json() == listed[1]
    refused(await proxy.http.get("/v1/models/other"), 404, "model_not_found")


async def test_an_unknown_model_is_refused_where_the_setting_says_so(
    start: Start, provider: ScriptedProvider
) -> None:
    settings = ("model.unknown_model=reject", "model.policy_names=gpt-4o,mine")
    proxy = await start(*settings, provider=provider, admit=10)
    key = (await proxy.open(task_id="t"))["api_key"]
    for name in ("policy", "gpt-4o", "mine", "judge"):
        assert (await proxy.call(key, model=name)).status_code == 200
    said = refused(await proxy.call(key, model="gpt-5"), 404, "model_not_found")
    assert "'gpt-5'" in said and "'policy'" in said
    names = (await scrape(proxy)).labels("any_agent_policy_calls_by_name_total", "name")
    assert names == {"policy", "gpt-4o", "mine"}


async def test_the_policy_makes_no_embeddings_and_counts_no_others_tokens(proxy: Proxy) -> None:
    key, path = (await proxy.open(task_id="t"))["api_key"], "/v1/embeddings"
    response = await proxy.post(path, {"model": "text-embedding-3-small", "input": "a"}, key)
    assert "frozen.model_list" in refused(response, 404, "model_not_found")
    bodies: list[Any] = [{"input": "a"}, {"surprise": 1}, {"model": 1}, [], None]
    for body in bodies:
        refused(await proxy.post(path, body, key), 400, "invalid_request")
    streamed = {"model": "judge", "input": "a", "stream": True}
    refused(await proxy.post("/embeddings", streamed, key), 400, "unsupported_parameter")
    counted = await proxy.post("/v1/messages/count_tokens", chat_body(), key)
    assert "policy's tokens" in refused(counted, 400, "invalid_request")


async def test_a_frozen_model_is_called_without_a_session_only_where_nothing_is_trained(
    start: Start, provider: ScriptedProvider
) -> None:
    training = await start(provider=provider)
    refused(await training.post(CHAT, chat_body()), 401, "no_session")
    assert not provider.judge.asked
    proxy = await start(training=False, provider=provider)
    response = await proxy.post(CHAT, chat_body())
    assert response.is_success
    assert "x-any-agent-interaction" not in response.headers
    assert response.json()["id"].startswith("frozen-")
    assert proxy.service.frozen.stats.usd["judge"] == ANSWER_USD


async def test_the_end_of_the_service_ends_calls(proxy: Proxy, provider: ScriptedProvider) -> None:
    provider.judge.may_answer.clear()
    session = await proxy.open(task_id="t")
    call = asyncio.create_task(judged(proxy, session))
    await until(lambda: provider.judge.asked)
    await proxy.service.frozen.close()
    assert not len(proxy.service.frozen)
    assert provider.closed
    await asyncio.wait([call])
