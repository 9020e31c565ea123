"""A client written for AReaL, over one rank: the URL is all that is changed."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import jsonschema  # type: ignore[import-untyped]
import numpy as np
import pytest
from openai.types.chat import ChatCompletion
from pydantic import TypeAdapter

from any_agent.chat import ChatFormat
from any_agent.errors import StoreUnavailable
from any_agent.types import SessionState
from tests.proxy_ext.calls.test_faults import SlowJournal
from tests.support.areal_client import ArealClient, Episode
from tests.support.messages import CALL, CHAT_TOOLS
from tests.support.proxy import HELLO, Proxy, noticed_hang_up, our_app, until
from tests.support.proxy_fixtures import Start
from tests.support.scripted_engine import ScriptedEngine

ADMIN = "operator-secret"
COMPONENTS = our_app().openapi()["components"]


@pytest.fixture
async def proxy(start: Start) -> Proxy:
    """No trainer has admitted anything; groups have two sessions."""
    return await start(f"server.admin_key={ADMIN}")


@pytest.fixture
async def client(proxy: Proxy) -> AsyncIterator[ArealClient]:
    async with ArealClient(proxy.url, ADMIN) as client:
        yield client


@contextmanager
def refused(status: int, code: str) -> Iterator[pytest.ExceptionInfo[httpx.HTTPStatusError]]:
    with pytest.raises(httpx.HTTPStatusError) as error:
        yield error
    response = error.value.response
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)


async def granted(client: ArealClient, task: str = "task") -> Episode:
    """An episode on a slot of its own."""
    await client.grant_capacity()
    return await client.start(task)


async def rewarded(client: ArealClient) -> Episode:
    """One with a call and a reward, still open."""
    episode = await granted(client)
    await episode.chat("x")
    await episode.set_last_reward(1.0)
    return episode


async def played(client: ArealClient) -> tuple[Episode, dict[str, Any], dict[str, Any]]:
    """One that has ended, and its two answers."""
    episode = await granted(client)
    first = await episode.chat("hello")
    second = await episode.chat("hello", first["choices"][0]["message"]["content"], "again")
    await episode.set_last_reward(1.0)
    await episode.end()
    return episode, first, second


async def test_an_episode_of_areals_client_is_rewarded_and_exported(
    proxy: Proxy, client: ArealClient
) -> None:
    assert await client.health() == {"status": "ok", "workers": 1}
    assert await client.grant_capacity() == {"capacity": 1}
    episode = await client.start("task")
    assert episode.session_id == "task-0-0"
    first = await episode.chat("What is 12 * 15 + 3?")
    said = first["choices"][0]["message"]["content"]
    second = await episode.chat("What is 12 * 15 + 3?", said, "Sure?")
    assert await episode.set_reward(0.5, first["id"]) == {"message": "success"}
    assert await episode.set_last_reward(1.0) == {"message": "success"}
    assert (await proxy.capacity())["grants"] == 0
    assert await episode.end() == {"message": "success", "interaction_count": 2}
    rows = await client.export("task-0-0", discount=0.9)
    assert list(rows) == [first["id"], second["id"]]
    assert [row["reward"] for row in rows.values()] == pytest.approx([0.5 + 0.9, 1.0])
    recorded = await proxy.recorded("task-0-0")
    for row, interaction in zip(rows.values(), recorded, strict=True):
        length = row["input_ids"].shape[1]
        assert row["rewards"].shape == (1,)
        for name in ("loss_mask", "logprobs", "versions", "attention_mask"):
            assert row[name].shape == (1, length), name
        output = len(interaction.output_ids)
        assert row["input_ids"][0, -output:].tolist() == interaction.output_ids.tolist()
        assert row["loss_mask"].sum() == output
        assert np.array_equal(row["logprobs"][0, -output:], interaction.output_logprobs)
        assert (row["versions"][0, :-output] == -1).all()
        assert row["attention_mask"].all()


async def test_the_concat_style_exports_one_row_for_a_conversation(client: ArealClient) -> None:
    episode, _, second = await played(client)
    rows = await client.export(episode.session_id, style="concat")
    assert list(rows) == [second["id"]]
    individual = await client.export(episode.session_id)
    masks = [row["loss_mask"].sum() for row in individual.values()]
    assert rows[second["id"]]["loss_mask"].sum() == sum(masks)


async def test_the_session_id_before_the_path_works_without_keys(start: Start) -> None:
    """Without keys, the session's id before the path, with /v1 and without."""
    proxy = await start()
    async with ArealClient(proxy.url, None) as client:
        await client.grant_capacity()
        episode = await client.start("task-0", prefixed=True)
        assert episode.session_id == "task-0-0-0"
        completion = await client.post(
            f"{episode.session_id}/v1/chat/completions",
            {"model": "default", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4},
            "DUMMY",
        )
        await episode.chat("x")
        await episode.set_reward(0.25, completion["id"])
        await episode.set_last_reward(0.5)
        assert (await episode.end())["interaction_count"] == 2
        rows = await client.export(episode.session_id)
        assert [row["reward"] for row in rows.values()] == [0.25, 0.5]


