"""A proxy that can be killed -9 and is back within a third of a second: forked from a process that
has imported what it needs. LiteLLM's own app, which takes long to import, is a stand-in here.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import httpx

from any_agent.chat import load_chat_format
from any_agent.config import load_config
from tests.support.in_thread import served_in_thread
from tests.support.scripted_engine import ScriptedEngine

START_LIMIT = 120.0
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "proxy_ext.app",
        "tests.support.chaos.killable",
        "tests.support.proxy",
        "uvloop",
        "transformers.models.auto.tokenization_auto",
        "renderers",
        "openai",
    ]
)


class KillableProxy:
    """One rank's proxy on a port that it keeps over all of its lives."""

    def __init__(
        self, root: Path, model: Path, engine_url: str, *settings: str, rank: int = 0
    ) -> None:
        self._settings = (f"root={root}", *settings)
        self._model = str(model)
        self._engine_url = engine_url
        self._rank = rank
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        # Here and not in the child: who calls while it is dead waits for its next life.
        self._listener.listen(2048)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._process: BaseProcess | None = None
        self.lives = 0

    def start(self) -> None:
        """Begin a life; returns when it answers."""
        self._process = _CONTEXT.Process(
            target=serve_proxy,
            args=(self._listener, self._settings, self._model, self._engine_url, self._rank),
        )
        self._process.start()
        self.lives += 1
        deadline = time.monotonic() + START_LIMIT
        with httpx.Client(trust_env=False, timeout=START_LIMIT) as http:
            while True:
                assert self._process.is_alive(), f"the proxy ended: {self._process.exitcode}"
                assert time.monotonic() < deadline, "the proxy did not start"
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
        if self._process is not None and self._process.is_alive():
            self.kill()
        self._listener.close()

    @property
    def pid(self) -> int:
        assert self._process is not None and self._process.pid is not None
        return self._process.pid


def serve_proxy(
    listener: socket.socket, settings: tuple[str, ...], model: str, engine_url: str, rank: int
) -> None:
    """The life of a proxy, in its own process."""
    import uvicorn

    from proxy_ext.app import create_app
    from proxy_ext.web.protocol import BoundedProtocol
    from tests.support.proxy import litellm_stand_in

    config = load_config(None, settings, {})
    app = create_app(
        config,
        load_chat_format(model, enable_thinking=False),
        rank=rank,
        engine_url=engine_url,
        public_url=f"http://127.0.0.1:{listener.getsockname()[1]}",
        training=True,
        load_litellm=litellm_stand_in,
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
