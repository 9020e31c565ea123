"""A run of two ranks under an admin key, seen from outside: its metrics, and its logs."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, urlsplit

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from any_agent.client.rl_client import RLClient
from any_agent.keys import SESSION_KEY_PREFIX
from any_agent.launcher import Node, NodeOptions
from tests.support.e2e.live_run import agent, live_config

ADMIN = r'odd"admin\key%2F+$1'
PARTS = ("engine-0", "engine-1", "rank-0", "rank-1", "router", "trainer")


@dataclass
class Observed:
    """What was seen of a run."""

    node: Node
    scrapes: list[list[Sample]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    async def scrape(self, http: httpx.AsyncClient) -> None:
        response = await http.get("/metrics", headers={"authorization": f"Bearer {ADMIN}"})
        assert response.status_code == 200, response.text
        families = list(text_string_to_metric_families(response.text))
        names = [family.name for family in families]
        assert len(names) == len(set(names))
        self.scrapes.append([s for family in families for s in family.samples])

    def value(self, scrape: list[Sample], name: str, **labels: str) -> float:
        return sum(s.value for s in scrape if s.name == name and labels.items() <= s.labels.items())


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Iterator[Observed]:
    """A run of a few steps that is scraped, abused, and loses a proxy meanwhile."""
    root = tmp_path_factory.mktemp("observed")
    settings = {"server.admin_key": ADMIN, "log_level": "debug", "log_format": "json"}
    config = live_config(root, tiny_model_dir, **settings, **{"train.steps": 4})
    said: list[str] = []
    with Node(config, NodeOptions(say=said.append)) as node:
        seen = Observed(node, said=said)
        asyncio.run(_run(seen))
    yield seen


async def _run(seen: Observed) -> None:
    numbers = iter(range(10**6))
    over, trained = asyncio.Event(), asyncio.Event()
    url = seen.node.url

    async def work(service: RLClient, rng: random.Random) -> None:
        while not over.is_set():
            try:
                if not await agent(service, next(numbers), rng, 4):
                    over.set()
            except Exception:
                # A proxy is killed under them: what becomes of agents is not this test's matter.
                await asyncio.sleep(0.1)

    async def look(http: httpx.AsyncClient) -> None:
        while not over.is_set():
            seen.node.check()
            await seen.scrape(http)
            if seen.value(seen.scrapes[-1], "any_agent_train_step"):
                trained.set()
            await asyncio.sleep(0.2)

    async with (
        RLClient(url, admin_key=ADMIN, trust_env=False) as service,
        httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as http,
        asyncio.timeout(420),
        asyncio.TaskGroup() as tasks,
    ):
        await _abuse(seen, service, http)
        tasks.create_task(look(http))
        for number in range(12):
            tasks.create_task(work(service, random.Random(number)))
        await trained.wait()
        os.kill(seen.node.parts["rank-0"].pid, signal.SIGKILL)


async def _abuse(seen: Observed, service: RLClient, http: httpx.AsyncClient) -> None:
    """Requests that carry keys in every place, and mostly go wrong."""
    for rank in range(2):
        session = await service.start_session(mode="eval", task_id=f"t{rank}")
        seen.keys.append(session.api_key)
        key, bearer = session.api_key, {"authorization": f"Bearer {session.api_key}"}
        for path in (f"/{key}/v1/models", f"/{key}/none", f"/v1/models?key={key}", f"/x/{key}"):
            await http.get(path, headers=bearer)
        for content in (
            f'{{"messages": "{key}"}}',
            f'{{"{key}": 1, "messages": []}}',
            key,
            "{" * 99,
        ):
            for headers in (bearer, {"authorization": f"Bearer {ADMIN}"}):
                await http.post("/v1/chat/completions", content=content, headers=headers)
        await http.post(f"/rl/v1/sessions/{key}/abort", json={"reason": f"{key} {ADMIN}"})
        await http.get(f"/rl/v1/start_session?api_key={key}", headers=bearer)
        for wrong in (f"{key[:-1]}0", f"{ADMIN}x", f"Basic {ADMIN}"):
            await http.get("/rl/v1/sessions", headers={"authorization": f"Bearer {wrong}"})
        wanted = {"model": key, "messages": [{"role": "user", "content": key}], "user": ADMIN}
        await http.post("/v1/chat/completions", json=wanted, headers=bearer)
        _send(
            seen.node.url, f"GET /{key} HTTP/1.1\r\nHost: x\r\nAuthorization: {ADMIN}\r\nx\r\n\r\n"
        )
        _send(seen.node.url, f"\x00{key} {ADMIN}\r\n\r\n")


def _send(url: str, text: str) -> None:
    """Bytes that are no HTTP."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=60) as raw:
        raw.sendall(text.encode("latin-1"))
        raw.recv(100)


