"""The bill of accounts: each number once, whatever is killed, deleted or read twice."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from any_agent.cli.main import main
from any_agent.rundir import usage
from any_agent.rundir.layout import RunDir
from any_agent.rundir.usage import ADD, TABLE, day_of
from router.cloud.metering import _by_day
from tests.router.cloud.conftest import ADMIN, Client, Opening
from tests.support.waiting import until

USAGE = "/rl/v1/usage"
COUNTED = ("prompt_tokens", "sampled_tokens", "calls", "sessions", "trained_tokens", "steps")


def count(cloud: Client, run: dict[str, Any], *calls: tuple[str, int, int], rank: int = 0) -> None:
    """Count calls as a rank's journal does: their day, their prompt's and their sampled tokens."""
    folder = RunDir(cloud.folder(run))
    path = folder.journal(rank)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.path.chmod(0o700)
    new = not path.exists()
    with closing(sqlite3.connect(path)) as journal, journal:
        if new:
            journal.execute("PRAGMA journal_mode = WAL")
            journal.executescript(f"CREATE TABLE sessions (created_at REAL); {TABLE}")
        for day, prompt, sampled in calls:
            journal.execute(ADD, (day, prompt, sampled, 1))


async def total(cloud: Client, key: str, query: str = "") -> dict[str, Any]:
    (account,) = (await cloud.ask("GET", f"{USAGE}{query}", key)).json()["accounts"]
    return {name: account["total"][name] for name in COUNTED}


async def test_an_account_sees_its_own_and_the_operator_all_by_run_and_day(
    opening: Opening,
) -> None:
    async with opening() as cloud:
        alice, bob = await cloud.account("alice"), await cloud.account("bob")
        one, two = await cloud.run(alice, "one"), await cloud.run(alice, "two")
        other = await cloud.run(bob)
        count(cloud, one, ("2026-11-29", 10, 1), ("2026-11-30", 20, 2), ("2026-11-30", 5, 5))
        count(cloud, one, ("2026-11-30", 100, 50), rank=1)
        count(cloud, two, ("2026-11-30", 7, 7))
        count(cloud, other, ("2026-11-30", 1, 3))
        folder = RunDir(cloud.folder(one))
        line = {"step": 1, "time": 1795996800.0, "tokens": 40}
        assert day_of(line["time"]) == "2026-11-30"
        folder.metrics.write_text(json.dumps(line) + "\n")
        zero = dict.fromkeys(COUNTED, 0)
        for _ in range(2):
            answer = (await cloud.ask("GET", USAGE, alice)).json()
            assert [each["account"] for each in answer["accounts"]] == ["alice"]
            runs = {run["experiment"]: run for run in answer["accounts"][0]["runs"]}
            days = {
                each["day"]: {name: each[name] for name in COUNTED} for each in runs["one"]["days"]
            }
            assert days == {
                "2026-11-29": {**zero, "prompt_tokens": 10, "sampled_tokens": 1, "calls": 1},
                "2026-11-30": {
                    **zero,
                    "prompt_tokens": 125,
                    "sampled_tokens": 57,
                    "calls": 3,
                    "trained_tokens": 40,
                    "steps": 1,
                },
            }
            assert (await total(cloud, alice))["sampled_tokens"] == 65
        everyone = (await cloud.ask("GET", USAGE, ADMIN)).json()["accounts"]
        assert {each["account"]: each["total"]["calls"] for each in everyone} == {
            "alice": 5,
            "bob": 1,
        }
        assert (await total(cloud, ADMIN, "?account=bob"))["sampled_tokens"] == 3
        assert (await total(cloud, alice, "?from=2026-11-30"))["prompt_tokens"] == 132
        assert (await total(cloud, alice, "?from=2026-11-29&to=2026-11-29"))["calls"] == 1
        # More is counted meanwhile.
        count(cloud, two, ("2026-12-01", 1, 1))
        assert (await total(cloud, alice))["calls"] == 6


async def test_a_bill_stays_when_its_run_and_its_account_are_deleted(opening: Opening) -> None:
    async with opening() as cloud:
        alice = await cloud.account("alice")
        run = await cloud.run(alice, "gone")
        # Nobody has asked for the bill before the run goes.
        count(cloud, run, ("2026-11-30", 20, 2))
        await cloud.ask("DELETE", f"/rl/v1/runs/{run['id']}", alice)
        await until(lambda: _gone(cloud, alice, run), "its end")
        assert not cloud.folder(run).exists()
        (account,) = (await cloud.ask("GET", USAGE, alice)).json()["accounts"]
        assert (account["runs"][0]["deleted"], account["total"]["sampled_tokens"]) == (True, 2)
        again = await cloud.run(alice, "gone")
        count(cloud, again, ("2026-11-30", 1, 1))
        assert (await total(cloud, alice))["sampled_tokens"] == 3
        await cloud.ask("DELETE", "/rl/v1/accounts/alice", ADMIN)
        await until(lambda: not (cloud.root / "alice").exists(), "the files' end")
        assert (await total(cloud, ADMIN))["sampled_tokens"] == 3
        # Another one of this name has used nothing.
        await until(lambda: _free(cloud, "alice"), "its name")
        made = await cloud.ask("POST", "/rl/v1/accounts/alice/keys", ADMIN, {})
        assert (await cloud.ask("GET", USAGE, made.json()["api_key"])).json()["accounts"] == []
    async with opening() as cloud:
        assert (await total(cloud, ADMIN))["sampled_tokens"] == 3


async def _gone(cloud: Client, key: str, run: dict[str, Any]) -> bool:
    return (await cloud.ask("GET", f"/rl/v1/runs/{run['id']}", key)).status_code == 404


async def _free(cloud: Client, name: str) -> bool:
    made = await cloud.ask("POST", "/rl/v1/accounts", ADMIN, {"name": name})
    return made.status_code == 201


async def test_a_removal_that_is_cut_off_counts_once(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.cloud.jobs._REMOVE_EVERY", 0.05)
    async with opening() as cloud:
        alice = await cloud.account("alice")
        run = await cloud.run(alice)
        count(cloud, run, ("2026-11-30", 20, 2))
        jobs, fails = cloud.cloud._jobs, 3
        remove = jobs._store.remove

        async def failing(row: Any) -> None:
            nonlocal fails
            fails -= 1
            if fails > 0:
                # Its files are gone, its row is not.
                raise sqlite3.OperationalError("disk I/O error")
            await remove(row)

        monkeypatch.setattr(jobs._store, "remove", failing)
        await cloud.ask("DELETE", f"/rl/v1/runs/{run['id']}", alice)
        await until(lambda: _gone(cloud, alice, run), "its end")
        assert (fails, (await total(cloud, alice))["sampled_tokens"]) == (0, 2)


async def test_a_run_whose_journal_cannot_be_read_now_is_not_removed_before_it_is_billed(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.cloud.jobs._REMOVE_EVERY", 0.05)
    async with opening() as cloud:
        alice = await cloud.account("alice")
        run = await cloud.run(alice)
        count(cloud, run, ("2026-11-30", 20, 2))
        read, fails = usage._JournalReader.read, 3

        def failing(reader: usage._JournalReader) -> Any:
            nonlocal fails
            fails -= 1
            if fails > 0:
                error = sqlite3.OperationalError("database is locked")
                error.sqlite_errorcode = sqlite3.SQLITE_BUSY
                raise error
            return read(reader)

        monkeypatch.setattr(usage._JournalReader, "read", failing)
        await cloud.ask("DELETE", f"/rl/v1/runs/{run['id']}", alice)
        await until(lambda: _gone(cloud, alice, run), "its end")
        assert (fails, (await total(cloud, alice))["sampled_tokens"]) == (0, 2)


async def test_a_damaged_journal_does_not_keep_the_files_of_a_deleted_run(
    opening: Opening,
) -> None:
    async with opening() as cloud:
        alice = await cloud.account("alice")
        run = await cloud.run(alice)
        count(cloud, run, ("2026-11-30", 20, 2))
        assert (await total(cloud, alice))["sampled_tokens"] == 2
        RunDir(cloud.folder(run)).journal(0).write_bytes(b"damaged" * 1000)
        await cloud.ask("DELETE", f"/rl/v1/runs/{run['id']}", alice)
        await until(lambda: _gone(cloud, alice, run), "its end")
        assert (await total(cloud, alice))["sampled_tokens"] == 2


async def test_an_account_that_is_made_anew_sees_no_bill_of_the_earlier_one(
    opening: Opening,
) -> None:
    async with opening() as cloud:
        made = await cloud.ask("POST", "/rl/v1/accounts", ADMIN, {"name": "alice"})
        alice = made.json()["api_key"]
        run = await cloud.run(alice, "secret-name")
        count(cloud, run, ("2026-11-30", 20, 2))
        await cloud.ask("DELETE", f"/rl/v1/runs/{run['id']}", alice)
        await until(lambda: _gone(cloud, alice, run), "its end")
        # Its last key goes, and so the account, without being deleted.
        await cloud.ask("DELETE", f"/rl/v1/accounts/alice/keys/{made.json()['id']}", ADMIN)
        later = await cloud.account("alice")
        assert (await cloud.ask("GET", USAGE, later)).json()["accounts"] == []
        assert (await total(cloud, ADMIN))["sampled_tokens"] == 2


async def test_lines_that_are_no_steps_and_a_file_that_shrank_change_no_bill(
    opening: Opening,
) -> None:
    async with opening() as cloud:
        alice = await cloud.account("alice")
        run = await cloud.run(alice)
        metrics = RunDir(cloud.folder(run)).metrics
        count(cloud, run, ("2026-11-30", 20, 2))
        line = json.dumps({"step": 1, "time": 1795996800.0, "tokens": 40})
        metrics.write_text(f'{line}\n[1]\n7\n{{"tokens": 3}}\n{{"step": 2, "tok')
        assert (await total(cloud, alice))["trained_tokens"] == 40
        metrics.write_text("[]\n")
        assert (await total(cloud, alice))["trained_tokens"] == 40
        metrics.unlink()
        assert (await total(cloud, alice))["steps"] == 1


async def test_days_without_usage_have_none_of_a_deleted_run(opening: Opening) -> None:
    async with opening() as cloud:
        alice = await cloud.account("alice")
        run = await cloud.run(alice)
        count(cloud, run, ("2026-11-29", 20, 2), ("2026-11-30", 20, 2))
        assert (await total(cloud, alice, "?from=2026-11-30"))["sampled_tokens"] == 2
        await cloud.ask("DELETE", f"/rl/v1/runs/{run['id']}", alice)
        await until(lambda: _gone(cloud, alice, run), "its end")
        answer = await cloud.ask("GET", f"{USAGE}?to=2026-11-28", alice)
        assert answer.json()["accounts"] == []


async def test_a_deletion_that_is_repeated_under_its_key_is_the_same_after_its_effect(
    opening: Opening,
) -> None:
    async with opening() as cloud:
        await cloud.account("alice")
        once = {"Idempotency-Key": "delete-alice"}
        path = "/rl/v1/accounts/alice"
        # A cloud that was killed has revoked the keys, and stored no answer.
        (await cloud.ask("DELETE", path, ADMIN)).raise_for_status()
        assert (await cloud.ask("DELETE", path, ADMIN, **once)).status_code == 202
        assert (await cloud.ask("DELETE", path, ADMIN)).status_code == 404
        unknown = await cloud.ask("DELETE", "/rl/v1/accounts/bob", ADMIN, **once)
        assert unknown.status_code == 404


async def test_a_journal_that_has_lost_what_it_counted_lowers_no_bill(opening: Opening) -> None:
    async with opening() as cloud:
        alice = await cloud.account("alice")
        run = await cloud.run(alice)
        count(cloud, run, ("2026-11-30", 20, 2), ("2026-11-30", 20, 2))
        assert (await total(cloud, alice))["sampled_tokens"] == 4
        journal = RunDir(cloud.folder(run)).journal(0)
        journal.write_bytes(b"damaged" * 1000)
        assert (await total(cloud, alice))["sampled_tokens"] == 4
        for path in journal.parent.iterdir():
            path.unlink()
        count(cloud, run, ("2026-11-30", 20, 2))
        assert (await total(cloud, alice))["sampled_tokens"] == 4


async def test_the_seconds_of_a_place_are_those_from_its_start_to_its_end(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.cloud.launching.Launching.gpus_of", lambda *_: 2)
    async with opening() as cloud:
        alice, bob = await cloud.account("alice"), await cloud.account("bob")
        run = await cloud.run(alice)
        await cloud.run(bob)
        before = time.monotonic()
        assert (await cloud.ask("GET", "/rl/v1/run", alice)).is_success
        while_up = await _seconds(cloud, alice)
        await cloud.ask("POST", f"/rl/v1/runs/{run['id']}/stop", alice)

        async def stopped() -> bool:
            return await cloud.state(alice, run["id"]) == "stopped"

        await until(stopped, "its end")
        most = time.monotonic() - before
        after = await _seconds(cloud, alice)
        assert 0 < while_up[0] < after[0] <= most
        assert after[1] == pytest.approx(2 * after[0])
        # It does not grow any more, and who had no place has no seconds.
        assert await _seconds(cloud, alice) == after
        assert await _seconds(cloud, bob) == (0, 0)
    async with opening() as cloud:
        assert await _seconds(cloud, alice) == after


async def _seconds(cloud: Client, key: str) -> tuple[float, float]:
    (account,) = (await cloud.ask("GET", USAGE, key)).json()["accounts"]
    return account["total"]["place_seconds"], account["total"]["gpu_seconds"]


def test_a_stay_over_midnights_is_divided_among_its_days() -> None:
    day = 86400.0
    parts = dict(_by_day(day - 10.0, 30.0 + day))
    assert parts == {"1970-01-01": 10.0, "1970-01-02": day, "1970-01-03": 20.0}
    assert list(_by_day(day, 0.0)) == []


@pytest.mark.parametrize(
    "query",
    ["from=yesterday", "to=20261130", "from=2026-12-01&to=2026-11-30", "day=1", "from=1&from=2"],
)
async def test_a_query_that_means_no_days_is_refused(opening: Opening, query: str) -> None:
    async with opening() as cloud:
        refused = await cloud.ask("GET", f"{USAGE}?{query}", ADMIN)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_request")


async def test_an_account_cannot_ask_for_anothers(opening: Opening) -> None:
    async with opening() as cloud:
        alice = await cloud.account("alice")
        await cloud.account("bob")
        assert (await cloud.ask("GET", f"{USAGE}?account=bob", alice)).status_code == 403


async def test_the_command_prints_the_bill_of_all_as_json_and_as_csv(
    opening: Opening,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("ANY_AGENT_SERVER__ADMIN_KEY", ADMIN)
    async with opening() as cloud:
        run = await cloud.run(await cloud.account("alice"))
        other = await cloud.run(await cloud.account("bob"))
        count(cloud, run, ("2026-11-29", 9, 9), ("2026-11-30", 20, 2))
        count(cloud, other, ("2026-11-30", 1, 3))
        settings = yaml.safe_load((tmp_path / "cloud.yaml").read_text())
        port = urlsplit(cloud.url).port
        (tmp_path / "this.yaml").write_text(yaml.safe_dump({**settings, "server": {"port": port}}))
        command = ["cloud", "usage", "--config", str(tmp_path / "this.yaml")]
        assert await asyncio.to_thread(main, command) == 0
        told = json.loads(capsys.readouterr().out)
        assert told == (await cloud.ask("GET", USAGE, ADMIN)).json()
        assert (told["total"]["sampled_tokens"], told["total"]["calls"]) == (14, 3)
        command += ["--csv", "--from", "2026-11-30"]
        assert await asyncio.to_thread(main, command) == 0
        rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
        assert [
            (row["account"], row["run"], row["day"], row["sampled_tokens"]) for row in rows
        ] == [("alice", run["id"], "2026-11-30", "2"), ("bob", other["id"], "2026-11-30", "3")]
        assert await asyncio.to_thread(main, [*command, "--to", "soon"]) == 1
        assert "is no day" in capsys.readouterr().err
        serving = ["cloud", "--config", str(tmp_path / "this.yaml"), "--csv"]
        assert await asyncio.to_thread(main, serving) == 2
