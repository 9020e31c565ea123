"""Who is calling: the operator (admin key), or the holder of a session key."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from starlette.requests import Request

from any_agent import keys
from any_agent.errors import Forbidden, SessionMismatch, Unauthenticated
from any_agent.keys import SESSION_KEY_PREFIX, KeySigner, SecretHash
from proxy_ext.session import Session
from proxy_ext.sessions import Sessions

PREFIX_SCOPE_KEY = "any_agent.session_prefix"
SESSION_HEADER = "x-any-agent-session"

_NO_SESSION = (
    "no session: POST /rl/v1/start_session gives an api_key; send it as the bearer token "
    "(OPENAI_API_KEY), or in the path as /{api_key}/v1"
)


class Scope(StrEnum):
    """What a key is good for; ``none`` is a request without one."""

    ADMIN = "admin"
    TRAINER = "trainer"
    TENANT = "tenant"
    SESSION = "session"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request."""

    scope: Scope
    name: str
    """What is recorded as who: "admin", "tenant alice (key 3f9a)", "session", "anyone"."""
    tenant: str | None = None
    identity: str = ""
    """The same for every request of one key, and for no other's: "admin", a key's id, a lane's."""


ANYONE = Caller(Scope.ADMIN, "anyone", identity="anyone")
"""Everybody, where there is no admin key."""
_ADMIN = Caller(Scope.ADMIN, "admin", identity="admin")
_NOBODY = Caller(Scope.NONE, "nobody")


class Auth:
    """Without an admin key (loopback only) everybody is the operator."""

    def __init__(self, sessions: Sessions, signer: KeySigner, admin_key: str | None) -> None:
        self._sessions = sessions
        self._signer = signer
        self._admin = SecretHash(admin_key) if admin_key else None

    @property
    def open_mode(self) -> bool:
        return self._admin is None

    def is_admin(self, request: Request) -> bool:
        bearer = bearer_of(request)
        if self._admin is None:
            return not bearer.startswith(SESSION_KEY_PREFIX)
        return bool(bearer) and self._admin.matches(bearer)

    def caller(self, request: Request) -> Caller:
        """Who sends this; Unauthenticated for a key that is not valid here."""
        prefix = request.scope.get(PREFIX_SCOPE_KEY)
        bearer = bearer_of(request) if prefix is None else prefix
        if bearer.startswith(SESSION_KEY_PREFIX):
            lane = self._signer.verify(bearer)
            if lane is None:
                raise Unauthenticated("this session key is not valid here")
            return Caller(Scope.SESSION, "session", identity=f"lane {lane.id}")
        if prefix is not None:
            if not self.open_mode:
                raise Unauthenticated("a session is named by its key here, not by its id")
            return Caller(Scope.SESSION, "session", identity=prefix)
        if self._admin is None:
            return ANYONE
        if not bearer:
            return _NOBODY
        if not self._admin.matches(bearer):
            raise Unauthenticated("this key is not valid here")
        return _ADMIN

    def require_admin(self, request: Request) -> None:
        """Unauthenticated without a key, Forbidden with one that does not suffice."""
        if self.is_admin(request):
            return
        bearer = bearer_of(request)
        if not bearer:
            raise Unauthenticated("this route needs the admin key: Authorization: Bearer <key>")
        if self._signer.verify(bearer) is not None:
            raise Forbidden("a session key cannot use this route; it needs the admin key")
        raise Unauthenticated("this key is not valid here")

    async def session(self, request: Request, named: str | None = None) -> Session:
        """The session a request is about; ``named`` is the one in its body or query.

        Path prefix, else key, else header, else ``named``; two that disagree are refused.
        """
        session = await self.session_or_none(request, named)
        if session is None:
            said = _NO_SESSION
            if bearer_of(request) and self._admin is not None:
                said = "the admin key names no session: send the session's own key, or session_id"
            raise Unauthenticated(said, code="no_session")
        return session

    async def session_or_none(self, request: Request, named: str | None = None) -> Session | None:
        """As `session`, but None where the operator names no session."""
        prefix = request.scope.get(PREFIX_SCOPE_KEY)
        others = [name for name in (request.headers.get(SESSION_HEADER), named) if name]
        if prefix is not None:
            # Behind a prefix other bearers ("DUMMY") mean nothing.
            chosen = await self._named(prefix, trusted=self.open_mode)
        else:
            bearer = bearer_of(request)
            if bearer.startswith(SESSION_KEY_PREFIX):
                chosen = await self._named(bearer, trusted=False)
            elif not self.is_admin(request):
                if bearer:
                    raise Unauthenticated("this key is not valid here")
                raise Unauthenticated(_NO_SESSION, code="no_session")
            elif others:
                chosen = await self._named(others.pop(0), trusted=True)
            else:
                return None
        for other in others:
            if (await self._named(other, trusted=True)).id != chosen.id:
                raise SessionMismatch(
                    "the request names two different sessions (path, key, header or body)"
                )
        return chosen

    async def _named(self, name: str, *, trusted: bool) -> Session:
        """By key, or where ids are trusted by id."""
        if name.startswith(SESSION_KEY_PREFIX):
            lane = self._signer.verify(name)
            session = await self._sessions.by_lane(lane.id) if lane is not None else None
            if session is None:
                raise Unauthenticated("this session key is not valid here")
            return session
        if not trusted:
            raise Unauthenticated("a session is named by its key here, not by its id")
        return await self._sessions.by_id(name)


def bearer_of(request: Request) -> str:
    """The key of `Authorization: Bearer` or `x-api-key`; two that differ are refused."""
    headers = request.headers
    return keys.bearer_of(headers.getlist("authorization"), headers.getlist("x-api-key"))
