"""`Idempotency-Key`: whose it is, what it is good for, and what is kept for it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import pytest

from any_agent.errors import StoreFull
from any_agent.keys import lane_in, rank_of_session
from any_agent.launcher.trial import trial_dir
from any_agent.protocol import idempotency
from any_agent.protocol.idempotency import ANSWER_TTL
from any_agent.runtime import boot_clock
from any_agent.types import SessionState
from tests.proxy_ext.api.test_refusals import refusal
from tests.support.proxy import Proxy, until
from tests.support.proxy_fixtures import Start
from tests.support.sessions import hold_commits

START = "/rl/v1/start_session"
ADMIN = "operator-secret-4711"


def keyed(key: str) -> dict[str, str]:
    return {"idempotency-key": key}


async def opens(proxy: Proxy) -> int:
    return sum((await proxy.service.journal.counts()).values())


async def test_a_repeated_request_with_its_key_is_answered_as_before(proxy: Proxy) -> None:
    first = await proxy.post(START, {"task_id": "t", "metadata": {"a": 1}}, **keyed("k"))
    # The order of the fields and white space say nothing.
    body = b'{ "metadata": {"a": 1},\n "task_id": "t" }'
    again = await proxy.post(START, body, **keyed("k"))
    assert (first.status_code, again.status_code) == (200, 200)
    assert again.content == first.content
    assert again.headers["content-type"] == first.headers["content-type"]
    assert again.headers["idempotent-replayed"] == "true"
    assert "idempotent-replayed" not in first.headers
    assert await opens(proxy) == 1
    other = await proxy.post(START, {"task_id": "t", "metadata": {"a": 1}}, **keyed("k2"))
    assert other.json()["session_id"] != first.json()["session_id"]


async def test_an_idempotency_key_of_another_request_is_refused(proxy: Proxy) -> None:
    assert (await proxy.post(START, {"task_id": "t"}, **keyed("k"))).status_code == 200
    for path, body in ((START, {"task_id": "u"}), (f"{START}?ttl=9", {"task_id": "t"})):
        refused = await proxy.post(path, body, **keyed("k"))
        refusal(refused, 422, "idempotency_mismatch")
    no_json = await proxy.post(START, b'{"task_id": "t"', **keyed("k"))
    assert no_json.status_code == 400
    assert await opens(proxy) == 1


async def test_a_malformed_idempotency_key_is_refused(proxy: Proxy) -> None:
    for keys in ([""], ["a b"], ["k" * 256], ["ü"], ["a", "b"]):
        headers = [(b"idempotency-key", key.encode()) for key in keys]
        answer = await proxy.http.post(START, json={}, headers=headers)
        refusal(answer, 400, "bad_idempotency_key")
    assert await opens(proxy) == 0


async def test_deep_bodies_are_refused_as_without_a_key(proxy: Proxy) -> None:
    for depth in (300, 2000, 20_000):
        body = b'{"metadata": {"a": ' + b"[" * depth + b"]" * depth + b"}}"
        plain, with_key = await proxy.post(START, body), await proxy.post(START, body, **keyed("k"))
        assert plain.status_code == with_key.status_code == 400
        assert plain.content == with_key.content
    # The key was good for nothing yet.
    assert (await proxy.post(START, {}, **keyed("k"))).status_code == 200


async def test_long_bodies_are_the_same_by_their_bytes(proxy: Proxy) -> None:
    session = await proxy.open()
    body = b'{"reason": "a"' + b" " * (1 << 20) + b"}"
    path = f"/rl/v1/sessions/{session['session_id']}/abort"
    first, again = [
        await proxy.post(path, body, session["api_key"], **keyed("k")) for _ in range(2)
    ]
    assert first.status_code == 200
    assert again.content == first.content


async def test_a_key_belongs_to_its_caller_and_path(start: Start) -> None:
    proxy = await start(f"server.admin_key={ADMIN}")
    await proxy.admit(10)
    sessions = [await proxy.open() for _ in range(2)]
    for session in sessions:
        await proxy.complete(session["api_key"])
    for session in sessions:
        reward = await proxy.post(
            "/rl/v1/set_reward", {"reward": 1}, session["api_key"], **keyed("k")
        )
        assert reward.json()["session_id"] == session["session_id"]
        ended = await proxy.post("/rl/v1/finalize", {}, session["api_key"], **keyed("k"))
        assert ended.json()["session_id"] == session["session_id"]
        # Who holds no key of this service has no answers here, either.
        forged = await proxy.post(
            "/rl/v1/finalize", {}, session["api_key"][:-1] + "x", **keyed("k")
        )
        assert forged.status_code == 401


async def test_a_refusal_is_not_kept_as_the_answer_to_its_key(proxy: Proxy) -> None:
    session = await proxy.open()
    key = session["api_key"]
    refused = await proxy.post("/rl/v1/finalize", {"final_reward": 1}, key, **keyed("k"))
    assert refused.status_code == 422
    await proxy.complete(key)
    done = await proxy.post("/rl/v1/finalize", {"final_reward": 1}, key, **keyed("k"))
    assert done.status_code == 200
    again = await proxy.post("/rl/v1/finalize", {"final_reward": 1}, key, **keyed("k"))
    assert again.content == done.content
    # Without the key, or with a new one, it is told as it is now, and so is that kept.
    veto = await proxy.post(f"/rl/v1/sessions/{session['session_id']}/veto", {}, key)
    assert veto.status_code == 200
    for headers in ({}, keyed("k2"), keyed("k2")):
        late = await proxy.post("/rl/v1/finalize", {"final_reward": 1}, key, **headers)
        assert (late.status_code, late.json()["state"]) == (200, "rejected")
    assert late.headers["idempotent-replayed"] == "true"


async def test_answers_kept_for_repeats_store_no_session_secret(proxy: Proxy) -> None:
    opening = {"rewards": "both"}
    session = (await proxy.post(START, opening, **keyed("k"))).json()
    assert session["judge_key"].startswith("sk-judge.")
    await proxy.complete(session["api_key"])
    # Also not where it stands in the path.
    path = f"/{session['api_key']}/rl/v1/finalize"
    body = {"final_reward": 1}
    first, again = [await proxy.post(path, body, **keyed("f")) for _ in range(2)]
    assert first.status_code == 200, first.text
    assert first.content == again.content
    assert (await proxy.post(START, opening, **keyed("k"))).json() == session
    secrets = [session[name].rpartition(".")[2].encode() for name in ("api_key", "judge_key")]
    folder = trial_dir(proxy.service.config).path / "journal"
    stored = b"".join(p.read_bytes() for p in folder.rglob("*") if p.is_file())
    assert session["session_id"].encode() in stored
    assert not any(secret in stored for secret in secrets)


@pytest.mark.parametrize("step", [-10 * 86400.0, 10 * 86400.0])
async def test_answers_are_kept_by_a_clock_that_nobody_can_set(
    start: Start, monkeypatch: pytest.MonkeyPatch, step: float
) -> None:
    """While the wall clock is set, over a restart, and while the answers' day goes by."""
    monkeypatch.setattr(idempotency, "SWEEP_INTERVAL", 0.0)
    proxy = await start()
    first = await proxy.post(START, {"mode": "eval"}, **keyed("early"))
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() + step)
    second = await proxy.post(START, {"mode": "eval"}, **keyed("late"))
    for _ in range(2):
        await proxy.service.answers.sweep()
        for key, answer in (("early", first), ("late", second)):
            again = await proxy.post(START, {"mode": "eval"}, **keyed(key))
            assert again.content == answer.content
        proxy = await start()
    boot = boot_clock.boot_seconds
    monkeypatch.setattr(boot_clock, "boot_seconds", lambda: boot() + ANSWER_TTL + 1)
    await proxy.service.answers.sweep()
    scope = f"anyone POST {START}"
    assert await proxy.service.journal.answer(scope, "early") is None
    assert await proxy.service.journal.answer(scope, "late") is None


