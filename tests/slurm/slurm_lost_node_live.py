"""A job of two nodes that loses one while agents work, as without power: processes, disk, all.

The other node carries on its rank: from the log in the job's Redis, for the same agents with the
same keys. Afterwards what agents were told is held against what the run's folder keeps.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import psutil
import pytest

from any_agent.client.rl_client import RLClient
from any_agent.config import JOURNAL_VARIABLE, Config, load_config
from any_agent.keys import rank_of_session
from any_agent.launcher.trial import trial_dir
from any_agent.rundir.layout import RunDir
from tests.slurm.jobs import ADMIN, over, said, sbatch, settings
from tests.slurm.lab import PATIENCE, Slurm, slurm, until
from tests.support.e2e import audit, history
from tests.support.e2e.crowd import Crowd
from tests.support.e2e.ledger import Answer, Ledger, Told
from tests.support.e2e.live_run import steps_of
from tests.support.e2e.retrain import retrain

STEPS = 8
BEFORE = 2
"""Steps until the node is lost."""
RANKS = 2
BOUND = 90.0
"""Seconds after which the lost rank answers at the latest: those until its node counts as lost, a
start of engine and proxy on a busy machine, and the lease."""
_TALK: list[Any] = [{"role": "user", "content": "talk"}]


@dataclass
class Run:
    config: Config
    dir: RunDir
    job: str
    log: str = ""
    state: str = ""
    ledger: Ledger = field(default_factory=Ledger)
    away: float = 0.0
    """Seconds from the loss until a session of the lost rank got its next answer."""
    password: str = ""
    shown: list[str] = field(default_factory=list)
    """Command lines with the password."""


@pytest.fixture(scope="module")
def lost_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm(tmp_path_factory.mktemp("lost")) as made:
        if not made.apart:
            why = "no namespaces can be made here, without which nodes share processes and disk"
            if os.environ.get("CI") == "true":
                pytest.fail(why)
            pytest.skip(why)
        yield made


@pytest.fixture(scope="module")
def run(lost_cluster: Slurm, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    cluster, folder = lost_cluster, tmp_path_factory.mktemp("run")
    log = folder / "job.log"
    path = settings(
        folder,
        model,
        steps=STEPS,
        # Another disk on each node.
        server={"journal_dir": str(cluster.folder / "apart" / "journals")},
        cluster={"training_nodes": 0, "redis": True, "lost_after": 5},
    )
    config = load_config(path, environ={})
    run = Run(config, trial_dir(config), "")
    run.job = sbatch(cluster, path, log, "--time=60", "--no-kill")
    until(lambda: run.dir.url.exists() or over(cluster, run.job), lambda: said(log))
    assert not over(cluster, run.job), said(log)
    asyncio.run(drive(run, cluster, log))
    until(lambda: over(cluster, run.job), lambda: said(log), within=300)
    run.state, run.log = cluster.state(run.job), said(log)
    return run


async def drive(run: Run, cluster: Slurm, log: Path) -> None:
    """Agents at work until the last step; the second node is lost meanwhile."""
    url = run.dir.url.read_text().strip()
    async with RLClient(url, admin_key=ADMIN) as service, asyncio.timeout(3 * PATIENCE):
        crowd = Crowd(url, service, run.ledger, agents=12, seed=0)
        async with working(crowd):
            await step(BEFORE, run, cluster, log)
            note_password(run, cluster)
            told = await open_on(1, service, url, run.ledger)
            cluster.lose()
            began = time.monotonic()
            # Its key is as good as before, its past is there, and it ends as if nothing had been.
            await answer(url, told)
            run.away = time.monotonic() - began
            await answer(url, told)
            await finish(service, told)
            await step(STEPS, run, cluster, log)


@asynccontextmanager
async def working(crowd: Crowd) -> AsyncIterator[None]:
    work = asyncio.create_task(crowd.work())
    try:
        yield
        crowd.leave()
    finally:
        work.cancel()
        await asyncio.wait([work])


async def step(number: int, run: Run, cluster: Slurm, log: Path) -> None:
    """Wait for a step, or the job's end."""

    def met() -> bool:
        return len(steps_of(run.dir)) >= number or over(cluster, run.job)

    await asyncio.to_thread(until, met, lambda: said(log))
    assert len(steps_of(run.dir)) >= number, said(log)


