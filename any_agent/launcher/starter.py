"""How the parts of one machine are started: with which arguments, and when each is ready."""

from __future__ import annotations

import math
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from any_agent.config import SECRET_VARIABLES, Config
from any_agent.launcher.component import Component
from any_agent.launcher.engines import engine_command, engine_ready, start_timeout
from any_agent.launcher.gpu_assignment import SHARED_GPUS, assign_gpus, visible_gpus
from any_agent.launcher.node_role import NodeRole
from any_agent.launcher.process import Command, SupervisedProcess
from any_agent.launcher.reachability import answers, from_here
from any_agent.launcher.served_model import ServedModel
from any_agent.launcher.training import trainer_arguments
from any_agent.rundir.layout import RunDir
from any_agent.rundir.registry import Registry, rank_name
from any_agent.runtime.ports import accept_on, reserve, url_of

_BACKLOG = 2048
"""Connections that may wait for a router that restarts."""


class Starter:
    """Adds parts to ``parts``. ``check`` looks after those that are there, as they are waited for.

    ``stack`` keeps the ports; ``lock`` is the run's locked file, which every child holds, too.
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
        self._ranks = place.ranks_of(config)
        self._deal = assign_gpus(
            config,
            visible_gpus(),
            engines=len(self._ranks),
            trains=training and place.trainer,
        )

    @property
    def sharing(self) -> str:
        """Which engines use the GPU that a trainer in this process sends new weights from."""
        return self._deal.sharing

    def engines(self) -> Sequence[str]:
        """The URLs of these ranks' engines; they are ready."""
        if self._config.engine.urls:
            return [self._config.engine.urls[rank] for rank in self._ranks]
        if self._ranks:
            path, version = self._model.weights()
            self._say(f"model     {path}, version {version}")
        ports = [self.reserve(self._place.host, 0) for _ in self._ranks]
        for rank, port, gpus in zip(self._ranks, ports, self._deal.engines, strict=True):
            self._add_engine(rank, port, gpus)
        self.until_ready()
        return [url_of(self._place.host, port) for port in ports]

    def _add_engine(self, rank: int, port: int, gpus: Sequence[str] | None) -> None:
        host, name = self._place.host, f"engine-{rank}"
        url = url_of(host, port)

        def now() -> Command:
            weights = self._model.weights()
            return engine_command(self._config, *weights, host, port, name, gpus=gpus)

        ready = engine_ready(self._config, url)
        self.add(
            name,
            now,
            ready=lambda _: ready(),
            timeout=start_timeout(self._config),
            where=f" at {url}",
            secret=False,
        )

    def proxies(self, engines: Sequence[str], public_url: str) -> None:
        """Of these ranks; they are ready."""
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

        def now() -> list[str]:
            # At first a wrong address is said at once; later its engine may be starting, too.
            wait = self._config.engine.update_wait if self._parts[name].restarts else 0.0
            tokenizer = self._model.tokenizer()
            return [*arguments, "--engine-wait", f"{wait:g}", "--model-path", tokenizer]

        ready = self.registered(name, url_of(host, port))
        self.add(name, now, ready=ready, quick=signal.SIGINT)

    def router(self, public: socket.socket, public_url: str) -> None:
        """It listens on this socket; it is ready."""
        host, port = self._config.server.host, port_of(public)
        # It listens here already, for all of the router's lives: who connects while none of them
        # is there waits for the next one, instead of being refused.
        accept_on(public, _BACKLOG)
        arguments = ["router", *self._settings, "--host", host, "--port", str(port)]
        arguments += ["--listener", str(public.fileno()), "--public-url", public_url]
        self.add(
            "router",
            lambda: arguments,
            listener=public.fileno(),
            quick=signal.SIGINT,
            ready=self.registered("router", url_of(from_here(host), port)),
            where=f" at {public_url}",
        )
        self.until_ready()

    def trainer(self) -> None:
        """It is not waited for: however long its model takes to load."""
        settings = self._dir.resolved
        # Of several machines that train, the first one's process tells how all of it is.
        leads = self._place.training is None or self._place.training.index == 0
        gpus = self._deal.trainer
        variables = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus is not None else {}
        # It decides by which way weights go to the engines.
        variables[SHARED_GPUS] = self._deal.sharing
        self.add(
            "trainer",
            lambda: Command(
                trainer_arguments(self._config, settings, self._place), variables=variables
            ),
            ready=self.registered("trainer") if leads else lambda _: True,
            timeout=math.inf,
            progress=lambda: _size(self._dir.metrics),
            finishes=True,
            # It has a key of its own, derived from the run's signing secret.
            secret=False,
        )

    def add(
        self,
        name: str,
        command: Callable[[], Command | list[str]],
        *,
        secret: bool = True,
        listener: int | None = None,
        quick: int = signal.SIGTERM,
        **options: Any,
    ) -> None:
        """A part whose process is this command, `python -m` a list of arguments; it is started."""
        key = self._config.server.admin_key if secret else None
        secrets = {SECRET_VARIABLES[0]: key.get_secret_value()} if key else {}
        log = self._dir.logs / f"{name}.log"

        def make() -> SupervisedProcess:
            made = command()
            now = made if isinstance(made, Command) else Command(made)
            return SupervisedProcess(
                name,
                now.arguments,
                log,
                python=now.python,
                variables=now.variables,
                orphaned=now.orphaned,
                lock=self._lock,
                listener=listener,
                secrets=secrets,
                quick=quick,
            )

        part = Component(name, make, say=self._say, **options)
        self._parts[name] = part
        part.start()

    def until_ready(self) -> None:
        """Parts that were ready before and die meanwhile are started again, as ever."""
        while any(part.state != "ready" for part in self._parts.values()):
            self._check()
            time.sleep(0.02)

    def registered(self, name: str, url: str | None = None) -> Callable[[SupervisedProcess], bool]:
        """Whether the process itself has told that it is ready, and answers.

        By the address alone it could be its predecessor, or another program.
        """

        def ready(process: SupervisedProcess) -> bool:
            registry = Registry(self._dir.registry)
            registry.refresh()
            entry = registry.get(name)
            told = entry is not None and entry.pid == process.pid and entry.state == "ready"
            return told and (url is None or answers(f"{url}/healthz"))

        return ready

    def reserve(self, host: str, port: int) -> int:
        """A port that parts get at each start, for as long as the machine's parts are kept."""
        return port_of(self._stack.enter_context(reserve(host, port)))

    @property
    def _settings(self) -> list[str]:
        return ["--config", str(self._dir.resolved)]


def port_of(bound: socket.socket) -> int:
    return int(bound.getsockname()[1])


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
