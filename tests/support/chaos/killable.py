"""A proxy and a router that can be killed -9 and are back within a third of a second: forked from a
process that has imported what they need. LiteLLM's own app, which takes long to import, is a
stand-in here.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import httpx

from any_agent.chat import load_chat_format
from any_agent.config import Config, load_config
from any_agent.rundir.registry import RegistryEntry, publish
from tests.support.in_thread import served_in_thread
from tests.support.redis_server import JOURNAL
from tests.support.scripted_engine import ScriptedEngine

START_LIMIT = 120.0
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "proxy_ext.app",
        "router.app",
        "tests.support.chaos.killable",
        "tests.support.proxy",
        "uvloop",
        "transformers.models.auto.tokenization_auto",
        "renderers",
        "openai",
    ]
)


class Killable:
    """A process on a port that it keeps over all of its lives."""

    def __init__(self) -> None:
        self._listener = listener(0)
        self._port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self._process: BaseProcess | None = None
        self.lives = 0

    def _make(self) -> BaseProcess:
        raise NotImplementedError

    def start(self) -> None:
        """Begin a life; returns when it answers."""
        if self._listener.fileno() < 0:
            self._listener = listener(self._port)
        self._process = self._make()
        self._process.start()
        self.lives += 1
        deadline = time.monotonic() + START_LIMIT
        with httpx.Client(trust_env=False, timeout=START_LIMIT) as http:
            while True:
                assert self._process.is_alive(), f"it ended: {self._process.exitcode}"
                assert time.monotonic() < deadline, "it did not start"
                try:
                    if http.get(f"{self.url}/healthz").status_code == 200:
                        return
                except httpx.TransportError:
                    time.sleep(0.02)

    def kill(self) -> None:
        """kill -9."""
        process = self._process
        assert process is not None and process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join(START_LIMIT)
        # Connections that nobody had accepted are still in the queue: the next life takes them.

    def close(self) -> None:
        """Kill it; who calls now is refused, until it starts again."""
        if self.alive:
            self.kill()
        self._listener.close()

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.is_alive()

    @property
    def pid(self) -> int:
        assert self._process is not None and self._process.pid is not None
        return self._process.pid


def listener(port: int) -> socket.socket:
    """Listens here and not in the child: who calls while it is dead waits for its next life."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind(("127.0.0.1", port))
    made.listen(2048)
    return made


class KillableProxy(Killable):
    """One rank's proxy."""

    def __init__(
        self, root: Path, model: Path, engine_url: str, *settings: str, rank: int = 0
    ) -> None:
        super().__init__()
        self._settings = (f"root={root}", *JOURNAL.settings(root), *settings)
        self._model = str(model)
        self._engine_url = engine_url
        self._rank = rank

    def _make(self) -> BaseProcess:
        arguments = (self._listener, self._settings, self._model, self._engine_url, self._rank)
        return _CONTEXT.Process(target=serve_proxy, args=arguments)


class MovingProxy(KillableProxy):
    """One rank's proxy with its log in Redis; each life is on another machine, its disk empty."""

    def __init__(
        self, root: Path, model: Path, engine_url: str, redis: str, *settings: str
    ) -> None:
        super().__init__(root, model, engine_url, f"server.journal={redis}", *settings)
        self._root = root

    @property
    def disk(self) -> Path:
        """The disk of its present machine."""
        return self._root / f"machine-{self.lives}"

    def _make(self) -> BaseProcess:
        # `lives` counts this one once it has begun.
        machine = f"machine-{self.lives + 1}"
        settings = (*self._settings, f"server.journal_dir={self._root / machine}")
        arguments = (self._listener, settings, self._model, self._engine_url, self._rank, machine)
        return _CONTEXT.Process(target=serve_proxy, args=arguments)

    def kill(self) -> None:
        super().kill()
        shutil.rmtree(self.disk)


class KillableRouter(Killable):
    """The router of a run."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self._config = config

    def _make(self) -> BaseProcess:
        return _CONTEXT.Process(target=serve_router, args=(self._listener, self._config))


def serve_router(listener: socket.socket, config: Config) -> None:
    """The life of a router, in its own process."""
    from router.app import running_router
    from router.entrance import serve

    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    serve(lambda: running_router(config, listener, url), config.server.drain_timeout)


def serve_proxy(
    listener: socket.socket,
    settings: tuple[str, ...],
    model: str,
    engine_url: str,
    rank: int,
    machine: str = "",
) -> None:
    """The life of a proxy, in its own process, and as on a machine of its own if it has a name."""
    import uvicorn

    from proxy_ext.app import create_app
    from proxy_ext.web.protocol import BoundedProtocol
    from tests.support.redis_journal import be_machine

    if machine:
        be_machine(machine)
    config = load_config(None, settings, {})
    app = create_app(
        config,
        load_chat_format(model, enable_thinking=False),
        rank=rank,
        engine_url=engine_url,
        public_url=f"http://127.0.0.1:{listener.getsockname()[1]}",
        training=True,
    )
    options = uvicorn.Config(
        app, http=BoundedProtocol, loop="uvloop", lifespan="on", access_log=False, log_config=None
    )
    uvicorn.Server(options).run(sockets=[listener])


@contextmanager
def engine_in_thread(model: Path) -> Iterator[ScriptedEngine]:
    """A scripted engine that outlives every proxy, for tests without an event loop of their own."""
    chat = load_chat_format(str(model), enable_thinking=False)
    engine = ScriptedEngine(decode=chat.decode)
    with served_in_thread(engine, within=START_LIMIT):
        yield engine


@contextmanager
def heartbeats(registry: Path, entry: RegistryEntry) -> Iterator[None]:
    """Write a rank's entry again and again, as the rank itself does."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(0.5):
            publish(registry, entry)

    publish(registry, entry)
    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
