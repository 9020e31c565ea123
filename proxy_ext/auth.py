"""Whose a request is, and which session it is about."""

from __future__ import annotations

from starlette.requests import Request

from any_agent import keys
from any_agent.auth.access import ANYONE, NOBODY, Access, Caller, Scope
from any_agent.errors import NotFound, SessionMismatch, Unauthenticated
from any_agent.keys import SESSION_KEY_PREFIX, Lane
from proxy_ext.sessions.session import RecordedSession
from proxy_ext.sessions.session_store import SessionStore
from proxy_ext.web.quotas import TenantQuotas

PREFIX_SCOPE_KEY = "any_agent.session_prefix"
_CALLER_SCOPE_KEY = "any_agent.caller"
SESSIONS_SCOPE_KEY = "any_agent.sessions"
"""Ids of the sessions that a request turned out to be about, for the audit log."""
SESSION_HEADER = "x-any-agent-session"

_NO_SESSION = (
    "no session: POST /rl/v1/start_session gives an api_key; send it as the bearer token "
    "(OPENAI_API_KEY), or in the path as /{api_key}/v1"
)


class Authenticator:
    """The keys of one rank. `proxy_ext.web.permissions` says what each is good for."""

    def __init__(self, sessions: SessionStore, access: Access, quotas: TenantQuotas) -> None:
        self._sessions = sessions
        self._quotas = quotas
        self.access = access

    @property
    def open_mode(self) -> bool:
        """Whether everybody is the operator."""
        return self.access.open_mode

    def caller(self, request: Request) -> Caller:
        """Who sends this; Unauthenticated for a key that is not valid here.

        Asked the first time it counts the request: TooManyRequests beyond the tenant's quota.
        """
        known: Caller | None = request.scope.get(_CALLER_SCOPE_KEY)
        if known is None:
            known = request.scope[_CALLER_SCOPE_KEY] = self._caller(request)
            self._quotas.charge_request(known.tenant)
        return known

    def _caller(self, request: Request) -> Caller:
        prefix: str | None = request.scope.get(PREFIX_SCOPE_KEY)
        if prefix is None:
            return self.access.caller(bearer_of(request))
        # Behind a prefix other bearers ("DUMMY") mean nothing, but for another session's key.
        if prefix.startswith(SESSION_KEY_PREFIX):
            return self.access.caller(prefix)
        if not self.open_mode:
            raise Unauthenticated("a session is named by its key here, not by its id")
        return Caller(Scope.SESSION, "session", identity=f"session {prefix}")

    async def session(self, request: Request, named: str | None = None) -> RecordedSession:
        """The session a request is about; ``named`` is the one in its path, body or query.

        Path prefix, else key, else header, else ``named``; two that disagree are refused. Another
        caller's session is NotFound, as if it were not there.
        """
        session = await self.session_or_none(request, named)
        if session is None:
            said = _NO_SESSION
            if self.caller(request) is not ANYONE:
                said = "this key names no session: send the session's own key, or session_id"
            raise Unauthenticated(said, code="no_session")
        return session

    async def session_or_none(
        self, request: Request, named: str | None = None
    ) -> RecordedSession | None:
        """As `session`, but None where the caller names no session."""
        names = [name for name in (request.headers.get(SESSION_HEADER), named) if name]
        caller = self.caller(request)
        if caller is NOBODY:
            raise Unauthenticated(_NO_SESSION, code="no_session")
        own = None
        if caller.scope is Scope.SESSION:
            own = await self._own(request)
            self._require_no_other(request, own)
            # Only now is it known whose request it is.
            self._quotas.charge_request(own.row.tenant)
        found = [await self._named(request, caller, name, own) for name in names]
        if len({session.id for session in found}) > 1:
            raise SessionMismatch(_DIFFERENT)
        # A key names its lane's newest session, unless an earlier one is named, too.
        session = found[0] if found else own
        if session is not None:
            request.scope[SESSIONS_SCOPE_KEY] = [session.id]
        return session

    async def require_same(self, request: Request, named: str) -> None:
        """SessionMismatch where ``named`` is not the session that a key, prefix or header names.

        For routes that are about no session, which any rank answers: where nothing else names one,
        it is not looked up.
        """
        if self.caller(request).scope is Scope.SESSION:
            await self.session_or_none(request, named)
        elif request.headers.get(SESSION_HEADER) not in (None, "", named):
            raise SessionMismatch(_DIFFERENT)

    async def _own(self, request: Request) -> RecordedSession:
        """The session that the caller's session key or path prefix names."""
        prefix: str | None = request.scope.get(PREFIX_SCOPE_KEY)
        name = bearer_of(request) if prefix is None else prefix
        if name.startswith(SESSION_KEY_PREFIX):
            return await self._by_key(name)
        return await self._sessions.by_id(name)

    def _require_no_other(self, request: Request, own: RecordedSession) -> None:
        """SessionMismatch where a prefix names one session and a genuine key another one.

        What is no key of ours, agents send because their SDK wants some key.
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
        """A session by its key or id, if it is the caller's."""
        if name.startswith(SESSION_KEY_PREFIX):
            session = await self._by_key(name)
            if own is not None and session.row.lane != own.row.lane:
                raise SessionMismatch(_DIFFERENT)
            if not is_callers(session, caller):
                raise Unauthenticated(_NOT_VALID)
            return session
        if name.startswith("sk-"):
            # No error repeats a key.
            raise NotFound("there is no session of that name", code="session_not_found")
        try:
            session = await self._sessions.by_id(name)
            if own is None and is_callers(session, caller):
                return session
            if own is not None and session.row.lane == own.row.lane:
                return session
        except NotFound:
            pass
        if own is not None and request.path_params.get("session_id") != name:
            raise SessionMismatch(_DIFFERENT)
        raise no_session(name)

    async def _by_key(self, key: str) -> RecordedSession:
        lane: Lane | None = self.access.signer.verify(key)
        session = await self._sessions.by_lane(lane.id) if lane is not None else None
        if session is None:
            raise Unauthenticated(_NOT_VALID)
        return session


def no_session(id: str) -> NotFound:
    """Of a session that is not there, and of one that the caller must not know of."""
    return NotFound(f"there is no session {id[:80]!r}", code="session_not_found")


def is_callers(session: RecordedSession, caller: Caller) -> bool:
    """Whether a session may be shown to a caller that has no session's key."""
    if caller.scope is Scope.TENANT:
        return session.row.tenant == caller.tenant
    return caller.scope is Scope.ADMIN


_NOT_VALID = "this session key is not valid here"
_DIFFERENT = "the request names two different sessions (path, key, header, query or body)"


def bearers_of(request: Request) -> set[str]:
    """Every key that a request's headers hold."""
    headers = request.headers
    return keys.bearers_of(headers.getlist("authorization"), headers.getlist("x-api-key"))


def bearer_of(request: Request) -> str:
    """The key of `Authorization: Bearer` or `x-api-key`; two that differ are refused."""
    headers = request.headers
    return keys.bearer_of(headers.getlist("authorization"), headers.getlist("x-api-key"))
