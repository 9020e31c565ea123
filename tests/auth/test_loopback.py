from __future__ import annotations

import pytest

from any_agent.auth.access import require_loopback_client
from any_agent.errors import Forbidden

LOCAL = ["127.0.0.1", "127.0.0.1:8000", "localhost:1", "[::1]:80", "127.8.9.1", ""]
FOREIGN = [
    "example.org",
    "127.0.0.1.example.org",
    "localhost.example.org:80",
    "10.0.0.1",
    "0.0.0.0",
    "null",
    "[::1",
    "user@example.org",
]


@pytest.mark.parametrize("host", LOCAL)
def test_this_machine(host: str) -> None:
    require_loopback_client(hosts=[host], origins=[], fetch_sites=["none", "same-origin"])
    if host:
        require_loopback_client(hosts=[], origins=[f"http://{host}"], fetch_sites=[])


@pytest.mark.parametrize("host", FOREIGN)
def test_others(host: str) -> None:
    for hosts, origins in (([host], []), (["localhost", host], []), ([], [f"https://{host}"])):
        with pytest.raises(Forbidden) as error:
            require_loopback_client(hosts=hosts, origins=origins, fetch_sites=[])
        assert "server.admin_key" in error.value.message


@pytest.mark.parametrize("site", ["cross-site", "same-site", "", "whatever"])
def test_pages(site: str) -> None:
    with pytest.raises(Forbidden):
        require_loopback_client(hosts=[], origins=[], fetch_sites=["none", site])
