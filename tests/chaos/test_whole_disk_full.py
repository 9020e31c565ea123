"""The disk of a whole run fills up while it trains: its journals, checkpoints, weights and logs.

Nothing dies: writes are refused, reads go on, the trainer waits and says so; and once there is
space again training goes on by itself, exactly.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import httpx
import pytest

from any_agent.client.rl_client import RLClient
from any_agent.errors import StoreFull
from any_agent.launcher import Node, NodeOptions
from any_agent.rundir.layout import RunDir
from any_agent.rundir.registry import read_entry
from tests.chaos.conftest import Figure
from tests.e2e.chaos import Chaos, Plan, chaos_config
from tests.support.e2e.crowd import Crowd
from tests.support.small_disk import Disk, small_disk
from tests.support.taught_models import copy_model

DISK = 96 << 20
LIMIT = 1500.0

pytestmark = pytest.mark.timeout(1800)


class FullDisk(Chaos):
    """One service under load, on a disk that fills up ``times`` times."""

    def __init__(self, disk: Disk, times: int, hold: float, *given: object) -> None:
        super().__init__(*given)  # type: ignore[arg-type]
        self.disk, self.times, self.hold = disk, times, hold
        self.said: list[str] = []
        self.pids: set[tuple[tuple[str, int], ...]] = set()
        self.waited = 0.0

    async def _act(self, node: Node, service: RLClient) -> None:
        ledger = self.outcome.ledger
        crowd = Crowd(node.url, service, ledger, agents=self.plan.agents, seed=self.plan.seed)
        work = asyncio.create_task(crowd.work())
        try:
            for _ in range(self.times):
                await self._until_step(self._step() + 2, work)
                await self._fill_up(node, service)
            assert all(part.restarts == 0 for part in node.parts.values())
            assert len(self.pids) == 1, "a part has another process now"
            await self._kill_while_full(node)
            await self._until_step(self._step() + 4, work)
            crowd.leave()
            await work
        finally:
            work.cancel()

    async def _fill_up(self, node: Node, service: RLClient) -> None:
        """Fill the disk in the middle of a step, so that the trainer is among those that write."""
        self.said.clear()
        for _ in range(20):
            self.disk.fill(leave=4 << 20)
            step = self._step()
            await self._until(partial(self._is_past, step), interval=0.001)
            if await self._stay_full(node, service):
                break
        else:
            raise AssertionError(f"the trainer never met the full disk: {self.said}")
        await self._until(lambda: self._says("trainer", "has space again"))

    async def _kill_while_full(self, node: Node) -> None:
        """Kill a rank, which cannot start on a full disk: that costs none of its attempts."""
        part = node.parts["rank-1"]
        began = time.monotonic()
        try:
            self.disk.fill()
            os.kill(part.pid, signal.SIGKILL)
            while time.monotonic() - began < self.hold:
                self.disk.fill()
                await asyncio.sleep(0.1)
        finally:
            self.disk.make_room()
        await self._until(lambda: part.state == "ready")
        assert len(part._history._deaths) <= 2

    async def _stay_full(self, node: Node, service: RLClient) -> bool:
        """Keep the disk full; return False if the trainer has nothing to write meanwhile."""
        began, step = time.monotonic(), self._step()
        self._note_pids(node)
        try:
            # Again and again: nobody must get what another one has just freed.
            while time.monotonic() - began < self.hold:
                self.disk.fill()
                await asyncio.sleep(0.1)
                if time.monotonic() - began > 6 and not self._trainer_waits(node):
                    # It waits for sessions, which agents cannot end now.
                    return False
            assert self._says("trainer", "disk full"), self.said
            await self._check_refusals(service)
            await self._check_reads(node, service)
            assert self._step() == step
            return True
        finally:
            self.disk.make_room()
            self.waited += time.monotonic() - began
            self._note_pids(node)

    def _is_past(self, step: int) -> bool:
        return self._step() > step

    def _trainer_waits(self, node: Node) -> bool:
        entry = read_entry(node.dir.registry, "trainer")
        return entry is not None and entry.disk_full is not None

    def _says(self, part: str, what: str) -> bool:
        return any(line.startswith(part) and what in line for line in self.said)

    async def _check_refusals(self, service: RLClient) -> None:
        """Open sessions until one is refused: a journal's log has room for some more."""
        with pytest.raises(StoreFull):
            for _ in range(1000):
                await service.start_session(mode="eval", metadata={"text": "x" * 16_000})

    async def _check_reads(self, node: Node, service: RLClient) -> None:
        told = self.outcome.ledger.sessions[0]
        info = await service.session_info(told.session_id)
        assert info.session_id == told.session_id
        assert (await service.run_info()).state == "training"
        headers = {"Authorization": f"Bearer {self._admin_key}"}
        async with httpx.AsyncClient(base_url=node.url, headers=headers, timeout=60) as http:
            assert (await http.get("/healthz")).status_code == 200
            ready = await http.get("/readyz")
            assert ready.status_code == 200 or ready.json()["error"]["code"] == "store_full"
            metrics = (await http.get("/metrics")).text
            assert "any_agent_train_disk_full 1" in metrics

    def _note_pids(self, node: Node) -> None:
        self.pids.add(tuple((name, part.pid) for name, part in node.parts.items()))

    async def _until(self, condition: Callable[[], bool], interval: float = 0.05) -> None:
        async with asyncio.timeout(120):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(interval)


def test_no_part_dies_and_training_goes_on_when_the_whole_disk_was_full(
    tmp_path: Path, long: bool, figure: Figure
) -> None:
    admin_key = secrets.token_hex(24)
    with small_disk(tmp_path / "disk", DISK) as disk:
        config = chaos_config(tmp_path / "disk" / "runs", 0, admin_key)
        config = config.model_copy(
            update={"model": config.model.model_copy(update={"path": str(tmp_path / "model")})}
        )
        copy_model(Path(config.model.path))
        run = RunDir.of(config.root, config.user, config.experiment, config.trial)
        plan = Plan(kills=0, agents=12, seed=0, steps=0, limit=LIMIT)
        times, hold = (5, 60.0) if long else (1, 15.0)
        chaos = FullDisk(disk, times, hold, config, plan, admin_key, print)
        options = NodeOptions(say=chaos.said.append)
        with Node(config, options) as node:
            asyncio.run(chaos.drive(node))
        chaos.audit(run)
        left = [str(p.relative_to(run.path)) for p in run.path.rglob(".partial-*")]
        ledger = chaos.outcome.ledger
    # Answers that were refused are no contradiction: nothing that was acknowledged is lost.
    assert {name: found[:5] for name, found in chaos.outcome.problems.items() if found} == {}
    assert left == []
    figure(
        f"the whole disk full {times} times, {chaos.waited:.0f} s in all: "
        f"{len(list(ledger.answers()))} answers acknowledged, lost 0, "
        f"restarted none but the one killed, {chaos.outcome.figures['history']}"
    )
