"""`Idempotency-Key` at the cloud's own routes: one effect, the first answer, no stored secret."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from any_agent.protocol.idempotency import ANSWER_TTL
from any_agent.runtime import boot_clock
from any_agent.runtime.ports import free_port
from tests.router.cloud.conftest import ADMIN, Client, Opening
from tests.support.waiting import until

RUNS = "/rl/v1/runs"
ACCOUNTS = "/rl/v1/accounts"
ONCE = {"Idempotency-Key": "once"}

_CUT_OFF = (httpx.TransportError, AttributeError)
"""What a request raises whose server is killed; the second is anyio's, of a socket that went as the
connection was made."""


async def test_each_change_of_a_run_has_one_effect_and_its_first_answer_over_a_restart(
    opening: Opening,
) -> None:
    asked: list[tuple[str, str, Any, httpx.Response]] = []
    async with opening() as cloud:
        key = await cloud.account("alice")

        async def ask(method: str, path: str, body: Any = None) -> dict[str, Any]:
            answer = await cloud.ask(method, path, key, body, **ONCE)
            assert answer.status_code in (201, 202), answer.text
            assert "idempotent-replayed" not in answer.headers
            asked.append((method, path, body, answer))
            return dict(answer.json())

        # Without a trial each post would be another run.
        run = await ask("POST", RUNS, {"experiment": "e", "settings": {"train.lr": 0.5}})
        gone = await cloud.run(key, "gone")
        assert (await ask("POST", f"{RUNS}/{run['id']}/stop"))["state"] == "stopped"
        await cloud.ask("POST", f"{RUNS}/{run['id']}/start", key)
        await ask("DELETE", f"{RUNS}/{gone['id']}")
        await until(lambda: _status(cloud, key, gone, 404), "its end")
        for _ in range(2):
            await _same_answers(cloud, key, asked)
    async with opening() as cloud:
        await _same_answers(cloud, key, asked)
        listed = (await cloud.ask("GET", RUNS, key)).json()["runs"]
        # A repeated stop does not stop a run that was started since.
        assert [(run["id"], run["state"]) for run in listed] == [(run["id"], "idle")]


async def _same_answers(
    cloud: Client, key: str, asked: list[tuple[str, str, Any, httpx.Response]]
) -> None:
    for method, path, body, first in asked:
        again = await cloud.ask(method, path, key, body, **ONCE)
        assert (again.status_code, again.content) == (first.status_code, first.content), path
        assert again.headers["idempotent-replayed"] == "true"


async def _status(cloud: Client, key: str, run: dict[str, Any], status: int) -> bool:
    return (await cloud.ask("GET", f"{RUNS}/{run['id']}", key)).status_code == status


async def test_equal_requests_at_once_make_one_run(opening: Opening) -> None:
    async with opening() as cloud:
        key = await cloud.account("alice")
        body = {"experiment": "e"}
        answers = await asyncio.gather(
            *(cloud.ask("POST", RUNS, key, body, **ONCE) for _ in range(20))
        )
        assert {answer.content for answer in answers} == {answers[0].content}
        assert {answer.status_code for answer in answers} == {201}
        assert len((await cloud.ask("GET", RUNS, key)).json()["runs"]) == 1


async def test_a_key_of_another_request_or_another_form_is_refused_and_changes_nothing(
    opening: Opening,
) -> None:
    async with opening() as cloud:
        alice, bob = await cloud.account("alice"), await cloud.account("bob")
        assert (await cloud.ask("POST", RUNS, alice, {"experiment": "a"}, **ONCE)).is_success
        other = await cloud.ask("POST", RUNS, alice, {"experiment": "b"}, **ONCE)
        assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_mismatch")
        bad = {"Idempotency-Key": "with space"}
        refused = await cloud.ask("POST", RUNS, alice, {"experiment": "b"}, **bad)
        assert (refused.status_code, refused.json()["error"]["code"]) == (
            400,
            "bad_idempotency_key",
        )
        assert len((await cloud.ask("GET", RUNS, alice)).json()["runs"]) == 1
        # A key is its caller's.
        own = await cloud.ask("POST", RUNS, bob, {"experiment": "a"}, **ONCE)
        assert (own.status_code, own.json()["account"]) == (201, "bob")


async def test_a_refused_request_may_be_repeated_with_its_key(opening: Opening) -> None:
    async with opening(runs_per_account=1) as cloud:
        key = await cloud.account("alice")
        full = await cloud.run(key)
        body = {"experiment": "more"}
        assert (await cloud.ask("POST", RUNS, key, body, **ONCE)).status_code == 429
        await cloud.ask("DELETE", f"{RUNS}/{full['id']}", key)
        assert (await cloud.ask("POST", RUNS, key, body, **ONCE)).status_code == 201


@pytest.mark.parametrize(
    ("path", "body"),
    [(ACCOUNTS, {"name": "carol"}), (f"{ACCOUNTS}/alice/keys", {"open_sessions": 3})],
)
async def test_a_repeated_request_for_a_key_makes_no_other_and_shows_no_secret(
    opening: Opening, path: str, body: Any
) -> None:
    async with opening() as cloud:
        await cloud.account("alice")
        first = await cloud.ask("POST", path, ADMIN, body, **ONCE)
        made = first.json()
        assert first.status_code == 201
        again = await cloud.ask("POST", path, ADMIN, body, **ONCE)
        error = again.json()["error"]
        assert (again.status_code, error["code"]) == (409, "key_shown_once")
        assert (error["account"], error["id"]) == (made["account"], made["id"])
        mismatch = await cloud.ask("POST", path, ADMIN, {**body, "open_sessions": 9}, **ONCE)
        assert mismatch.status_code == 422
        # What the error says to do.
        gone = await cloud.ask("DELETE", f"{ACCOUNTS}/{made['account']}/keys/{made['id']}", ADMIN)
        assert gone.json()["revoked_at"] is not None
        secret = made["api_key"].rpartition(".")[2].encode()
        stored = b"".join(p.read_bytes() for p in cloud.root.rglob("*") if p.is_file())
        assert made["id"].encode() in stored
        assert secret not in stored
    async with opening() as cloud:
        assert (await cloud.ask("POST", path, ADMIN, body, **ONCE)).status_code == 409
        listed = (await cloud.ask("GET", ACCOUNTS, ADMIN)).json()["accounts"]
        keys = [key for account in listed for key in account["keys"]]
        assert sum(key["id"] == made["id"] for key in keys) == (made["account"] == "alice")


async def test_a_request_that_was_cut_off_before_its_key_was_valid_makes_it_at_last(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opening() as cloud:
        with monkeypatch.context() as broken:

            def fail(*_: Any) -> None:
                raise OSError(28, "No space left on device")

            broken.setattr("any_agent.auth.key_store._write_keys", fail)
            assert (
                await cloud.ask("POST", ACCOUNTS, ADMIN, {"name": "alice"}, **ONCE)
            ).status_code == 500
        made = await cloud.ask("POST", ACCOUNTS, ADMIN, {"name": "alice"}, **ONCE)
        assert made.status_code == 201
        assert (await cloud.ask("GET", "/rl/v1/account", made.json()["api_key"])).is_success


async def test_answers_are_kept_for_a_day_and_a_callers_are_bounded(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("any_agent.protocol.idempotency.SWEEP_INTERVAL", 0.0)
    monkeypatch.setattr("router.cloud.asked._MAX_ANSWERS", 2)
    async with opening() as cloud:
        alice, bob = await cloud.account("alice"), await cloud.account("bob")

        async def make(key: str, once: str, **body: Any) -> httpx.Response:
            return await cloud.ask("POST", RUNS, key, body, **{"Idempotency-Key": once})

        first = (await make(alice, "1", experiment="e")).json()
        await make(alice, "2", experiment="e")
        many = await make(alice, "3", experiment="e")
        assert (many.status_code, many.json()["error"]["code"]) == (429, "too_many_answers")
        assert (await make(alice, "1", experiment="e")).json() == first
        assert (await make(bob, "3", experiment="e")).status_code == 201
        boot = boot_clock.boot_seconds
        monkeypatch.setattr(boot_clock, "boot_seconds", lambda: boot() + ANSWER_TTL + 1)
        assert (await make(alice, "1", experiment="e")).json()["id"] != first["id"]


@pytest.mark.service
async def test_whenever_the_cloud_is_killed_a_repeated_request_has_one_effect(
    tmp_path: Path,
) -> None:
    """SIGKILL a moment after the request, at growing moments; then ask again, until it answers."""
    port = free_port("127.0.0.1")
    config = tmp_path / "cloud.yaml"
    settings = {
        "root": str(tmp_path / "runs"),
        "server": {"port": port},
        "models": {"tiny": {"model.path": str(tmp_path), "server.ranks": 1}},
        "presets": {"grpo": {"train": {"steps": 7}}},
        "default": {"model": "tiny", "preset": "grpo"},
    }
    config.write_text(yaml.safe_dump(settings))
    environ = os.environ | {"ANY_AGENT_SERVER__ADMIN_KEY": ADMIN}
    command = [sys.executable, "-m", "router.cloud", "--config", str(config)]
    url, head = f"http://127.0.0.1:{port}", {"Authorization": f"Bearer {ADMIN}"}

    async def asked(name: str) -> httpx.Response | None:
        async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as http:
            try:
                headers = {**head, "Idempotency-Key": name}
                return await http.post(ACCOUNTS, headers=headers, json={"name": name})
            except _CUT_OFF:
                return None

    async def up() -> bool:
        async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
            try:
                return (await http.get("/healthz")).is_success
            except _CUT_OFF:
                return False

    process = _started(command, environ)
    try:
        await until(up, "the cloud", within=60)
        for number in range(6):
            asking = asyncio.create_task(asked(f"a{number}"))
            await asyncio.sleep(0.002 * number)
            process.send_signal(signal.SIGKILL)
            process.wait()
            first = await asking
            process = _started(command, environ)
            await until(up, "the cloud again", within=60)
            again = await asked(f"a{number}")
            assert again is not None
            # Its key is valid either way; the account and its key are there once.
            assert again.status_code == (409 if first is not None else again.status_code)
            assert again.status_code in (201, 409), again.text
            if again.status_code == 409:
                assert again.json()["error"]["code"] == "key_shown_once"
        async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
            listed = (await http.get(ACCOUNTS, headers=head)).json()["accounts"]
        assert {each["name"]: len(each["keys"]) for each in listed} == {
            f"a{number}": 1 for number in range(6)
        }
    finally:
        process.kill()
        process.wait()


def _started(command: list[str], environ: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, env=environ)


async def test_a_header_of_any_bytes_is_part_of_the_request(opening: Opening) -> None:
    async with opening() as cloud:
        key = await cloud.account("alice")
        head = [
            (b"Authorization", f"Bearer {key}".encode()),
            (b"Idempotency-Key", b"once"),
            (b"X-Any-Agent-Session", "ŝ".encode()),
        ]
        made = await cloud.http.post(RUNS, headers=head, json={"experiment": "exp"})
        again = await cloud.http.post(RUNS, headers=head, json={"experiment": "exp"})
        assert (made.status_code, again.content) == (201, made.content)
