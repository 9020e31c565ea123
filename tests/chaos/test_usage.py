"""A run's usage over kills of its rank at random moments: each call once, and each answer in it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from any_agent.launcher.trial import trial_dir
from any_agent.record import InteractionTree
from any_agent.rundir.usage import Usage, UsageReader
from proxy_ext.journal.reader import ExportFilter, JournalReader, StoredSession
from tests.chaos.conftest import Figure
from tests.support.chaos.killable import KillableProxy, engine_in_thread
from tests.support.proxy import config_for, until

AGENTS = 8


async def test_usage_is_what_is_recorded_and_all_that_was_answered_over_kills(
    tmp_path: Path, tiny_model_dir: Path, long: bool, figure: Figure
) -> None:
    kills, rng = (60 if long else 8), random.Random(7)
    config = config_for(tmp_path)
    run = trial_dir(config)
    run.create()
    run.signing_secret()
    answered: Counter[str] = Counter()
    with engine_in_thread(tiny_model_dir) as engine:
        rank = KillableProxy(tmp_path, tiny_model_dir, engine.url, "server.lane_tag=0badc0de")
        try:
            await asyncio.to_thread(rank.start)
            over = asyncio.Event()
            agents = [
                asyncio.create_task(_agent(rank.url, number, over, answered))
                for number in range(AGENTS)
            ]
            for _ in range(kills):
                goal = answered["calls"] + rng.randint(0, 12)
                await until(partial(_reached, answered, goal), "answers")
                await asyncio.to_thread(rank.kill)
                await asyncio.to_thread(rank.start)
            over.set()
            await asyncio.gather(*agents)
            await asyncio.to_thread(rank.kill)
        finally:
            rank.close()
    counted = sum(UsageReader(run).read()["rank-0"].values(), Usage())
    assert counted == _recorded(run.journal(0))
    # An agent may have lost an answer that is recorded, and never the other way round.
    for name, number in answered.items():
        assert 0 < number <= getattr(counted, name), name
    lost = counted.calls - answered["calls"]
    # Of a call that a kill cut off at most one is recorded for each agent.
    assert lost <= AGENTS * (kills + 1)
    figure(f"{kills} kills, {counted.calls} calls counted once, {lost} of them answered to nobody")


def _reached(answered: Counter[str], goal: int) -> bool:
    return answered["calls"] >= goal


def _recorded(journal: Path) -> Usage:
    """The usage by the tokens that the journal has."""
    total, reader = Usage(), JournalReader(journal)
    for session in reader.sessions(ExportFilter()):
        assert isinstance(session, StoredSession)
        tree = InteractionTree.from_interactions(session.interactions)
        total += Usage(sessions=1)
        for one in session.interactions:
            choice = one.id.partition(".")[2]
            total += Usage(sampled_tokens=len(one.output_ids))
            if not choice or choice == "0":
                total += Usage(prompt_tokens=len(tree.prompt_ids(one.id)), calls=1)
    reader.close()
    return total


async def _agent(url: str, number: int, over: asyncio.Event, answered: Counter[str]) -> None:
    """Open sessions and talk in them, one turn after the other; add up what the answers say."""
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:
        key, talk = "", [{"role": "user", "content": f"I am {number}."}]
        while not over.is_set():
            try:
                if not key:
                    opened = await http.post("/rl/v1/start_session", json={"mode": "eval"})
                    key = opened.json()["api_key"] if opened.status_code == 200 else ""
                    continue
                body: dict[str, Any] = {"model": "x", "messages": talk, "max_tokens": 8}
                body["n"] = 1 + number % 2
                head = {"Authorization": f"Bearer {key}"}
                answer = await http.post("/v1/chat/completions", json=body, headers=head)
            except httpx.TransportError:
                await asyncio.sleep(0.02)
                continue
            if answer.status_code != 200:
                await asyncio.sleep(0.02)
                continue
            usage, choices = answer.json()["usage"], answer.json()["choices"]
            answered["prompt_tokens"] += usage["prompt_tokens"]
            answered["sampled_tokens"] += usage["completion_tokens"]
            answered["calls"] += 1
            talk = [*talk, choices[0]["message"], {"role": "user", "content": "Go on."}]
            if len(talk) > 9:
                key, talk = "", talk[:1]
