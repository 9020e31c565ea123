"""A proxy that archives all the time, killed -9 again and again under agents: an export has every
session that was acknowledged, once and whole, wherever it lies by then."""

from __future__ import annotations

import asyncio
import json
import random
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import httpx

from any_agent.client.rl_client import RLClient
from any_agent.errors import AnyAgentError
from any_agent.rundir.layout import RunDir
from tests.chaos.conftest import Figure
from tests.support.chaos.killable import KillableProxy, engine_in_thread
from tests.support.proxy import HELLO, until
from tests.support.waiting import meanwhile

AGENTS = 8
NAMES = ("user=u", "experiment=e", "trial=t")


class Agents:
    """Open evaluation sessions, make calls, finalize; they end at once, and are archived soon."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.finalized: dict[str, tuple[str, float]] = {}
        """What was acknowledged: the last completion and the final reward of each session."""
        self.deleted: set[str] = set()

    async def work(self, number: int) -> None:
        rng = random.Random(number)
        async with RLClient(self.url, retry_for=60) as client, httpx.AsyncClient() as http:
            while True:
                try:
                    await self._episode(client, http, rng)
                except (AnyAgentError, httpx.HTTPError):
                    # It was killed amid a call, which nothing was said about.
                    continue

    async def _episode(self, client: RLClient, http: httpx.AsyncClient, rng: random.Random) -> None:
        session = await client.start_session(mode="eval")
        for _ in range(rng.randint(1, 3)):
            response = await http.post(
                f"{session.base_url}/chat/completions",
                json={"model": "any", "messages": HELLO, "max_tokens": 8},
                headers={"authorization": f"Bearer {session.api_key}"},
                timeout=60,
            )
            response.raise_for_status()
        reward = rng.random()
        await client.finalize(session.api_key, reward)
        self.finalized[session.session_id] = (response.json()["id"], reward)
        if rng.random() < 0.1 and self.finalized:
            victim = rng.choice(list(self.finalized))
            # Before it is asked for: an answer that is lost may have been a deed.
            del self.finalized[victim]
            await client.delete_session(victim)
            self.deleted.add(victim)


@asynccontextmanager
async def archiving(root: Path, model: Path, *settings: str) -> AsyncIterator[KillableProxy]:
    """A proxy that archives what has ended at its next sweep."""
    with engine_in_thread(model) as engine:
        soon = (*NAMES, "sessions.keep_hours=0", *settings)
        proxy = KillableProxy(root, model, engine.url, *soon)
        try:
            await asyncio.to_thread(proxy.start)
            yield proxy
        finally:
            await asyncio.to_thread(proxy.close)


async def exported(root: Path) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "any_agent.cli", "export", f"root={root}", *NAMES]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr.decode()
    return [json.loads(line) for line in done.stdout.splitlines()]


async def archived(url: str) -> int:
    async with httpx.AsyncClient() as http:
        text = (await http.get(f"{url}/metrics", timeout=60)).text
    (line,) = [x for x in text.splitlines() if x.startswith("any_agent_archived_sessions{")]
    return int(float(line.rpartition(" ")[2]))


async def killed(proxy: KillableProxy, kills: int, rng: random.Random) -> None:
    """Kill and start a proxy so often, while it archives."""
    for _ in range(kills):
        # Sweeps begin a second after a start.
        await asyncio.sleep(rng.uniform(0.9, 1.6))
        await asyncio.to_thread(proxy.kill)
        await asyncio.to_thread(proxy.start)


async def test_archived_exactly_once_under_kills(
    tiny_model_dir: Path, tmp_path: Path, long: bool, figure: Figure
) -> None:
    kills = 60 if long else 5
    async with archiving(tmp_path, tiny_model_dir) as proxy:
        agents = Agents(proxy.url)
        async with meanwhile(*map(agents.work, range(AGENTS))):
            await killed(proxy, kills, random.Random(7))
            await exported(tmp_path)
        wanted = min(len(agents.finalized) // 2, 500)

        async def moved_enough() -> bool:
            return await archived(proxy.url) >= wanted

        await until(moved_enough, "the sweep")
        moved = await archived(proxy.url)
        lines = await exported(tmp_path)
    times = Counter(line["session"]["id"] for line in lines)
    assert set(times.values()) == {1}
    assert not agents.deleted & times.keys()
    by_id = {line["session"]["id"]: line for line in lines}
    for id, (completion, reward) in agents.finalized.items():
        line = by_id[id]
        assert line["session"]["final_reward"] == reward
        assert line["interactions"][-1]["id"] == completion
        assert [r["value"] for r in line["rewards"]] == [reward]
    files = list((tmp_path / "u" / "e" / "t" / "archive").iterdir())
    figure(
        f"killed {kills} times while it archived: {len(agents.finalized)} acknowledged sessions "
        f"exported once each, 0 lost, 0 twice; {moved} moved to {len(files)} archives; "
        f"{len(agents.deleted)} deleted ones in none"
    )


async def test_the_limit_of_archives_loses_only_what_it_says_under_kills(
    tiny_model_dir: Path, tmp_path: Path, long: bool, figure: Figure
) -> None:
    """A session that is not exported any more is called deleted, and is older than the others."""
    kills, limit = 30 if long else 4, 50_000
    run = RunDir(tmp_path / "u" / "e" / "t")
    bounded = f"sessions.archive_bytes={limit}"
    async with archiving(tmp_path, tiny_model_dir, bounded) as proxy:
        agents = Agents(proxy.url)
        async with meanwhile(*map(agents.work, range(AGENTS))):
            await killed(proxy, kills, random.Random(8))
            await until(lambda: len(agents.finalized) >= 200, "sessions")

        def within() -> bool:
            sizes = [path.stat().st_size for path in run.archive.iterdir()]
            return sum(sizes) <= limit and not ids_of(run, "stored")

        await until(within, "the sweep")
        lines = await exported(tmp_path)
    kept = [line["session"]["id"] for line in lines]
    assert len(kept) == len(set(kept))
    gone = agents.finalized.keys() - set(kept)
    assert gone
    assert gone <= ids_of(run, "deleted")
    there = len(agents.finalized) - len(gone)
    figure(
        f"killed {kills} times at a limit of {limit} bytes: of {len(agents.finalized)} "
        f"acknowledged sessions {len(gone)} removed and called deleted, {there} exported once "
        "each, 0 missing"
    )


def ids_of(run: RunDir, content: str) -> set[str]:
    """Return the ended sessions whose content is there."""
    sql = "SELECT id FROM sessions WHERE state <> 'open' AND content = ?"
    with closing(sqlite3.connect(run.journal(0))) as journal:
        return {id for (id,) in journal.execute(sql, (content,))}
