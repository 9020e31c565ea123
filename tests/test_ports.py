from __future__ import annotations

import socket

import pytest

from any_agent.errors import ConfigError
from any_agent.ports import free_port, listen, url_of


def test_a_port_in_use_is_named() -> None:
    with listen("127.0.0.1", 0) as first:
        first.listen()
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot listen on 127\.0\.0\.1:{port}: .*in use"):
            listen("127.0.0.1", port)
    listen("127.0.0.1", port).close()


@pytest.mark.parametrize("host", ["a..b", "fe80::zz", "192.0.2.1"])
def test_an_address_that_is_not_ours(host: str) -> None:
    with pytest.raises(ConfigError, match="cannot listen on") as raised:
        listen(host, 0)
    assert f"{host}:0" in raised.value.message


def test_free_ports_can_be_listened_on() -> None:
    with listen("127.0.0.1", free_port("127.0.0.1")) as listener:
        assert listener.family == socket.AF_INET


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
def test_ipv6() -> None:
    try:
        listener = listen("::1", 0)
    except ConfigError:
        pytest.skip("this machine has no IPv6 loopback")
    with listener:
        assert listener.family == socket.AF_INET6


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("box.example", "http://box.example:80"),
        ("::1", "http://[::1]:80"),
        ("fe80::1", "http://[fe80::1]:80"),
    ],
)
def test_urls(host: str, url: str) -> None:
    assert url_of(host, 80) == url
