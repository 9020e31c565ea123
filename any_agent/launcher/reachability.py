"""Where parts are reached, and whether one answers there."""

from __future__ import annotations

import http.client
import socket
import time
import urllib.error
import urllib.request

LISTENING = "any-agent server listening at "
"""The words before the URL in that line."""


def reachable(host: str) -> str:
    """What other machines may call a host that stands for all of this one's addresses."""
    return socket.gethostname() if host in ("0.0.0.0", "::") else host


def from_here(host: str) -> str:
    """What this machine itself may call it."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def listening(url: str) -> str:
    """The line that says where agents find a service."""
    return f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] INFO: {LISTENING}{url}"


_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Never by an `http_proxy` of the environment: the parts are on this machine."""


def answers(url: str, *, within: float = 2.0) -> bool:
    """Whether a GET is answered with 200, within so many seconds."""
    try:
        with _DIRECT.open(url, timeout=within) as response:
            return int(response.status) == 200
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError):
        return False
