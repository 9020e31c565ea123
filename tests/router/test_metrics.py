"""One scrape of the router shows every part of the run."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

import router.metrics as metrics_module
from any_agent.auth.key_store import create_key
from any_agent.launcher.trial import trial_dir
from any_agent.rundir.registry import RegistryEntry, publish
from any_agent.runtime.metrics import CONTENT_TYPE, Exposition, Metric, merged
from router.metrics import CLIENT_LEFT, METRICS
from tests.router.conftest import StartLab
from tests.support.proxy import until
from tests.support.router import FakeRank, Lab, Received, answer_empty, die, never, says

SESSIONS = Metric("any_agent_sessions", "gauge", "Sessions.", ("state",))


class Shown:
    """A scrape's samples."""

    def __init__(self, text: str) -> None:
        self.families = list(text_string_to_metric_families(text))
        self.samples = [s for family in self.families for s in family.samples]

    def __call__(self, name: str, **labels: str) -> float:
        return sum(
            s.value for s in self.samples if s.name == name and labels.items() <= s.labels.items()
        )

    def up(self) -> dict[str, float]:
        return {s.labels["part"]: s.value for s in self.samples if s.name == "any_agent_up"}


async def scrape(lab: Lab, key: str | None = None) -> Shown:
    answer = await lab.get("/metrics", key)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == CONTENT_TYPE
    return Shown(answer.text)


def shows_metrics(rank: FakeRank, sessions: int) -> None:
    """The rank answers /metrics as a proxy does, and everything else with {}."""
    name = str(rank.number)
    shown = Exposition(f"rank-{name}", lambda: [(SESSIONS, {("open",): sessions})], rank=name)

    async def handler(received: Received) -> None:
        if received.target != "/metrics":
            return await received.answer()
        body = shown.render()
        head = f"HTTP/1.1 200 OK\r\ncontent-type: {CONTENT_TYPE}\r\ncontent-length: {len(body)}"
        await received.send(f"{head}\r\n\r\n".encode() + body)

    rank.handler = handler


async def until_up(lab: Lab, up: dict[str, int], trainer: str = "", state: str = "ready") -> Shown:
    """Scrape until just these parts are shown, after the trainer registers there."""
    if trainer:
        fields = {"name": "trainer", "boot_id": "t", "url": trainer, "pid": 1, "state": state}
        publish(lab.registry, RegistryEntry.model_validate(fields))

    async def shown() -> Shown | None:
        now = await scrape(lab)
        return now if now.up() == up else None

    return await until(shown)  # type: ignore[no-any-return]


async def test_metrics_of_all_parts_come_in_one_answer(pair: Lab) -> None:
    for rank in pair.ranks:
        shows_metrics(rank, sessions=rank.number + 3)
    trainer = FakeRank(9)
    shows_metrics(trainer, sessions=0)
    await trainer.start()
    now = await until_up(pair, {"rank-0": 1, "rank-1": 1, "trainer": 1}, trainer.url)
    await trainer.kill()
    # The port of a dead trainer is anybody's.
    assert trainer.received[-1].values("authorization") == [f"Bearer {pair.signer.metrics_key}"]
    assert now("any_agent_sessions", rank="0", state="open") == 3
    assert now("any_agent_sessions", rank="1", state="open") == 4
    names = [family.name for family in now.families]
    assert len(names) == len(set(names))
    parts = {s.labels["part"] for s in now.samples if s.name == "process_cpu_seconds_total"}
    assert parts == {"router", "rank-0", "rank-1", "rank-9"}
    keys = [(s.name, tuple(sorted(s.labels.items()))) for s in now.samples]
    assert len(keys) == len(set(keys))


async def test_every_metric_of_the_table_is_shown(lab: Lab) -> None:
    await lab.get("/v1/models")
    shown = {f.name: f.type for f in (await scrape(lab)).families}
    assert {m.name.removesuffix("_total"): m.kind for m in METRICS} == {
        name: kind for name, kind in shown.items() if name.startswith("any_agent_")
    }
    assert all(m.name.endswith("_total") == (m.kind == "counter") for m in METRICS)


async def test_parts_that_do_not_answer_are_shown_as_down(
    pair: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_module, "TIMEOUT", 0.2)
    first, second = pair.ranks
    shows_metrics(first, sessions=1)
    for handler in (never, says({"error": "x"}, status=500), says({"any_agent_sessions": 1}), die):
        second.handler = handler
        now = await scrape(pair)
        assert now.up() == {"rank-0": 1, "rank-1": 0}
        assert now("any_agent_sessions") == 1
    await second.kill()
    assert (await scrape(pair)).up() == {"rank-0": 1, "rank-1": 0}


