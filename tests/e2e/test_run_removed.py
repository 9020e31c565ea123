"""`rm -rf`, or a new name, for the run of a live service: nothing is acknowledged, and it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import sqlite3
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from any_agent.rundir.layout import RunDir
from tests.support.e2e.serving import Served, serve
from tests.support.waiting import meanwhile

SHORT, LONG = 1, 25
"""How often each; `--long` does it more often."""
AGENTS = 8
BOUND = 10.0
"""Seconds after which the service has ended, with what it needs to end its parts."""


@dataclass
class Load:
    """Agents that open, call, reward and finalize, and what they were answered."""

    url: str
    answers: list[tuple[float, str, int]] = field(default_factory=list)
    """The time of sending, the route, and the status, of each answer."""
    finalized: set[str] = field(default_factory=set)

    async def _send(self, http: httpx.AsyncClient, path: str, body: Any, key: str = "") -> Any:
        sent = time.monotonic()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        answer = await http.post(f"{self.url}{path}", json=body, headers=headers)
        self.answers.append((sent, path, answer.status_code))
        answer.raise_for_status()
        return answer.json()

    async def _agent(self, http: httpx.AsyncClient) -> None:
        while True:
            with contextlib.suppress(httpx.HTTPError, json.JSONDecodeError):
                opened = await self._send(http, "/rl/v1/start_session", {"mode": "eval"})
                key = opened["api_key"]
                talk = {"messages": [{"role": "user", "content": "count"}], "max_tokens": 4}
                await self._send(http, "/v1/chat/completions", {"model": "x", **talk}, key)
                await self._send(http, "/rl/v1/set_reward", {"reward": 1.0}, key)
                await self._send(http, "/rl/v1/finalize", {}, key)
                self.finalized.add(opened["session_id"])
            await asyncio.sleep(0.01)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with (
            httpx.AsyncClient(timeout=20) as http,
            meanwhile(*(self._agent(http) for _ in range(AGENTS))),
        ):
            yield


async def ended(served: Served) -> float:
    """Return the seconds until the service has ended."""
    began = time.monotonic()
    while served.process.poll() is None:
        assert time.monotonic() - began < 60, served.output.read_text()
        await asyncio.sleep(0.02)
    return time.monotonic() - began


@pytest.mark.parametrize("how", ["removed", "renamed"])
async def test_nothing_is_acknowledged_after_the_run_folder_is_removed(
    how: str,
    tmp_path: Path,
    tiny_model_dir: Path,
    long: bool,
    figure: Callable[[str], None],
) -> None:
    times = LONG if long else SHORT
    seconds, after = list[float](), Counter[int]()
    for number in range(times):
        folder = tmp_path / str(number)
        folder.mkdir()
        arguments = ["--no-train", "--model", str(tiny_model_dir), f"root={folder}/runs"]
        given = ["server.port=0", "server.ranks=1", "model.enable_thinking=false"]
        with serve(*arguments, *given, cwd=folder) as served:
            (settings,) = (folder / "runs").glob("*/*/*/resolved.yaml")
            run = RunDir(settings.parent)
            load = Load(served.url)
            async with load.running():
                async with asyncio.timeout(40):
                    while len(load.finalized) < 20:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                elsewhere = run.path.with_name("elsewhere")
                await asyncio.to_thread(run.path.rename, elsewhere)
                if how == "removed":
                    await asyncio.to_thread(shutil.rmtree, elsewhere)
                gone = time.monotonic()
                took = await ended(served)
            later = [(path, status) for sent, path, status in load.answers if sent > gone]
            assert [path for path, status in later if status < 300] == []
            assert took < BOUND, took
            assert served.process.returncode == 1
            assert str(run.path) in served.output.read_text()
            assert not run.path.exists(), [*run.path.rglob("*")]
            if how == "renamed":
                assert load.finalized <= _finalized_in(RunDir(elsewhere))
        seconds.append(took)
        after.update(status for _, status in later)
    slowest = max(seconds)
    figure(f"{how} {times} times: ended within {slowest:.1f} s, answers after it {dict(after)}")


def _finalized_in(run: RunDir) -> set[str]:
    with closing(sqlite3.connect(run.journal(0))) as journal:
        rows = journal.execute("SELECT id FROM sessions WHERE state = 'evaluated'")
        return {id for (id,) in rows}