async def open_on(rank: int, service: RLClient, url: str, ledger: Ledger) -> Told:
    """Open a session on this rank, and let its agent begin."""
    while True:
        started = await service.start_session(mode="eval", task_id="talk", wait=30, patience=60)
        told = ledger.open(started.session_id, started.api_key, started.mode)
        await answer(url, told)
        if rank_of_session(told.session_id) == rank:
            return told
        await finish(service, told)


async def answer(url: str, told: Told) -> None:
    """Ask once; the SDK repeats what is refused with `Retry-After`."""
    talk = _TALK[:]
    for one in told.answers.values():
        talk += [{"role": "assistant", "content": one.text}, {"role": "user", "content": "on"}]
    began = time.time()
    async with openai.AsyncOpenAI(
        api_key=told.api_key, base_url=f"{url}/v1", max_retries=30
    ) as sdk:
        done = await sdk.chat.completions.create(model="any", messages=talk, max_tokens=4)
    told.answers[done.id] = Answer(done.choices[0].message.content or "", began, time.time())


async def finish(service: RLClient, told: Told) -> None:
    last = [*told.answers][-1]
    await service.set_reward(told.api_key, 1.0, completion_id=last)
    told.rewards[last] = 1.0
    await service.finalize(told.api_key)
    told.finalized = True


def note_password(run: Run, cluster: Slurm) -> None:
    given = [one.environ().get(JOURNAL_VARIABLE) for one in cluster.processes(run.job)]
    (url,) = {url for url in given if url}
    run.password = urlsplit(url).password or ""
    lines = [" ".join(one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"])]
    assert any(f"redis-server 127.0.0.1:{urlsplit(url).port}" in line for line in lines)
    run.shown = [line for line in lines if run.password in line]


def test_the_job_goes_on_to_its_last_step(run: Run) -> None:
    assert run.state == "COMPLETED", run.log
    assert [step["step"] for step in steps_of(run.dir)] == list(range(1, STEPS + 1))
    assert "restart 1" not in run.log


def test_the_log_names_the_lost_node_and_who_carries_on(run: Run) -> None:
    assert "role      n1 (127.0.0.1): engines and proxies of ranks 0; the router; the trainer" in (
        run.log
    )
    assert "role      n2: engines and proxies of ranks 1" in run.log
    assert f"redis     ready, its file in {run.dir.path / 'redis'}" in run.log
    assert "job       n2 is lost: n1 carries on its ranks 1" in run.log
    after = run.log.partition("is lost")[2]
    assert re.search("^n1        rank 1    ready", after, re.MULTILINE), run.log
    assert "node 1    ready again" in after


def test_a_session_of_the_lost_rank_is_answered_in_time(run: Run) -> None:
    print(f"a session of the lost rank got its next answer after {run.away:.1f} s")
    assert 0 < run.away < BOUND


def test_nothing_that_agents_were_told_is_lost(run: Run) -> None:
    records = audit.read_records(run.dir, RANKS)
    lost = audit.lost(run.ledger, records)
    assert lost == audit.Lost([], [], [], [])
    assert run.ledger.broken == []
    homes = {rank_of_session(told.session_id) for told in run.ledger.sessions if told.finalized}
    assert homes == {0, 1}
    survived = history.read_history(run.dir)
    assert history.trained_twice(survived) == []
    assert history.contradictions(survived) == []
    states = {session_id: record.row.state for session_id, record in records.items()}
    steps = {session_id: record.row.step for session_id, record in records.items()}
    assert history.effects_against_states(survived, states, steps) == ([], [])
    # Made again in one go: each checkpoint bit for bit.
    compared, different = retrain(run.config, run.dir, records)
    assert compared >= 2
    assert different == []


def test_nobody_is_shown_the_password(run: Run) -> None:
    assert len(run.password) >= 32
    assert run.shown == []
    assert audit.leaks(run.dir, [ADMIN, run.password]) == []
    assert run.password not in run.log
