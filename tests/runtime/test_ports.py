from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator

import pytest

from any_agent.errors import ConfigError
from any_agent.runtime.ports import accept_on, keep, port_of, reserve, url_of
from tests.support.errors import fails_with
from tests.support.other_user import as_nobody


def test_a_port_in_use_is_named() -> None:
    with reserve("127.0.0.1", 0) as first:
        first.listen()
        port = first.getsockname()[1]
        with fails_with(ConfigError, f"127.0.0.1:{port}", "in use"):
            reserve("127.0.0.1", port)
    reserve("127.0.0.1", port).close()


def test_an_address_of_another_machine_cannot_be_reserved() -> None:
    for host in ("a..b", "fe80::zz", "192.0.2.1"):
        with fails_with(ConfigError, f"{host}:0"):
            reserve(host, 0)


def test_a_url_has_brackets_around_ipv6() -> None:
    hosts = ("127.0.0.1", "box.example", "::1", "fe80::1")
    urls = [
        "http://127.0.0.1:80",
        "http://box.example:80",
        "http://[::1]:80",
        "http://[fe80::1]:80",
    ]
    assert [url_of(host, 80) for host in hosts] == urls


LOOPBACK_HOSTS = ["127.0.0.1", "localhost", "0.0.0.0", "::1", "::"]


@pytest.fixture(params=LOOPBACK_HOSTS)
def reserved(request: pytest.FixtureRequest) -> Iterator[tuple[str, int]]:
    """A host and a port on it that is kept."""
    try:
        kept = keep(request.param)
    except ConfigError:
        pytest.skip(f"this machine has no {request.param}")
    with kept:
        yield request.param, kept.getsockname()[1]


def test_a_reserved_port_is_a_childs_each_time_it_starts(reserved: tuple[str, int]) -> None:
    host, port = reserved
    talks = []
    for _ in range(3):
        with reserve(host, port) as listener:
            listener.listen()
            client = socket.create_connection(("::1" if ":" in host else "127.0.0.1", port))
            talks += [client, listener.accept()[0]]
    # Talks of an earlier life, as a killed process leaves them, do not keep the next one off.
    for talk in talks:
        talk.close()
    reserve(host, port).close()


def test_nobody_else_gets_a_reserved_port(reserved: tuple[str, int]) -> None:
    host, port = reserved
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as other, fails_with(OSError, errno=errno.EADDRINUSE):
        other.bind((host, port))
    # Neither as any free port, nor as an outgoing connection's own, were it the only one left.
    with socket.socket(family) as other:
        only_port(other, port)
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with fails_with(OSError, errno=errno.EADDRINUSE):
            other.bind((host, 0))
    there = "::1" if ":" in host else "127.0.0.1"
    with reserve(there, 0) as listener, socket.socket(family) as outgoing:
        listener.listen()
        only_port(outgoing, port)
        with fails_with(OSError, errno=errno.EADDRNOTAVAIL):
            outgoing.connect(listener.getsockname()[:2])


def only_port(some: socket.socket, port: int) -> None:
    """Leave the system one port to choose from."""
    ip_local_port_range = 51
    try:
        some.setsockopt(socket.IPPROTO_IP, ip_local_port_range, struct.pack("I", port << 16 | port))
    except OSError:
        pytest.skip("this kernel cannot be told a socket's range of ports")


def test_of_two_that_reserve_a_port_the_first_to_listen_has_it() -> None:
    with reserve("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with reserve("127.0.0.1", port) as second:
            accept_on(first, 8)
            with fails_with(ConfigError, f"127.0.0.1:{port}", "in use"):
                accept_on(second, 8)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_gets_no_kept_port_with_any_option() -> None:
    """A kept port has no listener while its process is dead."""
    with keep("127.0.0.1") as kept:
        port = port_of(kept)
        with reserve("127.0.0.1", port) as listener:
            listener.listen()
            with socket.create_connection(("127.0.0.1", port)):
                listener.accept()[0].close()
        assert as_nobody(listen=[port])["listened"] == [[port, *[errno.EADDRINUSE] * 16]]
