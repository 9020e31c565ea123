"""`GET /rl/v1/tasks/next` of one rank."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from any_agent.auth.access import run_dir_of
from any_agent.auth.key_store import create_key
from any_agent.client.rl_client import RLClient
from any_agent.errors import InvalidRequest, NotFound
from any_agent.protocol.training import Rejection
from proxy_ext.sessions import task_advice
from tests.proxy_ext.api.test_refusals import refusal
from tests.support.errors import fails_with
from tests.support.proxy import Proxy
from tests.support.proxy_fixtures import Start
from tests.support.router import bearer

PATH = "/rl/v1/tasks/next"


async def group(proxy: Proxy, task: str, *rewards: float, key: str | None = None) -> list[str]:
    """A group of one task whose sessions have these rewards; their ids, once it is leased."""
    ids = []
    for reward in rewards:
        fields = {"task_id": task, "group_size": len(rewards)}
        session = (await proxy.post("/rl/v1/start_session", fields, key)).json()
        await proxy.complete(session["api_key"])
        await proxy.post("/rl/v1/finalize", {"final_reward": reward}, session["api_key"])
        ids.append(session["session_id"])
    assert {t.session_id for t in await proxy.lease()} == set(ids)
    return ids


async def judge(proxy: Proxy, ids: list[str], *, taught: bool) -> None:
    """What the trainer makes of a group."""
    alike = [] if taught else [Rejection(session_id=id, reason="zero_variance") for id in ids]
    trained = ids if taught else []
    await proxy.client.ack(owner="trainer", trained=trained, rejected=alike, step=1)


@pytest.fixture(autouse=True)
def fresh(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer is read anew, but in tests of those that are kept."""
    if "kept" not in request.node.name:
        monkeypatch.setattr(task_advice, "KEPT_SECONDS", 0.0)


async def facts(client: RLClient, *tasks: str) -> dict[str, tuple[str, float, int, float | None]]:
    found = await client.next_task(tasks)
    assert found.task_id in {one.task_id for one in found.candidates}
    return {
        one.task_id: (one.verdict, one.weight, one.sessions, one.mean_reward)
        for one in found.candidates
    }


async def test_a_task_is_advised_by_what_the_trainer_made_of_it(start: Start) -> None:
    proxy = await start(admit=100)
    await judge(proxy, await group(proxy, "teaches", 0, 1), taught=True)
    for _ in range(2):
        await judge(proxy, await group(proxy, "solved", 1, 1), taught=False)
    waits = await group(proxy, "waits", 0, 0)
    known = {
        "teaches": ("teaches", 1, 2, 0.5),
        "solved": ("taught_nothing", 0.25, 4, 1.0),
        "waits": ("unknown", 1, 2, 0.0),
    }
    assert await facts(proxy.client) == known
    new = {"new": ("unknown", 1, 0, None)}
    assert await facts(proxy.client, "new", "solved", "new") == new | {"solved": known["solved"]}
    assert (await proxy.client.next_task(["new"])).task_id == "new"
    await judge(proxy, waits, taught=False)
    # As the next process of the rank reads it.
    for each in (proxy, await start(admit=100)):
        known["waits"] = ("taught_nothing", 0.5, 2, 0.0)
        assert await facts(each.client) == known


async def test_without_any_task_the_answer_is_a_refusal_with_its_remedy(proxy: Proxy) -> None:
    session = await proxy.open(mode="eval", task_id="t")
    await proxy.complete(session["api_key"])
    with fails_with(NotFound, "?task_id=", code="no_known_task"):
        await proxy.client.next_task()
    refusal(await proxy.http.get(PATH), 404, "no_known_task", "task_id")


@pytest.mark.parametrize("names", [[f"t{n}" for n in range(33)], ["a b"], ["a" * 65], ["../x"]])
async def test_names_that_are_none_and_too_many_are_refused(proxy: Proxy, names: list[str]) -> None:
    with fails_with(InvalidRequest, "task_id"):
        await proxy.client.next_task(names)
    response = await proxy.http.get(PATH, params=[("task_id", name) for name in names])
    assert response.status_code == 400 and "task_id" in response.text


