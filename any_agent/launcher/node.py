"""All processes of one machine: a rank's engine and proxy as often as configured, router, trainer.

::

    engine-0 ... engine-N   embedded engines; none for `engine.urls`
    rank-0 ... rank-N       each rank's proxy
    router                  the public URL
    trainer
"""

from __future__ import annotations

import math
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from any_agent.access import require_key
from any_agent.atomic import write_whole
from any_agent.config import SECRET_VARIABLES, Config
from any_agent.errors import ConfigError, StartupError
from any_agent.launcher.address import answers, from_here, reachable
from any_agent.launcher.devices import require_devices
from any_agent.launcher.engines import engine_arguments
from any_agent.launcher.part import Part
from any_agent.launcher.process import Process
from any_agent.launcher.progress import Progress
from any_agent.launcher.room import Room
from any_agent.launcher.silence import Silence
from any_agent.launcher.stopping import Terminated, drain, stop
from any_agent.launcher.training import trainer_arguments
from any_agent.launcher.trial import Weights, latest_weights, newest_weights, trial_dir
from any_agent.ports import accept_on, reserve, url_of
from any_agent.registry import Registry, rank_name

_LOCAL = "127.0.0.1"
_LOOK_EVERY = 0.1
_BACKLOG = 2048
"""Connections that may wait for a router that restarts."""


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """What to start."""

    train: bool = True
    trainer_outside: bool = False
    """With ``train``: whoever entered the node trains itself; no trainer process is started."""
    weights: Weights | None = None
    """What engines serve, for good. None: the trial's newest at each start of an engine."""
    say: Callable[[str], None] = print
    """Told one line per part while starting, and when one ends and is there again."""


