"""A job's first node, alone: its settings, its address, its end; stand-ins for parts and Slurm."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import yaml

from any_agent.config import Config
from any_agent.errors import ConfigError, StartupError
from any_agent.launcher import component
from any_agent.launcher import journal_storage as journals
from any_agent.launcher.slurm import worker_node
from any_agent.launcher.slurm.head_node import HeadNode, run_job
from any_agent.launcher.slurm.job import SlurmJob
from any_agent.launcher.slurm.plan import NodeLost, plan
from any_agent.launcher.trial import trial_dir
from any_agent.runtime.ports import reserve
from tests.support.errors import fails_with
from tests.support.launcher.slurm_programs import ADDRESS, Programs
from tests.support.launcher.stand_ins import Lab, checked_until

pytestmark = [pytest.mark.service, pytest.mark.usefixtures("handlers", "programs")]

JOB = SlurmJob(id="7", nodes=("n1",), gpus=0, restarts=0)


def settings(lab: Lab, *more: str) -> Config:
    own = ["server.admin_key=a-secret-key", "cluster.warning=60"]
    return lab.config(*own, f"server.journal_dir={lab.home / 'local'}", *more)


def run(lab: Lab, config: Config, say: Callable[[str], None] = lambda _: None) -> int:
    def told(line: str) -> None:
        lab.said.append(line)
        say(line)

    return run_job(config, JOB, stay=True, say=told)


def at_each_check(monkeypatch: pytest.MonkeyPatch, act: Callable[[HeadNode], object]) -> None:
    """Act after each look of the node at its parts."""
    real = HeadNode.check

    def check(self: HeadNode) -> bool:
        trained = real(self)
        act(self)
        return trained

    monkeypatch.setattr(HeadNode, "check", check)


def warned_when_up(
    monkeypatch: pytest.MonkeyPatch, *, first: Callable[[], object] = lambda: None
) -> None:
    """The job's time is almost over when all of it has begun."""

    def warn(node: HeadNode) -> None:
        if node.came_up:
            first()
            os.kill(os.getpid(), signal.SIGUSR1)

    at_each_check(monkeypatch, warn)


