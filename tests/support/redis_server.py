"""A real Redis server of a test's own, on a port of its own, with its files in a folder."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Self

import pytest
import redis

from tests.support.ports import own_port


def require_redis() -> None:
    """Skip the test where no redis-server is installed, but in continuous integration fail it."""
    if shutil.which("redis-server") is None:
        if os.environ.get("CI") == "true":
            pytest.fail("redis-server is missing: apt-get install redis-server")
        pytest.skip("redis-server is not installed: apt-get install redis-server")


class RedisServer:
    """A server that can be killed, stopped and started again; it ends with the block."""

    def __init__(self, folder: Path, *settings: str, port: int = 0) -> None:
        require_redis()
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.port = port or own_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: object,
        error: object,
        trace: object,
    ) -> None:
        self.kill()

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.url, socket_timeout=5)

    def flush(self) -> None:
        """Forget everything."""
        with self.client() as client:
            client.flushall()

    def command(self) -> list[str]:
        own = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "dir": str(self.folder),
            "save": "",
            "appendonly": "yes",
            "appendfsync": "always",
            "repl-diskless-sync-delay": "0",
        }
        words = [word for name, value in own.items() for word in (f"--{name}", value)]
        return ["redis-server", *words, *self._settings]

    def start(self) -> None:
        """Start it and wait until it answers."""
        command = self.command()
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + 20
        while True:
            try:
                with self.client() as client:
                    client.ping()
                return
            except redis.AuthenticationError:
                return
            except redis.RedisError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise AssertionError((self.folder / "log").read_text()[-2000:]) from None
                time.sleep(0.02)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(20)
            self._process = None

    def pause(self) -> None:
        """Let it answer nothing until :meth:`go_on`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


def make_cluster(server: RedisServer) -> str:
    """Give a server all slots of a cluster; return the cluster's URL."""
    with server.client() as client:
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", "0", "16383")
        deadline = time.monotonic() + 20
        while client.cluster("info")["cluster_state"] != "ok":
            assert time.monotonic() < deadline
            time.sleep(0.05)
    return f"redis+cluster://127.0.0.1:{server.port}"


class JournalChoice:
    """The journal of the proxies that tests start: a file alone, or one with its log in Redis."""

    def __init__(self) -> None:
        self.server: RedisServer | None = None
        self._databases: dict[Path, int] = {}

    def settings(self, root: Path) -> tuple[str, ...]:
        """Return a proxy's settings: the runs below each root have a database of their own."""
        if self.server is None:
            return ()
        number = self._databases.setdefault(root, len(self._databases))
        url = f"redis://127.0.0.1:{self.server.port}/{number}"
        return (f"server.journal={url}", "server.journal_lease=1")


JOURNAL = JournalChoice()