async def test_a_session_starts_without_a_task(proxy: Proxy, client: ArealClient) -> None:
    """The first session of all is called as the documents call it."""
    await client.grant_capacity()
    for _ in range(2):
        once = await proxy.http.post("/rl/start_session", headers={"Idempotency-Key": "once"})
        assert once.json()["session_id"] == "task-0-0"
    # On the trainer's slots it is no member of a group, either.
    await proxy.admit(2)
    for number in (1, 2):
        assert (await proxy.http.post("/rl/start_session", json={})).json()[
            "session_id"
        ] == f"task-0-{number}"
    rows = [session.row for session in proxy.service.sessions.live.values()]
    assert [(row.task_id, row.group_id) for row in rows] == [(None, None)] * 3
    refused = await proxy.http.post("/rl/start_session")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "no_capacity")


async def test_sessions_of_one_task_are_numbered(
    start: Start, proxy: Proxy, client: ArealClient
) -> None:
    for _ in range(13):
        await client.grant_capacity()
    opened = await asyncio.gather(*(client.start("task") for _ in range(11)))
    assert {e.session_id for e in opened} == {f"task-0-{k}" for k in range(11)}
    assert (await client.start("other")).session_id == "other-0-0"
    restarted = await start(f"server.admin_key={ADMIN}")
    async with ArealClient(restarted.url, ADMIN) as again:
        assert (await again.start("task")).session_id == "task-0-11"


async def test_each_session_needs_its_grant(proxy: Proxy, client: ArealClient) -> None:
    with refused(429, "no_capacity") as error:
        await client.start("task")
    assert "retry-after" in error.value.response.headers
    waiting = asyncio.create_task(client.start_when_there_is_room("task"))
    assert await client.grant_capacity() == {"capacity": 1}
    assert (await waiting).session_id == "task-0-0"
    with refused(429, "no_capacity"):
        await client.start("task")
    # What was refused has used up no number.
    await client.grant_capacity()
    assert (await client.start("task")).session_id == "task-0-1"


async def test_grants_outlive_the_proxy_and_count_apart(start: Start, client: ArealClient) -> None:
    for _ in range(3):
        await client.grant_capacity()
    await client.start("task")
    proxy = await start(f"server.admin_key={ADMIN}")
    assert (await proxy.capacity())["admitted"] == 0
    assert (await proxy.capacity())["reserved"] == 0
    assert (await proxy.capacity())["running"] == 0, "no trainer's"
    async with ArealClient(proxy.url, ADMIN) as again:
        assert await again.grant_capacity() == {"capacity": 3}
        for _ in range(3):
            await again.start("task")
        with refused(429, "no_capacity"):
            await again.start("task")
        # A trainer's slots are not used up by them.
        await proxy.admit(2)
        await again.start("task")
        await again.start("task")


