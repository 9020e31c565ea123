"""A session call by call and token by token, as the dashboard shows it: exact, in pages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from proxy_ext.api.rl import interactions
from tests.proxy_ext.sessions.test_content import talk
from tests.proxy_ext.test_tenants import ADMIN, Tenants
from tests.support.archives import archive_now
from tests.support.proxy import HELLO, Proxy
from tests.support.proxy_fixtures import Start


async def shown(proxy: Proxy, id: str, rest: str = "", **query: Any) -> dict[str, Any]:
    path = f"/rl/v1/sessions/{id}/interactions{rest}"
    response = await proxy.http.get(path, params=query)
    assert response.status_code == 200, response.text
    return dict(response.json())


async def test_interactions_are_shown_with_their_tree_and_rewards(proxy: Proxy) -> None:
    session = await talk(proxy)
    id, key = session["session_id"], session["api_key"]
    first, second, other = await proxy.recorded(id)
    assert [c["propagated"] for c in (await shown(proxy, id))["interactions"]] == [None] * 3
    await proxy.post("/rl/v1/set_reward", {"reward": 0.25, "completion_id": first.id}, key)
    await proxy.post("/rl/v1/finalize", {"final_reward": 1.0}, key)
    page = await shown(proxy, id)
    assert (page["total"], page["next"], page["cut"]) == (3, None, False)
    calls = page["interactions"]
    assert [c["id"] for c in calls] == [first.id, second.id, other.id]
    assert [c["parent_id"] for c in calls] == [None, first.id, None]
    assert [(c["number"], c["depth"]) for c in calls] == [(1, 0), (2, 1), (3, 0)]
    assert [len(c["message_delta"]) for c in calls] == [1, 1, 1]
    assert [c["reward"] for c in calls] == [0.25, None, None]
    # The final reward is every leaf's, and runs back with discount 1.
    assert [c["propagated"] for c in calls] == [1.25, 1.0, 1.0]
    assert page["score"] == pytest.approx(3.25 / 3)
    tokens = [len(i.output_ids) for i in (first, second, other)]
    assert [c["output_tokens"] for c in calls] == tokens
    whole = len(first.prompt_delta_ids) + tokens[0] + len(second.prompt_delta_ids)
    assert calls[1]["prompt_tokens"] == whole
    assert calls[1]["logprob_mean"] == pytest.approx(float(second.output_logprobs.mean()))


async def test_pages_of_interactions_are_bounded_by_number_and_length(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    id = (await talk(proxy))["session_id"]
    page = await shown(proxy, id, start=1, limit=1)
    assert ([c["number"] for c in page["interactions"]], page["next"]) == ([2], 2)
    assert (await shown(proxy, id, start=9))["interactions"] == []
    monkeypatch.setattr(interactions, "MAX_PAGE_TEXT", 10)
    page = await shown(proxy, id)
    assert ([c["number"] for c in page["interactions"]], page["next"]) == ([1], 1)
    for query in ("limit=0", "limit=101", "start=-1", "unknown=1"):
        response = await proxy.http.get(f"/rl/v1/sessions/{id}/interactions?{query}")
        assert response.status_code == 400, query
    # A long text is cut, and says so.
    monkeypatch.undo()
    monkeypatch.setattr(interactions, "MAX_TEXT", 7)
    page = await shown(proxy, id)
    assert page["cut"]
    text = page["interactions"][0]["message_delta"][0]["content"]
    assert text == f"{HELLO[0]['content'][:7]} … ({len(HELLO[0]['content']) - 7} more characters)"


def test_ten_megabytes_and_halves_of_characters_are_shown_as_text_that_ends() -> None:
    cutter = interactions._Cutter()
    shown = cutter.cut([{"content": "x" * (10 << 20), "half \ud83d": "\ud83d"}])
    whole = 10 * 1024 * 1024
    text = f"{'x' * interactions.MAX_TEXT} … ({whole - interactions.MAX_TEXT} more characters)"
    assert shown == [{"content": text, "half ?": "?"}] and cutter.shortened
    assert cutter.taken < 2 * interactions.MAX_TEXT


async def test_shown_tokens_are_the_recorded_ones(proxy: Proxy) -> None:
    id = (await talk(proxy))["session_id"]
    one = (await proxy.recorded(id))[1]
    got = await shown(proxy, id, f"/{one.id}/tokens")
    prompt, output = one.prompt_delta_ids.tolist(), one.output_ids.tolist()
    assert (got["ids"], got["prompt"], got["total"]) == (
        prompt + output,
        len(prompt),
        len(prompt + output),
    )
    assert got["logprobs"][: len(prompt)] == [None] * len(prompt)
    assert np.array_equal(np.float32(got["logprobs"][len(prompt) :]), one.output_logprobs)
    assert got["versions"][len(prompt) :] == one.output_versions.tolist()
    assert got["trained"] is True
    decode = proxy.service.completer.chat.decode
    assert "".join(got["texts"][: len(prompt)]) == decode(prompt)
    assert "".join(got["texts"][len(prompt) :]) == decode(output)
    # A part that begins in the prompt and ends in the output.
    start = len(prompt) - 1
    part = await shown(proxy, id, f"/{one.id}/tokens", start=start, limit=3)
    for name in ("ids", "texts", "logprobs", "versions"):
        assert part[name] == got[name][start : start + 3], name
    missing = await proxy.http.get(f"/rl/v1/sessions/{id}/interactions/chatcmpl-no/tokens")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "interaction_not_found")
    # Those of an eval session are not trained on.
    id = (await talk(proxy, mode="eval"))["session_id"]
    one = (await proxy.recorded(id))[0]
    assert (await shown(proxy, id, f"/{one.id}/tokens"))["trained"] is False


async def test_a_run_that_keeps_no_texts_shows_ids_alone(start: Start) -> None:
    proxy = await start("sessions.store_content=false")
    await proxy.admit(10)
    id = (await talk(proxy))["session_id"]
    one = (await proxy.recorded(id))[0]
    got = await shown(proxy, id, f"/{one.id}/tokens")
    assert got["texts"] is None and got["ids"][got["prompt"] :] == one.output_ids.tolist()
    assert (await shown(proxy, id))["interactions"][0]["message_delta"] == []


async def test_archived_interactions_are_said_to_be_archived(start: Start) -> None:
    proxy = await start()
    session = await proxy.open(mode="eval")
    await proxy.complete(session["api_key"])
    await proxy.post("/rl/v1/finalize", {}, session["api_key"])
    assert await archive_now(proxy) == 1
    response = await proxy.http.get(f"/rl/v1/sessions/{session['session_id']}/interactions")
    assert (response.status_code, response.json()["error"]["code"]) == (409, "content_not_stored")


async def test_a_sessions_calls_are_its_tenants_alone(start: Start) -> None:
    proxy = await start(ADMIN, "server.ranks=1")
    tenants = Tenants(proxy)
    alice, bob = tenants.key("alice"), tenants.key("bob")
    session = (await tenants.open(alice)).json()
    await proxy.complete(session["api_key"])
    id = session["session_id"]
    one = (await proxy.recorded(id))[0]
    for path in (
        f"/rl/v1/sessions/{id}/interactions",
        f"/rl/v1/sessions/{id}/interactions/{one.id}/tokens",
    ):
        for key, status in ((alice, 200), (bob, 404), (session["api_key"], 403), ("no", 401)):
            headers = {"Authorization": f"Bearer {key}"}
            assert (await proxy.http.get(path, headers=headers)).status_code == status, (path, key)
