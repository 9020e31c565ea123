"""GET /rl/v1/sessions: all that there ever was, filtered, in pages, a tenant's own for its keys."""

from __future__ import annotations

from typing import Any

from tests.proxy_ext.test_tenants import ADMIN, Tenants
from tests.support.archives import archive_now
from tests.support.proxy import Proxy
from tests.support.proxy_fixtures import Start

AFTER = "x-any-agent-after"


async def listed(proxy: Proxy, **query: Any) -> list[dict[str, Any]]:
    response = await proxy.http.get("/rl/v1/sessions", params=query)
    assert response.status_code == 200, response.text
    return list(response.json())


async def test_ended_sessions_are_listed_too(proxy: Proxy) -> None:
    done = await proxy.finished_session(task_id="t", group_size=1, reward=0.5)
    gone = await proxy.open(mode="eval")
    path = f"/rl/v1/sessions/{gone['session_id']}/abort"
    await proxy.post(path, {"reason": "no use"}, gone["api_key"])
    live = await proxy.open()
    await proxy.complete(live["api_key"])
    await proxy.lease()
    await proxy.client.ack(owner="trainer", trained=[done["session_id"]], rejected=[], step=3)
    shown = await listed(proxy)
    assert [s["session_id"] for s in shown] == [s["session_id"] for s in (live, gone, done)]
    assert [s["state"] for s in shown] == ["open", "aborted", "trained"]
    assert [s["number"] for s in shown] == [3, 2, 1]
    assert [s["interactions"] for s in shown] == [1, 0, 1]
    assert (shown[1]["reason"], shown[1]["ended_at"] > 0) == ("no use", True)
    assert (shown[2]["final_reward"], shown[2]["step"], shown[2]["task_id"]) == (0.5, 3, "t")
    assert [s["session_id"] for s in await listed(proxy, state="open")] == [live["session_id"]]
    assert [s["state"] for s in await listed(proxy, task_id="t")] == ["trained"]
    assert await listed(proxy, state="leased") == []


async def test_an_archived_session_is_listed_as_archived(start: Start) -> None:
    proxy = await start()
    session = await proxy.open(mode="eval")
    await proxy.complete(session["api_key"])
    await proxy.post("/rl/v1/finalize", {}, session["api_key"])
    assert await archive_now(proxy) == 1
    (shown,) = await listed(proxy)
    assert (shown["content"], shown["state"]) == ("archived", "evaluated")
    id = session["session_id"]
    info = (await proxy.http.get(f"/rl/v1/sessions/{id}")).json()
    assert (info["content"], info["interactions"]) == ("archived", 0)
    # It is as sealed as before, and can still be deleted.
    response = await proxy.call(session["api_key"])
    assert (response.status_code, response.json()["error"]["state"]) == (410, "evaluated")
    for _ in range(2):
        response = await proxy.http.delete(f"/rl/v1/sessions/{id}")
        assert response.json()["content"] == "deleted", response.text
    assert proxy.service.archive.bytes == 0


async def test_pages_go_through_all_sessions_once(proxy: Proxy) -> None:
    ids = [(await proxy.open(mode="eval"))["session_id"] for _ in range(5)]
    found: list[str] = []
    after = ""
    for _ in range(9):
        params: dict[str, Any] = {"limit": 2, "after": after}
        response = await proxy.http.get("/rl/v1/sessions", params=params)
        found += [s["session_id"] for s in response.json()]
        if AFTER not in response.headers:
            break
        after = response.headers[AFTER]
    assert found == ids[::-1]
    for wrong in ("x", "0", "0:", "0:-1", "0:1:2", ":", "0:" + "9" * 19):
        response = await proxy.http.get("/rl/v1/sessions", params={"after": wrong})
        assert response.status_code == 400, wrong
    for query in ("state=odd", "limit=0", "limit=1001", "unknown=1"):
        assert (await proxy.http.get(f"/rl/v1/sessions?{query}")).status_code == 400, query


