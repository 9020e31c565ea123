"""What a scrape of one rank shows, and to whom."""

from __future__ import annotations

import asyncio
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from any_agent.completions.untrainable import REASONS
from any_agent.types import SessionState
from proxy_ext.metrics import METRICS
from tests.support.archives import archive_now
from tests.support.proxy import HELLO, Proxy, until
from tests.support.proxy_fixtures import Start
from tests.support.scripted_engine import ScriptedEngine


class Scrape:
    """The samples of one answer."""

    def __init__(self, text: str) -> None:
        self.families = list(text_string_to_metric_families(text))
        self._samples = [s for family in self.families for s in family.samples]

    def __call__(self, name: str, **labels: str) -> float:
        """The sum over the samples that have these labels; an error if there is none."""
        found = [
            s.value for s in self._samples if s.name == name and labels.items() <= s.labels.items()
        ]
        assert found, f"no {name} with {labels}"
        return sum(found)

    def labels(self, name: str, label: str) -> set[str]:
        return {s.labels[label] for s in self._samples if s.name == name}


async def scrape(proxy: Proxy) -> Scrape:
    response = await proxy.http.get("/metrics")
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return Scrape(response.text)


async def until_shown(proxy: Proxy, name: str, value: float) -> None:
    async def shown() -> bool:
        return (await scrape(proxy))(name) == value

    await until(shown, f"{name} is {value}")


async def test_every_metric_of_the_table_is_shown(proxy: Proxy) -> None:
    shown = {f.name: f.type for f in (await scrape(proxy)).families}
    assert {m.name.removesuffix("_total"): m.kind for m in METRICS} == {
        name: kind for name, kind in shown.items() if name.startswith("any_agent_")
    }
    assert all(m.name.endswith("_total") == (m.kind == "counter") for m in METRICS)
    assert "process_resident_memory_bytes" in shown


async def test_sessions_balance_and_survive_a_restart(start: Start, proxy: Proxy) -> None:
    finished = [await proxy.finished_session() for _ in range(3)]
    await proxy.finished_session(mode="eval")
    aborted = await proxy.open()
    await proxy.post(f"/rl/v1/sessions/{aborted['session_id']}/abort", {}, aborted["api_key"])
    await proxy.open()
    await proxy.lease()
    await proxy.client.ack(owner="trainer", trained=[finished[0]["session_id"]], rejected=[])
    for one in (proxy, await start()):
        now = await scrape(one)
        for mode, number in (("train", 5), ("eval", 1)):
            assert now("any_agent_sessions_created_total", mode=mode) == number
            assert now("any_agent_sessions", mode=mode) == number
        assert now.labels("any_agent_sessions", "rank") == {"0"}
        states = {state: now("any_agent_sessions", state=state, rank="0") for state in SessionState}
        assert {state: number for state, number in states.items() if number} == {
            "open": 1,
            "finalized": 2,
            "trained": 1,
            "aborted": 1,
            "evaluated": 1,
        }
    other = await scrape(await start(rank=1))
    assert other("any_agent_sessions_created_total", rank="1") == 0, "ranks share nothing"


async def test_calls_tokens_and_continuations_are_counted(
    proxy: Proxy, engine: ScriptedEngine
) -> None:
    chat = proxy.service.completer.chat
    session = await proxy.open()
    key = session["api_key"]
    end = chat.stop_token_ids[0]
    prompts = []
    messages: list[Any] = list(HELLO)
    for turn in range(3):
        engine.say([*chat.tokenizer.encode(f"turn {turn}"), end])
        answer = await proxy.complete(key, messages, max_tokens=30, temperature=0.5)
        prompts.append(answer["usage"]["prompt_tokens"])
        messages += [answer["choices"][0]["message"], {"role": "user", "content": "go on"}]
    # The same conversation with nothing new, and another one.
    await proxy.stream(key, messages[:2])
    await proxy.stream(key, [{"role": "user", "content": "something else"}])
    now = await scrape(proxy)
    assert now("any_agent_calls_total", mode="train", outcome="completed") == 5
    assert now("any_agent_calls_total", outcome="failed") == 0
    shown = {
        how: now("any_agent_interactions_total", mode="train", continuation=how)
        for how in ("first", "exact", "branch", "root")
    }
    assert shown == {"first": 1, "exact": 2, "branch": 1, "root": 1}
    assert now.labels("any_agent_branches_total", "reason") == {
        "new_conversation",
        "no_new_message",
    }
    assert now("any_agent_branches_total") == 2
    recorded = await proxy.recorded(session["session_id"])
    sampled = sum(len(i.output_ids) for i in recorded)
    assert now("any_agent_output_tokens_total", mode="train") == sampled
    assert now("any_agent_prompt_tokens_total", mode="train") > sum(prompts)
    assert now("any_agent_overrides_total", parameter="temperature") == 3
    assert now("any_agent_call_seconds_count") == 5
    assert now("any_agent_first_token_seconds_count") == 2
    assert now("any_agent_journal_writes_total") >= 6
    assert now("any_agent_journal_commit_seconds_count") >= 6


async def test_untrainable_interactions_are_counted_by_reason(proxy: Proxy) -> None:
    train, graded = await proxy.open(), await proxy.open(mode="eval")
    for asked in ({}, {"presence_penalty": 1}, {"logit_bias": {"5": 1}, "n": 3}):
        await proxy.complete(train["api_key"], **asked)
        # Nothing is lost where nothing is trained on.
        await proxy.complete(graded["api_key"], **asked)
    now, name = await scrape(proxy), "any_agent_untrainable_interactions_total"
    shown = {reason: now(name, reason=reason) for reason in now.labels(name, "reason")}
    assert shown.keys() == set(REASONS)
    assert {reason: n for reason, n in shown.items() if n} == {"penalty": 1, "logit_bias": 3}


