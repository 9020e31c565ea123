"""All processes of one rank on one machine: engine, proxy, trainer."""

from __future__ import annotations

import logging
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import yaml

from any_agent.atomic import write_whole
from any_agent.config import SECRET_VARIABLES, Config
from any_agent.errors import ConfigError, StartupError
from any_agent.launcher.process import Process
from any_agent.launcher.progress import Progress
from any_agent.ports import free_port, listen
from any_agent.rundir import RunDir

log = logging.getLogger(__name__)

_START_TIMEOUT = 300.0
_STOP_GRACE = 4.0
_MAX_RESTARTS = 5
_RESTART_WINDOW = 60.0


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """What to start."""

    train: bool = True
    model_path: str | None = None
    """The weights that the engine starts with, if not the configured model."""
    weight_version: int = 0
    say: Callable[[str], None] = print
    """Told one line per part while starting."""


class Node:
    """The service on one machine; a context manager that stops everything it started."""

    def __init__(self, config: Config, options: NodeOptions | None = None) -> None:
        self.config = config
        self.options = options or NodeOptions()
        self.dir = RunDir.of(config.root, config.user, config.experiment, config.trial)
        self._stack = ExitStack()
        self._processes: list[Process] = []
        self._restarts: list[float] = []
        self._lock: int | None = None
        self.engine_url = config.engine.url or ""
        self.url = ""
        self.proxy: Process
        self.trainer: Process | None = None

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End every process within seconds, for certain; the trainer first, while it has a service.

        It finishes the step under way and keeps a checkpoint, if its time is enough for that.
        """
        with _uninterrupted():
            if self.trainer is not None:
                self.trainer.stop(grace=_STOP_GRACE)
            for process in self._processes:
                process.ask_to_stop()
            deadline = time.monotonic() + _STOP_GRACE
            for process in reversed(self._processes):
                process.stop(grace=max(0.1, deadline - time.monotonic()))
            self._processes.clear()
            self._stack.close()

    def watch(self, *, until_trained: bool = False) -> None:
        """Keep the parts running; returns when training has ended and that was asked for.

        A dead proxy is started again (its journal holds what it acknowledged). StartupError when
        another part dies, or the proxy too often.
        """
        progress = Progress(self.dir.metrics, self.config.train.steps)
        told = False
        while True:
            trained = self.check()
            for line in progress.new_lines():
                self.options.say(line)
            if trained and not told:
                told = True
                self.options.say(f"trainer  done; checkpoints in {self.dir.checkpoints}")
            if trained and until_trained:
                return
            time.sleep(0.2)

    def check(self) -> bool:
        """Look at every part once; whether training has ended."""
        for process in self._processes:
            code = process.poll()
            if code is None or (process is self.trainer and code == 0):
                continue
            if process is not self.proxy:
                raise StartupError(
                    f"{process.name} ended with code {code}:\n{process.last_lines()}"
                )
            self._restart_proxy(code)
        return self.trainer is not None and self.trainer.poll() == 0

    # ------------------------------------------------------------------------------------------

    def _start(self) -> None:
        model = self.options.model_path or self.config.model.path
        check_model(model)
        self.dir.create()
        self._lock = self._stack.enter_context(self.dir.lock())
        host = self.config.server.host
        port = self.config.server.port or free_port(host)
        listen(host, port).close()
        self.url = self.config.server.public_url or url_of(_reachable(host), port)
        settings = yaml.safe_dump(self.config.dump(), sort_keys=False)
        config_path = self.dir.path / "resolved.yaml"
        write_whole(config_path, settings)
        self.options.say(f"run      {self.dir.path}")
        if not self.engine_url:
            self._start_engine(model)
        arguments = ["proxy_ext", "--config", str(config_path), "--engine-url", self.engine_url]
        arguments += ["--host", host, "--port", str(port), "--public-url", self.url]
        arguments += ["--model-path", model]
        if self.options.train:
            arguments += ["--training"]
        self.proxy = self._add("proxy", arguments, secret=True)
        local = url_of({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port)
        self.proxy.wait_ready(lambda: _answers(f"{local}/healthz"), timeout=_START_TIMEOUT)
        self.options.say(f"proxy    ready at {self.url}")
        if self.options.train:
            # Only now: a start that failed must not bind the trial to a mistyped model.
            write_whole(self.dir.path / "config.yaml", settings)
        if self.options.train:
            arguments = ["trainer", "--config", str(config_path)]
            arguments += ["--service-url", local, "--engine-url", self.engine_url]
            self.trainer = self._add("trainer", arguments, secret=True)
            self.options.say("trainer  started")

    def _start_engine(self, model: str) -> None:
        engine = self.config.engine
        port = free_port("127.0.0.1")
        self.engine_url = f"http://127.0.0.1:{port}"
        arguments = ["any_agent.engine.embedded", "--model-path", model]
        arguments += ["--host", "127.0.0.1", "--port", str(port)]
        arguments += ["--dtype", self.config.model.dtype, "--threads", str(engine.threads)]
        arguments += ["--max-running-requests", str(engine.max_running_requests)]
        arguments += ["--max-queued-requests", str(engine.max_queued_requests)]
        arguments += ["--weight-version", str(self.options.weight_version)]
        arguments += ["--incremental-streaming-output", "--device", engine.device]
        if engine.context_length:
            arguments += ["--context-length", str(engine.context_length)]
        self.options.say(f"engine   loading {model}")
        process = self._add("engine", arguments)
        process.wait_ready(lambda: _answers(f"{self.engine_url}/health"), timeout=_START_TIMEOUT)
        self.options.say(f"engine   ready at {self.engine_url}")

    def _add(self, name: str, arguments: list[str], *, secret: bool = False) -> Process:
        key = self.config.server.admin_key
        secrets = {}
        if secret and key is not None:
            secrets = {SECRET_VARIABLES[0]: key.get_secret_value()}
        log = self.dir.logs / f"{name}.log"
        process = Process(name, arguments, log, lock=self._lock, secrets=secrets)
        self._processes.append(process)
        process.start()
        return process

    def _restart_proxy(self, code: int) -> None:
        now = time.monotonic()
        self._restarts = [t for t in self._restarts if now - t < _RESTART_WINDOW] + [now]
        if len(self._restarts) > _MAX_RESTARTS:
            raise StartupError(
                f"proxy ended {len(self._restarts)} times in {_RESTART_WINDOW:g} s:\n"
                f"{self.proxy.last_lines()}"
            )
        self.options.say(f"proxy    ended with code {code}; starting it again")
        time.sleep(min(2.0, 0.2 * 2 ** (len(self._restarts) - 1)))
        self.proxy.start()


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


def url_of(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _reachable(host: str) -> str:
    """What other machines may call a host that stands for all of this one's addresses."""
    return socket.gethostname() if host in ("0.0.0.0", "::") else host


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let no second Ctrl-C end the launcher before its children."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Never by an `http_proxy` of the environment: the parts are on this machine."""


def _answers(url: str) -> bool:
    try:
        with _DIRECT.open(url, timeout=2) as response:
            return int(response.status) == 200
    except (urllib.error.URLError, OSError, ValueError):
        return False
