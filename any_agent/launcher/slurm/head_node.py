"""A job's head node: its own parts of the service, and the worker nodes, each started by `srun`."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from types import FrameType

from any_agent.config import JOURNAL_VARIABLE, LOOPBACK, Config, ServerConfig
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
from any_agent.launcher.slurm.job_redis import (
    new_url,
    redis_command,
    redis_folder,
    redis_ready,
    require_redis,
)
from any_agent.launcher.slurm.plan import NodeLost, Role, count_ranks, place_elsewhere, plan
from any_agent.rundir.registry import HEARTBEAT, read_entry
from any_agent.runtime.log_tail import LogTail

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
        self._own, self._gpus = own, job.gpus
        address = node_address(own.node, config.cluster.network)
        changes: dict[str, object] = {"ranks": count_ranks(roles)}
        if config.cluster.redis:
            require_redis(config, own.node)
            changes["journal"] = new_url(address if self._others else LOCAL)
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
        if self._others and server.journal is None:
            say(
                "journals  each node's own disk has those of its ranks: a lost node loses its open "
                "sessions; to keep them, set cluster.redis, or server.journal to a Redis's URL"
            )
        self._roles: dict[str, Role] = {}
        """Roles of the other nodes' launchers, by the launchers' names."""
        self._starts: dict[str, int] = {}
        """How often each of them was started."""
        self._logs: dict[str, LogTail] = {}
        self._lost: set[str] = set()
        """Nodes that are lost."""
        self._missing_since: dict[str, float] = {}
        """When each launcher was found to have ended, unless it has shown itself since."""
        self._token = ""
        self.came_up = False
        """True once all parts were ready and the trainer had its model."""
        self._next_check = 0.0

    def check(self) -> bool:
        for name, log in self._logs.items():
            for line in log.new_lines():
                self.options.say(f"{self._roles[name].node:<9} {line}")
        trained = super().check()
        self._replace_missing()
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
        if self.config.cluster.redis:
            self._start_redis()
        for role in self._others:
            if role.training is None:
                self._start_node(role)

    def _start_trainer(self) -> None:
        super()._start_trainer()
        for role in self._others:
            if role.training is not None:
                self._start_node(role)

    def _start_redis(self) -> None:
        """Start the job's Redis; the nodes' ranks need it from their start."""
        config = self.config
        self._add(
            "redis",
            lambda: redis_command(self.dir),
            ready=lambda _: redis_ready(config),
            where=f", its file in {redis_folder(self.dir)}",
            secrets=(JOURNAL_VARIABLE,),
        )
        self._until_ready()

    def _start_node(self, role: Role) -> None:
        name = f"node-{role.index}"
        self._roles[name], self._starts[name] = role, 0
        self._logs[name] = LogTail(self.dir.logs / f"{name}.log")

        def command() -> Command:
            role = self._roles[name]
            self._starts[name] += 1
            return Command(
                [*self.worker_command(role), "--start", self._start_of(name)],
                # srun passes these on, while at SIGTERM it kills what it started.
                drain=signal.SIGUSR1,
                quick=signal.SIGUSR2,
                before=[*_PREFIX, f"--nodelist={role.node}", f"--job-name={name}"],
            )

        trains = role.training is not None
        self._add(
            name,
            command,
            ready=lambda _: self._shows(name, ready=True),
            relocate=lambda: self._replace(name),
            where=f" on {role.node}",
            kind="trainer" if trains else "rank",
            grace=_GRACE,
            finishes=trains,
            timeout=self.config.cluster.start_timeout,
        )

    def worker_command(self, role: Role) -> Sequence[str]:
        arguments = ["any_agent.launcher.slurm.worker_node", "--config", str(self.dir.resolved)]
        arguments += ["--token", self._token, "--public-url", self.url]
        return [*arguments, "--role", json.dumps(asdict(role))]

    def _start_of(self, name: str) -> str:
        """Return the id of a launcher's last start."""
        return f"{self._token}-{self._starts[name]}"

    def _shows(self, name: str, *, ready: bool = False) -> bool:
        """Return whether a launcher's last start has registered; with ``ready`` as ready."""
        entry = read_entry(self.dir.registry, name)
        if entry is None or entry.boot_id != self._start_of(name):
            return False
        return not ready or entry.state == "ready"

    def _replace_missing(self) -> None:
        """Replace the nodes whose launchers have ended and do not show themselves again."""
        now = time.monotonic()
        for name in self._roles:
            part = self.parts[name]
            if part.state != "restarting" or self._shows(name):
                self._missing_since.pop(name, None)
            elif now - self._missing_since.setdefault(name, now) >= self.config.cluster.lost_after:
                del self._missing_since[name]
                if self._replace(name) and part.running:
                    part.kill("was started on a node that is lost")

    def _replace(self, name: str) -> bool:
        """Have another node do the work of a lost one.

        Returns False if it is not lost, or its disk has the journals: it is only started again.
        Raises NodeLost if no other node can.
        """
        role = self._roles[name]
        if self.config.server.journal is None or self._shows(name):
            return False
        self._lost.add(role.node)
        others = [one for one in (self._own, *self._roles.values()) if one.node not in self._lost]
        self._roles[name] = moved = place_elsewhere(self.config, role, others, self._gpus)
        self.parts[name].forget_deaths()
        self.options.say(
            f"job       {role.node} is lost: {moved.node} carries on its {role.named_ranks}"
        )
        return True

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
            for line in listening(config, node.url):
                say(line)
            say(f"url       {node.url} is in {node.dir.url}")
            node.watch(until_trained=not stay)
    except NodeLost as error:
        if not (node.came_up and config.cluster.requeue):
            raise
        say(f"job       {error.message}")
        say(f"job       {job.id} is queued again, to go on with all its nodes")
        requeue(job.id)
        return error.exit_code
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
        requeue(job.id)
    return 0
