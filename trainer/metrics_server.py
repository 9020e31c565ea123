"""The trainer's registry entry and its `/metrics`, in threads beside the one that trains."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import TCPServer
from typing import Any, Self

from any_agent import keys
from any_agent.errors import AnyAgentError, NotFound, Unauthenticated
from any_agent.keys import KeySigner
from any_agent.rundir.registry import EntryStore, Heartbeat, RegistryEntry
from any_agent.runtime.event_loop import LoopThread
from any_agent.runtime.metrics import CONTENT_TYPE
from any_agent.runtime.ports import url_of
from trainer.metrics import TrainerMetrics

log = logging.getLogger(__name__)

_LAST_WRITE_TIMEOUT = 60.0
"""Seconds that a trainer which is done waits until its last registry entry is written."""


class TrainerHeartbeat:
    """A context manager: while it is open, `/metrics` is served and the registry entry is fresh.

    ``signer`` checks the key that metrics need. ``ready`` returns False while the
    trainer still starts. ``host`` is an address that the router reaches. ``pid`` is the process
    that the launcher started, if that is not this one. ``on_lost`` is called with the reason, in
    another thread, once the run's folder is gone.
    """

    def __init__(
        self,
        folder: Path,
        metrics: TrainerMetrics,
        *,
        signer: KeySigner,
        ready: Callable[[], bool],
        admits: Callable[[], bool] = lambda: True,
        host: str = "127.0.0.1",
        pid: int | None = None,
        also: EntryStore | None = None,
        on_lost: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._metrics = metrics
        self._server = _Server(metrics.exposition().render, signer, host)
        self.url = url_of(host, self._server.server_address[1])
        self._ready = ready
        self._admits = admits
        self._pid = pid or os.getpid()
        self._boot_id = secrets.token_hex(8)
        self._heartbeat = Heartbeat(folder, self._entry, also, on_lost)
        self._loop = LoopThread("heartbeat")
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="metrics", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        self._loop.start()
        # Not waited for: a disk that hangs must not keep the trainer from its work.
        self._begun = asyncio.run_coroutine_threadsafe(self._heartbeat.begin(), self._loop.loop)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._server.shutdown()
        self._thread.join(5)
        self._server.server_close()
        # The run waits for a trainer that failed, but not for one that is done.
        if kind is None:
            try:
                self._loop.call(self._end(), _LAST_WRITE_TIMEOUT)
            except TimeoutError:
                log.warning(
                    "the trainer's last registry entry is not written after %g s",
                    _LAST_WRITE_TIMEOUT,
                )
        self._loop.stop()

    async def _end(self) -> None:
        await asyncio.wrap_future(self._begun)
        await self._heartbeat.end()

    def _entry(self) -> RegistryEntry:
        return RegistryEntry(
            name="trainer",
            boot_id=self._boot_id,
            url=self.url,
            pid=self._pid,
            state="ready" if self._ready() else "starting",
            version=self._metrics.version,
            admits=self._admits(),
            disk_full=str(wait) if (wait := self._metrics.disk.waiting) else None,
        )


class _Server(TCPServer):
    """Serves one request at a time: only the router sends any. HTTPServer would do a DNS lookup."""

    allow_reuse_address = True

    def __init__(self, render: Callable[[], bytes], signer: KeySigner, host: str) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.render = render
        self.signer = signer
        super().__init__((host, 0), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A router that gave up, perhaps while this process was stopped, is no fault of its own.
        if not isinstance(sys.exception(), ConnectionError):
            log.exception("a scrape of the trainer's metrics failed")


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 2.0
    """Seconds that a client may delay the others."""

    def do_GET(self) -> None:
        try:
            self._authorize()
            self._reply(200, CONTENT_TYPE, self.server.render())
        except AnyAgentError as error:
            self._reply(error.status, "text/plain; charset=utf-8", f"{error.message}\n".encode())

    def _authorize(self) -> None:
        """Require the key that the router has; others read the router's metrics."""
        headers = self.headers
        bearer = keys.bearer_of(
            headers.get_all("Authorization", []), headers.get_all("X-Api-Key", [])
        )
        if not self.server.signer.is_metrics_key(bearer):
            raise Unauthenticated("the trainer's metrics are part of the router's /metrics")
        if self.path.partition("?")[0] != "/metrics":
            raise NotFound("this server has no path but /metrics")

    def _reply(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def version_string(self) -> str:
        return "any-agent"

    def log_message(self, format: str, *args: Any) -> None:
        """Write no access log."""
