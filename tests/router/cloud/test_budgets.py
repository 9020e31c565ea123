"""Budgets of accounts: what ends when one is used up, what goes on, and when it begins anew."""

from __future__ import annotations

import json
import time
from datetime import date, timedelta
from typing import Any

import pytest

from any_agent.config.cloud import Budget
from any_agent.rundir.layout import RunDir
from any_agent.rundir.usage import day_of
from router.cloud import budgets
from router.cloud.budgets import period_of
from tests.router.cloud.conftest import ADMIN, Client, Opening
from tests.router.cloud.test_usage import count
from tests.support.waiting import until

CALL, OPEN = "/v1/chat/completions", "/rl/v1/start_session"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "CHECK_EVERY", 0.05)


async def set_budget(cloud: Client, name: str, **limits: Any) -> dict[str, Any]:
    answer = await cloud.ask("PUT", f"/rl/v1/accounts/{name}/budget", ADMIN, limits)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def status(cloud: Client, path: str, key: str, method: str = "POST") -> int:
    return (await cloud.ask(method, path, key, {})).status_code


def train(cloud: Client, run: dict[str, Any], *steps: int) -> None:
    """Note steps of ten tokens each, made now, as a trainer does."""
    lines = [{"step": step, "time": time.time(), "tokens": 10} for step in steps]
    RunDir(cloud.folder(run)).metrics.write_text("".join(f"{json.dumps(x)}\n" for x in lines))


async def test_calls_and_opens_end_with_the_budget_and_rewards_go_on(opening: Opening) -> None:
    async with opening() as cloud:
        alice, bob = await cloud.account("alice"), await cloud.account("bob")
        run = await cloud.run(alice)
        seen = await set_budget(cloud, "alice", sampled_tokens=100)
        assert (seen["limits"], seen["used"]) == ({"sampled_tokens": 100}, {"sampled_tokens": 0})
        session = (await cloud.ask("POST", OPEN, alice, {})).json()["api_key"]
        count(cloud, run, (day_of(time.time()), 10**6, 99))
        assert await status(cloud, CALL, session) == 200
        count(cloud, run, (day_of(time.time()), 0, 1))

        async def refused() -> bool:
            return await status(cloud, CALL, session) == 402

        await until(refused)
        spent = (await cloud.ask("POST", CALL, session, {})).json()["error"]
        assert spent["code"] == "budget_exhausted"
        assert "100 sampled_tokens a month, is used up (100)" in spent["message"]
        named = "/runs/exp/trial-1"
        for path in (OPEN, "/rl/start_session", CALL, f"{named}{CALL}", f"/{session}/v1/responses"):
            assert await status(cloud, path, alice) == 402, path
        assert await status(cloud, OPEN, alice, "GET") == 402
        for path in ("/rl/v1/set_reward", "/rl/v1/finalize", f"{named}/rl/set_reward"):
            assert await status(cloud, path, session) == 200, path
        assert await status(cloud, f"/{session}/v1/rl/set_reward", "DUMMY") == 200
        assert await status(cloud, "/v1/models", alice, "GET") == 200
        assert await cloud.state(alice, run["id"]) == "running"
        assert await status(cloud, CALL, bob) == 200
        assert (await cloud.ask("GET", "/rl/v1/account", alice)).json()["budget"] == {
            **{"per": "month", "ends": period_of(Budget(), budgets._today()).ends},
            **{"limits": {"sampled_tokens": 100}, "used": {"sampled_tokens": 100}},
            **{"left": {"sampled_tokens": 0}, "exhausted": "sampled_tokens"},
        }
        assert (await set_budget(cloud, "alice", sampled_tokens=101))["exhausted"] is None
        assert await status(cloud, CALL, session) == 200


async def test_a_run_whose_steps_are_used_up_stops_and_goes_on_with_a_larger_budget(
    opening: Opening,
) -> None:
    async with opening() as cloud:
        alice = await cloud.account("alice")
        await set_budget(cloud, "alice", steps=3, per="total")
        run = await cloud.run(alice)
        session = (await cloud.ask("POST", OPEN, alice, {})).json()["api_key"]
        train(cloud, run, 1, 2, 3)

        async def stopped() -> bool:
            return await cloud.state(alice, run["id"]) == "stopped"

        await until(stopped)
        assert "3 steps, is used up (3)" in await cloud.reason(alice, run["id"])
        # Nothing may start it, neither a reward nor its owner.
        assert await status(cloud, "/rl/v1/set_reward", session) == 402
        started = await cloud.ask("POST", f"/rl/v1/runs/{run['id']}/start", alice)
        assert (started.status_code, started.json()["state"]) == (202, "stopped")
        assert cloud.cloud._jobs.stats.ends["budget"] == 1
        other = await cloud.run(alice, "other")
        assert await cloud.state(alice, other["id"]) == "stopped"
        assert await status(cloud, "/runs/other/trial-1/rl/v1/set_reward", alice) == 402
        await set_budget(cloud, "alice", steps=4, per="total")
        assert await status(cloud, "/rl/v1/set_reward", session) == 200