async def test_without_grants_a_task_is_a_group(proxy: Proxy, client: ArealClient) -> None:
    await proxy.admit(4)
    episodes = [await client.start("task") for _ in range(4)]
    assert [e.session_id for e in episodes] == [f"task-0-{k}" for k in range(4)]
    for k, episode in enumerate(episodes):
        await episode.chat("x")
        await episode.set_last_reward(float(k % 2))
        await episode.end()
    groups = [t.group_id for t in (await proxy.lease()) + (await proxy.lease())]
    assert len(groups) == 4
    assert len(set(groups)) == 2


async def test_a_key_is_used_for_one_episode_after_another(
    proxy: Proxy, client: ArealClient
) -> None:
    """Each start ends the session before, as agents need that read their key once."""
    for _ in range(3):
        await client.grant_capacity()
    key, seen = None, []
    for k in range(3):
        episode = await client.start("task", api_key=key)
        assert key in (None, episode.api_key)
        key = episode.api_key
        seen.append(episode.session_id)
        await episode.chat("x")
        await episode.set_last_reward(float(k))
    assert seen == ["task-0-0", "task-0-1", "task-0-2"]
    states = [(await proxy.service.sessions.by_id(id)).state for id in seen]
    assert states == [SessionState.FINALIZED, SessionState.FINALIZED, SessionState.OPEN]


async def test_the_next_episode_waits_for_its_slot(proxy: Proxy, client: ArealClient) -> None:
    episode = await rewarded(client)
    following = asyncio.create_task(client.start("task", api_key=episode.api_key))
    sessions = proxy.service.sessions

    async def ended() -> bool:
        return (await sessions.by_id("task-0-0")).state is SessionState.FINALIZED

    await until(ended)
    await client.grant_capacity()
    assert (await following).session_id == "task-0-1"


