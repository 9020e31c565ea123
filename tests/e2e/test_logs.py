"""The logs of a run of two ranks under an admin key, whose agents send keys where none belongs."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, urlsplit

import httpx
import pytest

from any_agent.client.rl_client import RLClient
from any_agent.keys import SESSION_KEY_PREFIX
from any_agent.launcher import Node, NodeOptions
from tests.support.e2e.live_run import drive, live_config

ADMIN = r'odd"admin\key%2F+$1'
PARTS = {"engine-0", "engine-1", "rank-0", "rank-1", "router", "trainer"}


@dataclass
class Logged:
    """A run that has ended, what its launcher said, and the keys that were sent."""

    node: Node
    said: list[str]
    keys: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Iterator[Logged]:
    settings = {"server.admin_key": ADMIN, "log_level": "debug", "log_format": "json"}
    settings |= {"rollout.batch_size": 8, "sampling.max_new_tokens": 24}
    root = tmp_path_factory.mktemp("logged")
    config = live_config(root, tiny_model_dir, **settings, **{"train.steps": 2})
    said: list[str] = []
    with Node(config, NodeOptions(say=said.append)) as node:
        logged = Logged(node, said)
        asyncio.run(_abuse(logged))
        asyncio.run(drive(node, agents=8, admin_key=ADMIN))
    yield logged


async def _abuse(logged: Logged) -> None:
    """Send requests that carry keys in every place, and mostly go wrong."""
    url = logged.node.url
    async with (
        RLClient(url, admin_key=ADMIN, trust_env=False) as service,
        httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as http,
    ):
        for rank in range(2):
            session = await service.start_session(mode="eval", task_id=f"t{rank}")
            key, bearer = session.api_key, {"authorization": f"Bearer {session.api_key}"}
            logged.keys.append(key)
            for path in (f"/{key}/v1/models", f"/{key}/none", f"/v1/models?key={key}", f"/x/{key}"):
                await http.get(path, headers=bearer)
            broken = (f'{{"messages": "{key}"}}', f'{{"{key}": 1, "messages": []}}', key, "{" * 99)
            for content in broken:
                for headers in (bearer, {"authorization": f"Bearer {ADMIN}"}):
                    await http.post("/v1/chat/completions", content=content, headers=headers)
            await http.post(f"/rl/v1/sessions/{key}/abort", json={"reason": f"{key} {ADMIN}"})
            await http.get(f"/rl/v1/start_session?api_key={key}", headers=bearer)
            for wrong in (f"{key[:-1]}0", f"{ADMIN}x", f"Basic {ADMIN}"):
                await http.get("/rl/v1/sessions", headers={"authorization": f"Bearer {wrong}"})
            wanted = {"model": key, "messages": [{"role": "user", "content": key}], "user": ADMIN}
            await http.post("/v1/chat/completions", json=wanted, headers=bearer)
            _send(url, f"GET /{key} HTTP/1.1\r\nHost: x\r\nAuthorization: {ADMIN}\r\nx\r\n\r\n")
            _send(url, f"\x00{key} {ADMIN}\r\n\r\n")


def _send(url: str, text: str) -> None:
    """Send bytes that are no HTTP."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=60) as raw:
        raw.sendall(text.encode("latin-1"))
        raw.recv(100)


def test_no_log_has_a_key(logged: Logged) -> None:
    run = logged.node.dir
    logs = {path.stem: path.read_text() for path in run.logs.iterdir()}
    assert logs.keys() == PARTS
    files = [p for p in run.path.rglob("*") if p.suffix in (".json", ".yaml", ".jsonl")]
    texts = [*logs.values(), *logged.said, *(path.read_text() for path in files)]
    forms = {ADMIN, repr(ADMIN)[1:-1], json.dumps(ADMIN)[1:-1], quote(ADMIN, safe="")}
    assert len(logged.keys) == 2
    for text in texts:
        assert SESSION_KEY_PREFIX not in text
        assert not [form for form in forms if form in text]
        assert not [key for key in logged.keys if key.split(".")[3] in text]


def test_every_log_line_is_json_of_its_part(logged: Logged) -> None:
    for path in logged.node.dir.logs.iterdir():
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert lines and {line["part"] for line in lines} == {path.stem}
        for line in lines:
            assert {"time", "level", "logger", "message", "pid"} <= line.keys()
