"""A worker node of a job: the head node runs ``python -m any_agent.launcher.slurm.worker_node``.

It runs its share of the parts until it is told to end: SIGUSR1 or SIGTERM lets what is under way
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
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Literal
from urllib.parse import urlsplit

from any_agent.auth.access import run_dir_of
from any_agent.config import Config, load_resolved
from any_agent.errors import ConfigError, StartupError
from any_agent.launcher.node import Node, NodeOptions
from any_agent.launcher.node_role import NodeRole, TrainingNodes
from any_agent.launcher.shutdown import Terminated
from any_agent.launcher.slurm.job import node_address
from any_agent.launcher.slurm.shared_folder import require_shared
from any_agent.rundir.layout import RunDir, locked
from any_agent.rundir.registry import HEARTBEAT, Registry, RegistryEntry, publish
from any_agent.runtime.command_line import guarded
from any_agent.runtime.logs import set_up_logging
from any_agent.runtime.ports import reserve, url_of

_PREDECESSOR = 30.0
"""Seconds that an earlier start of this node may take to be gone."""
_LAST = 40.0
"""Of a warning's seconds, those that the first node keeps for the end."""
_POLL_INTERVAL = 0.1
_TOLD = 128 + signal.SIGTERM
"""The exit code of what was told to end."""


class WorkerNode(Node):
    """This node's share; while it lives, the registry says so."""

    def __init__(
        self,
        config: Config,
        options: NodeOptions,
        *,
        name: str,
        start: str,
        url: str,
        lock: int,
    ) -> None:
        super().__init__(config, options)
        self._name = name
        self._start_id = start
        self._url = url
        self._lock = lock
        self._beaten = 0.0
        self._state: Literal["starting", "ready"] = "starting"

    def check(self) -> bool:
        if time.monotonic() - self._beaten >= HEARTBEAT:
            self._beat()
        return super().check()

    def ready(self) -> None:
        """Tell so."""
        self._state = "ready"
        self._beat()

    def _begin_elsewhere(self) -> None:
        self.dir.create()

    def _beat(self) -> None:
        self._beaten = time.monotonic()
        entry = RegistryEntry(
            name=self._name,
            boot_id=self._start_id,
            url=self._url,
            pid=os.getpid(),
            state=self._state,
        )
        try:
            publish(self.dir.registry, entry)
        except OSError as error:
            self.options.say(f"cannot write in {self.dir.registry}: {error.strerror}")


def main() -> int:
    args = _arguments()
    signal.signal(signal.SIGUSR2, _at_once)
    try:
        return guarded(lambda: _run(args))
    except Terminated:
        # Code 0 would say that training is done, also where it was not the first node that told
        # this one to end.
        return _TOLD


def _at_once(number: int, frame: FrameType | None) -> None:
    # It is sent again, and must not interrupt the end.
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m any_agent.launcher.slurm.worker_node")
    add = parser.add_argument
    add("--config", required=True, type=Path, help="the run's resolved YAML")
    add("--token", required=True, help="what the first node left in the run's folder")
    add("--start", required=True, help="which start of this node this is")
    add("--index", required=True, type=int, help="which of the job's nodes this is")
    add("--node", required=True, help="its name in Slurm")
    add("--ranks", required=True, help="numbers, separated by commas")
    add("--public-url", required=True)
    add("--training", type=int, help="which of the training nodes this is")
    add("--training-nodes", type=int, default=1)
    add("--first-trainer", type=int, help="which of the job's nodes has the trainer's rank 0")
    return parser.parse_args()


def _run(args: argparse.Namespace) -> int:
    run = RunDir(args.config.parent)
    require_shared(run, args.token, args.node)
    config = load_resolved(args.config)
    run = run_dir_of(config)
    set_up_logging(config.log_level, secrets=config.secrets())
    trains = args.training is not None
    within = float(max(0.5 * config.cluster.warning, config.cluster.warning - _LAST))

    def told(number: int, frame: FrameType | None) -> None:
        # The first node tells when it is time, and waits no longer than it can.
        raise Terminated(within if trains else None)

    signal.signal(signal.SIGUSR1, told)
    signal.signal(signal.SIGTERM, told)
    name = f"node-{args.index}"
    say = partial(print, flush=True)
    address = node_address(args.node, config.cluster.network)
    port = meeting_port(args.token)
    first = trains and args.training == 0
    with ExitStack() as stack:
        lock = stack.enter_context(_alone(run, name))
        if first and args.training_nodes > 1:
            stack.enter_context(_reserved(address, port))
        place = NodeRole(
            host=address,
            ranks=tuple(int(rank) for rank in args.ranks.split(",") if rank),
            router=False,
            trainer=trains,
            training=_training(config, run, args, address, port) if trains else None,
            public_url=args.public_url,
            machine=args.node,
        )
        options = NodeOptions(place=place, say=say)
        node = WorkerNode(
            config,
            options,
            name=name,
            start=args.start,
            url=url_of(address, port),
            lock=lock,
        )
        with node:
            node.ready()
            # Its steps are told by the first node.
            while not node.check() or not trains:
                time.sleep(_POLL_INTERVAL)
    return 0


def meeting_port(token: str) -> int:
    """Where the training nodes of one start of a job meet: of all starts, hardly two the same."""
    return 20_000 + int(token[:8], 16) % 12_000


def _reserved(address: str, port: int) -> socket.socket:
    try:
        return reserve(address, port)
    except ConfigError:
        raise StartupError(
            f"the port {port} of {address}, where the training nodes meet, is taken: start the job "
            "again, and it is another one"
        ) from None


def _training(
    config: Config, run: RunDir, args: argparse.Namespace, address: str, port: int
) -> TrainingNodes | None:
    """How this node finds the others that train; StartupError if the first of them is missing."""
    if args.training_nodes == 1:
        return None
    if args.training > 0:
        address = _address_of(run, f"node-{args.first_trainer}", config.cluster.start_timeout)
    return TrainingNodes(args.training_nodes, args.training, address, port)


def _address_of(run: RunDir, name: str, within: float) -> str:
    registry = Registry(run.registry)
    deadline = time.monotonic() + within
    while True:
        registry.refresh()
        if registry.heard(name) and (entry := registry.get(name)) is not None:
            return urlsplit(entry.url).hostname or ""
        if time.monotonic() >= deadline:
            raise StartupError(f"{name}, the first training node, is not there after {within:g} s")
        time.sleep(HEARTBEAT)


@contextmanager
def _alone(run: RunDir, name: str) -> Iterator[int]:
    """Wait until the last process of an earlier start of this node is gone; a locked file."""
    with open(run.path / f"{name}.lock", "w") as file:
        deadline = time.monotonic() + _PREDECESSOR
        while not locked(file):
            if time.monotonic() >= deadline:
                raise StartupError(
                    f"an earlier start of {name} still runs after {_PREDECESSOR:g} s"
                )
            time.sleep(0.2)
        yield file.fileno()


if __name__ == "__main__":
    code = main()
    sys.exit(code)
