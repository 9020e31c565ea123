"""Runs of accounts: made, started by requests, queued, stopped, failed, deleted, found again."""

from __future__ import annotations

import asyncio
import os
import signal
from functools import partial
from typing import Any

import pytest

from any_agent.errors import ConfigError, StartupError
from tests.router.cloud.conftest import ADMIN, Client, Opening
from tests.support.waiting import until


async def test_the_first_request_of_an_account_makes_its_default_run(opening: Opening) -> None:
    async with opening() as cloud:
        key = await cloud.account("alice")
        first, second = await asyncio.gather(
            cloud.ask("GET", "/rl/v1/run", key), cloud.ask("POST", "/rl/v1/start_session", key, {})
        )
        assert {first.json()["run"], second.json()["run"]} == {"alice/default/trial-1"}
        runs = (await cloud.ask("GET", "/rl/v1/runs", key)).json()["runs"]
        assert [run["state"] for run in runs] == ["running"]


async def test_a_request_reaches_the_run_as_it_came_and_the_answer_names_the_run(
    opening: Opening,
) -> None:
    async with opening() as cloud:
        key = await cloud.account("alice")
        answer = await cloud.ask(
            "POST", "/v1/chat/completions?a=%2F&b", key, {"text": "é" * 50_000}
        )
        got = answer.json()
        assert (got["path"], got["method"]) == ("/v1/chat/completions?a=%2F&b", "POST")
        assert (got["known"], got["size"]) == (True, len(answer.request.content))
        assert answer.headers["x-any-agent-experiment"] == "default"
        assert answer.headers["x-any-agent-trial"] == "trial-1"


async def test_a_run_is_chosen_by_the_url_and_a_session_finds_its_own_by_its_key(
    opening: Opening,
) -> None:
    async with opening() as cloud:
        key = await cloud.account("alice")
        old, new = await cloud.run(key, "old"), await cloud.run(key, "new")
        assert (await cloud.ask("GET", "/rl/v1/run", key)).json()["run"] == "alice/new/trial-1"
        named = await cloud.ask("POST", "/runs/old/trial-1/rl/v1/start_session", key, {})
        assert (named.json()["run"], named.json()["path"]) == (
            "alice/old/trial-1",
            "/rl/v1/start_session",
        )
        session = named.json()["api_key"]
        for path, bearer in (
            ("/v1/chat/completions", session),
            (f"/{session}/v1/chat/completions", "DUMMY"),
            (f"/runs/old/trial-1/{session}/v1/chat/completions", "DUMMY"),
        ):
            got = await cloud.ask("POST", path, bearer, {})
            assert got.json()["run"] == "alice/old/trial-1", path
        for model, run in (
            ("old/trial-1", "old"),
            ("alice/old/trial-1", "old"),
            ("bob/old/trial-1", "new"),
            ("gpt-4o", "new"),
            ("Qwen/Qwen3-0.6B", "new"),
        ):
            for path in ("/v1/chat/completions", "/v1/responses", "/messages"):
                got = await cloud.ask("POST", path, key, {"model": model})
                assert got.json()["run"] == f"alice/{run}/trial-1", (model, path)
                assert got.json()["size"] == len(got.request.content)
        other = await cloud.ask("POST", "/runs/new/trial-1/v1/chat/completions", session, {})
        assert other.status_code == 403
        assert old["id"] != new["id"]


