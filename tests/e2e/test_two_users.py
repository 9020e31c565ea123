"""Another user of the machine, beside a live run: it can read nothing, and nothing obeys it.

The other user is `nobody`, a real process under that uid. It tries every port on which a process
of the run listens, with every route of every part, without a key and with forged ones, and every
file of the run's folder. The run has an admin key: without one, the service is open to every user.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import httpx
import psutil
import pytest

from any_agent.engine.embedded.server import EngineServer
from any_agent.launcher import Node, NodeOptions
from any_agent.rundir.registry import Registry
from proxy_ext.web import permissions
from tests.support.e2e.live_run import live_config, some_steps
from tests.support.other_user import as_nobody

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can start a process of another user"
)
ADMIN = "the-operators-key"
HEADERS = {"Authorization": f"Bearer {ADMIN}"}
FORGED = (
    "",
    "Bearer sk-engine." + 64 * "0",
    "Bearer sk-trainer.run." + 64 * "0",
    "Bearer sk-v1.0." + 24 * "0" + "." + 32 * "0",
    "Bearer sk-admin.01234567." + 48 * "0",
)
PUBLIC = {
    ("router", "GET /"),
    ("router", "GET /healthz"),
    ("router", "GET /readyz"),
    ("router", "GET /health"),
    ("rank", "GET /healthz"),
    ("rank", "GET /readyz"),
    ("rank", "GET /health"),
    ("rank", "GET /openapi.json"),
    ("router", "GET /openapi.json"),
    ("engine", "GET /health"),
}
"""The routes that need no key: they tell whether a part is well, and what routes there are."""
REFUSED = (401, 403, 404, 405, 501)
SAID = {
    "a request": b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "zeros": bytes(512),
}


@dataclass
class Live:
    """A run that has trained and still serves, and a folder above it that anybody may enter."""

    node: Node
    top: Path

    @property
    def pids(self) -> dict[str, int]:
        return {name: part.pid for name, part in self.node.parts.items()}


@pytest.fixture(scope="module")
def live(tiny_model_dir: Path) -> Iterator[Live]:
    # Not pytest's folder: nobody may enter that, so no file's mode would matter.
    top = Path(tempfile.mkdtemp(prefix="any-agent-two-users-"))
    top.chmod(0o755)
    before = os.umask(0o022)
    settings: dict[str, Any] = {
        "server.admin_key": ADMIN,
        "rollout.batch_size": 4,
        "rollout.max_concurrent": 8,
        "sampling.max_new_tokens": 12,
        "train.steps": 1000,
        "train.checkpoint_every": 1,
    }
    try:
        config = live_config(top / "runs", tiny_model_dir, **settings)
        with Node(config, NodeOptions(say=lambda _: None)) as node:
            asyncio.run(some_steps(node, 2, admin_key=ADMIN))
            yield Live(node, top)
    finally:
        os.umask(before)
        shutil.rmtree(top)


def listeners(live: Live) -> dict[tuple[str, int], str]:
    """Return every port on which a process of the run listens, and the part that it is of."""
    found = {}
    for name, pid in live.pids.items():
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            for connection in one.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    host = str(connection.laddr.ip)
                    assert host == "127.0.0.1", f"{name} listens for other machines, on {host}"
                    found[host, int(connection.laddr.port)] = name.partition("-")[0]
    return found


def routes() -> list[tuple[str, str]]:
    """Return the methods and paths of every part."""
    engine = EngineServer(MagicMock()).app().router.routes()
    engines = {(route.method, route.resource.canonical) for route in engine if route.resource}
    ranks = set(permissions.RULES)
    models = {("POST", path) for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses")}
    named = {
        (method, re.sub(r"\{[^}]*\}", "ses-0-0123456789abcdef", path))
        for method, path in engines | ranks | models | {("GET", "/metrics"), ("GET", "/")}
    }
    return sorted((method, path) for method, path in named if method in ("GET", "POST", "PUT"))


def test_the_other_user_is_another_one(live: Live) -> None:
    """Else the rest would show nothing: what is for everybody, it can have."""
    shared = live.top / "for-everybody"
    shared.write_text("x")
    shared.chmod(0o644)
    engine = _engines(live)[0]
    found = as_nobody(
        files=[str(shared), str(live.node.dir.secret)],
        requests=[[engine.host, engine.port, "GET", "/health", {}]],
    )
    assert found["files"] == [f"read {shared}"]
    assert found["requests"][0][-1] == 200


def test_no_port_takes_anything_from_another_user(live: Live) -> None:
    ports = listeners(live)
    assert {"router", "rank", "engine", "trainer"} <= set(ports.values()), ports
    before, parts = _boots(live), live.pids
    asked = [
        [host, port, method, path, {"Authorization": key} if key else {}]
        for host, port in ports
        for method, path in routes()
        for key in FORGED
    ]
    found = as_nobody(requests=asked)
    taken = sorted(
        {
            (ports[host, port], f"{method} {path}", status)
            for host, port, method, path, _, status in found["requests"]
            if isinstance(status, int) and status not in REFUSED
        }
    )
    public = {(part, route) for part, route, _ in taken if (part, route) in PUBLIC}
    assert [one for one in taken if one[:2] not in public] == []
    assert public >= {("router", "GET /healthz"), ("rank", "GET /healthz")}
    assert _boots(live) == before
    _require_sound(live)
    live.node.check()
    assert live.pids == parts


def test_no_port_tells_another_user_anything(live: Live) -> None:
    ports = listeners(live)
    said = {name: text.hex() for name, text in SAID.items()}
    found = as_nobody(ports=[list(port) for port in ports], said=said)
    told = [
        (ports[host, port], host, port, name, answer[:200])
        for host, port, name, answer in found["spoken"]
        if answer not in ("refused", "closed", "silent")
        and not re.match(r"HTTP/1\.[01] (400|401|403|404|413|431|501|505) ", answer)
    ]
    assert told == []


def test_no_port_of_a_dead_part_is_another_users(live: Live) -> None:
    """Prompts and keys are sent there meanwhile."""
    kept = {port: part for (_, port), part in listeners(live).items() if part in ("rank", "engine")}
    dead = [part for part in live.node.parts.values() if part.kind in ("rank", "engine")]
    assert len(kept) == len(dead) == 2 * live.node.config.server.ranks
    for part in dead:
        os.kill(part.pid, signal.SIGKILL)
        psutil.Process(part.pid).wait(30)
    listened = as_nobody(listen=list(kept))["listened"]
    assert {port: set(results) for port, *results in listened} == {
        port: {errno.EADDRINUSE} for port in kept
    }
    deadline = time.monotonic() + 120
    while live.node.check() or any(part.state != "ready" for part in dead):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert set(kept) <= {port for _, port in listeners(live)}
    _require_sound(live)


def test_no_command_line_shows_a_key(live: Live) -> None:
    secrets = [ADMIN, live.node.dir.secret.read_text().split()[0], _engine_key(live)]
    for pid in live.pids.values():
        for one in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            words = " ".join(one.cmdline())
            assert not [secret for secret in secrets if secret in words]
            assert "sk-" not in words


def test_no_file_of_the_run_is_another_users_to_read(live: Live) -> None:
    """Neither by walking through the folders nor by a name that it was told."""
    run = live.node.dir
    secret = {run.secret, run.engine_key, *run.logs.iterdir(), run.journal(0), *run.audit.iterdir()}
    files = {path for path in run.path.rglob("*") if not path.name.startswith(".")}
    assert files > secret
    assert as_nobody(folders=[str(run.path)], files=[*map(str, files)])["files"] == []


def _engines(live: Live) -> list[httpx.URL]:
    return [httpx.URL(url) for url in live.node.engine_urls]


def _engine_key(live: Live) -> str:
    key: str = json.loads(live.node.dir.engine_key.read_text())["api-key"]
    return key


def _boots(live: Live) -> list[tuple[str, str]]:
    registry = Registry(live.node.dir.registry)
    registry.refresh()
    return sorted((entry.name, entry.boot_id) for entry in registry.entries())


def _require_sound(live: Live) -> None:
    """Wait until every engine has the run's version and the same weights, and samples.

    The trainer may make one more step of the sessions that are left.
    """
    key = {"Authorization": f"Bearer {_engine_key(live)}"}
    deadline = time.monotonic() + 120
    while True:
        wanted = httpx.get(f"{live.node.url}/rl/v1/version", headers=HEADERS).json()["version"]
        told = [httpx.get(f"{u}/server_info", headers=key).json() for u in live.node.engine_urls]
        sums = [
            httpx.post(f"{url}/weights_checker", json={}, headers=key).json()["ranks"]
            for url in live.node.engine_urls
        ]
        seen = {(one["weight_version"], one["paused"]) for one in told}
        if seen == {(str(wanted), None)} and all(one == sums[0] for one in sums):
            return
        assert time.monotonic() < deadline, (wanted, told)
        time.sleep(0.2)