async def test_a_budget_survives_a_restart_and_not_its_account(opening: Opening) -> None:
    async with opening() as cloud:
        alice = await cloud.account("alice")
        run = await cloud.run(alice)
        await set_budget(cloud, "alice", calls=1)
        count(cloud, run, (day_of(time.time()), 1, 1))
        # A killed cloud has not read it.
    async with opening(budget={"calls": 5, "per": "day"}) as cloud:

        async def refused() -> bool:
            return await status(cloud, CALL, alice) == 402

        await until(refused)
        assert (await cloud.ask("DELETE", "/rl/v1/accounts/alice", ADMIN)).status_code == 202

        async def gone() -> bool:
            return not (await cloud.ask("GET", "/rl/v1/runs", ADMIN)).json()["runs"]

        await until(gone)
        made = {"name": "alice", "budget": {"calls": 7}}
        alice = (await cloud.ask("POST", "/rl/v1/accounts", ADMIN, made)).json()["api_key"]
        own = (await cloud.ask("GET", "/rl/v1/account", alice)).json()["budget"]
        assert (own["limits"], own["used"], own["per"]) == ({"calls": 7}, {"calls": 0}, "month")
        dropped = await cloud.ask("DELETE", "/rl/v1/accounts/alice/budget", ADMIN)
        assert (dropped.json()["limits"], dropped.json()["per"]) == ({"calls": 5}, "day")
        assert await status(cloud, CALL, alice) == 200


async def test_a_new_period_lets_what_was_used_up_go_on(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opening(budget={"steps": 2, "per": "day"}) as cloud:
        alice = await cloud.account("alice")
        run = await cloud.run(alice)
        assert await status(cloud, OPEN, alice) == 200
        train(cloud, run, 1, 2)

        async def state(wanted: int) -> bool:
            return await status(cloud, CALL, alice) == wanted

        await until(lambda: state(402))
        tomorrow = budgets._today() + timedelta(days=1)
        monkeypatch.setattr(budgets, "_today", lambda: tomorrow)
        await until(lambda: state(200))


async def test_a_run_that_cannot_be_read_frees_nobody(opening: Opening) -> None:
    async with opening() as cloud:
        alice = await cloud.account("alice")
        run = await cloud.run(alice)
        RunDir(cloud.folder(run)).metrics.mkdir(parents=True)
        assert (await set_budget(cloud, "alice", calls=0))["exhausted"] == "calls"
        assert await status(cloud, CALL, alice) == 402


async def test_a_budget_below_what_is_used_is_used_up_until_its_period_ends(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opening(budget={"sampled_tokens": 50}) as cloud:
        alice = await cloud.account("alice")
        run = await cloud.run(alice)
        count(cloud, run, (day_of(time.time()), 1, 40))
        lower = await set_budget(cloud, "alice", sampled_tokens=10)
        assert (lower["left"], lower["exhausted"]) == ({"sampled_tokens": 0}, "sampled_tokens")
        assert await status(cloud, CALL, alice) == 402
        dropped = await cloud.ask("DELETE", "/rl/v1/accounts/alice/budget", ADMIN)
        assert dropped.json()["left"] == {"sampled_tokens": 10}
        # It uses up the default budget, and then has neither a run nor a budget of its own.
        count(cloud, run, (day_of(time.time()), 1, 10))
        assert (await cloud.ask("GET", "/rl/v1/account", alice)).json()["budget"]["exhausted"]
        await cloud.ask("DELETE", f"/rl/v1/runs/{run['id']}", alice)

        async def gone() -> bool:
            return not (await cloud.ask("GET", "/rl/v1/runs", ADMIN)).json()["runs"]

        await until(gone)
        assert await status(cloud, CALL, alice) == 402
        next_month = time.time() + 31 * 86_400
        monkeypatch.setattr(budgets.time, "time", lambda: next_month)

        async def answered() -> bool:
            return await status(cloud, CALL, alice) == 200

        await until(answered)


@pytest.mark.parametrize(
    "body",
    [
        {"calls": -1},
        {"calls": "5"},
        {"calls": True},
        {"calls": 1e400},
        {"calls": 1e19},
        {"calls": float("nan")},
        {"tokens": 5},
        {"per": "year", "calls": 5},
        {"calls": [5]},
    ],
)
async def test_what_is_no_budget_is_refused_and_changes_nothing(
    opening: Opening, body: dict[str, Any]
) -> None:
    async with opening() as cloud:
        alice = await cloud.account("alice")
        await set_budget(cloud, "alice", calls=3)
        sent = json.dumps(body).replace("Infinity", "1e400")
        bearer = {"Authorization": f"Bearer {ADMIN}"}
        answer = await cloud.http.put("/rl/v1/accounts/alice/budget", content=sent, headers=bearer)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["code"] == "invalid_request"
        nobodys = await cloud.ask("PUT", "/rl/v1/accounts/nobody/budget", ADMIN, {"calls": 3})
        assert nobodys.json()["error"]["code"] == "unknown_account"
        assert await status(cloud, "/rl/v1/accounts/alice/budget", alice, "PUT") == 403
        own = (await cloud.ask("GET", "/rl/v1/account", alice)).json()["budget"]
        assert own["limits"] == {"calls": 3}


@pytest.mark.parametrize(
    ("per", "today", "first", "last", "ends"),
    [
        ("month", "2026-12-31", "2026-12-01", "2026-12-31", "2027-01-01"),
        ("month", "2028-02-29", "2028-02-01", "2028-02-29", "2028-03-01"),
        ("day", "2026-12-31", "2026-12-31", "2026-12-31", "2027-01-01"),
        ("total", "2026-12-31", "0001-01-01", "9999-12-31", None),
    ],
)
def test_a_budget_begins_anew_with_its_period(
    per: Any, today: str, first: str, last: str, ends: str | None
) -> None:
    assert period_of(Budget(per=per), date.fromisoformat(today)) == (first, last, ends)