async def test_a_sessions_id_finds_its_run_whichever_is_the_newest(opening: Opening) -> None:
    async with opening() as cloud:
        key, bob = await cloud.account("alice"), await cloud.account("bob")
        await cloud.run(key, "old")
        session = (await cloud.ask("POST", "/rl/v1/start_session", key, {})).json()
        # Ids of AReaL's form name no run, which is no question while there is one.
        areal = "/rl/v1/sessions/task-0-3"
        assert (await cloud.ask("GET", areal, key)).json()["run"] == "alice/old/trial-1"
        await cloud.run(key, "new")
        id = session["session_id"]
        head = {"X-Any-Agent-Session": id}
        for method, path, body, headers in (
            ("GET", f"/rl/v1/sessions/{id}", None, {}),
            ("POST", f"/rl/v1/sessions/{id}/heartbeat", {}, {}),
            ("DELETE", f"/rl/v1/sessions/{id}", None, {}),
            ("GET", f"/rl/v1/sessions?session_id={id}", None, {}),
            ("POST", "/rl/v1/finalize", {"session_id": id}, {}),
            ("POST", "/rl/v1/set_reward", {"session_id": session["api_key"], "reward": 1}, {}),
            ("POST", "/rl/v1/start_session", {"api_key": session["api_key"]}, {}),
            ("POST", "/v1/chat/completions", {}, head),
            ("POST", f"/{id}/v1/chat/completions", {}, {}),
        ):
            got = (await cloud.ask(method, path, key, body, **headers)).json()
            assert (got["run"], got["path"]) == ("alice/old/trial-1", path), path
        assert (await cloud.ask("GET", "/rl/v1/sessions", key)).json()["run"] == "alice/new/trial-1"
        unclear = await cloud.ask("GET", areal, key)
        assert (unclear.status_code, unclear.json()["error"]["code"]) == (404, "run_not_named")
        assert "/runs/EXPERIMENT/TRIAL/" in unclear.json()["error"]["message"]
        # Another's session is not there, as one that never was.
        await cloud.run(bob, "own")
        for other in (id, f"ses-0-0badc0de{'0' * 16}"):
            gone = await cloud.ask("GET", f"/rl/v1/sessions/{other}", bob)
            assert (gone.status_code, gone.json()["error"]["code"]) == (404, "session_not_found")
            assert "alice" not in gone.text
        new = (await cloud.ask("POST", "/rl/v1/start_session", key, {})).json()
        both = {"session_id": new["session_id"]}
        two = await cloud.ask("POST", f"/rl/v1/sessions/{id}/abort", key, both)
        assert (two.status_code, two.json()["error"]["code"]) == (400, "session_mismatch")


async def test_an_account_sees_words_and_the_operator_where_it_failed(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = "/srv/of-the-operator/models/tiny"
    failures = (
        StartupError(f"{place} is damaged: restore it from a copy"),
        ConfigError(f"cannot write in {place}: choose another root"),
        PermissionError(13, "Permission denied", place),
        RuntimeError(f"cannot open {place}"),
    )
    monkeypatch.setattr("router.cloud.jobs._FIRST_PAUSE", 1000.0)
    async with opening(hold=30.0) as cloud:
        key = await cloud.account("alice")
        for number, failure in enumerate(failures):

            def fail(*_: Any, failure: Exception = failure) -> None:
                raise failure

            monkeypatch.setattr("router.cloud.launching.Launching._start", fail)
            run = await cloud.run(key, f"e{number}")
            refused = asyncio.create_task(cloud.ask("GET", "/rl/v1/run", key))
            await until(partial(_is, cloud, key, run, "failed"), "the failure")
            path = f"/rl/v1/runs/{run['id']}"
            told = [
                await cloud.ask("GET", path, key),
                await cloud.ask("GET", "/rl/v1/runs", key),
                await cloud.ask("POST", f"{path}/start", key),
            ]
            cloud.cloud._jobs.by_id[run["id"]].hurry()
            told.append(await refused)
            assert [answer.status_code for answer in told] == [200, 200, 202, 503]
            for answer in told:
                everything = answer.text + str(answer.headers)
                assert "cannot be started" in everything
                assert "of-the-operator" not in everything
                assert str(cloud.root) not in everything
            assert place in (await cloud.ask("GET", path, ADMIN)).json()["reason"]


async def test_a_run_without_a_place_waits_and_is_told_why(opening: Opening) -> None:
    async with opening(places=1, hold=1.0, quiet_after=1000.0) as cloud:
        alice, bob = await cloud.account("alice"), await cloud.account("bob")
        await until(lambda: _answers(cloud, alice), "alice's start")
        refused = await cloud.ask("GET", "/rl/v1/run", bob)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["position"]) == (503, "run_queued", 1)
        assert int(refused.headers["Retry-After"]) > 0
        assert "1 of 1 places are taken" in error["message"]
        run = (await cloud.ask("GET", "/rl/v1/runs", bob)).json()["runs"][0]
        assert (run["state"], run["position"]) == ("queued", 1)
        # The place is free once its owner stops the other run.
        other = (await cloud.ask("GET", "/rl/v1/runs", alice)).json()["runs"][0]
        await cloud.ask("POST", f"/rl/v1/runs/{other['id']}/stop", alice)
        await until(lambda: _answers(cloud, bob), "bob's turn")