class Node:
    """The service on one machine; a context manager that stops everything it started.

    `Terminated`, as `terminate` raises it at SIGTERM, lets what is under way end first.
    Call :meth:`check` or :meth:`watch` while it runs, always in the thread that entered it:
    children end with the thread that started them.
    """

    def __init__(self, config: Config, options: NodeOptions | None = None) -> None:
        self.config = config
        self.options = options or NodeOptions()
        self.dir = trial_dir(config)
        self.url = ""
        """The public one."""
        self.local_url = ""
        """The router's, as this machine reaches it."""
        self.engine_urls: Sequence[str] = ()
        """Of the ranks' engines."""
        self.parts: dict[str, Part] = {}
        """By name, in the order of starting; each tells its state and process id."""
        self._silence = Silence(self.dir.registry, self.parts)
        self._room = Room(self.dir.registry, self.options.say)
        self._stack = ExitStack()
        self._lock: int | None = None
        self._public: socket.socket
        self._settings = self.dir.path / "resolved.yaml"

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException as error:
            self._end(error, drains=False)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end(error, drains=isinstance(error, Terminated))

    def _end(self, error: BaseException | None, *, drains: bool) -> None:
        """End every process, and tell whoever asked for it what becomes of calls."""
        asked = isinstance(error, Terminated | KeyboardInterrupt)
        say = self.options.say if asked else lambda _: None
        cut = False
        try:
            if drains:
                within = self.config.server.drain_timeout
                say(
                    "service   draining: new work is refused, what is under way has "
                    f"{within:g} s to end"
                )
                cut = not drain(self.parts, self._refuse_connections, within)
            else:
                say("service   stopping: calls under way are cut off")
        finally:
            self.stop()
        say(f"service   stopped{'; what had not ended was cut off' if cut else ''}")

    def stop(self) -> None:
        """End every process within seconds, for certain."""
        stop(self.parts, self._refuse_connections)
        self._stack.close()

    def _refuse_connections(self) -> None:
        """To the public URL, once its router is gone."""
        if "router" in self.parts:
            self._public.close()

    def watch(self, *, until_trained: bool = False) -> None:
        """Keep the parts running; returns when training has ended and that was asked for.

        Raises what :meth:`check` raises.
        """
        progress = Progress(self.dir.metrics, self.config.train.steps)
        told = False
        while True:
            trained = self.check()
            for line in progress.new_lines():
                self.options.say(line)
            if trained and not told:
                told = True
                self.options.say(f"trainer   done; checkpoints in {self.dir.checkpoints}")
            if trained and until_trained:
                return
            time.sleep(_LOOK_EVERY)

    def check(self) -> bool:
        """Look at every part once, start dead ones again; whether training has ended.

        It never waits. A part that hangs is killed. A dead proxy's journal holds what it
        acknowledged, a dead engine gets the newest weights, a dead trainer goes on from its
        checkpoint. Raises ConfigError or StartupError for a part that cannot go on.
        """
        for part in self.parts.values():
            part.check()
        self._silence.look()
        self._room.look()
        trainer = self.parts.get("trainer")
        return trainer is not None and trainer.finished

    # ------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._check_model()
        require_devices(self.config, trains=self.options.train)
        require_key(self.config, self.config.server.host)
        settings = yaml.safe_dump(self.config.dump(), sort_keys=False)
        self._take_folder(settings)
        server = self.config.server
        self._public = self._stack.enter_context(reserve(server.host, server.port))
        self.url = server.public_url or url_of(reachable(server.host), _port(self._public))
        self.local_url = url_of(from_here(server.host), _port(self._public))
        self.options.say(f"run       {self.dir.path}")
        self._tell_if_trained()
        self.engine_urls = self._start_engines()
        self._start_proxies(self.engine_urls)
        self._start_router()
        if self.options.train:
            # Only now: a start that failed must not bind the trial to a mistyped model.
            write_whole(self.dir.path / "config.yaml", settings)
        if self.options.train and not self.options.trainer_outside:
            self._start_trainer()

    def _take_folder(self, settings: str) -> None:
        """Make the trial's folder this service's; StartupError where that cannot be."""
        try:
            self.dir.create()
            self._lock = self._stack.enter_context(self.dir.lock())
            for left in self.dir.registry.iterdir():
                left.unlink()
            write_whole(self._settings, settings)
        except OSError as error:
            raise StartupError(
                f"cannot write in {self.dir.path}: {error.strerror}; choose another root"
            ) from None

    def _tell_if_trained(self) -> None:
        saved = latest_weights(self.config)
        if saved is not None and saved.step >= self.config.train.steps:
            self.options.say(
                f"run       its {self.config.train.steps} steps are done: train sessions are "
                f"refused; checkpoint {saved.path}"
            )

    def _start_engines(self) -> Sequence[str]:
        """Their URLs; they are ready."""
        if self.config.engine.urls:
            return self.config.engine.urls
        path, version = self._weights()
        self.options.say(f"model     {path}, version {version}")
        ports = [self._reserve(_LOCAL, 0) for _ in range(self.config.server.ranks)]
        for rank, port in enumerate(ports):
            self._add_engine(rank, port)
        self._until_ready()
        return [url_of(_LOCAL, port) for port in ports]

    def _add_engine(self, rank: int, port: int) -> None:
        url, name = url_of(_LOCAL, port), f"engine-{rank}"
        self._add(
            name,
            lambda: engine_arguments(self.config, *self._weights(), _LOCAL, port, name),
            ready=lambda _: answers(f"{url}/health"),
            where=f" at {url}",
            secret=False,
        )

    def _start_proxies(self, engines: Sequence[str]) -> None:
        for rank, engine in enumerate(engines):
            self._add_proxy(rank, engine, self._reserve(_LOCAL, 0))
        self._until_ready()

    def _add_proxy(self, rank: int, engine: str, port: int) -> None:
        name = rank_name(rank)
        arguments = ["proxy_ext", *self._config, "--rank", str(rank), "--engine-url", engine]
        arguments += ["--host", _LOCAL, "--port", str(port), "--public-url", self.url]
        if self.options.train:
            arguments += ["--training"]

        def now() -> list[str]:
            # At first a wrong address is said at once; later its engine may be starting, too.
            wait = self.config.engine.update_wait if self.parts[name].restarts else 0.0
            return [*arguments, "--engine-wait", f"{wait:g}", "--model-path", self._tokenizer()]

        ready = self._registered(name, url_of(_LOCAL, port))
        self._add(name, now, ready=ready, quick=signal.SIGINT)

    def _start_router(self) -> None:
        host, port = self.config.server.host, _port(self._public)
        # It listens here already, for all of the router's lives: who connects while none of them
        # is there waits for the next one, instead of being refused.
        accept_on(self._public, _BACKLOG)
        listener = self._public.fileno()
        arguments = ["router", *self._config, "--host", host, "--port", str(port)]
        arguments += ["--listener", str(listener), "--public-url", self.url]
        ready = self._registered("router", url_of(from_here(host), port))
        where = f" at {self.url}"
        self._add(
            "router",
            lambda: arguments,
            listener=listener,
            quick=signal.SIGINT,
            ready=ready,
            where=where,
        )
        self._until_ready()

    def _start_trainer(self) -> None:
        self._add(
            "trainer",
            self._trainer_arguments,
            ready=self._registered("trainer"),
            # However long its model takes to load.
            timeout=math.inf,
            progress=lambda: _size(self.dir.metrics),
            finishes=True,
            # It has a key of its own, derived from the run's signing secret.
            secret=False,
        )

    def _trainer_arguments(self) -> list[str]:
        return trainer_arguments(self.config, self._settings)

    @property
    def _config(self) -> list[str]:
        return ["--config", str(self._settings)]

    def _add(
        self,
        name: str,
        arguments: Callable[[], list[str]],
        *,
        secret: bool = True,
        listener: int | None = None,
        quick: int = signal.SIGTERM,
        **options: Any,
    ) -> None:
        key = self.config.server.admin_key if secret else None
        secrets = {SECRET_VARIABLES[0]: key.get_secret_value()} if key else {}
        log = self.dir.logs / f"{name}.log"

        def make() -> Process:
            return Process(
                name,
                arguments(),
                log,
                lock=self._lock,
                listener=listener,
                secrets=secrets,
                quick=quick,
            )

        part = Part(name, make, say=self.options.say, **options)
        self.parts[name] = part
        part.start()

    def _until_ready(self) -> None:
        """Parts that were ready before and die meanwhile are started again, as ever."""
        while any(part.state != "ready" for part in self.parts.values()):
            self.check()
            time.sleep(0.02)

    def _registered(self, name: str, url: str | None = None) -> Callable[[Process], bool]:
        """Whether the process itself has told that it is ready, and answers.

        By the address alone it could be its predecessor, or another program.
        """

        def ready(process: Process) -> bool:
            registry = Registry(self.dir.registry)
            registry.refresh()
            entry = registry.get(name)
            told = entry is not None and entry.pid == process.pid and entry.state == "ready"
            return told and (url is None or answers(f"{url}/healthz"))

        return ready

    def _reserve(self, host: str, port: int) -> int:
        """A port that parts get at each start, for as long as the node lives."""
        return _port(self._stack.enter_context(reserve(host, port)))

    def _check_model(self) -> None:
        """ConfigError if there is nothing to serve, or to begin training with."""
        saved = latest_weights if self.options.train else newest_weights
        if self.options.weights is None and saved(self.config) is None:
            check_model(self.config.model.path)

    def _weights(self) -> tuple[str, int]:
        """What an engine that starts now serves, and its version."""
        found = self.options.weights or newest_weights(self.config)
        return (str(found.path), found.version) if found else (self.config.model.path, 0)

    def _tokenizer(self) -> str:
        """The model's own folder, which stays; for a model that is gone, what the engines load."""
        try:
            check_model(self.config.model.path)
        except ConfigError:
            return self._weights()[0]
        return self.config.model.path


def check_model(path: str) -> None:
    """ConfigError for a model that cannot be there; hub names are left to the engine."""
    if not path:
        raise ConfigError(
            "no model is configured: set model.path to a local folder or a hub name, e.g. "
            "model.path=Qwen/Qwen3-0.6B"
        )
    looks_local = path.startswith(("/", ".", "~")) or path.count("/") != 1
    if looks_local and not (Path(path).expanduser() / "config.json").is_file():
        raise ConfigError(f"model.path={path} is no model folder: it has no config.json")


def _port(bound: socket.socket) -> int:
    return int(bound.getsockname()[1])


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
