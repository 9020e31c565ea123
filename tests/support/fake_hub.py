"""A hub of models on loopback, as `huggingface_hub` asks it: models, trees and files."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_PART = 1 << 16


@dataclass
class FakeHub:
    """The models by name, each a folder, and how their files are served."""

    url: str = ""
    models: dict[str, Path] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    pause: float = 0.0
    """Seconds before each 64 KiB of a file."""
    stalls_after: int | None = None
    """Bytes of a file after which nothing more comes."""
    requests: list[str] = field(default_factory=list)
    """The path of each request."""
    sent: list[str] = field(default_factory=list)
    """The name of each file whose content was asked for."""
    over: threading.Event = field(default_factory=threading.Event)


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """Serve a hub inside the block."""
    hub = FakeHub()

    class Handler(_Handler):
        of = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.over.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    of: FakeHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub, path = self.of, urlsplit(self.path).path
        hub.requests.append(path)
        parts = path.strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        name = "/".join(parts[2:4] if api else parts[:2])
        rest = parts[4:] if api else parts[2:]
        # A gated model's existence and commit are public; its files are not.
        if name in hub.gated and not api:
            self._refuse(403, "GatedRepo")
        elif name not in hub.models:
            self._refuse(404, "RepoNotFound")
        elif api and rest[:1] == ["tree"]:
            self._json([{"type": "file", **one} for one in self._files(name)])
        elif api:
            siblings = [{"rfilename": one["path"]} for one in self._files(name)]
            self._json({"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings})
        else:
            self._file(hub.models[name] / "/".join(rest[2:]))

    def _files(self, name: str) -> list[dict[str, object]]:
        root = self.of.models[name]
        files = [path for path in sorted(root.rglob("*")) if path.is_file()]
        return [
            {"path": str(path.relative_to(root)), "size": path.stat().st_size, "oid": _etag(path)}
            for path in files
        ]

    def _file(self, path: Path) -> None:
        content = path.read_bytes()
        first = 0
        if wanted := self.headers.get("Range"):
            first = int(wanted.removeprefix("bytes=").partition("-")[0])
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(len(content) - first))
        if wanted:
            size = len(content)
            self.send_header("Content-Range", f"bytes {first}-{size - 1}/{size}")
        self.send_header("ETag", f'"{_etag(path)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "HEAD":
            return
        self.of.sent.append(path.name)
        for at in range(first, len(content), _PART):
            stop = self.of.stalls_after
            if stop is not None and at >= stop:
                self.of.over.wait()
                return
            time.sleep(self.of.pause)
            try:
                self.wfile.write(content[at : at + _PART])
            except OSError:
                return

    def _json(self, data: object) -> None:
        content = json.dumps(data).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", f"refused: {code}")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


def _etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes(), usedforsecurity=False).hexdigest()
