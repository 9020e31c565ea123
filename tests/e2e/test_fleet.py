"""Ranks that are added and drained under load by `any-agent ranks`: from 2 to 3 to 1.

A tiny model behind a real service trains on what concurrent agents do meanwhile; then the agents'
ledgers are held against the ranks' journals. ``--long``: from 4 ranks to 6 to 2.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from any_agent.client.rl_client import RLClient
from any_agent.config import Config
from any_agent.demo.models.tiny import save_tiny_model
from any_agent.keys import rank_of_session
from any_agent.launcher import Node
from any_agent.rundir.fleet import Fleet, load_fleet
from any_agent.rundir.layout import RunDir, published_versions
from any_agent.rundir.registry import rank_name, read_entry
from any_agent.types import SessionState
from tests.e2e.chaos import Chaos, Plan, beside, chaos_config, told
from tests.support.e2e import audit
from tests.support.e2e.crowd import Crowd
from tests.support.waiting import until

_NOISE = 0.3
"""The share of rewards that are chance: groups never cease to differ."""
_STEPS = 3  # steps after each change
_CHANGE_TIMEOUT = 240.0
_UNFINISHED = {
    SessionState.OPEN,
    SessionState.AWAITING_REWARD,
    SessionState.FINALIZED,
    SessionState.LEASED,
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """The numbers of ranks, one after the other."""

    first: int
    most: int
    last: int

    @property
    def drained(self) -> range:
        """The ranks that go: the oldest, which have the most groups."""
        return range(self.most - self.last)


SHORT, LONG = Sizes(2, 3, 1), Sizes(4, 6, 2)


def fleet_config(root: Path, seed: int, admin_key: str, sizes: Sizes) -> Config:
    plain = chaos_config(root, seed, admin_key).model_dump()
    plain["experiment"] = "fleet"
    plain["server"]["ranks"] = sizes.first
    plain["rollout"]["batch_size"] = 16
    # A drained rank ends once its last step is in the oldest checkpoint.
    plain["train"] |= {"checkpoint_every": 1, "keep_checkpoints": 2}
    return Config.model_validate(plain)


class ChangingFleet(Chaos):
    """One service under load whose ranks come and go."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        sizes: Sizes,
        admin_key: str,
        say: Callable[[str], None],
    ) -> None:
        super().__init__(config, plan, admin_key, say)
        self._sizes = sizes
        self._versions: list[str] = []
        """Ranks that began to serve with an old version."""

    async def _act(self, node: Node, service: RLClient) -> None:
        ledger, plan = self.outcome.ledger, self.plan
        crowd = Crowd(node.url, service, ledger, agents=plan.agents, seed=plan.seed, noise=_NOISE)
        work = asyncio.create_task(crowd.work())
        try:
            await self._until_step(1, work)
            await beside(work, self._change(node, work))
            crowd.leave()
            await work
        finally:
            work.cancel()
        finalized = sum(told.finalized for told in ledger.sessions)
        self.outcome.figures["load"] = f"{len(ledger.sessions)} sessions, {finalized} finalized"

    async def _change(self, node: Node, work: asyncio.Task[None]) -> None:
        sizes, began = self._sizes, time.monotonic()
        for _ in range(sizes.most - sizes.first):
            await self._command("add")
        known = max(published_versions(node.dir.weights), default=0)
        await self._until(node, lambda fleet: len(fleet.serving) == sizes.most)
        for rank in range(sizes.first, sizes.most):
            entry = read_entry(node.dir.registry, rank_name(rank))
            if entry is None or entry.version < known:
                self._versions.append(f"rank {rank} began to serve as {entry}, not with {known}")
        self._note("grown", began)
        await self._until_step(self._step() + _STEPS, work)
        began = time.monotonic()
        for rank in sizes.drained:
            await self._command("drain", str(rank))
        await self._until(node, lambda fleet: len(fleet.ranks) == sizes.last)
        gone = {f"{kind}-{rank}" for kind in ("rank", "engine") for rank in sizes.drained}
        await self._until(node, lambda _: not gone & node.parts.keys())
        self._note("shrunk", began)
        await self._until_step(self._step() + _STEPS, work)

    def _note(self, what: str, began: float) -> None:
        self.outcome.figures[what] = f"in {time.monotonic() - began:.1f} s, at step {self._step()}"

    async def _command(self, *words: str) -> None:
        config = self.config
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "any_agent.cli", "ranks", *words),
            *(f"root={config.root}", f"user={config.user}"),
            *(f"experiment={config.experiment}", f"trial={config.trial}"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        out, _ = await process.communicate()
        self._say(f"command   ranks {' '.join(words)}: {out.decode().strip()}")
        assert process.returncode == 0, out.decode()

    async def _until(self, node: Node, met: Callable[[Fleet], bool]) -> None:
        def there() -> bool:
            fleet = load_fleet(node.dir.fleet)
            return fleet is not None and met(fleet)

        await until(there, "the fleet's change", within=_CHANGE_TIMEOUT)

    def audit(self, run: RunDir) -> None:
        super().audit(run)
        records = self._read_records(run)
        self._check("ranks with old weights", self._versions)
        homes: defaultdict[str, set[int | None]] = defaultdict(set)
        left, consumed = [], 0
        for session_id, record in records.items():
            rank, row = rank_of_session(session_id), record.row
            if row.group_id is not None:
                homes[row.group_id].add(rank)
            if rank in self._sizes.drained:
                consumed += row.state is SessionState.TRAINED
                if row.state in _UNFINISHED:
                    left.append(f"{session_id} is {row.state}")
        split = [f"{group} is at {ranks}" for group, ranks in homes.items() if len(ranks) > 1]
        self._check("groups that were split", split)
        self._check("left at drained ranks", left)
        sessions = [rank_of_session(session_id) for session_id in records]
        per_rank = {rank: sessions.count(rank) for rank in range(self._sizes.most)}
        idle = [f"rank {rank} had no session" for rank, count in per_rank.items() if not count]
        self._check("ranks without work", idle)
        self.outcome.figures["fleet"] = (
            f"sessions by rank {per_rank}, {len(homes)} groups, {consumed} sessions of drained "
            "ranks trained on"
        )
        failed = self.outcome.ledger.failed("call")
        self._check("calls that failed", [f"{n} {error}" for error, n in failed.items()])

    def _read_records(self, run: RunDir) -> dict[str, audit.Record]:
        return audit.read_records(run, self._sizes.most)

    def _audit_training(self, run: RunDir, records: dict[str, audit.Record]) -> None:
        """Not made anew: only two checkpoints are kept."""


def test_every_promise_is_kept_while_ranks_come_and_go(
    tmp_path: Path, long: bool, figure: Callable[[str], None]
) -> None:
    sizes, agents = (LONG, 32) if long else (SHORT, 12)
    plan = Plan(kills=0, agents=agents, seed=0, steps=0, limit=1800 if long else 800)
    admin_key = secrets.token_hex(24)
    config = fleet_config(tmp_path, plan.seed, admin_key, sizes)
    save_tiny_model(Path(config.model.path), seed=plan.seed)
    changing = ChangingFleet(config, plan, sizes, admin_key, print)
    changing.go()
    outcome = changing.outcome
    print("\n" + "\n".join(told(outcome)))
    for name, text in outcome.figures.items():
        figure(f"{name} {text}")
    assert {name: problems[:5] for name, problems in outcome.problems.items() if problems} == {}
