"""The caller of a request, and the session that the request is about."""

from __future__ import annotations

from contextlib import suppress

from starlette.requests import Request

from any_agent import keys
from any_agent.auth.access import ANYONE, NOBODY, Access, Caller, Scope
from any_agent.errors import NotFound, SessionMismatch, Unauthenticated
from any_agent.keys import KEY_PREFIXES, SESSION_KEY_PREFIX
from proxy_ext.litellm_app import ConfiguredLiteLLMApp
from proxy_ext.sessions.session import RecordedSession
from proxy_ext.sessions.session_store import SessionStore, no_session
from proxy_ext.web.quotas import TenantQuotas

PREFIX_SCOPE_KEY = "any_agent.session_prefix"
_CALLER_SCOPE_KEY = "any_agent.caller"
_COUNTED_SCOPE_KEY = "any_agent.counted"
SESSIONS_SCOPE_KEY = "any_agent.sessions"
"""Ids of the sessions that a request concerns, for the audit log."""
SESSION_HEADER = "x-any-agent-session"

_NO_SESSION = (
    "the request names no session: POST /rl/v1/start_session gives an api_key; send it as the "
    "bearer token (OPENAI_API_KEY), or in the path as /{api_key}/v1"
)


class Authenticator:
    """Resolves the keys of one rank's requests; `proxy_ext.web.permissions` has their rights."""

    def __init__(
        self,
        sessions: SessionStore,
        access: Access,
        quotas: TenantQuotas,
        litellm: ConfiguredLiteLLMApp | None = None,
    ) -> None:
        """``litellm`` judges the keys that are none of the service's."""
        self._sessions = sessions
        self._quotas = quotas
        self.litellm = litellm
        self.access = access

    async def admit(self, request: Request) -> Caller:
        """Return the sender of a request at its door, and count the request if it is a tenant's.

        LiteLLM judges a key that is none of the service's. Raises its refusal, Unauthenticated for
        a key that is not valid here, and TooManyRequests beyond the tenant's quota.
        """
        if self.litellm is not None and PREFIX_SCOPE_KEY not in request.scope:
            virtual = await self._virtual_caller(bearer_of(request))
            if virtual is not None:
                request.scope[_CALLER_SCOPE_KEY] = virtual
        caller = self.caller(request)
        await self._count(request, caller.tenant)
        return caller

    async def _virtual_caller(self, key: str) -> Caller | None:
        """Return the holder of one of LiteLLM's keys; None for a key of the service's."""
        assert self.litellm is not None
        if key.startswith(KEY_PREFIXES) or self.access.knows(key):
            return None
        key_hash = await self.litellm.hash_of_key(key)
        if key_hash is None:
            return None
        who, whole = f"LiteLLM key {key_hash[:8]}", f"LiteLLM key {key_hash}"
        return Caller(Scope.TENANT, who, tenant=key_hash, identity=whole)

    def caller(self, request: Request) -> Caller:
        """Return the sender of a request; Unauthenticated for a key that is not valid here."""
        known: Caller | None = request.scope.get(_CALLER_SCOPE_KEY)
        if known is None:
            known = request.scope[_CALLER_SCOPE_KEY] = self._caller(request)
        return known

    async def _count(self, request: Request, tenant: str | None) -> None:
        """Count a request once."""
        if tenant is not None and _COUNTED_SCOPE_KEY not in request.scope:
            request.scope[_COUNTED_SCOPE_KEY] = True
            await self._quotas.charge_request(tenant)

    def _caller(self, request: Request) -> Caller:
        prefix: str | None = request.scope.get(PREFIX_SCOPE_KEY)
        if prefix is None:
            return self.access.caller(bearer_of(request))
        # With a prefix any other bearer ("DUMMY") means nothing, unless it is a session's key.
        if prefix.startswith(SESSION_KEY_PREFIX):
            return self.access.caller(prefix)
        if not self.access.open_mode:
            raise Unauthenticated(
                "this service needs API keys: put the session's key in the path, not its id"
            )
        return Caller(Scope.SESSION, "session", identity=f"session {prefix}")

    async def session(self, request: Request, named: str | None = None) -> RecordedSession:
        """Return a request's session; ``named`` is the one in its path, body or query.

        The path prefix, else the key, else the header, else ``named`` counts; two that disagree are
        refused. Another caller's session is NotFound, as if it did not exist.
        """
        session = await self.session_or_none(request, named)
        if session is None:
            message = _NO_SESSION
            if self.caller(request) is not ANYONE:
                message = "this key names no session: send the session's own key, or session_id"
            raise Unauthenticated(message, code="no_session")
        return session

    async def session_or_none(
        self, request: Request, named: str | None = None
    ) -> RecordedSession | None:
        """Return a request's session as `session` does; None if the request names none."""
        names = [name for name in (request.headers.get(SESSION_HEADER), named) if name]
        caller = self.caller(request)
        if caller is NOBODY:
            raise Unauthenticated(_NO_SESSION, code="no_session")
        own = None
        if caller.scope in (Scope.SESSION, Scope.JUDGE):
            own = await self._own(request, caller)
            self._require_no_other(request, own)
            # Only now is the tenant known.
            await self._count(request, own.row.tenant)
        found = [await self._named(request, caller, name, own) for name in names]
        if len({session.id for session in found}) > 1:
            raise SessionMismatch(_DIFFERENT)
        # A key means its lane's newest session, unless the request names an earlier one.
        session = found[0] if found else own
        if session is not None:
            request.scope[SESSIONS_SCOPE_KEY] = [session.id]
        return session

    async def require_same(self, request: Request, named: str) -> None:
        """Raise SessionMismatch unless key, prefix and header name the same session as ``named``.

        For routes that any rank answers: if only ``named`` names a session, it is not looked up.
        """
        if self.caller(request).scope in (Scope.SESSION, Scope.JUDGE):
            await self.session_or_none(request, named)
        elif request.headers.get(SESSION_HEADER) not in (None, "", named):
            raise SessionMismatch(_DIFFERENT)

    async def _own(self, request: Request, caller: Caller) -> RecordedSession:
        """Return the session of the caller's own key or path prefix."""
        if caller.lane is None:
            return await self._sessions.by_id(request.scope[PREFIX_SCOPE_KEY])
        return await self._by_lane(caller.lane)

    def _require_no_other(self, request: Request, own: RecordedSession) -> None:
        """Raise SessionMismatch if a prefix and a genuine session key mean different sessions.

        Other bearers are ignored: agents send them because their SDK needs some key.
        """
        if PREFIX_SCOPE_KEY not in request.scope:
            return
        for key in bearers_of(request):
            lane = self.access.signer.verify(key)
            if lane is not None and lane.id != own.row.lane:
                raise SessionMismatch(_DIFFERENT)

    async def _named(
        self, request: Request, caller: Caller, name: str, own: RecordedSession | None
    ) -> RecordedSession:
        """Return a session by its key or id, if the caller may use it."""
        if own is not None and name == own.id:
            return own
        if name.startswith(SESSION_KEY_PREFIX):
            lane = self.access.signer.verify(name)
            if lane is None:
                raise Unauthenticated(_NOT_VALID)
            session = await self._by_lane(lane.id)
            if own is not None and session.row.lane != own.row.lane:
                raise SessionMismatch(_DIFFERENT)
            if not is_callers(session, caller):
                raise Unauthenticated(_NOT_VALID)
            return session
        if name.startswith("sk-"):
            # An error must not repeat a key.
            raise NotFound(
                "there is no session of that name; check the key or id", code="session_not_found"
            )
        with suppress(NotFound):
            session = await self._sessions.by_id(name)
            if is_callers(session, caller) if own is None else session.row.lane == own.row.lane:
                return session
        if own is not None and request.path_params.get("session_id") != name:
            raise SessionMismatch(_DIFFERENT)
        raise no_session(name)

    async def _by_lane(self, lane: str) -> RecordedSession:
        """Return a lane's newest session; Unauthenticated without one."""
        session = await self._sessions.by_lane(lane)
        if session is None:
            raise Unauthenticated(_NOT_VALID)
        return session


def is_callers(session: RecordedSession, caller: Caller) -> bool:
    """Return whether a caller without a session key may use a session."""
    if caller.scope is Scope.TENANT:
        return session.row.tenant == caller.tenant
    return caller.scope is Scope.ADMIN


_NOT_VALID = "this session key is not valid here"
_DIFFERENT = "the request names two different sessions (path, key, header, query or body); name one"


def bearers_of(request: Request) -> set[str]:
    """Return every key in a request's headers."""
    return keys.bearers_of(*_key_headers(request))


def bearer_of(request: Request) -> str:
    """Return the key of `Authorization: Bearer`, `x-api-key` or `api-key`; two that differ are
    refused."""
    return keys.bearer_of(*_key_headers(request))


def _key_headers(request: Request) -> tuple[list[str], list[str]]:
    """Return the values of `Authorization`, and those of the headers that have a key alone."""
    headers = request.headers
    plain = [value for name in keys.KEY_HEADERS for value in headers.getlist(name)]
    return headers.getlist("authorization"), plain