def test_metrics_of_every_part_are_in_one_scrape(observed: Observed) -> None:
    up = [
        {s.labels["part"]: s.value for s in scrape if s.name == "any_agent_up"}
        for scrape in observed.scrapes
    ]
    assert {"rank-0": 1, "rank-1": 1, "trainer": 1} in up
    assert {"rank-0": 0, "rank-1": 1, "trainer": 1} in up, "the killed proxy was not missed"
    parts = {
        s.labels["part"]
        for scrape in observed.scrapes
        for s in scrape
        if s.name == "process_resident_memory_bytes"
    }
    assert parts == {"router", "rank-0", "rank-1", "trainer"}


def test_counters_of_sessions_balance_at_every_scrape_over_a_kill(observed: Observed) -> None:
    for scrape in observed.scrapes:
        for rank in "01":
            for mode in ("train", "eval"):
                labels = {"rank": rank, "mode": mode}
                created = observed.value(scrape, "any_agent_sessions_created_total", **labels)
                assert created == observed.value(scrape, "any_agent_sessions", **labels)
    # Counters never fall back: the killed proxy's are those that it had, and more.
    series = [
        observed.value(scrape, "any_agent_sessions_created_total", rank="0")
        for scrape in observed.scrapes
        if {"part": "rank-0"} in [s.labels for s in scrape if s.name == "any_agent_up" and s.value]
    ]
    assert series == sorted(series)
    assert series[-1] > 10


def test_metrics_show_what_training_did(observed: Observed) -> None:
    last = next(
        s for s in reversed(observed.scrapes) if any(x.name == "any_agent_train_loss" for x in s)
    )
    value = observed.value
    assert value(last, "any_agent_train_step") >= 1
    assert value(last, "any_agent_train_tokens_total") > 0
    assert value(last, "any_agent_train_sessions_total") >= 16
    # How small it is, over so few tokens, is luck; that it is small is other tests' matter.
    assert math.isfinite(value(last, "any_agent_train_logprob_mismatch"))
    assert value(last, "any_agent_train_logprob_mismatch") >= 0
    assert value(last, "any_agent_weight_version", rank="1") >= 1
    assert value(last, "any_agent_update_pauses_total", rank="1") >= 1
    assert value(last, "any_agent_output_tokens_total", mode="train") > 0
    exact = value(last, "any_agent_interactions_total", continuation="exact")
    branch = value(last, "any_agent_interactions_total", continuation="branch")
    assert exact > 0 and branch == 0
    assert value(last, "any_agent_router_requests_total", route="completions", status="200") > 20


def test_no_log_has_a_key(observed: Observed) -> None:
    node = observed.node
    logs = {path.stem: path.read_text() for path in node.dir.logs.iterdir()}
    assert sorted(logs) == sorted(PARTS)
    files = [
        path for path in node.dir.path.rglob("*") if path.suffix in (".json", ".yaml", ".jsonl")
    ]
    texts = [*logs.values(), *observed.said, *(path.read_text() for path in files)]
    forms = {ADMIN, repr(ADMIN)[1:-1], json.dumps(ADMIN)[1:-1], quote(ADMIN, safe="")}
    assert len(observed.keys) == 2
    for text in texts:
        assert SESSION_KEY_PREFIX not in text
        assert not [form for form in forms if form in text]
        assert not [key for key in observed.keys if key.split(".")[3] in text]


def test_every_log_line_is_json_of_its_part(observed: Observed) -> None:
    count = 0
    for path in observed.node.dir.logs.iterdir():
        for line in path.read_text().splitlines():
            data = json.loads(line)
            assert data["part"] == path.stem
            assert {"time", "level", "logger", "message", "pid"} <= data.keys()
            count += 1
    assert count > 20