async def test_a_session_ends_although_its_client_leaves_meanwhile(
    proxy: Proxy, client: ArealClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session ends in memory, too: its lane and its group would wait for it otherwise."""
    episode = await rewarded(client)
    slow = SlowJournal(proxy, monkeypatch)
    noticed = noticed_hang_up(monkeypatch)
    following = asyncio.create_task(client.start("task", api_key=episode.api_key))
    await until(lambda: slow.waiting)
    following.cancel()
    await asyncio.wait_for(noticed.wait(), 60)
    slow.go.set()

    async def ended() -> bool:
        (session,) = proxy.service.sessions.live.values()
        row = await proxy.service.journal.session(session.id)
        assert row is not None
        return row.state == session.state == SessionState.FINALIZED

    await until(ended)


async def test_an_episode_without_reward_is_not_taken_for_zero(client: ArealClient) -> None:
    episode = await granted(client)
    await episode.chat("x")
    for again in (episode.end(), client.start("task", api_key=episode.api_key)):
        with refused(422, "no_reward"):
            await again
    await episode.set_last_reward(0.0)
    assert (await episode.end())["interaction_count"] == 1


async def test_an_empty_episode_is_thrown_away(proxy: Proxy, client: ArealClient) -> None:
    episode = await granted(client)
    for _ in range(2):
        assert await episode.end() == {"message": "success", "interaction_count": 0}
    assert await client.export(episode.session_id) == {}
    session = await proxy.service.sessions.by_id(episode.session_id)
    assert session.state is SessionState.ABORTED


async def test_an_end_whose_answer_was_lost_is_told_again(
    proxy: Proxy, client: ArealClient
) -> None:
    episode = await rewarded(client)
    for _ in range(2):
        once = {"Idempotency-Key": "reward"}
        given = await proxy.post("/rl/set_reward", {"reward": 1.0}, episode.api_key, **once)
        assert given.json() == {"message": "success"}
    for _ in range(3):
        assert await episode.end() == {"message": "success", "interaction_count": 1}
    with refused(410, "session_closed"):
        await episode.chat("x")


async def test_an_export_waits_for_the_end(client: ArealClient) -> None:
    episode = await granted(client)
    await episode.chat("x")
    export = asyncio.create_task(client.export(episode.session_id))
    await episode.set_last_reward(1.0)
    assert not export.done()
    await episode.end()
    assert [row["reward"] for row in (await export).values()] == [1.0]


async def test_an_export_does_not_hold_up_a_stop(proxy: Proxy, client: ArealClient) -> None:
    episode = await granted(client)
    export = asyncio.create_task(client.export(episode.session_id))
    # It waits by the time that another request was answered.
    await client.health()
    await proxy.service.drain()
    with refused(503, "draining"):
        await export


async def test_a_grant_is_not_lost_with_a_failed_open(
    proxy: Proxy, client: ArealClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.grant_capacity()
    with monkeypatch.context() as broken:

        async def fail(*_: object) -> None:
            raise StoreUnavailable("no room")

        broken.setattr(proxy.service.journal, "commit", fail)
        for work in (client.start("task"), client.grant_capacity()):
            with refused(503, "store_unavailable"):
                await work
    await client.start("task")
    with refused(429, "no_capacity"):
        await client.start("task")


async def test_an_export_takes_a_session_out_of_our_training(
    proxy: Proxy, client: ArealClient
) -> None:
    episode, *_ = await played(client)
    first = await client.export(episode.session_id)
    again = await client.export(episode.session_id)
    assert first.keys() == again.keys(), "an answer may be lost"
    assert await proxy.lease() == []
    session = await proxy.service.sessions.by_id(episode.session_id)
    assert (session.state, session.row.owner) == (SessionState.TRAINED, "export")
    assert not proxy.service.sessions.live


async def test_bad_starts_and_exports_of_nothing_are_refused(
    proxy: Proxy, client: ArealClient
) -> None:
    for body, param in (
        ({"task_id": "a/b"}, "task_id"),
        ({"task_id": "17:3"}, "task_id"),
        ({"task_id": "t" * 49}, "task_id"),
        ({"task_id": "t", "mode": "eval"}, "mode"),
    ):
        response = await proxy.post("/rl/start_session", body, ADMIN)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), body
    for name in ("unknown-0-7", "nothing"):
        with refused(404, "session_not_found"):
            await client.export(name)


async def test_wrong_and_session_keys_may_not_grant_start_or_export(
    proxy: Proxy, client: ArealClient
) -> None:
    episode = await granted(client)
    for path, body in (
        ("/grant_capacity", {}),
        ("/rl/start_session", {"task_id": "t"}),
        ("/export_trajectories", {"session_id": episode.session_id}),
    ):
        for key, status in (("wrong", 401), (episode.api_key, 403)):
            response = await proxy.post(path, body, key)
            assert response.status_code == status, (path, response.text)
    for path in ("/rl/set_reward", "/rl/end_session"):
        response = await proxy.post(path, {"reward": 1} if "reward" in path else {}, "wrong")
        assert response.status_code == 401
    forged = await proxy.post("/rl/start_session", {"task_id": "t", "api_key": "sk-x"}, ADMIN)
    assert forged.status_code == 401
    # An id is no key.
    episode.prefixed = True
    with refused(401, "invalid_api_key"):
        await episode.set_last_reward(1.0)


# -- what an export says ---------------------------------------------------------------------------


async def interactions(proxy: Proxy, client: ArealClient, session_id: str) -> list[dict[str, Any]]:
    body = {"session_id": session_id, "discount": 0.5}
    out = await client.post("export_trajectories", body, ADMIN)
    for id, one in out["interactions"].items():
        assert one["interaction_id"] == id
        shape = {"$ref": "#/components/schemas/ArealInteraction", "components": COMPONENTS}
        jsonschema.validate(one, shape)
        if one["completion"] is not None:
            assert one["completion"]["id"] == id
            # Strictly: the SDK itself takes anything.
            text = json.dumps(one["completion"])
            TypeAdapter(ChatCompletion).validate_json(text, strict=True)
    recorded = {i.id: i for i in await proxy.recorded(session_id)}
    assert list(out["interactions"]) == list(recorded)
    for id, one in out["interactions"].items():
        prompt, node = one["model_response"], recorded[id]
        row = base64.b64decode(one["tensor_dict"]["input_ids"]["data"])
        ids = np.frombuffer(row, "<i4").tolist()
        assert prompt["input_tokens"] + prompt["output_tokens"] == ids
        assert prompt["output_tokens"] == node.output_ids.tolist()
        assert prompt["output_logprobs"] == node.output_logprobs.tolist()
        assert prompt["output_versions"] == node.output_versions.tolist()
        assert one["parent_id"] == node.parent_id
    return list(out["interactions"].values())


async def test_an_export_has_the_messages_that_were_said(proxy: Proxy, client: ArealClient) -> None:
    episode, first, second = await played(client)
    said = first["choices"][0]["message"]["content"]
    root, child = await interactions(proxy, client, episode.session_id)
    assert (root["parent_id"], child["parent_id"]) == (None, first["id"])
    assert [m["content"] for m in child["messages"]] == ["hello", said, "again"]
    assert root["output_message_list"] == [{"role": "assistant", "content": said}]
    for one, answer in ((root, first), (child, second)):
        completion = one["completion"]
        for name in ("id", "object", "created", "choices", "usage"):
            assert completion[name] == answer[name], name
        reason = one["completion"]["choices"][0]["finish_reason"]
        assert one["model_response"]["stop_reason"] == reason


async def test_calls_of_other_apis_are_exported_as_chat_completions(
    proxy: Proxy, client: ArealClient
) -> None:
    for path, body in (
        ("responses", {"input": "x", "max_output_tokens": 16}),
        ("completions", {"prompt": "x"}),
        ("messages", {"messages": HELLO, "max_tokens": 16}),
    ):
        episode = await granted(client)
        response = await proxy.post(f"/v1/{path}", {"model": "m", **body}, episode.api_key)
        assert response.status_code == 200, response.text
        await episode.set_last_reward(1.0)
        await episode.end()
        (one,) = await interactions(proxy, client, episode.session_id)
        said = {"refusal": None, **one["output_message_list"][0], "role": "assistant"}
        assert one["completion"]["choices"][0]["message"] == said


async def test_an_exported_tool_call_is_the_one_that_was_answered(
    proxy: Proxy, client: ArealClient, engine: ScriptedEngine, chat: ChatFormat
) -> None:
    episode = await granted(client)
    engine.say([*chat.tokenizer.encode(CALL), chat.stop_token_ids[0]])
    body = {"messages": HELLO, "tools": CHAT_TOOLS, "max_tokens": 200}
    answer = (await proxy.post("/v1/chat/completions", body, episode.api_key)).json()
    await episode.set_last_reward(1.0)
    await episode.end()
    (one,) = await interactions(proxy, client, episode.session_id)
    assert one["completion"]["choices"] == answer["choices"]
    assert one["completion"]["choices"][0]["finish_reason"] == "tool_calls"
    assert one["model_response"]["stop_reason"] == "stop"


async def test_an_export_without_kept_texts_has_empty_messages(start: Start) -> None:
    proxy = await start(f"server.admin_key={ADMIN}", "sessions.store_content=false")
    async with ArealClient(proxy.url, ADMIN) as client:
        episode, *_ = await played(client)
        for one in await interactions(proxy, client, episode.session_id):
            assert one["messages"] == []
            assert one["output_message_list"] is one["completion"] is None
