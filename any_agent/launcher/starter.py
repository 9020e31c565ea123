"""The start of the parts of one machine: their arguments, and checks that they are ready."""

from __future__ import annotations

import math
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from any_agent.config import SECRET_VARIABLES, Config
from any_agent.launcher.component import Component
from any_agent.launcher.engines import engine_command, engine_ready, start_timeout, visible_gpus
from any_agent.launcher.gpu_assignment import SHARED_GPUS, assign_gpus
from any_agent.launcher.node_role import NodeRole
from any_agent.launcher.process import Command, SupervisedProcess
from any_agent.launcher.reachability import answers, from_here
from any_agent.launcher.trial import ServedModel
from any_agent.rundir.layout import RunDir
from any_agent.rundir.registry import rank_name, read_entry
from any_agent.runtime.ports import accept_on, reserve, url_of

_BACKLOG = 2048  # connections that may wait for a router that restarts


class Starter:
    """Adds parts to ``parts``, and calls ``check``, which supervises them, while it waits for one.

    ``stack`` keeps the ports; ``lock`` is the run's locked file, which every child inherits.
    """

    def __init__(
        self,
        config: Config,
        run_dir: RunDir,
        place: NodeRole,
        model: ServedModel,
        parts: dict[str, Component],
        *,
        say: Callable[[str], None],
        check: Callable[[], object],
        stack: ExitStack,
        training: bool,
        lock: int | None,
    ) -> None:
        self._config = config
        self._dir = run_dir
        self._place = place
        self._model = model
        self._parts = parts
        self._say = say
        self._check = check
        self._stack = stack
        self._training = training
        self._lock = lock
        self._settings = ["--config", str(run_dir.resolved)]
        self._ranks = place.ranks_of(config)
        trains = training and place.trainer
        self._gpus = assign_gpus(config, visible_gpus(), engines=len(self._ranks), trains=trains)

    @property
    def sharing(self) -> str:
        """The share of the engines on the GPU from which this process's trainer sends weights."""
        return self._gpus.sharing

    def engines(self) -> Sequence[str]:
        """Start this machine's engines and return their URLs when all are ready."""
        if self._config.engine.urls:
            return [self._config.engine.urls[rank] for rank in self._ranks]
        if self._ranks:
            path, version = self._model.weights()
            self._say(f"model     {path}, version {version}")
        ports = [self.reserve(self._place.host, 0) for _ in self._ranks]
        for rank, port, gpus in zip(self._ranks, ports, self._gpus.engines, strict=True):
            self._add_engine(rank, port, gpus)
        self.until_ready()
        return [url_of(self._place.host, port) for port in ports]

    def _add_engine(self, rank: int, port: int, gpus: Sequence[str] | None) -> None:
        host, name = self._place.host, f"engine-{rank}"
        url = url_of(host, port)

        def command() -> Command:
            weights = self._model.weights()
            return engine_command(self._config, *weights, host, port, name, gpus=gpus)

        self.add(
            name,
            command,
            ready=lambda _: engine_ready(self._config, url),
            timeout=start_timeout(self._config),
            where=f" at {url}",
            secret=False,
        )

    def proxies(self, engines: Sequence[str], public_url: str) -> None:
        """Start this machine's proxies, each with its engine, and wait until all are ready."""
        for rank, engine in zip(self._ranks, engines, strict=True):
            self._add_proxy(rank, engine, public_url)
        self.until_ready()

    def _add_proxy(self, rank: int, engine: str, public_url: str) -> None:
        name, host = rank_name(rank), self._place.host
        port = self.reserve(host, 0)
        arguments = ["proxy_ext", *self._settings, "--rank", str(rank), "--engine-url", engine]
        arguments += ["--host", host, "--port", str(port), "--public-url", public_url]
        if self._training:
            arguments += ["--training"]

        def command() -> Command:
            # The first start reports a wrong address at once; later the engine may be starting.
            wait = self._config.engine.update_wait if self._parts[name].restarts else 0.0
            own = ["--engine-wait", f"{wait:g}", "--model-path", self._model.tokenizer()]
            return Command([*arguments, *own], quick=signal.SIGINT)

        self.add(name, command, ready=self.registered(name, url_of(host, port)))

    def router(self, public: socket.socket, public_url: str) -> None:
        """Start the router on this socket and wait until it is ready."""
        host, port = self._config.server.host, port_of(public)
        # The launcher already listens: a client that connects while no router runs waits for the
        # next one instead of being refused.
        accept_on(public, _BACKLOG)
        arguments = ["router", *self._settings, "--host", host, "--port", str(port)]
        arguments += ["--listener", str(public.fileno()), "--public-url", public_url]
        command = Command(arguments, listener=public.fileno(), quick=signal.SIGINT)
        self.add(
            "router",
            lambda: command,
            ready=self.registered("router", url_of(from_here(host), port)),
            where=f" at {public_url}",
        )
        self.until_ready()

    def trainer(self) -> None:
        """Start the trainer without waiting for it: its model may take any time to load."""
        settings = self._dir.resolved
        # Of several machines that train, the first one's process reports for all of them.
        leads = self._place.training is None or self._place.training.index == 0
        gpus = self._gpus.trainer
        variables = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus is not None else {}
        # The trainer chooses by it how weights go to the engines.
        variables[SHARED_GPUS] = self._gpus.sharing
        arguments = trainer_arguments(self._config, settings, self._place)
        self.add(
            "trainer",
            lambda: Command(arguments, variables=variables),
            ready=self.registered("trainer") if leads else lambda _: True,
            timeout=math.inf,
            progress=lambda: _size(self._dir.metrics),
            finishes=True,
            # The trainer has a key of its own, derived from the run's signing secret.
            secret=False,
        )

    def add(
        self, name: str, command: Callable[[], Command], *, secret: bool = True, **options: Any
    ) -> None:
        """Start a part that runs ``command``; with ``secret`` it gets the admin key."""
        key = self._config.server.admin_key if secret else None
        secrets = {SECRET_VARIABLES[0]: key.get_secret_value()} if key else {}
        log = self._dir.logs / f"{name}.log"

        def make() -> SupervisedProcess:
            return SupervisedProcess(
                name, replace(command(), secrets=secrets), log, lock=self._lock
            )

        part = Component(name, make, say=self._say, **options)
        self._parts[name] = part
        part.start()

    def until_ready(self) -> None:
        """Wait until all parts are ready; ones that die meanwhile are started again."""
        while any(part.state != "ready" for part in self._parts.values()):
            self._check()
            time.sleep(0.02)

    def registered(self, name: str, url: str | None = None) -> Callable[[SupervisedProcess], bool]:
        """Return a check that the process itself has registered as ready, and answers.

        Its predecessor or another program could answer at the same address.
        """

        def ready(process: SupervisedProcess) -> bool:
            entry = read_entry(self._dir.registry, name)
            own = entry is not None and entry.pid == process.pid and entry.state == "ready"
            return own and (url is None or answers(f"{url}/healthz"))

        return ready

    def reserve(self, host: str, port: int) -> int:
        """Reserve a port for all starts of a part until the service ends."""
        return port_of(self._stack.enter_context(reserve(host, port)))


def trainer_arguments(config: Config, settings: Path, place: NodeRole) -> list[str]:
    """Return the arguments after `python -m` of a trainer with these resolved settings.

    If several processes train, this process starts this machine's share of them and ends with them;
    they report its process id as the trainer's.
    """
    each = ["--config", str(settings), "--host", place.host]
    together = place.training
    if config.train.processes == 1 and (together is None or together.count == 1):
        return ["trainer", *each]
    arguments = ["trainer.parallel", "--processes", str(config.train.processes)]
    arguments += ["--host", place.host]
    if together is not None:
        arguments += ["--machines", str(together.count), "--machine", str(together.index)]
        arguments += ["--address", together.address, "--port", str(together.port)]
    return [*arguments, "--", *each]


def port_of(bound: socket.socket) -> int:
    return int(bound.getsockname()[1])


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