async def test_sessions_are_found_by_the_given_name_of_their_group(proxy: Proxy) -> None:
    for _ in range(2):
        await proxy.open(group_id="g", group_size=2)
    await proxy.open(group_id="h", group_size=2)
    assert [s["group_id"] for s in await listed(proxy, group_id="g")] == ["g", "g"]


async def test_sessions_are_filtered_by_the_reward_that_the_list_shows(proxy: Proxy) -> None:
    await proxy.finished_session(reward=0.0, group_size=1)
    # As most agents do: the last call is rewarded, and finalizing adds nothing.
    session = await proxy.open(group_size=1)
    await proxy.complete(session["api_key"])
    await proxy.post("/rl/v1/set_reward", {"reward": 0.5}, session["api_key"])
    await proxy.post("/rl/v1/finalize", {}, session["api_key"])
    session = await proxy.open(group_size=1)
    await proxy.complete(session["api_key"])
    await proxy.post("/rl/v1/set_reward", {"reward": 0.75}, session["api_key"])
    await proxy.post("/rl/v1/finalize", {"final_reward": 0.25}, session["api_key"])
    await proxy.open()
    for query, rewards in (
        ({"min_reward": 0.5}, [1.0, 0.5]),
        ({"max_reward": 0.5}, [0.5, 0.0]),
        ({"min_reward": 0.1, "max_reward": 0.9, "state": "finalized"}, [0.5]),
        ({"min_reward": 2}, []),
    ):
        assert [s["reward"] for s in await listed(proxy, **query)] == rewards, query
    assert (await proxy.http.get("/rl/v1/sessions?min_reward=nan")).status_code == 400


async def test_sessions_are_filtered_by_a_part_of_their_reason_and_by_opening_time(
    proxy: Proxy,
) -> None:
    opened = [await proxy.open(mode="eval") for _ in range(3)]
    first, second, third = (one["session_id"] for one in opened)
    for id, reason in ((first, "Tool FAILED: no such file"), (second, "100% done")):
        await proxy.http.post(f"/rl/v1/sessions/{id}/abort", json={"reason": reason})
    times = {one["session_id"]: one["created_at"] for one in await listed(proxy)}
    for query, ids in (
        ({"reason": "failed: no"}, [first]),
        ({"reason": "%"}, [second]),
        ({"reason": "nothing like it"}, []),
        ({"reason": ""}, [third, second, first]),
        ({"created_after": times[second]}, [third, second]),
        ({"created_before": times[second]}, [first]),
        ({"created_after": times[second], "created_before": times[third]}, [second]),
    ):
        assert [one["session_id"] for one in await listed(proxy, **query)] == ids, query
    for wrong in ("created_after=nan", "created_before=x", f"reason={'x' * 129}"):
        assert (await proxy.http.get(f"/rl/v1/sessions?{wrong}")).status_code == 400, wrong


async def test_a_tenant_is_listed_its_own_sessions_alone(start: Start) -> None:
    proxy = await start(ADMIN)
    await proxy.admit(9)
    tenants = Tenants(proxy)
    keys = {name: tenants.key(name) for name in ("alice", "bob")}
    own = {
        name: (await tenants.open(key, mode="train", group_id="g", group_size=1)).json()
        for name, key in keys.items()
    }
    for name, key in keys.items():
        for query in ("", "?group_id=g", f"?tenant={name}"):
            response = await proxy.http.get(
                f"/rl/v1/sessions{query}", headers={"authorization": f"Bearer {key}"}
            )
            (shown,) = response.json()
            assert (shown["session_id"], shown["tenant"]) == (own[name]["session_id"], name)
            assert shown["group_id"] == "g"
    refused = await proxy.http.get(
        "/rl/v1/sessions?tenant=bob", headers={"authorization": f"Bearer {keys['alice']}"}
    )
    assert refused.status_code == 403
    # The operator sees both, by their tenants or all.
    assert len(await listed(proxy)) == 2
    assert [s["tenant"] for s in await listed(proxy, tenant="bob", group_id="g")] == ["bob"]