async def test_a_tenant_has_its_own_sessions_in_view(start: Start) -> None:
    proxy = await start("server.admin_key=operator-secret", admit=100)
    path = run_dir_of(proxy.service.config).keys
    alice, bob = (create_key(path, "tenant", tenant=name)[0] for name in ("alice", "bob"))
    await judge(proxy, await group(proxy, "secret", 1, 1, key=alice), taught=False)
    await judge(proxy, await group(proxy, "bobs", 1, 0, key=bob), taught=True)

    async def ask(key: str, **query: Any) -> httpx.Response:
        return await proxy.http.get(PATH, params=query, headers=bearer(key))

    def told(response: httpx.Response) -> dict[str, tuple[str, int]]:
        found = response.json()["candidates"]
        return {one["task_id"]: (one["verdict"], one["sessions"]) for one in found}

    assert told(await ask(alice)) == {"secret": ("taught_nothing", 2)}
    assert told(await ask(bob)) == {"bobs": ("teaches", 2)}
    assert told(await ask(bob, task_id="secret")) == {"secret": ("unknown", 0)}
    session = (await proxy.post("/rl/v1/start_session", {"task_id": "secret"}, alice)).json()
    assert (await ask(session["api_key"])).status_code == 403


async def test_evaluations_take_no_place_of_train_sessions(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_advice, "_PAGE", 2)
    proxy = await start(admit=100)
    await judge(proxy, await group(proxy, "t", 1, 1), taught=False)
    for _ in range(3):
        session = await proxy.open(mode="eval", task_id="t")
        await proxy.complete(session["api_key"])
    known = {"t": ("taught_nothing", 0.5, 2, 1.0)}
    assert await facts(proxy.client, "t") == known
    assert await facts(proxy.client) == known


async def test_all_tasks_share_a_bounded_number_of_sessions(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_advice, "_MOST", 4)
    monkeypatch.setattr(task_advice, "_PAGE", 3)
    proxy = await start(admit=100)
    for task in ("a", "b"):
        await group(proxy, task, 0, 1, 2)
    seen = {name: one[2] for name, one in (await facts(proxy.client, "a", "b")).items()}
    assert seen == {"a": 2, "b": 2}


async def test_facts_are_kept_a_moment_for_each_caller_and_a_bounded_number_of_them(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_advice, "KEPT_SECONDS", 3600.0)
    monkeypatch.setattr(task_advice, "_MOST_KEPT", 2)
    proxy = await start(admit=100)
    advice = proxy.service.task_advice
    empty = await advice.facts(["t"], None)
    await group(proxy, "t", 0, 1)
    assert await advice.facts(["t"], None) == empty, "no read in between"
    assert [one.sessions for one in await advice.facts(["t", "t"], "alice")] == [0]
    assert [one.sessions for one in await advice.facts([], None)] == [2]
    assert len(advice._kept) == 2
    # The oldest one has made room.
    assert [one.sessions for one in await advice.facts(["t"], None)] == [2]


@pytest.mark.parametrize(
    ("teacher", "verdicts"),
    [
        ((), ("taught_nothing", "unknown")),
        (("train.teacher=t", "train.teacher_coef=1"), ("teaches", "teaches")),
        (
            ("train.reward_coef=0", "train.kl_coef=1", "train.kl_estimator=k2"),
            ("teaches", "teaches"),
        ),
    ],
    ids=["rewards", "teacher", "reference"],
)
async def test_where_steps_take_all_groups_rewards_judge_unless_another_model_teaches(
    start: Start, teacher: tuple[str, ...], verdicts: tuple[str, str]
) -> None:
    """Rewards of calls leave the verdict open: their mean is the score, not their sum."""
    proxy = await start("train.dynamic_sampling=keep", *teacher, admit=100)
    await judge(proxy, await group(proxy, "final", 1, 1), taught=True)
    ids = []
    for calls in (1, 2):
        session = await proxy.open(task_id="calls", group_size=2)
        for n in range(calls):
            await proxy.complete(session["api_key"], [{"role": "user", "content": f"{n}"}])
        await proxy.post("/rl/v1/set_reward", {"reward": 1}, session["api_key"])
        await proxy.post("/rl/v1/finalize", {}, session["api_key"])
        ids.append(session["session_id"])
    assert len(await proxy.lease()) == 2
    await judge(proxy, ids, taught=True)
    found = {name: one[0] for name, one in (await facts(proxy.client)).items()}
    assert found == dict(zip(("final", "calls"), verdicts, strict=True))
