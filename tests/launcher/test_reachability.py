"""Where parts are reached, and whether one answers there."""

from __future__ import annotations

import socket
import threading

import pytest

from any_agent.launcher.process import answers
from any_agent.runtime.ports import from_here, reachable


def test_a_host_that_listens_everywhere_is_named_by_an_address_to_reach() -> None:
    here = socket.gethostname()
    for host, outside, inside in (
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("box.example", "box.example", "box.example"),
        ("0.0.0.0", here, "127.0.0.1"),
        ("::", here, "::1"),
    ):
        assert (reachable(host), from_here(host)) == (outside, inside)


def test_only_a_part_that_answers_with_success_counts_as_answering(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The parts are on this machine, whatever the environment says.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    replies = {
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok": True,
        b"HTTP/1.1 503 Not Yet\r\nContent-Length: 0\r\n\r\n": False,
        b"this is not HTTP\r\n\r\n": False,
        b"": False,
    }
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for reply in replies:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(reply)

        thread = threading.Thread(target=serve)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        assert [answers(url) for _ in replies] == list(replies.values())
        thread.join(10)
    assert not answers(url), "nobody is there"
    assert not answers("http://no such host/")
