"""The session that a piece of code is in, and the requests that belong to it.

A context variable holds the session: tasks inherit it, `asyncio.to_thread` copies it, and any
thread may (`contextvars.copy_context`). While sessions are open, `http_patches` calls
:func:`key_for` for each request to any address."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

import httpx

from any_agent.client.environment import PLACEHOLDER_KEY
from any_agent.client.service_url import moved, names_file, url_file
from any_agent.completions.apis import all_apis, plain_path
from any_agent.keys import (
    KEY_HEADERS,
    LANE_KEY_PREFIXES,
    PLACEHOLDER_SESSION,
    SESSION_KEY_PREFIX,
    bearers_of,
    session_prefix,
)

_PORTS = {"http": 80, "https": 443}
_REWARDS = ("set_reward", "finalize", "end_session")
"""The `/rl` routes that an agent calls for its own session."""
_ENDS = ("/finalize", "/end_session")
_NAMING = "x-any-agent-session"


@dataclass(frozen=True, slots=True)
class _Origin:
    """The address of a service."""

    scheme: str
    host: str
    port: int
    path: str
    """The prefix of the service's paths."""


@dataclass(slots=True, eq=False)
class Membership:
    """A context's membership in a session: its key, and the address that may get it."""

    service: str
    """The URL of the service, or of the file that holds it."""
    api_key: str = field(repr=False)
    outer: Membership | None = field(default=None, repr=False)
    over: bool = False
    """True once the session was left: leaving an inner one does not return here."""
    asked_to_end: bool = False
    """True if a request was to end the session, which may have happened."""

    @property
    def origin(self) -> _Origin | None:
        """The service's present address; None while it is unknown."""
        url: str | None = self.service
        if names_file(self.service):
            url = url_file(self.service, "url").now()
        return _origin_of(url) if url is not None else None


@lru_cache(maxsize=64)
def _origin_of(url: str) -> _Origin:
    parsed = httpx.URL(url)
    return _Origin(
        scheme=parsed.scheme,
        host=parsed.raw_host.decode("ascii"),
        port=parsed.port or _PORTS[parsed.scheme],
        path=parsed.path.rstrip("/"),
    )


_current: ContextVar[Membership | None] = ContextVar("any_agent_session", default=None)


def join(service: str, api_key: str) -> Membership:
    """Put this context into the session with this key; ``service`` is a URL of the service, or of
    the file that holds it."""
    membership = Membership(service, api_key, outer=_nearest_open(_current.get()))
    _current.set(membership)
    return membership


def leave(membership: Membership) -> None:
    """Return this context to the outer session. A context that has not joined, or is in an inner
    session, does not change, and does not return to this session later."""
    membership.over = True
    if _current.get() is membership:
        _current.set(_nearest_open(membership.outer))


def _nearest_open(membership: Membership | None) -> Membership | None:
    """Return the nearest membership, from this one outward, that was not left: sessions may be left
    in another order, and in another context, than they were joined in."""
    while membership is not None and membership.over:
        membership = membership.outer
    return membership


def key_for(
    scheme: str, host: str | None, port: int | None, path: str, headers: Mapping[str, Any]
) -> str | None:
    """Return the key of the session that this request belongs to.

    None outside of every session, for another origin than the service's, for a route that agents do
    not call, and for a request that names a session itself.
    """
    here = _current.get()
    origin = here.origin if here is not None else None
    if here is None or origin is None or (scheme, host) != (origin.scheme, origin.host):
        return None
    if (port or _PORTS[scheme]) != origin.port or not path.startswith(f"{origin.path}/"):
        return None
    path = path[len(origin.path) :]
    if not _is_agents(path) or session_prefix(path) is not None or _names_session(headers):
        return None
    here.asked_to_end |= path.endswith(_ENDS)
    return here.api_key


def followed(url: str, headers: Mapping[str, Any]) -> str | None:
    """Return the new URL of a session's request whose service has moved since its client was made,
    or whose client took the URL that `require_service` has set.

    None for all other requests: outside of sessions, and to the service's present address.
    """
    to = moved(url)
    if to is not None and SESSION_KEY_PREFIX not in to and not _is_sessions(to, headers):
        to = None
    placeholder = f"/{PLACEHOLDER_SESSION}/"
    if placeholder in (to or url):
        named = (to or url).replace(placeholder, "/", 1)
        if _is_sessions(named, headers) and not _has_foreign_key(headers):
            return named
    return to


def _is_sessions(url: str, headers: Mapping[str, Any]) -> bool:
    """Return True if a request to this URL names a session, or belongs to that of this context."""
    parsed = httpx.URL(url)
    host = parsed.raw_host.decode("ascii")
    key = key_for(parsed.scheme, host, parsed.port, parsed.path, headers)
    return key is not None or _names_session(headers)


def _is_agents(path: str) -> bool:
    path = unquote(path)
    if ".." in path.split("/"):
        # Behind a reverse proxy this may be another service's path.
        return False
    parts = plain_path(path)[0].split("/")[1:]
    if parts[0] == "v1":
        parts = parts[1:]
    if parts[:1] == ["rl"]:
        parts = parts[2:] if parts[1:2] == ["v1"] else parts[1:]
        return len(parts) == 1 and parts[0] in _REWARDS
    # The paths of model calls, and the paths below them.
    return parts[:1] == ["models"] or any(
        parts[:1] == api.path.split("/")[1:2] for api in all_apis()
    )


def _names_session(headers: Mapping[str, Any]) -> bool:
    if headers.get(_NAMING):
        return True
    bearer = _text(headers.get("authorization"))
    return (
        bearer[:7].lower() == "bearer " and bearer[7:].strip().startswith(LANE_KEY_PREFIXES)
    ) or any(_text(headers.get(name)).startswith(LANE_KEY_PREFIXES) for name in KEY_HEADERS)


def _has_foreign_key(headers: Mapping[str, Any]) -> bool:
    """Return True for a key of another provider, whose call must not pass for the agent's."""
    plain = (_text(headers.get(name)) for name in KEY_HEADERS)
    keys = bearers_of([_text(headers.get("authorization"))], plain)
    return not keys <= {PLACEHOLDER_KEY} and not _names_session(headers)


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode("latin-1")
    return value if isinstance(value, str) else ""
