"""The public address is the launcher's: it outlives the router, and ends with the node."""

from __future__ import annotations

import http.client
import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.launcher.stand_ins import Lab, checked_until


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    monkeypatch.chdir(tmp_path)
    for name in [n for n in os.environ if n.startswith("ANY_AGENT_")]:
        monkeypatch.delenv(name)
    return Lab(tmp_path)


def get(address: tuple[str, int]) -> int:
    connection = http.client.HTTPConnection(*address, timeout=60)
    try:
        connection.request("GET", "/")
        return connection.getresponse().status
    finally:
        connection.close()


def address_of(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    assert parts.hostname is not None and parts.port is not None
    return parts.hostname, parts.port


@pytest.mark.service
def test_who_connects_while_the_router_is_away_waits_for_the_next(lab: Lab) -> None:
    with lab.node() as node, ThreadPoolExecutor(4) as pool:
        router, address = node.parts["router"], address_of(node.url)
        os.kill(router.pid, signal.SIGKILL)
        os.waitid(os.P_PID, router.pid, os.WEXITED | os.WNOWAIT)
        waiting = [pool.submit(get, address) for _ in range(4)]
        # Not refused, though nobody is there.
        socket.create_connection(address, timeout=10).close()
        assert not any(answer.done() for answer in waiting)
        checked_until(node, lambda: router.restarts == 1 and router.state == "ready")
        assert [answer.result(60) for answer in waiting] == [200] * 4


@pytest.mark.service
def test_nobody_waits_for_a_router_that_will_not_come(lab: Lab) -> None:
    with lab.node() as node:
        address = address_of(node.url)
        assert get(address) == 200
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=10)