async def test_after_a_reboot_the_wall_clock_is_left(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (await start()).service.answers.now
    wall = time.time
    monkeypatch.setattr(boot_clock, "boot_id", lambda: "another")
    monkeypatch.setattr(time, "time", lambda: wall() + 3600)
    again = (await start()).service.answers
    assert 3600 <= again.now - before < 3600 + 600
    monkeypatch.setattr(time, "time", wall)
    assert again.now - before >= 3600


async def test_heartbeats_leave_nothing_in_the_journal(proxy: Proxy) -> None:
    session = await proxy.open()
    path = f"/rl/v1/sessions/{session['session_id']}/heartbeat"
    commits = proxy.service.journal.stats.writes
    for n in range(20):
        beat = await proxy.post(path, {}, session["api_key"], **keyed(f"fresh-{n}"))
        assert beat.status_code == 200 and beat.json()["session_id"] == session["session_id"]
    assert proxy.service.journal.stats.writes == commits


@pytest.mark.parametrize("ending", ["finalize", "await", "areal", "delete"])
@pytest.mark.service
async def test_repeated_endings_cannot_fill_the_journal(proxy: Proxy, ending: str) -> None:
    """They change nothing; each under a fresh key, they are answered and, beyond some, not kept."""
    session = await proxy.open()
    await proxy.complete(session["api_key"])
    method, path, body = {
        "finalize": ("POST", "/rl/v1/finalize", {"final_reward": 1}),
        "await": ("POST", "/rl/v1/finalize", {"final_reward": 1, "await_reward": True}),
        "areal": ("POST", "/rl/end_session", {}),
        "delete": ("DELETE", f"/rl/v1/sessions/{session['session_id']}", None),
    }[ending]
    reward = await proxy.post("/rl/v1/set_reward", {"final_reward": 1}, session["api_key"])
    assert reward.status_code == 200
    answers = []
    for n in range(80):
        headers = {"authorization": f"Bearer {session['api_key']}", **keyed(f"fresh-{n}")}
        answers.append(await proxy.http.request(method, path, json=body, headers=headers))
    assert {answer.status_code for answer in answers} == {200}
    lane = lane_in(session["api_key"])
    assert lane is not None
    scope = f"lane {lane.id} {method} {path}"
    kept = [await proxy.service.journal.answer(scope, f"fresh-{n}") for n in range(80)]
    assert kept[0] is not None and kept[10] is not None
    assert sum(row is not None for row in kept) <= 65


async def test_a_waiting_request_goes_on_when_the_first_leaves(start: Start) -> None:
    proxy = await start()
    body = {"wait": 20}
    first = asyncio.create_task(proxy.post(START, body, **keyed("k")))
    await until(lambda: proxy.service.sessions.admission.waiting == 1)
    second = asyncio.create_task(proxy.post(START, body, **keyed("k")))
    await until(lambda: proxy.service.answers.turns.waiting == 1)
    first.cancel()
    await until(lambda: proxy.service.answers.turns.waiting == 0)
    await proxy.admit(5)
    assert (await second).status_code == 200
    assert await opens(proxy) == 1


async def test_an_opener_that_leaves_finds_its_session(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its open was being written; with a key it comes back for the answer."""
    writing, go_on = hold_commits(proxy.service.journal, monkeypatch)
    asked = asyncio.create_task(proxy.post(START, {}, **keyed("k")))
    await writing.wait()
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    again = asyncio.create_task(proxy.post(START, {}, **keyed("k")))
    await until(lambda: proxy.service.answers.turns.waiting == 1)
    go_on.set()
    session = (await again).json()
    assert await opens(proxy) == 1
    live = proxy.service.sessions.live[session["session_id"]]
    assert live.state is SessionState.OPEN
    assert rank_of_session(live.id) == 0


async def test_one_too_many_that_waits_or_one_that_waits_too_long_is_refused(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idempotency, "MAX_WAITING", 1)
    proxy = await start()
    asked = [asyncio.create_task(proxy.post(START, {"wait": 20}, **keyed("k"))) for _ in range(2)]
    await until(lambda: proxy.service.answers.turns.waiting == 1)
    refusals = [await proxy.post(START, {"wait": 20}, **keyed("k"))]
    monkeypatch.setattr(idempotency, "MAX_WAITING", 2)
    monkeypatch.setattr(idempotency, "MAX_WAIT", 0.05)
    refusals.append(await proxy.post(START, {"wait": 20}, **keyed("k")))
    for refused in refusals:
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "idempotency_busy"
        assert refused.headers["retry-after"] == "2"
    await proxy.admit(5)
    assert len({a.content for a in await asyncio.gather(*asked)}) == 1


async def test_effect_and_answer_are_written_together_or_not_at_all(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await proxy.open()
    await proxy.complete(session["api_key"])
    journal = proxy.service.journal
    commit = journal.commit
    seen: list[tuple[str, ...]] = []

    async def full(*statements: Any) -> None:
        seen.append(tuple(type(s).__name__ for s in statements))
        raise StoreFull("the disk is full", retry_after=5)

    async def finalize() -> httpx.Response:
        body = {"final_reward": 1}
        return await proxy.post("/rl/v1/finalize", body, session["api_key"], **keyed("k"))

    monkeypatch.setattr(journal, "commit", full)
    assert (await finalize()).status_code == 507
    (together,) = [names for names in seen if "PutAnswer" in names]
    assert len(together) > 1
    monkeypatch.setattr(journal, "commit", commit)
    assert (await finalize()).status_code == 200
