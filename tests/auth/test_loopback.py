from __future__ import annotations

import pytest

from any_agent.auth.access import require_loopback_client
from any_agent.errors import Forbidden
from tests.support.errors import fails_with

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
def test_a_request_to_this_machine_is_taken(host: str) -> None:
    require_loopback_client(hosts=[host], origins=[], fetch_sites=["none", "same-origin"])
    if host:
        require_loopback_client(hosts=[], origins=[f"http://{host}"], fetch_sites=[])


@pytest.mark.parametrize("host", FOREIGN)
def test_a_request_under_a_foreign_name_is_refused(host: str) -> None:
    for hosts, origins in (([host], []), (["localhost", host], []), ([], [f"https://{host}"])):
        with fails_with(Forbidden, "server.admin_key"):
            require_loopback_client(hosts=hosts, origins=origins, fetch_sites=[])


@pytest.mark.parametrize("site", ["cross-site", "same-site", "", "whatever"])
def test_a_request_of_another_sites_page_is_refused(site: str) -> None:
    with pytest.raises(Forbidden):
        require_loopback_client(hosts=[], origins=[], fetch_sites=["none", site])
