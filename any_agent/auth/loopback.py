"""The guard of a service without an admin key: this machine is served, its web pages are not."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from functools import lru_cache
from urllib.parse import urlsplit

from any_agent.config import LOOPBACK
from any_agent.errors import Forbidden


def require_loopback_client(
    *, hosts: Iterable[str], origins: Iterable[str], fetch_sites: Iterable[str]
) -> None:
    """Forbidden unless these values of `Host`, `Origin` and `Sec-Fetch-Site` are a local program's.

    Without a key, a web page in the operator's browser must not be able to call us.
    """
    for site in fetch_sites:
        if site not in ("none", "same-origin"):
            raise Forbidden("without an admin key no web page is served; set server.admin_key")
    for name, values in (("host", hosts), ("origin", origins)):
        for value in values:
            if value and not _is_loopback(value):
                raise Forbidden(
                    f"without an admin key only loopback is served, not {name} {value[:80]!r}; "
                    "set server.admin_key"
                )


@lru_cache(maxsize=1024)
def _is_loopback(value: str) -> bool:
    """Whether a Host or an Origin names this machine; 127.0.0.1.example.org does not."""
    try:
        host = urlsplit(value if "//" in value else f"//{value}").hostname or ""
        return host in LOOPBACK or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