def test_worker_nodes_read_the_roles_of_the_plan(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(lab, "server.ranks=4", "cluster.training_nodes=2")
    job = replace(JOB, nodes=("n1", "n2", "n3", "n4"))
    node = HeadNode(config, job, lambda _: None)
    for role in plan(config, job.nodes, job.gpus)[1:]:
        command = node.worker_command(role)
        assert "a-secret-key" not in " ".join(command)
        monkeypatch.setattr(sys, "argv", [*command, "--start", "s-1"])
        assert worker_node.worker_arguments().role == role


def test_a_job_that_had_begun_is_queued_again_and_goes_on_on_any_node(
    lab: Lab, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This one's address is for this start alone, and a port that nobody asked for is no matter."""
    warned_when_up(monkeypatch)
    config = settings(lab, "server.port=8000")
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ConfigError):  # taken already
            stack.enter_context(reserve(ADDRESS, 8000)).listen()
        assert run(lab, config) == 0
    assert programs.requeued == ["7"]
    dir = trial_dir(config)
    url = dir.url.read_text().strip()
    assert url.startswith(f"http://{ADDRESS}:") and not url.endswith(":8000")
    now, kept = (yaml.safe_load(p.read_text()) for p in (dir.resolved, dir.path / "config.yaml"))
    assert now["server"]["host"] == ADDRESS
    assert kept["server"]["host"] == "127.0.0.1"
    assert kept | {"server": now["server"]} == now


@pytest.mark.parametrize("when", ["engine 0", "router"])
def test_a_job_whose_time_is_too_short_for_its_start_is_not_requeued(
    lab: Lab, programs: Programs, when: str
) -> None:
    def say(line: str) -> None:
        if line.startswith(f"{when:<9} ready"):
            os.kill(os.getpid(), signal.SIGUSR1)

    assert run(lab, settings(lab), say) == 1
    assert programs.requeued == []
    assert "its time limit is too short" in lab.said[-1]


def test_a_job_whose_trainer_never_has_its_model_is_not_requeued(
    lab: Lab, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service itself is there all the same."""
    lab.enter("trainer", state="starting")

    def warn(node: HeadNode) -> None:
        if (node.dir.registry / "trainer.json").exists():
            os.kill(os.getpid(), signal.SIGUSR1)

    at_each_check(monkeypatch, warn)
    assert run(lab, settings(lab)) == 1
    assert programs.requeued == []


def test_a_journal_that_cannot_be_copied_keeps_no_other_and_no_job_from_going_on(
    lab: Lab, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(lab)
    dir = trial_dir(config)

    def write() -> None:
        dir.journal(0).write_bytes(b"this is no database" * 1000)
        with sqlite3.connect(dir.journal(1)) as connection:
            connection.execute("CREATE TABLE IF NOT EXISTS t (x)")
        connection.close()

    warned_when_up(monkeypatch, first=write)
    assert run(lab, config) == 0
    assert programs.requeued == ["7"]
    (line,) = [line for line in lab.said if "was not copied" in line]
    assert line.startswith("rank 0") and line.endswith(
        f"its sessions are only at n1:{dir.journal(0)}"
    )
    assert (dir.path / "journal" / "rank-1.kept").exists()


def test_no_signal_interrupts_the_copy_of_the_journals(
    lab: Lab, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = []
    real = journals.store_journals

    def leave(*arguments: Any) -> None:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            os.kill(os.getpid(), number)
        real(*arguments)
        copied.append(True)

    monkeypatch.setattr(journals, "store_journals", leave)
    warned_when_up(monkeypatch)
    assert run(lab, settings(lab)) == 0
    assert copied == [True]
    assert programs.requeued == ["7"]


LOGGED = ("server.journal=redis://:a-secret-password@127.0.0.1:1/0", "cluster.lost_after=5")


@contextmanager
def several(
    lab: Lab, *more: str, nodes: tuple[str, ...] = ("n1", "n2", "n3")
) -> Iterator[HeadNode]:
    """The first one of several nodes, which also trains; each has a rank."""
    own = ["cluster.training_nodes=0", f"server.ranks={len(nodes)}", *more]
    with HeadNode(settings(lab, *own), replace(JOB, nodes=nodes), lab.said.append) as node:
        yield node


def serves_on(where: str, *names: str, node: HeadNode, programs: Programs) -> Callable[[], bool]:
    """Return a check that these launchers are ready, started last on this node."""

    def serves() -> bool:
        last = {one["name"]: one["node"] for one in programs.launched}
        return all(node.parts[n].state == "ready" and last[n] == where for n in names)

    return serves


@pytest.mark.parametrize("mood", ["lost", "hangs"])
def test_another_node_carries_on_the_ranks_of_a_lost_one(
    lab: Lab, programs: Programs, monkeypatch: pytest.MonkeyPatch, mood: str
) -> None:
    """A process that Slurm still has for it, but that does nothing, makes no difference."""
    with several(lab, *LOGGED) as node:
        assert [one["node"] for one in programs.launched] == ["n2", "n3"]
        programs.mood("n2", mood)
        checked_until(node, serves_on("n3", "node-1", node=node, programs=programs))
        first, *_, last = [one for one in programs.launched if one["name"] == "node-1"]
        # n1 has no more ranks, but trains.
        assert last["role"] == first["role"] | {"node": "n3"}
        assert "job       n2 is lost: n3 carries on its ranks 1" in lab.said
        assert "node 1    ready again" in lab.said
        # Then this one is lost, with the ranks of both.
        programs.mood("n3", mood)
        checked_until(node, serves_on("n1", "node-1", "node-2", node=node, programs=programs))
    assert "a-secret-password" not in "".join(lab.said)


def test_a_node_that_only_starts_again_keeps_its_ranks(lab: Lab, programs: Programs) -> None:
    with several(lab, *LOGGED, "cluster.lost_after=60", nodes=("n1", "n2")) as node:
        os.kill(node.parts["node-1"].pid, signal.SIGKILL)
        checked_until(node, lambda: node.parts["node-1"].restarts == 1)
        checked_until(node, serves_on("n2", "node-1", node=node, programs=programs))
        assert [one["node"] for one in programs.launched] == ["n2", "n2"]


@pytest.mark.parametrize(("mood", "more"), [("lost", LOGGED[1:]), ("fails", LOGGED)])
def test_a_fault_that_another_node_could_not_mend_ends_the_job(
    lab: Lab, programs: Programs, monkeypatch: pytest.MonkeyPatch, mood: str, more: tuple[str, ...]
) -> None:
    """The lost one's disk has the journals; where launchers fail, another one would, too."""
    monkeypatch.setattr(component, "MAX_RESTARTS", 2)
    with (
        several(lab, *more) as node,
        fails_with(StartupError, "node 1 ", "ended 3 times") as raised,
    ):
        programs.mood("n2", mood)
        checked_until(node, lambda: False)
    assert not isinstance(raised.value, NodeLost)
    assert {one["node"] for one in programs.launched} == {"n2", "n3"}


@pytest.mark.parametrize("again", [True, False])
def test_a_job_that_no_other_node_can_carry_on_is_queued_again(
    lab: Lab, programs: Programs, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """With all its nodes it goes on: nothing is lost but the node."""
    at_each_check(monkeypatch, lambda node: node.came_up and programs.mood("n2", "lost"))
    config = settings(lab, *LOGGED, f"cluster.requeue={again}")
    job = replace(JOB, nodes=("n1", "n2"))
    said = lab.said.append
    if again:
        assert run_job(config, job, stay=True, say=said) == 1
        assert lab.said[-2:] == [
            "job       n2 is lost, and with it a trainer, which no other node can be",
            "job       7 is queued again, to go on with all its nodes",
        ]
    else:
        with pytest.raises(NodeLost):
            run_job(config, job, stay=True, say=said)
    assert programs.requeued == ["7"] * again
