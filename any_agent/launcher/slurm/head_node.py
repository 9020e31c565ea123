"""A job's head node: its own parts of the service, and the worker nodes, each started by `srun`."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from types import FrameType

from any_agent.config import LOOPBACK, Config, ServerConfig
from any_agent.errors import ConfigError
from any_agent.launcher.node import Node, NodeOptions, listening
from any_agent.launcher.node_role import LOCAL, NodeRole
from any_agent.launcher.process import Command
from any_agent.launcher.shutdown import Terminated, terminate
from any_agent.launcher.slurm.job import (
    SlurmJob,
    drain_seconds,
    mark,
    node_address,
    requeue,
    require_program,
)
from any_agent.launcher.slurm.plan import Role, count_ranks, plan
from any_agent.launcher.training_progress import LogTail
from any_agent.rundir.registry import HEARTBEAT, read_entry

_GRACE = 20.0  # the most seconds in which a node ends its parts and copies its journals
_PREFIX = (
    *("srun", "--nodes=1", "--ntasks=1", "--overlap", "--unbuffered", "--kill-on-bad-exit=0"),
    # A node needs this one's PATH and keys, whatever the site's defaults are.
    "--export=ALL",
    # One task may use all cores.
    "--cpu-bind=none",
)


class Warned(Terminated):
    """The job's time is almost over; raised at SIGUSR1."""


class HeadNode(Node):
    """The service of a job; a context manager like any node.

    Raises ConfigError for settings that do not fit the job.
    """

    def __init__(self, config: Config, job: SlurmJob, say: Callable[[str], None]) -> None:
        roles = plan(config, job.nodes, job.gpus)
        own, *self._others = roles
        address = node_address(own.node, config.cluster.network)
        changes: dict[str, object] = {"ranks": count_ranks(roles)}
        if config.server.host in LOOPBACK:
            # No client outside of this node would reach it.
            changes["host"] = address
        server = config.server.model_copy(update=changes)
        place = NodeRole(
            # On a single node the parts need only loopback.
            host=address if self._others else LOCAL,
            ranks=own.ranks,
            trainer=own.training is not None,
            machine=own.node,
        )
        super().__init__(
            config.model_copy(update={"server": server}),
            NodeOptions(say=say, place=place, configured=config),
        )
        again = f", restart {job.restarts}" if job.restarts else ""
        say(f"job       {job.id} on {', '.join(job.nodes)}{again}")
        say(f"role      {own.node} ({address}): {own}")
        for role in self._others:
            say(f"role      {role.node}: {role}")
        if self._others:
            say(
                "journals  each node's own disk has those of its ranks: a lost node loses its open "
                "sessions; to keep them, the journal would have to be in Redis"
            )
        self._node_logs: dict[str, LogTail] = {}
        """Logs of the other nodes' launchers, by the nodes' names."""
        self._token = ""
        self.came_up = False
        """True once all parts were ready and the trainer had its model."""
        self._next_check = 0.0

    def check(self) -> bool:
        for node, log in self._node_logs.items():
            for line in log.new_lines():
                self.options.say(f"{node:<9} {line}")
        trained = super().check()
        if not self.came_up and time.monotonic() >= self._next_check:
            self._next_check = time.monotonic() + HEARTBEAT
            self.came_up = self._is_up()
        return trained

    # ------------------------------------------------------------------------------------------

    def _claim_address(self) -> None:
        server = self.config.server
        try:
            super()._claim_address()
        except ConfigError:
            if server.port != ServerConfig.model_fields["port"].default or server.public_url:
                raise
            # Agents read the URL from a file, so another port than the default works, too.
            self.options.say(f"url       port {server.port} is in use here: taking another one")
            server = server.model_copy(update={"port": 0})
            self.config = self.config.model_copy(update={"server": server})
            super()._claim_address()

    def _before_parts(self) -> None:
        self._token = mark(self.dir)
        for role in self._others:
            if role.training is None:
                self._start_node(role)

    def _start_trainer(self) -> None:
        super()._start_trainer()
        for role in self._others:
            if role.training is not None:
                self._start_node(role)

    def _start_node(self, role: Role) -> None:
        name = f"node-{role.index}"
        self._node_logs[role.node] = LogTail(self.dir.logs / f"{name}.log")
        starts = 0

        def command() -> Command:
            nonlocal starts
            starts += 1
            return Command(
                [*self._worker(role), "--start", f"{self._token}-{starts}"],
                # srun passes these on, while at SIGTERM it kills what it started.
                drain=signal.SIGUSR1,
                quick=signal.SIGUSR2,
                before=[*_PREFIX, f"--nodelist={role.node}", f"--job-name={name}"],
            )

        trains = role.training is not None
        self._add(
            name,
            command,
            ready=lambda _: self._is_ready(name, f"{self._token}-{starts}"),
            where=f" on {role.node}",
            kind="trainer" if trains else "rank",
            grace=_GRACE,
            finishes=trains,
            timeout=self.config.cluster.start_timeout,
        )

    def _worker(self, role: Role) -> Sequence[str]:
        arguments = ["any_agent.launcher.slurm.worker_node", "--config", str(self.dir.resolved)]
        arguments += ["--token", self._token, "--public-url", self.url]
        return [*arguments, "--role", json.dumps(asdict(role))]

    def _is_ready(self, name: str, start: str) -> bool:
        entry = read_entry(self.dir.registry, name)
        return entry is not None and entry.boot_id == start and entry.state == "ready"

    def _is_up(self) -> bool:
        if any(part.state == "starting" for part in self.parts.values()):
            return False
        # A node is ready before its trainer, which the service does not need.
        trainer = read_entry(self.dir.registry, "trainer")
        return trainer is not None and trainer.state != "starting"


def run_job(config: Config, job: SlurmJob, *, stay: bool, say: Callable[[str], None]) -> int:
    """Serve and train in this job until the last step or the end of its time; return the exit code.

    At SIGUSR1, the warning, it writes a checkpoint, ends, and has Slurm queue the job again. At
    SIGTERM, from scancel or preemption, running work ends and nothing is queued.
    """
    for name in ("scontrol", "srun"):
        require_program(name)
    node = HeadNode(config, job, say)

    def warned(number: int, frame: FrameType | None) -> None:
        raise Warned(within=drain_seconds(config))

    signal.signal(signal.SIGTERM, terminate)
    signal.signal(signal.SIGUSR1, warned)
    began = time.monotonic()
    try:
        with node:
            say(listening(node.url))
            say(f"url       {node.url} is in {node.dir.url}")
            node.watch(until_trained=not stay)
    except Warned:
        took = time.monotonic() - began
        say(f"job       {job.id} has ended for now, after {took:.0f} s")
        if not node.came_up:
            # The next start would not get further.
            say(
                f"job       its time limit is too short: not all parts were ready "
                f"{config.cluster.warning} s before it (cluster.warning); it is not queued again: "
                "submit it with a longer --time"
            )
            return 1
        if not config.cluster.requeue:
            say("job       cluster.requeue is off: submit it again to go on")
            return 0
        # Printed first: Slurm ends this process to queue it again.
        say(f"job       {job.id} is queued again")
        requeue(job)
    return 0
