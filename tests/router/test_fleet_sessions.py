"""Real proxies behind a router, and a trainer's leases, while ranks come and go: in one process."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from any_agent.chat import ChatFormat
from any_agent.client.rl_client import RLClient
from any_agent.keys import rank_of_session
from any_agent.launcher.trial import trial_dir
from any_agent.rollout import LeaseExecutor, RankClients
from any_agent.rundir.fleet import Fleet, FleetFile, save_fleet
from proxy_ext.server import entry_of
from tests.router.test_two_ranks import Pair, running_pair
from tests.support.proxy import HELLO, LIMIT, until

pytestmark = pytest.mark.service

GROUP = 4


class Run:
    """Agents and a trainer at a service whose ranks change."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.fleet = Fleet.of(2)
        self.homes: defaultdict[str, set[int | None]] = defaultdict(set)
        self.finalized: set[str] = set()
        self.consumed: Counter[str] = Counter()
        self.leaving = False
        self._step = 0
        run = trial_dir(pair.config)
        self.executor = LeaseExecutor(
            lambda: RankClients(run.registry, FleetFile(run.fleet, 2), retry_for=LIMIT),
            pair.config.rollout,
            owner="trainer",
        )

    def change(self, rank: int, state: str | None) -> None:
        self.fleet = self.fleet.with_state(rank, state)  # type: ignore[arg-type]
        save_fleet(trial_dir(self.pair.config).fleet, self.fleet)

    def sessions_at(self, rank: int) -> int:
        return sum(rank_of_session(session) == rank for session in self.finalized)

    # -- agents --------------------------------------------------------------------------------

    async def work(self, agents: int) -> None:
        """The members of a group are different agents."""
        members = self._members()

        async def agent() -> None:
            async with RLClient(self.pair.url, timeout=LIMIT, trust_env=False) as client:
                for group in members:
                    await self._episode(client, group)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(agents):
                tasks.create_task(agent())

    def _members(self) -> Iterator[str]:
        for number in itertools.count():
            if self.leaving and number % GROUP == 0:
                return
            yield f"g{number // GROUP}"

    async def _episode(self, client: RLClient, group: str) -> None:
        session = await client.start_session(
            group_id=group, group_size=GROUP, wait=20.0, patience=LIMIT
        )
        self.homes[group].add(rank_of_session(session.session_id))
        body = {"model": "m", "messages": HELLO, "max_tokens": 4}
        response = await client.request(
            "POST", "/chat/completions", body, key=session.api_key, base="/v1"
        )
        assert response.status_code == 200
        await client.finalize(session.api_key, 1.0)
        self.finalized.add(session.session_id)

    # -- the trainer ---------------------------------------------------------------------------

    async def train(self) -> None:
        """Make steps until interrupted; each is in a checkpoint once the next one is made."""
        while True:
            try:
                batch = await asyncio.to_thread(self.executor.prepare_batch, LIMIT)
            except InterruptedError:
                return
            ids = [trajectory.session_id for episode in batch for trajectory in episode]
            self.consumed.update(ids)
            self._step += 1
            await asyncio.to_thread(self.executor.ack, ids, [], step=self._step)
            for rank, proxy in list(self.pair.proxies.items()):
                if self.fleet.state(rank) is not None:
                    await proxy.client.set_run(
                        "training", step=self._step, checkpoint="c", oldest_step=self._step - 1
                    )

    # -- the launcher --------------------------------------------------------------------------

    async def add(self, rank: int) -> None:
        self.change(rank, "joining")
        await self.pair.start_rank(rank)
        admission = self.pair.proxies[rank].service.sessions.admission
        await until(lambda: admission.limited, "the trainer leads the rank")
        assert admission.admitted == 0, "it has served before its time"
        self.change(rank, "serving")

    async def drain(self, rank: int) -> None:
        self.change(rank, "draining")
        service = self.pair.proxies[rank].service

        def done() -> bool:
            entry = entry_of(service, url="u", boot_id="b")
            return entry.retired and not entry.unfinished and not entry.replayable

        await until(done, "the rank is done")
        self.change(rank, None)
        await asyncio.sleep(1.5)
        await self.pair.end(f"rank-{rank}")


@pytest.fixture
async def run(tmp_path: Path, chat: ChatFormat) -> AsyncIterator[Run]:
    settings = ("rollout.max_concurrent=16", f"sessions.group_size={GROUP}")
    async with running_pair(tmp_path, chat, *settings, engines=3) as pair:
        yield Run(pair)


async def test_no_session_is_lost_and_no_group_is_split(run: Run) -> None:
    await asyncio.to_thread(run.executor.start)
    await asyncio.to_thread(run.executor.begin)
    training = asyncio.create_task(run.train())
    work = asyncio.create_task(run.work(agents=6))
    try:
        await until(lambda: run.sessions_at(0) and run.sessions_at(1))
        await run.add(2)
        await until(lambda: run.sessions_at(2) >= GROUP, "the added rank has work")
        for rank in (0, 1):
            await run.drain(rank)
            assert not work.done() and not training.done()
        before = run.sessions_at(2)
        await until(lambda: run.sessions_at(2) >= before + 2 * GROUP, "agents go on")
        run.leaving = True
        await work
        assert run.fleet.ranks == (2,)
        assert {group: ranks for group, ranks in run.homes.items() if len(ranks) > 1} == {}
        gone = {id for id in run.finalized if rank_of_session(id) != 2}
        assert len(gone) >= 2 * GROUP
        assert gone <= run.consumed.keys(), "sessions of drained ranks were not trained on"
        await until(lambda: len(run.finalized - run.consumed.keys()) < 8, "training goes on")
        assert run.consumed.most_common(1)[0][1] == 1
    finally:
        work.cancel()
        run.executor.interrupt()
        await asyncio.wait([training, work])
        await asyncio.to_thread(run.executor.stop)
    training.result()