async def test_a_trainer_is_missed_unless_it_is_done(lab: Lab) -> None:
    shows_metrics(lab.ranks[0], 0)
    assert (await scrape(lab)).up() == {"rank-0": 1}
    await until_up(lab, {"rank-0": 1, "trainer": 0}, "http://127.0.0.1:1")
    await until_up(lab, {"rank-0": 1}, "http://127.0.0.1:1", "stopping")


async def test_keys_of_the_trial_open_it_by_their_scope(start_lab: StartLab) -> None:
    lab = await start_lab()
    path = trial_dir(lab.config).keys
    shows_metrics(lab.ranks[0], 1)
    trainer, tenant = create_key(path, "trainer")[0], create_key(path, "tenant", tenant="a")[0]
    assert (await lab.get("/metrics")).status_code == 200, "open mode"
    assert (await lab.get("/metrics", tenant)).status_code == 403
    admin = create_key(path, "admin")[0]

    async def closed() -> bool:
        return (await lab.get("/metrics")).status_code == 401

    await until(closed, "the end of open mode")
    assert (await lab.get("/metrics", "DUMMY")).status_code == 401
    assert (await lab.get("/healthz", origin="https://evil.example")).status_code == 200
    for key in (trainer, admin, lab.signer.run_key):
        assert (await scrape(lab, key)).up() == {"rank-0": 1}
    refused = await until(lambda: _audited(lab), "the audit log")
    assert refused[0]["status"] == 403 and refused[0]["claimed"] == tenant.split(".")[1]
    assert "sk-" not in str(refused)


def _audited(lab: Lab) -> list[dict[str, Any]]:
    path = trial_dir(lab.config).audit / "router.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def test_requests_are_counted_by_the_router(lab: Lab) -> None:
    key = lab.key(0)
    await lab.post("/v1/chat/completions", {"model": "x"}, key)
    await lab.post(f"/{key}/chat/completions?a=b", {"model": "x"})
    await lab.get("/v1/invented/by/a/client", key)
    await lab.get("/v1/models", "sk-v1.0.forged")
    now = await scrape(lab)
    assert now("any_agent_router_requests_total", route="completions", status="200") == 2
    assert now("any_agent_router_requests_total", route="other", status="200") == 1
    assert now("any_agent_router_requests_total", route="models", status="200") == 1
    assert now("any_agent_router_requests_running") == 1  # this very scrape
    assert now("any_agent_router_received_bytes_total") == 2 * len('{"model": "x"}')
    assert now("any_agent_router_sent_bytes_total") > 400
    assert (await scrape(lab))("any_agent_router_requests_total", route="metrics") == 1


async def test_failures_are_counted_by_their_kind(pair: Lab) -> None:
    key = pair.key(0)
    rank = pair.ranks[0]

    async def die_amid(received: Received) -> None:
        await received.begin()
        await received.chunk(b"data: x\n\n")
        received.die()

    rank.handler = die
    assert (await pair.post("/v1/chat/completions", {}, key)).status_code == 502
    rank.handler = die_amid
    with pytest.raises(httpx.RemoteProtocolError):
        await pair.post("/v1/chat/completions", {}, key)
    now = await scrape(pair)
    assert now("any_agent_router_replies_lost_total") == 1
    assert now("any_agent_router_answers_aborted_total") == 1
    assert now("any_agent_router_requests_total", route="completions", status="502") == 1

    rank.handler = never
    call = asyncio.create_task(pair.post("/v1/chat/completions", {}, key))
    await until(lambda: rank.received[-1].target != "/metrics")
    call.cancel()
    await until(lambda: pair.router.stats.ended["completions", CLIENT_LEFT])
    await rank.kill()
    pair.router.ranks.mark_failed(0)
    waiting = asyncio.create_task(pair.post("/v1/chat/completions", {}, key))

    async def waits() -> bool:
        return (await scrape(pair))("any_agent_router_requests_waiting") == 1

    await until(waits)
    rank.handler = answer_empty
    await pair.restart(rank)
    assert (await waiting).status_code == 200
    assert (await scrape(pair))("any_agent_router_requests_waiting") == 0
    assert pair.router.stats.running == 0


def test_merging_takes_nothing_that_is_no_sample() -> None:
    assert merged(
        ["<html>\n# x\nhello 1\n", "#\n# HELP \n# HELP a x\nb 1\na 1\n"]
    ).splitlines() == ["# HELP ", "# HELP a x", "a 1"]