async def test_a_quiet_run_gives_its_place_up_and_comes_back_where_it_was(
    opening: Opening,
) -> None:
    async with opening(places=1, quiet_after=0.2, hold=60.0) as cloud:
        alice, bob = await cloud.account("alice"), await cloud.account("bob")
        session = (await cloud.ask("POST", "/rl/v1/start_session", alice, {})).json()["api_key"]
        assert (await cloud.ask("GET", "/rl/v1/run", bob)).json()["run"] == "bob/default/trial-1"
        again = await cloud.ask("POST", "/v1/chat/completions", session, {})
        assert (again.json()["run"], again.json()["known"]) == ("alice/default/trial-1", True)
        run = (await cloud.ask("GET", "/rl/v1/runs", alice)).json()["runs"][0]
        assert (cloud.folder(run) / "starts").read_text().split()[1:]


async def test_an_idle_run_stops_and_a_request_under_way_keeps_it(opening: Opening) -> None:
    async with opening(idle_after=0.3) as cloud:
        key = await cloud.account("alice")
        run = await cloud.run(key)
        slow = await cloud.ask("POST", "/v1/slow", key, {})
        assert slow.json()["calls"] == 1
        await until(lambda: _is(cloud, key, run, "idle"), "its end")
        assert (await cloud.ask("POST", "/v1/x", key, {})).json()["calls"] == 1


async def test_a_stopped_run_refuses_requests_until_it_is_started(opening: Opening) -> None:
    async with opening() as cloud:
        key = await cloud.account("alice")
        run = await cloud.run(key)
        path = f"/rl/v1/runs/{run['id']}"
        assert (await cloud.ask("GET", "/rl/v1/run", key)).status_code == 200
        assert (await cloud.ask("POST", f"{path}/stop", key)).status_code == 202
        refused = await cloud.ask("GET", "/rl/v1/run", key)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "run_stopped")
        await until(lambda: _is(cloud, key, run, "stopped"), "its end")
        await cloud.ask("POST", f"{path}/start", key)
        assert (await cloud.ask("GET", "/rl/v1/run", key)).status_code == 200