async def test_calls_that_fail_are_aborted_or_reach_nobody_are_counted(
    proxy: Proxy, engine: ScriptedEngine
) -> None:
    session = await proxy.open()
    engine.fail("status", status=400)
    assert (await proxy.call(session["api_key"])).status_code == 400
    engine.hold(1)
    call = asyncio.create_task(proxy.call(session["api_key"]))
    await until_shown(proxy, "any_agent_calls_running", 1)
    id = session["session_id"]
    await proxy.post(f"/rl/v1/sessions/{id}/abort", {}, session["api_key"])
    await call
    kept = await proxy.open()
    answer = await proxy.complete(kept["api_key"])
    live = proxy.service.sessions.live[kept["session_id"]]
    for _ in range(2):
        await proxy.service.sessions.mark_undelivered(live, live.tree[answer["id"]])
    now = await scrape(proxy)
    assert now("any_agent_undelivered_answers_total") == 1
    assert now("any_agent_calls_running") == 0
    assert now("any_agent_calls_total", outcome="failed", mode="train") == 1
    assert now("any_agent_calls_total", outcome="aborted", mode="train") == 1
    assert now("any_agent_calls_total", outcome="completed") == 1


async def test_slots_refused_opens_and_calls_without_a_session_are_counted(start: Start) -> None:
    proxy = await start(admit=3)
    await proxy.open(task_id="t", group_size=2)
    await proxy.open()
    response = await proxy.http.post("/rl/v1/start_session", json={})
    assert response.status_code == 429
    await proxy.http.post("/rl/v1/start_session", json={"group_size": 2})
    now = await scrape(proxy)
    assert now("any_agent_slots_admitted") == 3
    assert now("any_agent_slots_limit") == 3
    assert now("any_agent_slots_reserved") == 1
    assert now("any_agent_opens_refused_total", code="no_capacity") == 1
    assert now("any_agent_opens_refused_total", code="invalid_request") == 1
    waiter = asyncio.create_task(proxy.open(wait=60))
    await until_shown(proxy, "any_agent_slots_waiting", 1)
    await proxy.admit(4)
    await waiter
    await proxy.client.set_run("finished", step=1, checkpoint=None)
    await proxy.http.post("/rl/v1/start_session", json={})
    now = await scrape(proxy)
    assert now("any_agent_slots_waiting") == 0
    assert now("any_agent_opens_refused_total", code="run_finished") == 1
    assert (await proxy.call(None)).status_code == 200
    now = await scrape(proxy)
    assert now("any_agent_calls_total", mode="none", outcome="completed") == 1
    assert now("any_agent_output_tokens_total", mode="none") > 0
    assert now("any_agent_interactions_total") == 0


async def test_weight_updates_and_their_pauses_are_counted(
    proxy: Proxy, engine: ScriptedEngine
) -> None:
    assert (await scrape(proxy))("any_agent_update_pauses_total") == 0
    for version in (3, 4):
        await proxy.client.pause(ttl=60)
        await proxy.client.pause(ttl=60)  # repeated, as after a lost answer
        during = (await scrape(proxy))("any_agent_update_pause_seconds_total")
        assert during > 0
        engine.weight_version = str(version)
        await proxy.client.publish_version(version=version, path="w", step=version)
        await proxy.client.resume()
    now = await scrape(proxy)
    assert now("any_agent_weight_version", rank="0") == 4
    assert now("any_agent_update_pauses_total") == 2
    after = now("any_agent_update_pause_seconds_total")
    assert after >= during
    assert (await scrape(proxy))("any_agent_update_pause_seconds_total") == after


async def test_an_engine_that_dies_is_shown(proxy: Proxy, engine: ScriptedEngine) -> None:
    key = (await proxy.open())["api_key"]
    assert (await scrape(proxy))("any_agent_engine_up") == 1
    engine.hold(2)
    call = asyncio.create_task(proxy.stream(key))
    await until(lambda: engine.requests)
    await engine.die()
    await until_shown(proxy, "any_agent_engine_up", 0)
    await engine.revive()
    await call
    now = await scrape(proxy)
    assert now("any_agent_engine_up") == 1
    assert now("any_agent_resubmissions_total", reason="death") == 1
    assert now("any_agent_resubmissions_total", reason="update") == 0


async def test_trees_journal_and_archive_are_shown_with_their_bytes(start: Start) -> None:
    proxy = await start("sessions.hot_bytes=0")
    session = await proxy.open(mode="eval")
    await proxy.complete(session["api_key"])
    # Another one that wants room.
    await proxy.open(mode="eval")
    await proxy.complete(session["api_key"])
    now = await scrape(proxy)
    assert now("any_agent_tree_reads_total") == proxy.service.sessions.trees.reads >= 1
    assert now("any_agent_tree_bytes") == proxy.service.sessions.trees.bytes
    assert now("any_agent_journal_bytes") > 4096
    assert now("any_agent_archived_sessions") == now("any_agent_archive_bytes") == 0
    await proxy.post("/rl/v1/finalize", {}, session["api_key"])
    await archive_now(proxy)
    now = await scrape(proxy)
    assert now("any_agent_archived_sessions") == 1
    assert now("any_agent_archive_bytes") > 100
