"""Where parts are reached, and whether one answers there."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from any_agent.launcher.process import answers
from any_agent.runtime.ports import from_here, reachable


@pytest.mark.parametrize(
    ("host", "outside", "inside"),
    [
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("box.example", "box.example", "box.example"),
        ("0.0.0.0", socket.gethostname(), "127.0.0.1"),
        ("::", socket.gethostname(), "::1"),
    ],
)
def test_names_of_a_host(host: str, outside: str, inside: str) -> None:
    assert (reachable(host), from_here(host)) == (outside, inside)


@contextmanager
def server(reply: bytes) -> Iterator[str]:
    """Says the same to whoever comes, once."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(reply)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        thread.join(10)


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", True),
        (b"HTTP/1.1 503 Not Yet\r\nContent-Length: 0\r\n\r\n", False),
        (b"this is not HTTP\r\n\r\n", False),
        (b"", False),
    ],
)
def test_whether_it_answers(reply: bytes, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # The parts are on this machine, whatever the environment says.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with server(reply) as url:
        assert answers(url) is expected


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert not answers(f"http://127.0.0.1:{port}/")
    assert not answers("http://no such host/")
