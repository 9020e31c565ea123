"""One rank's proxy, or the router, killed -9 again and again under agents and a trainer.

Nothing that was said is lost, nothing is trained on twice, and every session is accounted for.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from any_agent.client.rl_client import RLClient
from any_agent.errors import AnyAgentError, Conflict
from any_agent.launcher.trial import trial_dir
from any_agent.record import unpack_trajectories
from any_agent.rundir import RunDir
from any_agent.rundir.registry import RegistryEntry, rank_name
from any_agent.types import SessionState
from tests.chaos.conftest import Figure
from tests.support.chaos.killable import (
    Killable,
    KillableProxy,
    KillableRouter,
    engine_in_thread,
    heartbeats,
)
from tests.support.e2e import audit
from tests.support.e2e.crowd import Crowd
from tests.support.e2e.ledger import Ledger
from tests.support.proxy import config_for
from tests.support.scripted_engine import ScriptedEngine

PACE = 0.004
"""Seconds between tokens, so that kills meet calls under way."""
LEAST = 20
"""Sessions that agents finalize, however slow the machine is, before they are told to leave."""


@dataclass
class Load:
    """Agents and a trainer at one proxy, until :meth:`leave`."""

    proxy: KillableProxy
    url: str
    """Agents call here; the trainer calls the proxy."""
    ledger: Ledger = field(default_factory=Ledger)
    trained: Counter[str] = field(default_factory=Counter)
    """By session: how often it was handed out after its ack was acknowledged, plus that ack."""
    crowd: Crowd | None = None
    left: bool = False

    async def agents(self, count: int) -> None:
        # Longer than any outage.
        async with RLClient(self.url, retry_for=120) as service:
            self.crowd = Crowd(self.url, service, self.ledger, agents=count, seed=0)
            await self.crowd.work()
        self.left = True

    async def trainer(self) -> None:
        """Leases and acknowledges; what it was told to be done with must never come again."""
        held: set[str] = set()
        capacity = asyncio.create_task(self._capacity(held))
        try:
            async with RLClient(self.proxy.url, retry_for=60) as service:
                while not capacity.done():
                    await self._batch(service, held)
        finally:
            capacity.cancel()

    async def _batch(self, service: RLClient, held: set[str]) -> None:
        try:
            packed = await service.lease(owner="trainer", wait=1.0, max_groups=4)
        except AnyAgentError:
            return
        got = unpack_trajectories(packed) if packed else []
        for trajectory in got:
            self.trained[trajectory.session_id] += trajectory.session_id in self.trained
        fresh = [t.session_id for t in got if t.session_id not in held]
        held.update(fresh)
        await self._ack(service, fresh)
        held.difference_update(fresh)

    async def _ack(self, service: RLClient, sessions: list[str]) -> None:
        """All of them; where a lease was lost meanwhile, one by one: that one comes again."""
        while sessions:
            try:
                await service.ack(owner="trainer", trained=sessions, rejected=[])
            except Conflict:
                if len(sessions) > 1:
                    for session in sessions:
                        await self._ack(service, [session])
                return
            except AnyAgentError as error:
                if not error.retryable:
                    raise
            else:
                self.trained.update(sessions)
                return

    async def _capacity(self, held: set[str]) -> None:
        number = 0
        async with RLClient(self.proxy.url, retry_for=1) as service:
            while True:
                number += 1
                try:
                    said = await service.get_capacity()
                    if self.left and said.running + said.buffered == 0:
                        return
                    await service.set_capacity(
                        limit=said.admitted + 64,
                        ttl=30,
                        owner="trainer",
                        held=list(held),
                        number=number,
                    )
                except AnyAgentError as error:
                    self.ledger.fail("capacity", error)
                await asyncio.sleep(0.1)


async def under_fire(
    load: Load, victim: Killable, *, agents: int, kills: int, rng: random.Random
) -> list[float]:
    """Kill the victim at random moments of its lives; how long each was away, in seconds."""
    away = []
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(load.agents(agents))
        tasks.create_task(load.trainer())
        for _ in range(kills):
            await asyncio.sleep(rng.uniform(0.05, 1.2))
            began = time.monotonic()
            await asyncio.to_thread(victim.kill)
            await asyncio.to_thread(victim.start)
            away.append(time.monotonic() - began)
        for _ in range(60):
            await asyncio.sleep(1.0)
            if len(load.ledger.finalized()) >= LEAST:
                break
        assert load.crowd is not None
        load.crowd.leave()
    return away


SETTINGS = ("sessions.ttl=40", "sessions.group_timeout=25", "rollout.max_concurrent=64")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("victim", ["proxy", "router"])
def test_a_killed_proxy_or_router_keeps_the_services_word(
    victim: str, tmp_path: Path, tiny_model_dir: Path, long: bool, figure: Figure
) -> None:
    kills, agents = (200, 32) if long else (8, 16)
    run = trial_dir(config_for(tmp_path))
    with engine_in_thread(tiny_model_dir) as engine, ExitStack() as stack:
        engine.pace = PACE
        target: Killable
        target = proxy = KillableProxy(tmp_path, tiny_model_dir, engine.url, *SETTINGS)
        stack.callback(proxy.close)
        proxy.start()
        if victim == "router":
            entry = RegistryEntry(name=rank_name(0), boot_id="one", url=proxy.url, pid=proxy.pid)
            stack.enter_context(heartbeats(run.registry, entry))
            target = KillableRouter(config_for(tmp_path, "server.ranks=1"))
            stack.callback(target.close)
            target.start()
        load, rng = Load(proxy, target.url), random.Random(0)
        away = asyncio.run(under_fire(load, target, agents=agents, kills=kills, rng=rng))
        counters = audit.counters_of(httpx.get(f"{proxy.url}/metrics", timeout=60).text)
        stack.close()
        judge(load, engine, counters, run, away, figure)


def judge(
    load: Load,
    engine: ScriptedEngine,
    counters: audit.Counters,
    run: RunDir,
    away: list[float],
    figure: Figure,
) -> None:
    """Compare what agents and trainer were told with the record."""
    ledger = load.ledger
    records = audit.read_records(run, 1)
    lost = audit.lost(ledger, records)
    twice = [id for id, count in load.trained.items() if count > 1]
    unheard = records.keys() - {told.session_id for told in ledger.sessions}
    unbalanced = audit.unbalanced([counters], records, 1)
    failures = Counter(f"{failure.what} {failure.error}" for failure in ledger.failures)
    answers = sum(1 for _ in ledger.answers())
    recorded = sum(len(record.interactions) for record in records.values())
    figure(
        f"{len(away)} kill -9 (away {sorted(away)[len(away) // 2]:.2f} s), {len(ledger.sessions)} "
        f"sessions, {answers} answers of {recorded} recorded ({len(engine.requests)} sampled), "
        f"{len(load.trained)} trained"
    )
    figure(
        f"lost: {len(lost.sessions)} sessions, {len(lost.answers)} answers, {len(lost.rewards)} "
        f"rewards, {len(lost.finalizes)} finalizes; trained twice {len(twice)}; opened unheard "
        f"{len(unheard)}; counters out of balance {len(unbalanced)}"
    )
    finalized = ledger.finalized()
    states = Counter(str(records[told.session_id].row.state) for told in finalized)
    figure(f"finalized ones are {dict(states)}; failed for agents: {dict(failures.most_common(6))}")
    assert (lost.sessions, lost.answers, lost.rewards, lost.finalizes) == ([], [], [], [])
    assert (twice, sorted(unheard), unbalanced, ledger.broken) == ([], [], [], [])
    assert len(finalized) >= LEAST
    # All that were finalized came to an end: trained on, or in a group that lost its others.
    assert set(states) <= {SessionState.TRAINED, SessionState.REJECTED, SessionState.EVALUATED}
    assert states[SessionState.TRAINED] == len(load.trained)
