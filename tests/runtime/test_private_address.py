"""Where engines may be: nowhere that the world reaches."""

from __future__ import annotations

import pytest

from any_agent.errors import ConfigError
from any_agent.runtime.private_address import is_private, require_private_host, require_private_url
from tests.support.errors import fails_with

PRIVATE = ["127.0.0.1", "10.2.3.4", "172.31.255.1", "192.168.0.9", "169.254.3.4"]
PRIVATE += ["::1", "fd00::1", "fe80::1", "fe80::1%lo", "::ffff:10.0.0.1"]
PUBLIC = ["8.8.8.8", "172.32.0.1", "0.0.0.0", "::", "2001:db8::1", "100.64.0.1", "::ffff:8.8.8.8"]


@pytest.mark.parametrize("address", PRIVATE + PUBLIC)
def test_only_private_addresses_are_taken(address: str) -> None:
    url = f"http://[{address}]:30000" if ":" in address else f"http://{address}:30000"
    assert is_private(address) == (address in PRIVATE)
    if address in PRIVATE:
        require_private_url(url)
        return
    with fails_with(ConfigError, address):
        require_private_url(url)
    with fails_with(ConfigError, address):
        require_private_host(address)


@pytest.mark.parametrize("url", ["", "engine:30000", "ftp://10.0.0.1", "http://", "http://[1"])
def test_malformed_urls_of_engines_are_refused(url: str) -> None:
    with fails_with(ConfigError, repr(url)):
        require_private_url(url)


def test_a_host_name_that_resolves_to_a_public_address_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = ["10.0.0.1"]

    def look_up(host: str, *_: object, **__: object) -> list[object]:
        if not found:
            raise OSError("no such host")
        return [(0, 0, 0, "", (address, 0)) for address in found]

    monkeypatch.setattr("socket.getaddrinfo", look_up)
    require_private_url("http://engine.cluster:3")
    require_private_host("engine.cluster")
    found.append("8.8.8.8")
    with fails_with(ConfigError, "engine.cluster", "8.8.8.8"):
        require_private_url("http://engine.cluster:3")
    found.clear()
    # It may not be there yet: the connection will say so.
    require_private_url("http://engine.cluster:3")
    with pytest.raises(ConfigError):
        require_private_host("engine.cluster")
