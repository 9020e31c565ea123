"""A worker node of a job: the head node runs ``python -m any_agent.launcher.slurm.worker_node``.

It runs its share of the parts until a signal ends it: SIGUSR1 or SIGTERM lets what is under way
end first, SIGUSR2 does not.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from urllib.parse import urlsplit

from pydantic import TypeAdapter

from any_agent.auth.access import run_dir_of
from any_agent.config import Config, load_resolved
from any_agent.errors import ConfigError, StartupError
from any_agent.launcher.node import Node, NodeOptions
from any_agent.launcher.node_role import NodeRole, TrainingNodes
from any_agent.launcher.shutdown import Terminated
from any_agent.launcher.slurm.job import drain_seconds, node_address, requeue, require_shared
from any_agent.launcher.slurm.plan import Role
from any_agent.rundir.layout import RunDir, locked
from any_agent.rundir.registry import (
    HEARTBEAT,
    Registry,
    RegistryEntry,
    Stamp,
    publish,
    read_entry,
    read_stamp,
)
from any_agent.runtime.command_line import guarded, say
from any_agent.runtime.file_owner import own_file
from any_agent.runtime.logs import set_up_logging
from any_agent.runtime.ports import reserve, url_of

_PREDECESSOR_TIMEOUT = 30.0  # seconds for the processes of an earlier start of this node to end
HEAD_TIMEOUT = 60.0
"""Seconds without a sign of the router, which its node starts again within a few when it fails."""
_POLL_INTERVAL = 0.1
_SIGNALLED = 128 + signal.SIGTERM  # the exit code after a signal


class WorkerNode(Node):
    """This node's share of the service; it writes an entry of its own into the registry."""

    def __init__(
        self, config: Config, options: NodeOptions, entry: RegistryEntry, lock: int
    ) -> None:
        super().__init__(config, options)
        self._entry = entry
        self._lock = lock
        self._beat_at = 0.0
        self._router: Stamp | None = None
        """The router's last entry in the registry, and when it was noticed."""
        self._router_at = 0.0

    def check(self) -> bool:
        if time.monotonic() - self._beat_at >= HEARTBEAT:
            self._beat()
        return super().check()

    def ready(self) -> None:
        """Register as ready."""
        self._entry = self._entry.model_copy(update={"state": "ready"})
        self._beat()

    def _before_parts(self) -> None:
        self.dir.create()

    def _beat(self) -> None:
        self._beat_at = time.monotonic()
        found = read_entry(self.dir.registry, self._entry.name)
        if found is not None and _is_later(found.boot_id, self._entry.boot_id):
            raise StartupError(f"{self._entry.name} was started again: this start of it ends")
        try:
            publish(self.dir.registry, self._entry)
        except OSError as error:
            self.options.say(f"cannot write in {self.dir.registry}: {error.strerror}")
            return
        if self.config.server.journal is not None:
            # Without a log of the journals Slurm ends the job by itself.
            self._require_head()

    def _require_head(self) -> None:
        """Have Slurm queue the job again and raise StartupError if its first node is lost."""
        stamp = read_stamp(self.dir.registry, "router")
        if stamp is None or stamp != self._router:
            self._router, self._router_at = stamp, time.monotonic()
        elif time.monotonic() - self._router_at > HEAD_TIMEOUT:
            why = f"the job's first node has been silent for {HEAD_TIMEOUT:g} s: this one ends"
            if self.config.cluster.requeue and (job := os.environ.get("SLURM_JOB_ID")):
                why += ", and the job is queued again"
                # Another node may have done so.
                with suppress(StartupError):
                    requeue(job)
            raise StartupError(why)


def main() -> int:
    args = worker_arguments()
    signal.signal(signal.SIGUSR2, _at_once)
    try:
        return guarded(lambda: _run(args))
    except Terminated:
        # Code 0 would mean that training is done, also where the signal did not come from the head
        # node.
        return _SIGNALLED


def _at_once(number: int, frame: FrameType | None) -> None:
    # The signal is sent again, and must not interrupt the end.
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def worker_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m any_agent.launcher.slurm.worker_node")
    add = parser.add_argument
    add("--config", required=True, type=Path, help="the run's resolved YAML")
    add("--token", required=True, help="the token that the head node wrote into the run's folder")
    add("--start", required=True, help="the id of this start of the node")
    add("--public-url", required=True)
    role = TypeAdapter(Role).validate_json
    add("--role", required=True, type=role, help="the node's role in the job, as JSON")
    return parser.parse_args()


