"""The single public URL: finds each request's rank and passes it on, byte by byte.

::

    app        the handler of every request; start and stop
    affinity   which rank: from the key or id, or computed from the group's name (pure)
    health     which ranks serve now; waiting for one
    forward    a request to a rank, sent again while nothing was sent
    upstream   the shared client session, and what a failure means
    body       a client's body, bounded        reply    answers, which clients must take
    opens      `start_session`                 fanout   routes over all ranks
    leasing    acks, exports, leases           merge    several answers as one (pure)
    stats      what is counted                 metrics  `/metrics` of all parts
    serving    its life: signals, draining     proxy_router  before proxies named by their URLs

It keeps nothing that a restart would lose.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from router.proxy_router import ProxyRouter

__all__ = ["ProxyRouter"]


def __getattr__(name: str) -> Any:
    """Import it when it is used."""
    if name not in __all__:
        raise AttributeError(f"module 'router' has no attribute {name!r}")
    from router import proxy_router

    return getattr(proxy_router, name)
