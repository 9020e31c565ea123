"""`GET /rl/v1/overview`: the dashboard's figures as JSON, for an operator's key alone."""

from __future__ import annotations

from typing import Any

import pytest

from any_agent.auth.key_store import create_key
from any_agent.launcher.trial import trial_dir
from any_agent.runtime.metrics import Exposition, Metric
from proxy_ext import metrics as rank_metrics
from router.dashboard import scrape
from router.dashboard.alarms import Part
from router.dashboard.overview import Group, since_step, why_waiting
from router.dashboard.scrape import Rates, Samples
from tests.router.conftest import StartLab
from tests.support.proxy import until
from tests.support.router import Lab, Received
from trainer import metrics as trainer_metrics

ADMIN = "admin-key-1"
PATH = "/rl/v1/overview"


TRAINS = [Part("router", "ready"), Part("trainer", "ready")]
IDLE = {"waiting": 0}


@pytest.mark.parametrize(
    ("counts", "slots", "groups", "words"),
    [
        ({}, IDLE, [], ["for agents"]),
        ({"trained": 64}, IDLE, [], ["for agents"]),
        ({"open": 3}, IDLE, [], []),
        ({"finalized": 3}, IDLE, [], []),
        ({"open": 3}, {"waiting": 2}, [], ["slots", "2 opens"]),
        ({"awaiting_reward": 5}, IDLE, [], ["rewards", "5 sessions"]),
        ({"open": 1}, IDLE, [Group("g", 3, 8, 9.0)], ["group g (3 of 8)"]),
    ],
)
def test_the_reason_why_training_waits_is_said(
    counts: dict[str, int], slots: dict[str, int], groups: list[Group], words: list[str]
) -> None:
    text = why_waiting(TRAINS, {"train": counts}, slots, groups)
    assert bool(text) == bool(words) and all(word in text for word in words)
    starts = [Part("trainer", "starting")]
    assert "trainer" in why_waiting(starts, {"train": counts}, slots, groups)
    # Without a trainer nothing waits for a step.
    assert why_waiting(TRAINS[:1], {"train": counts}, slots, groups) == ""


TRAINER = """\
any_agent_train_since_step_reward_mean{rank="trainer"} 0.996
any_agent_train_since_step_sessions{rank="trainer",dull="false"} 712.0
any_agent_train_since_step_sessions{rank="trainer",dull="true"} 8008.0
"""


def test_the_reward_of_all_sessions_is_that_of_the_trainers_metrics() -> None:
    found = since_step(Samples(TRAINER))
    assert found == {"reward": 0.996, "sessions": 8720, "dull": 8008}
    assert (
        since_step(None)
        == since_step(Samples(""))
        == {**found, "reward": None, "sessions": 0, "dull": 0}
    )


async def rank(received: Received) -> None:
    data: dict[str, Any] = {}
    if received.target == "/rl/v1/capacity":
        data = {"unfilled": [{"group_id": "g", "members": 1, "size": 4, "closes_in": 60}]}
    await received.answer(data)


@pytest.mark.parametrize("ui", ["true", "false"])
async def test_an_operator_gets_the_overview_with_and_without_pages(
    start_lab: StartLab, ui: str
) -> None:
    lab = await start_lab(f"server.admin_key={ADMIN}", f"server.ui={ui}")
    lab.ranks[0].handler = rank
    answer = await lab.get(PATH, ADMIN)
    assert answer.status_code == 200, answer.text
    run = answer.json()
    assert run["trial"] == "/".join(trial_dir(lab.config).path.parts[-2:])
    assert [part["name"] for part in run["parts"]] == ["router", "rank-0"]
    assert run["groups"][0]["group_id"] == "g"
    assert answer.headers["x-any-agent-api"]
    assert (await lab.get("/ui")).status_code == (401 if ui == "true" else 200)


async def test_a_rank_that_is_away_is_an_alarm(start_lab: StartLab) -> None:
    lab = await start_lab(ranks=2)
    assert (await lab.get(PATH)).json()["alarms"] == []
    await lab.ranks[1].kill()

    async def away() -> bool:
        alarms = (await lab.get(PATH)).json()["alarms"]
        return bool(alarms) and alarms[0]["what"].startswith("Rank 1 ")

    await until(away)


async def test_nobody_but_an_operator_gets_the_overview(start_lab: StartLab) -> None:
    lab: Lab = await start_lab(f"server.admin_key={ADMIN}")
    keys = trial_dir(lab.config).keys
    tenant, _ = create_key(keys, "tenant", tenant="alice", created_by="me")
    trainer, _ = create_key(keys, "trainer", created_by="me")
    _, session = lab.signer.mint(0)
    assert (await lab.get(PATH)).status_code == 401
    assert (await lab.get(PATH, "wrong")).status_code == 401
    for key in (tenant, trainer, session):

        async def known(key: str = key) -> bool:
            return (await lab.get(PATH, key)).status_code == 403

        await until(known)
    assert lab.ranks[0].received == []
    # The console of the run's own launcher shows it, too.
    assert (await lab.get(PATH, lab.signer.run_key)).status_code == 200
    path = trial_dir(lab.config).audit / "router.jsonl"

    async def all_written() -> bool:
        # Written by a thread.
        return path.exists() and path.read_text().count('"route":"GET /rl/v1/overview"') >= 5

    await until(all_written)


SESSIONS = Metric("any_agent_sessions", "gauge", "Sessions.", ("mode", "state"))
OTHER = Metric("any_agent_prompt_tokens_total", "counter", "Tokens.", ("mode",))


def test_samples_of_an_exposition_are_read_with_their_labels() -> None:
    values = {("train", 'a "quoted" state'): 3.0, ("eval", "open"): 2.0}
    text = Exposition("r", lambda: [(SESSIONS, values), (OTHER, {("train",): 7})], rank="0")
    found = Samples(text.render().decode())
    assert found.sum("sessions") == 5
    assert found.sum("sessions", mode="eval", state="open") == 2
    assert found.sum("prompt_tokens_total") == 0, "what no page shows is skipped"
    assert found.sum("made_up") == 0
    assert {labels["rank"] for labels, _ in found.each("sessions")} == {"0"}


def test_the_overview_reads_only_metrics_that_the_parts_export() -> None:
    exported = {m.name for m in (*rank_metrics.METRICS, *trainer_metrics.METRICS)}
    wanted = scrape.WANTED.pattern.removeprefix("any_agent_(").removesuffix(")").split("|")
    for name in wanted:
        assert name == "slots_.*" or f"any_agent_{name}" in exported, name


def test_rates_are_over_a_window_and_none_span_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(scrape.time, "monotonic", lambda: now)
    rates = Rates()
    assert rates.add({"calls": 10}) == {}
    now += 4
    assert rates.add({"calls": 30, "new": 5}) == {"calls": 5.0}
    now += 4
    assert rates.add({"calls": 2, "new": 9}) == {}, "the part has started again"
    now += 61
    assert rates.add({"calls": 8}) == {}, "nobody has looked for a minute"