def _run(args: argparse.Namespace) -> int:
    run, role = RunDir(args.config.parent), args.role
    require_shared(run, args.token, role.node)
    config = load_resolved(args.config)
    run = run_dir_of(config)
    set_up_logging(config.log_level, secrets=config.secrets())
    trains = role.training is not None

    def drain(number: int, frame: FrameType | None) -> None:
        # The head node sends the signal in time, and waits no longer than it can.
        raise Terminated(drain_seconds(config) if trains else None)

    signal.signal(signal.SIGUSR1, drain)
    signal.signal(signal.SIGTERM, drain)
    name = f"node-{role.index}"
    address = node_address(role.node, config.cluster.network)
    port = meeting_port(args.token)
    entry = RegistryEntry(
        name=name,
        boot_id=args.start,
        url=url_of(address, port),
        pid=os.getpid(),
        state="starting",
    )
    # From now on the node counts as there, however long its parts take, and an earlier start ends.
    with suppress(OSError):
        publish(run.registry, entry)
    with ExitStack() as stack:
        lock = stack.enter_context(_node_lock(run, name))
        if role.training == 0 and role.training_nodes > 1:
            stack.enter_context(_reserve_meeting_port(address, port))
        place = NodeRole(
            host=address,
            ranks=role.ranks,
            router=False,
            trainer=trains,
            training=_training(config, run, role, address, port),
            public_url=args.public_url,
            gpus_taken=role.gpus_taken,
            machine=role.node,
        )
        options = NodeOptions(place=place, say=say)
        with WorkerNode(config, options, entry, lock) as node:
            node.ready()
            # The head node prints the trainer's steps.
            while not node.check() or not trains:
                time.sleep(_POLL_INTERVAL)
    return 0


def _is_later(start: str, other: str) -> bool:
    """Return whether one start of a node came after another one of the same job."""
    (token, _, number), (job, _, earlier) = start.rpartition("-"), other.rpartition("-")
    return token == job and int(number) > int(earlier)


def meeting_port(token: str) -> int:
    """Return the port where the training nodes of one start of a job meet; few starts share one."""
    return 20_000 + int(token[:8], 16) % 12_000


def _reserve_meeting_port(address: str, port: int) -> socket.socket:
    try:
        return reserve(address, port)
    except ConfigError:
        raise StartupError(
            f"port {port} of {address}, where the training nodes meet, is in use: submit the job "
            "again, which takes another port"
        ) from None


def _training(
    config: Config, run: RunDir, role: Role, address: str, port: int
) -> TrainingNodes | None:
    """Return where the training nodes meet; StartupError if the first of them is missing."""
    if role.training is None or role.training_nodes == 1:
        return None
    if role.training > 0:
        address = _address_of(run, f"node-{role.first_trainer}", config.cluster.start_timeout)
    return TrainingNodes(role.training_nodes, role.training, address, port)


def _address_of(run: RunDir, name: str, within: float) -> str:
    registry = Registry(run.registry)
    deadline = time.monotonic() + within
    while True:
        registry.refresh()
        if registry.heard(name) and (entry := registry.get(name)) is not None:
            return urlsplit(entry.url).hostname or ""
        if time.monotonic() >= deadline:
            raise StartupError(
                f"{name}, the first training node, did not register within {within:g} s"
            )
        time.sleep(HEARTBEAT)


@contextmanager
def _node_lock(run: RunDir, name: str) -> Iterator[int]:
    """Wait for the processes of an earlier start of this node to end; yield a locked file."""
    with open(run.path / f"{name}.lock", "a", opener=own_file) as file:
        deadline = time.monotonic() + _PREDECESSOR_TIMEOUT
        while not locked(file):
            if time.monotonic() >= deadline:
                raise StartupError(
                    f"an earlier start of {name} still runs after {_PREDECESSOR_TIMEOUT:g} s"
                )
            time.sleep(0.2)
        yield file.fileno()


if __name__ == "__main__":
    sys.exit(main())
