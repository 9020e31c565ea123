"""Requests that may be sent again as they were, because their rank does what they ask for once."""

from __future__ import annotations

from aiohttp import web
from multidict import istr

IDEMPOTENCY_KEY = istr("Idempotency-Key")
_RETRY_COUNT = istr("x-stainless-retry-count")
"""An SDK that sends it marks its retries, and a retried model call is not sampled again."""


def is_idempotent(request: web.BaseRequest) -> bool:
    """Whether a request whose reply was lost can be sent again without a second effect."""
    if request.method not in ("POST", "DELETE"):
        return False
    path = request.raw_path
    if "/rl/" in path or path.startswith("/grant_capacity"):
        return IDEMPOTENCY_KEY in request.headers
    return _RETRY_COUNT in request.headers
