"""`any-agent sessions` against a running proxy: what a tired operator reads and types."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import time
from datetime import datetime

import pytest

from any_agent.auth.key_store import create_key
from any_agent.cli.main import main
from any_agent.cli.sessions import age
from any_agent.cli.tail import Endings, reward_of
from any_agent.launcher.trial import trial_dir
from any_agent.runtime.command_line import printable
from tests.support.archives import archive_now
from tests.support.command import Said, typed
from tests.support.proxy import LIMIT, Proxy
from tests.support.proxy_fixtures import Start


async def sessions(proxy: Proxy, *arguments: str, **environ: str) -> Said:
    return await typed("sessions", *arguments, "--url", proxy.url, **environ)


async def abort(proxy: Proxy, session: dict[str, str], reason: str = "enough") -> None:
    path = f"/rl/v1/sessions/{session['session_id']}/abort"
    await proxy.post(path, {"reason": reason}, session["api_key"])


@pytest.mark.service
async def test_sessions_are_listed_as_a_table_and_no_text_moves_the_cursor(proxy: Proxy) -> None:
    done = (await proxy.finished_session(group_id="math", group_size=1, reward=0.25))["session_id"]
    aborted = await proxy.open(mode="eval", task_id="t")
    await abort(proxy, aborted, "red \x1b[31m\u202e")
    gone = aborted["session_id"]
    said = await sessions(proxy, "list")
    assert said.code == 0
    head, first, second = said.out.splitlines()
    assert head.split() == ["SESSION", "STATE", "MODE", "CALLS", "REWARDS", "FINAL", "STEP",
                            "AGE", "GROUP", "OR", "TASK", "NOTE"]  # fmt: skip
    assert first.split()[:4] == [gone, "aborted", "eval", "0"]
    told = await sessions(proxy, "list", "--reason", "RED", "--since", "5m")
    assert [line.split()[0] for line in told.out.splitlines()[1:]] == [gone]
    # Nothing of it moves the cursor.
    assert first.endswith("red \ufffd[31m\ufffd") and "\x1b" not in said.out
    assert second.split() == [done, "finalized", "train", "1", "1", "0.25", "-",
                              second.split()[7], "math"]  # fmt: skip
    assert printable("ok é ☃ \t\r\n\x9b") == "ok é ☃ " + "\ufffd" * 4
    said = await sessions(proxy, "list", "--json", "--state", "aborted")
    assert [json.loads(line)["session_id"] for line in said.out.splitlines()] == [gone]
    said = await sessions(proxy, "list", "--limit", "1", "--json")
    assert len(said.out.splitlines()) == 1
    said = await sessions(proxy, "list", "--group", "none")
    assert (said.code, said.out, said.err) == (0, "", "no sessions\n")
    said = await sessions(proxy, "list", "--state", "odd")
    assert said.code == 2 and "--state" in said.err


@pytest.mark.service
async def test_rewards_of_calls_are_counted(proxy: Proxy) -> None:
    session = await proxy.open(task_id="t", group_size=1)
    key, none = session["api_key"], (await proxy.open(mode="eval"))["session_id"]
    first, second = [await proxy.complete(key) for _ in range(2)]
    for answer in (first, second, second):
        body = {"reward": 0, "completion_id": answer["id"]}
        await proxy.post("/rl/v1/set_reward", body, key)
    _, unrewarded, rewarded = (await sessions(proxy, "list")).out.splitlines()
    assert unrewarded.split()[:6] == [none, "open", "eval", "0", "-", "-"]
    assert rewarded.split()[3:6] == ["2", "3", "-"]
    await proxy.post("/rl/v1/finalize", {"final_reward": 0.5}, key)
    rewarded = (await sessions(proxy, "list")).out.splitlines()[2]
    assert rewarded.split()[3:6] == ["2", "4", "0.5"]
    await sessions(proxy, "abort", none)
    await archive_now(proxy)
    _, archived, _ = (await sessions(proxy, "list")).out.splitlines()
    assert archived.split()[3:6] == ["?", "?", "-"]


@pytest.mark.service
async def test_a_reason_that_is_too_long_changes_nothing(proxy: Proxy) -> None:
    id = (await proxy.open())["session_id"]
    for command in ("abort", "veto"):
        said = await sessions(proxy, command, id, "--reason", "x" * 201)
        assert (said.code, said.out) == (2, "")
        assert said.err.startswith("error: --reason: ") and "200 characters" in said.err
    assert json.loads((await sessions(proxy, "show", "--json", id)).out)["state"] == "open"


@pytest.mark.service
async def test_a_list_goes_over_as_many_pages_as_it_needs(proxy: Proxy) -> None:
    ids = [(await proxy.open(mode="eval"))["session_id"] for _ in range(230)]
    said = await sessions(proxy, "list", "--limit", "0")
    assert [line.split()[0] for line in said.out.splitlines()] == ["SESSION", *ids[::-1]]
    said = await sessions(proxy, "list", "--limit", "120", "--json")
    assert [json.loads(line)["session_id"] for line in said.out.splitlines()] == ids[:-121:-1]


@pytest.mark.service
async def test_a_session_is_shown_with_its_rewards_dates_and_roots(proxy: Proxy) -> None:
    session = await proxy.open(task_id="t", group_size=1)
    answer = await proxy.complete(session["api_key"])
    await proxy.post("/rl/v1/set_reward", {"reward": {"right": 1}}, session["api_key"])
    id = session["session_id"]
    said = await sessions(proxy, "show", id)
    assert said.code == 0
    shown = dict(line.split(None, 1) for line in said.out.splitlines())
    assert (shown["session_id:"], shown["state:"], shown["task_id:"]) == (id, "open", "t")
    assert shown["reward:"].startswith(f"1 (right) for {answer['id']}, by ")
    dates = re.findall(r"\d{4}-\d\d-\d\d.*", said.out)
    assert len(dates) == 2
    for date in dates:
        at = datetime.strptime(date, "%Y-%m-%dT%H:%M:%S%z")
        assert abs(time.time() - at.timestamp()) < 300, "whatever the zone here is"
    said = await sessions(proxy, "show", "--json", id)
    assert json.loads(said.out)["session_id"] == id
    assert (shown["roots:"], "root_reasons:" in shown) == ("1", False)
    lied = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "never said"}]
    await proxy.complete(session["api_key"], messages=[*lied, lied[0]])
    said = await sessions(proxy, "show", id)
    shown = dict(line.split(None, 1) for line in said.out.splitlines())
    assert shown["roots:"] == "2" and shown["root_reasons:"].startswith("1 history_rewritten")
    assert "roles:" not in shown
    named = {"model": "m", "messages": lied[:1], "max_tokens": 8}
    path, key = "/v1/chat/completions", session["api_key"]
    assert (await proxy.post(path, named, key, **{"x-any-agent-role": "critic"})).is_success
    said = await sessions(proxy, "show", id)
    shown = dict(line.split(None, 1) for line in said.out.splitlines())
    assert shown["roles:"] == "2 of no name, 1 of critic"
    said = await sessions(proxy, "show", "ses-0-none", id)
    assert said.code == 1 and "there is no session" in said.err and id in said.out


@pytest.mark.service
async def test_sessions_are_aborted_vetoed_and_deleted_by_command(proxy: Proxy) -> None:
    live = (await proxy.open())["session_id"]
    done = (await proxy.finished_session())["session_id"]
    said = await sessions(proxy, "abort", live, "--reason", "stuck")
    assert (said.code, said.out) == (0, f"{live} is aborted\n")
    said = await sessions(proxy, "veto", done, live)
    assert said.code == 1
    assert said.out == f"{done} is rejected\n"
    assert f"session {live} is aborted" in said.err
    said = await sessions(proxy, "delete", done)
    assert said.out == f"{done} is rejected, its content deleted\n"
    said = await sessions(proxy, "list")
    assert "stuck" in said.out and "vetoed by the operator" in said.out


@pytest.mark.service
async def test_the_key_is_taken_from_its_variables_and_a_wrong_one_is_named(start: Start) -> None:
    key = "an-admin-key-of-mine"
    proxy = await start(f"server.admin_key={key}")
    tenant, _ = create_key(trial_dir(proxy.service.config).keys, "tenant", tenant="agents")
    for environ in (
        {"ANY_AGENT_KEY": key, "ANY_AGENT_API_KEY": "sk-tenant.no"},
        {"ANY_AGENT_SERVER__ADMIN_KEY": key, "OPENAI_API_KEY": "sk-tenant.no"},
        {"ANY_AGENT_API_KEY": tenant, "OPENAI_API_KEY": "sk-tenant.no"},
        {"OPENAI_API_KEY": tenant},
    ):
        assert (await sessions(proxy, "list", **environ)).code == 0
    assert (await sessions(proxy, "list", "--key", key)).code == 0
    for environ, used in (
        ({}, "no key was given"),
        ({"OPENAI_API_KEY": "sk-proj-wrong"}, "no key was given"),
        ({"OPENAI_API_KEY": "sk-tenant.wrong"}, "the key came from OPENAI_API_KEY"),
        ({"ANY_AGENT_KEY": "wrong-admin-key-x"}, "the key came from ANY_AGENT_KEY"),
    ):
        for command in (("list",), ("show", "ses-0-x", "ses-0-y")):
            said = await sessions(proxy, *command, **environ)
            assert said.code == 1 and said.err.count("\n") == 1
            assert f"({used}); give one with --key or in ANY_AGENT_KEY" in said.err
        assert key not in said.out + said.err and "wrong" not in said.err


def test_the_service_is_the_one_that_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("any_agent.cli.operator_client.PATIENCE", 0.0)
    monkeypatch.setattr("any_agent.cli.operator_client.DEFAULT_URL", "http://127.0.0.1:10")
    away = "is the service running?"
    for environ, options, code, said in (
        ({"ANY_AGENT_URL": "http://127.0.0.1:9/v1"}, (), 1, ("http://127.0.0.1:9 ", away)),
        # An operator's key must not reach another provider.
        ({"OPENAI_BASE_URL": "http://127.0.0.1:9/v1"}, (), 1, ("http://127.0.0.1:10 ", away)),
        ({"ANY_AGENT_URL": "nowhere"}, (), 2, ("ANY_AGENT_URL is 'nowhere'",)),
        ({}, ("--limit", "-1"), 2, ("is not a whole number from 0",)),
        *(
            ({}, ("--url", url), 2, ("http://",))
            for url in ("foo", "127.0.0.1:8000", "localhost:8000", "ftp://127.0.0.1", "http://a:b")
        ),
    ):
        for name in ("ANY_AGENT_URL", "OPENAI_BASE_URL"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        try:
            ended: object = main(["sessions", "list", *options])
        except SystemExit as error:
            ended = error.code
        told = capsys.readouterr().err
        assert ended == code, (environ, options)
        assert "error: " in told and all(text in told for text in said), told


def test_ages_are_told_in_their_largest_unit() -> None:
    told = {-3: "0s", 90: "90s", 125: "2m", 7200: "2h", 200_000: "2d"}
    assert {seconds: age(seconds) for seconds in told} == told


async def test_the_reward_of_a_followed_session_is_that_of_the_list(proxy: Proxy) -> None:
    session = await proxy.open(mode="eval")
    answer = await proxy.complete(session["api_key"])
    assert reward_of(await proxy.client.session_details(session["session_id"])) is None
    for given in ({"interaction_id": answer["id"], "reward": 0.5}, {"final_reward": 0.25}):
        await proxy.post("/rl/v1/set_reward", given, session["api_key"])
        details = await proxy.client.session_details(session["session_id"])
        (line,) = [s async for s in proxy.client.sessions(limit=10)]
        assert reward_of(details) == line.reward is not None
    assert line.reward == 0.75


async def test_each_session_is_followed_once_when_it_has_ended(proxy: Proxy) -> None:
    await proxy.finished_session()
    going_on = await proxy.open(mode="eval")
    endings = Endings(proxy.client, {})
    await endings.begin()
    assert await endings.look() == []
    done = await proxy.finished_session(reward=0.5, task_id="t", group_size=1)
    (one,) = await endings.look()
    assert (one.session_id, one.state) == (done["session_id"], "finalized")
    assert (one.final_reward, one.interactions, one.output_tokens) == (0.5, 1, 8)
    assert await endings.look() == []
    await abort(proxy, going_on)
    (one,) = await endings.look()
    assert (one.session_id, one.state, one.reason) == (going_on["session_id"], "aborted", "enough")
    late = await proxy.open(mode="eval")
    await proxy.complete(late["api_key"])
    await proxy.post("/rl/v1/finalize", {"await_reward": True}, late["api_key"])
    # It waits for its reward.
    assert await endings.look() == []
    await proxy.post("/rl/v1/set_reward", {"final_reward": 1}, late["api_key"])
    await proxy.post("/rl/v1/finalize", {}, late["api_key"])
    (one,) = await endings.look()
    assert (one.session_id, one.final_reward) == (late["session_id"], 1.0)
    assert await endings.look() == []


async def test_only_sessions_of_the_filter_are_followed(proxy: Proxy) -> None:
    endings = Endings(proxy.client, {"task_id": "wanted"})
    await endings.begin()
    ids = {task: (await proxy.finished_session(task_id=task))["session_id"] for task in
           ("other", "wanted")}  # fmt: skip
    assert [one.session_id for one in await endings.look()] == [ids["wanted"]]


async def test_a_session_that_is_deleted_meanwhile_has_no_tokens(proxy: Proxy) -> None:
    session = await proxy.open(mode="eval")
    endings = Endings(proxy.client, {})
    await endings.begin()
    await abort(proxy, session)
    await proxy.http.delete(f"/rl/v1/sessions/{session['session_id']}")
    found = [(one.content, one.output_tokens) for one in await endings.look()]
    assert found == [("deleted", None)]
    assert await endings.look() == []


@pytest.mark.service
async def test_the_command_prints_sessions_as_they_end(proxy: Proxy) -> None:
    for extra in ((), ("--json",), ("--state", "finalized", "--min-reward", "0.4")):
        await follow(proxy, *extra)


async def follow(proxy: Proxy, *extra: str) -> None:
    command = ["-m", "any_agent.cli", "sessions", "tail", "--url", proxy.url, "--every", "0.1"]
    env = {k: v for k, v in os.environ.items() if not k.startswith("ANY_AGENT")}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, *extra, stdout=pipe, stderr=pipe, env=env
    )
    assert process.stdout is not None and process.stderr is not None
    try:
        async with asyncio.timeout(LIMIT):
            if "--json" in extra:
                # It says nothing until a session ends: go on until one does after its beginning.
                line = b""
                while not line:
                    await proxy.finished_session(reward=0.25)
                    try:
                        line = await asyncio.wait_for(process.stdout.readline(), 0.5)
                    except TimeoutError:
                        line = b""
                assert json.loads(line)["final_reward"] == 0.25
                assert "reward_history" not in json.loads(line)
            else:
                head = (await process.stdout.readline()).decode().split()
                assert head[:6] == ["ENDED", "STATE", "MODE", "REWARD", "TURNS", "TOKENS"]
                low = await proxy.finished_session(reward=0.25, task_id="low", group_size=1)
                high = await proxy.finished_session(reward=0.75, task_id="high", group_size=1)
                shown = [high] if extra else [low, high]
                lines = [(await process.stdout.readline()).decode().split() for _ in shown]
                assert {line[6] for line in lines} == {one["session_id"] for one in shown}
                assert lines[-1][1:6] in (
                    ["finalized", "train", "0.75", "1", "8"],
                    ["finalized", "train", "0.25", "1", "8"],
                )
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), LIMIT) == 130
        assert await process.stderr.read() == b""
    finally:
        if process.returncode is None:
            process.kill()


async def test_sessions_of_a_rank_that_is_away_are_not_taken_for_ended(proxy: Proxy) -> None:
    session = await proxy.open(mode="eval")
    endings = Endings(proxy.client, {})
    await endings.begin()
    endings.missing.clear()
    # Its rank does not answer: it is not taken for ended.
    sessions = proxy.client.sessions

    def without_ranks(**options: object):  # type: ignore[no-untyped-def]
        options.pop("missing")("0")  # type: ignore[operator]
        return sessions(state="trained")

    proxy.client.sessions = without_ranks  # type: ignore[method-assign]
    assert await endings.look() == [] and endings.missing == {"0"}
    proxy.client.sessions = sessions  # type: ignore[method-assign]
    await abort(proxy, session)
    (one,) = await endings.look()
    assert one.session_id == session["session_id"]
