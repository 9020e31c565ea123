"""The addresses of parts, and a check that a part answers."""

from __future__ import annotations

import http.client
import socket
import time
import urllib.error
import urllib.request

LISTENING = "any-agent server listening at "
"""The text before the URL in the line of :func:`listening`."""


def reachable(host: str) -> str:
    """Return the name by which other machines reach ``host``, which may mean all addresses."""
    return socket.gethostname() if host in ("0.0.0.0", "::") else host


def from_here(host: str) -> str:
    """Return the name by which this machine itself reaches ``host``."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def listening(url: str) -> str:
    """Return the line that names the URL at which agents find a service."""
    return f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] INFO: {LISTENING}{url}"


_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens URLs without an `http_proxy` of the environment: the parts are on this machine."""


def answers(url: str, *, within: float = 2.0) -> bool:
    """Return whether a GET is answered with 200 within so many seconds."""
    try:
        with _DIRECT.open(url, timeout=within) as response:
            return int(response.status) == 200
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError):
        return False