async def test_a_run_that_fails_is_said_to_and_started_again_later(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.cloud.jobs._FIRST_PAUSE", 0.5)
    async with opening(hold=0.2) as cloud:
        key = await cloud.account("alice")
        run = await cloud.run(key)
        folder = cloud.folder(run)
        folder.mkdir(parents=True, mode=0o700)
        (folder / "fails").touch()
        await until(lambda: _code(cloud, key, "run_failed"), "the failure")
        assert "code 3" in (await cloud.ask("GET", "/rl/v1/run", key)).json()["error"]["message"]
        (folder / "fails").unlink()
        await until(lambda: _answers(cloud, key), "another start")


async def test_a_run_that_does_not_end_is_killed_after_its_time(opening: Opening) -> None:
    async with opening(stop_timeout=1) as cloud:
        key = await cloud.account("alice")
        run = await cloud.run(key)
        folder = cloud.folder(run)
        folder.mkdir(parents=True, mode=0o700)
        (folder / "stays").touch()
        assert (await cloud.ask("GET", "/rl/v1/run", key)).status_code == 200
        await cloud.ask("POST", f"/rl/v1/runs/{run['id']}/stop", key)
        await until(lambda: _is(cloud, key, run, "stopped"), "its end")


async def test_a_run_that_is_killed_is_started_again_by_the_next_request(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.cloud.jobs._FIRST_PAUSE", 0.2)
    async with opening() as cloud:
        key = await cloud.account("alice")
        run = await cloud.run(key)
        await cloud.ask("GET", "/rl/v1/run", key)
        started = (cloud.folder(run) / "starts").read_text().split()
        os.kill(int(started[-1]), signal.SIGKILL)
        await until(lambda: _is(cloud, key, run, "failed"), "the failure")
        assert "code -9" in await cloud.reason(key, run["id"])
        await until(lambda: _answers(cloud, key), "another start")


async def test_a_deleted_run_leaves_no_file_and_its_name_is_free(opening: Opening) -> None:
    async with opening() as cloud:
        key = await cloud.account("alice")
        run = await cloud.run(key)
        session = (await cloud.ask("POST", "/rl/v1/start_session", key, {})).json()["api_key"]
        gone = await cloud.ask("DELETE", f"/rl/v1/runs/{run['id']}", key)
        assert (gone.status_code, gone.json()["state"]) == (202, "deleting")
        await until(lambda: _status(cloud, key, run, 404), "its end")
        assert [path.name for path in cloud.root.rglob("*") if run["id"] in path.name] == []
        assert not (cloud.root / "alice").exists()
        late = await cloud.ask("POST", "/v1/chat/completions", session, {})
        assert late.status_code == 401
        assert (await cloud.run(key))["id"] != run["id"]


async def test_what_was_acknowledged_is_there_after_a_restart(opening: Opening) -> None:
    async with opening() as cloud:
        alice, bob = await cloud.account("alice"), await cloud.account("bob")
        run, stopped = await cloud.run(alice, settings={"train.steps": 3}), await cloud.run(bob)
        session = (await cloud.ask("POST", "/rl/v1/start_session", alice, {})).json()["api_key"]
        await cloud.ask("POST", f"/rl/v1/runs/{stopped['id']}/stop", bob)
        # As after a crash amid a deletion.
        extra = await cloud.run(bob, "extra")
        jobs = cloud.cloud._jobs
        await jobs._store.change(jobs.by_id[extra["id"]].run, "delete")
    async with opening() as cloud:
        found = (await cloud.ask("GET", f"/rl/v1/runs/{run['id']}", alice)).json()
        assert (found["settings"], found["state"]) == ({"train.steps": 3}, "idle")
        assert await cloud.state(bob, stopped["id"]) == "stopped"
        assert (await cloud.ask("POST", "/v1/chat/completions", session, {})).status_code == 200
        await until(lambda: _status(cloud, bob, extra, 404), "the deletion")


async def test_a_client_that_leaves_amid_a_change_leaves_no_half_of_it(opening: Opening) -> None:
    async with opening() as cloud:
        key = await cloud.account("alice")
        for path, body in (("/rl/v1/runs", {"experiment": "e"}), ("/rl/v1/start_session", {})):
            for pause in (0.0, 0.001, 0.003, 0.01):
                asking = asyncio.create_task(cloud.ask("POST", path, key, body))
                await asyncio.sleep(pause)
                asking.cancel()
                await asyncio.wait([asking])
        await until(lambda: _answers(cloud, key), "an answer")
        listed = (await cloud.ask("GET", "/rl/v1/runs", key)).json()["runs"]
        assert {run["id"] for run in listed} == set(cloud.cloud._jobs.by_id)
        for run in listed:
            removing = asyncio.create_task(cloud.ask("DELETE", f"/rl/v1/runs/{run['id']}", key))
            await asyncio.sleep(0.005)
            removing.cancel()
            await asyncio.wait([removing])
            await cloud.ask("DELETE", f"/rl/v1/runs/{run['id']}", key)
            await until(partial(_status, cloud, key, run, 404), "its end")


async def test_one_who_comes_back_after_minutes_is_in_the_queue_again(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.cloud.schedule.ASKED_FOR", 0.5)
    async with opening(places=1, hold=0.1, quiet_after=1000.0) as cloud:
        alice, bob = await cloud.account("alice"), await cloud.account("bob")
        await until(lambda: _answers(cloud, alice), "alice's start")
        assert not await _answers(cloud, bob)
        await asyncio.sleep(1.0)
        run = (await cloud.ask("GET", "/rl/v1/runs", alice)).json()["runs"][0]
        await cloud.ask("POST", f"/rl/v1/runs/{run['id']}/stop", alice)
        await until(lambda: _is(cloud, alice, run, "stopped"), "its end")
        await until(lambda: _answers(cloud, bob), "bob's turn")


async def test_a_path_that_hides_its_run_is_refused(opening: Opening) -> None:
    async with opening() as cloud:
        for path in ("/runs%2Fa%2Fb%2Fc", "/runs/a%2Fb/c/v1/x", "/runs//x/v1", "/runs/a/b"):
            assert (await cloud.ask("GET", path)).status_code == 401, path


async def test_a_second_cloud_on_the_same_folder_is_refused(opening: Opening) -> None:
    async with opening() as cloud:
        with pytest.raises(StartupError, match="another any-agent cloud"):
            async with opening():
                pass
        folder = cloud.root / ".cloud"
    folder.chmod(0o777)
    with pytest.raises(ConfigError):
        async with opening():
            pass


async def test_requests_that_wait_are_answered_when_the_cloud_stops(opening: Opening) -> None:
    async with opening(hold=100.0) as cloud:
        key = await cloud.account("alice")
        run = await cloud.run(key)
        cloud.folder(run).mkdir(parents=True, mode=0o700)
        (cloud.folder(run) / "unready").touch()
        waiting = asyncio.create_task(cloud.ask("GET", "/rl/v1/run", key))
        await until(lambda: _is(cloud, key, run, "starting"), "its start")
        await cloud.cloud.drain(10)
        answer = await waiting
        assert (answer.status_code, answer.headers["x-any-agent-run-state"]) == (503, "starting")


async def test_the_same_run_twice_is_one_and_another_of_its_name_is_refused(
    opening: Opening,
) -> None:
    async with opening(runs_per_account=2) as cloud:
        key = await cloud.account("alice")
        body = {"experiment": "exp", "trial": "t", "settings": {"train.lr": 0.01}}
        answers = [await cloud.ask("POST", "/rl/v1/runs", key, body) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [201, 200]
        assert answers[0].json()["id"] == answers[1].json()["id"]
        other = await cloud.ask("POST", "/rl/v1/runs", key, {"experiment": "exp", "trial": "t"})
        assert (other.status_code, other.json()["error"]["code"]) == (409, "run_exists")
        assert (await cloud.run(key, "exp"))["trial"] == "trial-1"
        more = await cloud.ask("POST", "/rl/v1/runs", key, {"experiment": "exp"})
        assert (more.status_code, more.json()["error"]["code"]) == (429, "quota_exceeded")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"experiment": "../etc"}, "invalid_request"),
        ({"experiment": "e", "model": "gpt-9"}, "unknown_model"),
        ({"experiment": "e", "preset": "no"}, "unknown_preset"),
        ({"experiment": "e", "settings": {"model.path": "/etc"}}, "not_settable"),
        ({"experiment": "e", "settings": {"plugins": ["os"]}}, "not_settable"),
        ({"experiment": "e", "settings": {"train.lr": "much"}}, "bad_settings"),
        ({"experiment": "e", "settings": {"train.preset": "os.system"}}, "not_settable"),
        ({"experiment": "e", "settings": {"train.preset": "${model.path}"}}, "not_settable"),
        ({"experiment": "e", "settings": {"train.preset": "nothing"}}, "bad_settings"),
        ({"experiment": "e", "settings": {"sessions.ttl": [1]}}, "not_settable"),
        ({"experiment": "e", "settings": {"sampling.max_new_tokens": 1e12}}, "not_settable"),
        ({"experiment": "e", "settings": {"train": {"lr": 1}}}, "not_settable"),
        ({"experiment": "e", "more": 1}, "invalid_request"),
        ([], "invalid_request"),
    ],
)
async def test_a_run_that_cannot_be_is_refused_and_leaves_nothing(
    opening: Opening, body: Any, code: str
) -> None:
    async with opening() as cloud:
        key = await cloud.account("alice")
        refused = await cloud.ask("POST", "/rl/v1/runs", key, body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, code)
        assert (await cloud.ask("GET", "/rl/v1/runs", ADMIN)).json() == {"runs": []}


async def _answers(cloud: Client, key: str) -> bool:
    return (await cloud.ask("GET", "/rl/v1/run", key)).status_code == 200


async def _code(cloud: Client, key: str, code: str) -> bool:
    return bool((await cloud.ask("GET", "/rl/v1/run", key)).json()["error"]["code"] == code)


async def _is(cloud: Client, key: str, run: dict[str, Any], state: str) -> bool:
    return await cloud.state(key, run["id"]) == state


async def _status(cloud: Client, key: str, run: dict[str, Any], status: int) -> bool:
    found = await cloud.ask("GET", f"/rl/v1/runs/{run['id']}", key)
    return found.status_code == status
