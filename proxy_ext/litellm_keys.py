"""LiteLLM's virtual keys. Its database has them and its own code judges them; here a key is known
by its hash, which is the name of its tenant.

So a session remembers the key that opened it, and a key's holder sees the sessions of that key.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.requests import Request
from starlette.types import Message

from any_agent.errors import (
    AnyAgentError,
    Forbidden,
    ServiceUnavailable,
    TooManyRequests,
    Unauthenticated,
)

PREFIX = "sk-"
"""The beginning of every virtual key."""
_HASH = re.compile(r"[0-9a-f]{64}")
_PATH = "/v1/chat/completions"
"""The route of LiteLLM's that a call of the policy counts as, for whatever a key may do."""
_OVER_BUDGET = "budget_exceeded"
"""LiteLLM's name of this refusal, and ours."""
_ADMITTED_SECONDS = 1.0
"""Time for which LiteLLM's consent holds: its checks cost more CPU than a call of the policy."""
_MAX_ADMITTED = 4096
_admitted: dict[tuple[str, str | None], float] = {}
"""The time of LiteLLM's last consent, by key and model."""
_MAX_WORDS = 500  # characters of LiteLLM's refusal


def hash_in(tenant: str | None) -> str | None:
    """Return the hash of the virtual key that a tenant stands for; None for other tenants."""
    return tenant if tenant is not None and _HASH.fullmatch(tenant) else None


def hash_of(key: str) -> str:
    """Return the hash by which LiteLLM knows a key."""
    from litellm.proxy._types import hash_token

    return str(hash_token(key))


def has_database() -> bool:
    """Return whether LiteLLM has a database, without which there are no keys."""
    from litellm.proxy import proxy_server

    return proxy_server.prisma_client is not None


async def authorized(key_hash: str, request: Request, body: dict[str, Any]) -> Any:
    """Return what LiteLLM knows of a key that may make a request; its exception if it may not.

    LiteLLM reads the key from its cache, else from the database.
    """
    from litellm.proxy.auth.user_api_key_auth import authorize_internal_virtual_key
    from litellm.proxy.spend_tracking.budget_reservation import release_budget_reservation

    known = await authorize_internal_virtual_key(key_hash, request, body)
    # Only LiteLLM's pipeline would settle it: what a call costs is counted when it has ended.
    await release_budget_reservation(known.budget_reservation)
    known.budget_reservation = None
    return known


async def require(key_hash: str, model: str | None) -> None:
    """Raise LiteLLM's refusal of a key: Unauthenticated, Forbidden, ServiceUnavailable, or
    TooManyRequests (`budget_exceeded`) beyond its budget, or its team's or its user's.

    ``model``: the model that it must be allowed to call, if any.
    """
    now, asked = time.monotonic(), (key_hash, model)
    if now - _admitted.get(asked, -_ADMITTED_SECONDS) < _ADMITTED_SECONDS:
        return
    body = {} if model is None else {"model": model}
    try:
        known = await authorized(key_hash, _request(body), body)
    except Exception as error:
        raise _refusal(error) from None
    if known.token != key_hash:
        # Without its database LiteLLM may be set to let everybody in, as nobody.
        raise ServiceUnavailable("LiteLLM cannot read its keys now", code="litellm_unavailable")
    if len(_admitted) >= _MAX_ADMITTED:
        _admitted.clear()
    _admitted[asked] = now


def _request(body: Mapping[str, Any]) -> Request:
    content = orjson.dumps(body)

    async def receive() -> Message:
        return {"type": "http.request", "body": content, "more_body": False}

    scope = {
        "type": "http",
        "method": "POST",
        "scheme": "http",
        "path": _PATH,
        "raw_path": _PATH.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 0),
        "path_params": {},
        "state": {},
    }
    return Request(scope, receive)


def _refusal(error: Exception) -> AnyAgentError:
    """Return LiteLLM's refusal as ours, in its words."""
    from litellm.proxy.auth.auth_exception_handler import _as_proxy_exception

    told = _as_proxy_exception(error)
    words, status = told.message[:_MAX_WORDS], str(told.code)
    if told.type == _OVER_BUDGET or status == "429":
        # Whatever the configuration's own status for it is.
        return TooManyRequests(words, code=_OVER_BUDGET)
    if status == "403":
        return Forbidden(words)
    if status.startswith("5"):
        return ServiceUnavailable(words, code="litellm_unavailable")
    return Unauthenticated(words)
