"""The single public URL: finds the rank of each request and passes it on, byte by byte.

::

    app               the handler of every request; start and stop, signals, draining
    affinity          the rank of a session's key or id, and the home of a group (pure)
    implicit_affinity the rank of a model call that names no session
    rank_health       the ranks that serve now; waits for one
    forward           requests to ranks, repeated until a rank has received them
    upstream          the pool of connections to the ranks
    body              clients' bodies, bounded
    client_response   answers, which clients must take
    open_session      `start_session`
    fanout            routes over all ranks
    lease             acks, exports, leases
    areal             the routes of the AReaL documents, granted slots
    dashboard         the pages at `/ui`
    metrics           counters, and `/metrics` of all parts
    proxy_router      a router for proxies that are named by their URLs

The router has no state that a restart would lose.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from any_agent.runtime.public_names import public_name

if TYPE_CHECKING:
    from router.proxy_router import ProxyRouter

__all__ = ["ProxyRouter"]


def __getattr__(name: str) -> Any:
    """Import ProxyRouter when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module 'router' has no attribute {name!r}")
    return public_name("router.proxy_router", name)
