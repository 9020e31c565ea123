"""The routes of `/ui`: who may see what, and the headers that keep a browser from doing more."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import orjson
from aiohttp import hdrs, web
from multidict import CIMultiDict, istr

from any_agent.auth.access import Access, Caller, Scope
from any_agent.auth.audit_log import AuditLog
from any_agent.config import TrainConfig
from any_agent.errors import AnyAgentError, Forbidden, InvalidRequest, NotFound, Unauthenticated
from any_agent.keys import key_id
from any_agent.rundir.layout import RunDir
from router.affinity import SessionAffinity, key_in
from router.body import RequestBody
from router.dashboard.advantage import advantages_of, read_advantage
from router.dashboard.group import read_group
from router.dashboard.logins import LIFETIME, FailureLimit, Logins
from router.dashboard.overview import STATES, OverviewReader
from router.dashboard.ranks import RankReader, Refused, Visitor, reward_unknown
from router.dashboard.service_files import keys_of, log_of, logs_of, settings_of
from router.dashboard.tasks import LATEST, ORDERS, tasks_of
from router.dashboard.training import StepReader, charts_of, table_of
from router.dashboard.trajectory import PAGE, read_trajectory
from router.dashboard.trials import serve_commands, trials_beside
from router.forward import Forwarder
from router.metrics import MetricsRoute, RouterStats, authorize_request

ROOT = "/ui"
_FETCH_SITE = istr("Sec-Fetch-Site")
_MAX_LOGIN_BYTES = 4096
_MAX_FIELDS = 16
_PAGE_OF_SESSIONS = "50"
_FILTERS = ("state", "task_id", "group_id", "tenant", "min_reward", "max_reward", "reason")
_LATELY = {"5 minutes": 300, "hour": 3600, "day": 86_400}
"""The choices of a list of the sessions that were opened lately, in seconds."""
_NEXT = re.compile(r"/ui(?:/[A-Za-z0-9][A-Za-z0-9._-]{0,127}){0,2}(?:\?view=[a-z]{1,16})?")
_COMPILE_AFTER = 0.5  # seconds
_FOR_EVER = "public, max-age=31536000, immutable"
_TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_SAFE = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    # Without a referrer browsers would name no origin with a form, either.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True, slots=True)
class Reply:
    body: bytes = b""
    status: int = 200
    kind: str = "text/html; charset=utf-8"
    headers: Mapping[str, str] = field(default_factory=dict)


class _LoginNeeded(Exception):
    """The visitor is not logged in, or is no longer; the message says which."""


class Dashboard:
    """Answers every request below `/ui`. Nothing here changes the run."""

    def __init__(
        self,
        run_dir: RunDir,
        public_url: str,
        access: Access,
        audit: AuditLog,
        forwarder: Forwarder,
        affinity: SessionAffinity,
        metrics: MetricsRoute,
        stats: RouterStats,
        train: TrainConfig,
    ) -> None:
        self._run_dir = run_dir
        self._train = train
        self._access = access
        self._audit = audit
        self._replies = forwarder.replies
        self._origin = urlsplit(public_url)
        self._trial = "/".join(run_dir.path.parts[-2:])
        # Browsers send a cookie to all ports of a host, where other runs may serve.
        self._cookie = f"any_agent_ui_{hashlib.sha256(str(run_dir.path).encode()).hexdigest()[:8]}"
        self._logins = Logins()
        self._failures = FailureLimit()
        self._compiled: asyncio.Task[None] | None = None
        self._ranks = RankReader(forwarder, affinity, access.signer)
        self._steps = StepReader(run_dir.metrics)
        self._overview = OverviewReader(
            run_dir, metrics, forwarder.ranks, self._ranks, stats, self._steps
        )

    async def handle(
        self, request: web.BaseRequest, path: str, body: RequestBody
    ) -> web.StreamResponse:
        """Answer a request; an error is a page that says what is wrong."""
        try:
            reply = await self._answer(request, path.removeprefix(ROOT), body)
        except _LoginNeeded as needed:
            if "/tokens/" in path:
                reply = _json({"error": "your login has ended; load the page again"}, 401)
            else:
                whole = f"{path}?{request.query_string}"
                after = whole if _NEXT.fullmatch(whole) else path
                reply = await self._login_page(str(needed), 401, after)
        except AnyAgentError as error:
            status = error.rank_status if isinstance(error, Refused) else error.status
            if "/tokens/" in path:
                reply = _json({"error": error.message}, status)
            else:
                visitor = self._visitor_or_none(request)
                reply = await self._page(
                    "error.html", visitor, status, error.headers(), message=error.message
                )
        head = CIMultiDict({**_SAFE, **reply.headers})
        head[hdrs.CONTENT_TYPE] = reply.kind
        head[hdrs.CONTENT_LENGTH] = str(len(reply.body))
        content = b"" if request.method == "HEAD" else reply.body
        return await self._replies.send(request, reply.status, head, content)

    async def show_overview(self, request: web.BaseRequest, _: RequestBody) -> web.StreamResponse:
        """Answer with the overview as JSON, to an operator's key in the request's head."""
        key = key_in(request.headers)
        if self._access.signer.is_run_key(key):
            # The launcher's console shows the same.
            visitor = Visitor(key, "the run", None, request.remote or "")
        else:
            caller = authorize_request(request, {Scope.ADMIN}, self._access, self._audit)
            visitor = _visitor_of(caller, key, request)
        run = await self._overview.read(visitor)
        return await self._replies.json(request, {"trial": self._trial, **run.plain()})

    async def _answer(self, request: web.BaseRequest, path: str, body: RequestBody) -> Reply:
        parts = [part for part in path.split("/") if part]
        if request.method == "POST":
            self._require_same_origin(request)
            if parts == ["login"]:
                return await self._log_in(request, body)
            if parts == ["logout"]:
                return self._log_out(request)
        if request.method not in ("GET", "HEAD"):
            raise InvalidRequest("pages are read with GET")
        match parts:
            case ["static", name]:
                return await self._static(request, name)
            case ["login"]:
                return await self._login_page("", 200, ROOT)
        visitor = self._visitor(request)
        query = _query(request)
        match parts:
            case []:
                return await self._show_overview(visitor)
            case ["training"]:
                return await self._show_training(visitor, query)
            case ["service"]:
                return await self._show_service(visitor, query)
            case ["tasks"]:
                return await self._show_tasks(visitor, query)
            case ["sessions"]:
                return await self._show_sessions(visitor, query)
            case ["groups"]:
                return await self._show_group(visitor, query)
            case ["sessions", session_id]:
                return await self._show_session(visitor, session_id, query)
            case ["sessions", session_id, "tokens", interaction_id]:
                return await self._show_tokens(visitor, session_id, interaction_id, query)
        raise NotFound("there is no such page")

    # -- the visitor

    def _visitor(self, request: web.BaseRequest) -> Visitor:
        """Return who looks; `_LoginNeeded` for somebody who has not logged in."""
        token = request.cookies.get(self._cookie)
        login = self._logins.find(token) if token is not None else None
        try:
            caller = self._access.caller(login.key if login is not None else "")
        except Unauthenticated:
            self._logins.end(token or "")
            raise _LoginNeeded("Your key is no longer valid here.") from None
        if caller.scope is Scope.NONE:
            raise _LoginNeeded("Your login has ended. Log in again." if token else "")
        return _visitor_of(caller, login.key if login is not None else "", request)

    def _visitor_or_none(self, request: web.BaseRequest) -> Visitor | None:
        try:
            return self._visitor(request)
        except (_LoginNeeded, AnyAgentError):
            return None

    async def _log_in(self, request: web.BaseRequest, body: RequestBody) -> Reply:
        address = request.remote or ""
        self._failures.check(address)
        content = await body.read(_MAX_LOGIN_BYTES)
        try:
            form = dict(parse_qsl(content.decode(), max_num_fields=_MAX_FIELDS))
        except ValueError:
            raise InvalidRequest("the form cannot be read; send it from the page") from None
        key, after = form.get("key", "").strip(), form.get("next", "")
        about: dict[str, Any] = {"route": "POST /ui/login", "client": address}
        try:
            caller = self._access.caller(key)
            if caller.scope is Scope.NONE:
                raise Unauthenticated("no key")
        except Unauthenticated as error:
            self._failures.count(address)
            self._audit.refusal(error.code, claimed=key_id(key), status=401, **about)
            return await self._login_page("This key is not valid here.", 401, after)
        try:
            _visitor_of(caller, key, request)
        except Forbidden as error:
            return await self._login_page(error.message, 403, after)
        self._audit.use(who=caller.name, key=key_id(key), **about)
        token = self._logins.begin(key, caller.identity)
        return Reply(
            status=303,
            headers={
                "Location": after if _NEXT.fullmatch(after) else ROOT,
                "Set-Cookie": self._cookie_text(token, int(LIFETIME)),
            },
        )

    def _log_out(self, request: web.BaseRequest) -> Reply:
        self._logins.end(request.cookies.get(self._cookie, ""))
        cookie = self._cookie_text("", 0)
        return Reply(status=303, headers={"Location": f"{ROOT}/login", "Set-Cookie": cookie})

    def _cookie_text(self, token: str, seconds: int) -> str:
        secure = "; Secure" if self._origin.scheme == "https" else ""
        return (
            f"{self._cookie}={token}; Path={ROOT}; Max-Age={seconds}; HttpOnly; "
            f"SameSite=Strict{secure}"
        )

    def _require_same_origin(self, request: web.BaseRequest) -> None:
        """Raise Forbidden for a form of another site: browsers say where a form comes from."""
        site = request.headers.get(_FETCH_SITE)
        origin = request.headers.get(hdrs.ORIGIN)
        own = (request.headers.get(hdrs.HOST), self._origin.netloc)
        if (site is not None and site != "same-origin") or (
            site is None and origin is not None and urlsplit(origin).netloc not in own
        ):
            raise Forbidden("this form comes from another site; open the page here, and try again")

    # -- the pages

    async def _login_page(self, message: str, status: int, after: str) -> Reply:
        known = after if _NEXT.fullmatch(after) else ROOT
        return await self._page("login.html", None, status, message=message, next=known)

    async def _show_overview(self, visitor: Visitor) -> Reply:
        if not visitor.operates:
            return Reply(status=303, headers={"Location": f"{ROOT}/sessions"})
        run = await self._overview.read(visitor)
        return await self._page(
            "overview.html", visitor, run=run, states=STATES, steps=self._train.steps
        )

    async def _show_training(self, visitor: Visitor, query: Mapping[str, str]) -> Reply:
        _require_operator(visitor)
        run = self._run_dir
        steps = await asyncio.to_thread(self._steps.read)
        choices, beside = await asyncio.to_thread(trials_beside, run, query.get("with", ""))
        return await self._page(
            "training.html",
            visitor,
            run=steps,
            charts=await asyncio.to_thread(charts_of, steps, run.path.name, beside),
            rows=table_of(steps),
            choices=choices,
            checkpoints=await asyncio.to_thread(serve_commands, run),
        )

    async def _show_sessions(self, visitor: Visitor, query: Mapping[str, str]) -> Reply:
        chosen = {name: query[name].strip() for name in _FILTERS if query.get(name, "").strip()}
        asked = {**chosen, "limit": _PAGE_OF_SESSIONS}
        if (lately := query.get("lately", "")) in _LATELY:
            chosen["lately"] = lately
            asked["created_after"] = f"{time.time() - _LATELY[lately]:.3f}"
        if query.get("after"):
            asked["after"] = query["after"]
        page, problem, status = None, "", 200
        try:
            page = await self._ranks.sessions(visitor, asked)
        except Refused as error:
            problem, status = error.message, error.rank_status
        more = urlencode({**chosen, "after": page.after}) if page and page.after else ""
        return await self._page(
            "sessions.html",
            visitor,
            status,
            page=page,
            problem=problem,
            chosen=chosen,
            more=more,
            newest=urlencode(chosen),
            later="after" in asked,
            states=STATES,
            lately=_LATELY,
        )

    async def _show_service(self, visitor: Visitor, query: Mapping[str, str]) -> Reply:
        _require_operator(visitor)
        run, name = self._run_dir, query.get("log")
        log = await asyncio.to_thread(log_of, run, name) if name else None
        keys, problem = await asyncio.to_thread(keys_of, run)
        return await self._page(
            "service.html",
            visitor,
            log=log,
            logs=await asyncio.to_thread(logs_of, run),
            keys=keys,
            problem=problem,
            settings=await asyncio.to_thread(settings_of, run),
        )

    async def _show_tasks(self, visitor: Visitor, query: Mapping[str, str]) -> Reply:
        page = await self._ranks.sessions(visitor, {"limit": str(LATEST)})
        order = query.get("order", ORDERS[0])
        keeps = self._train.dynamic_sampling == "keep"
        tasks, known, without = await asyncio.to_thread(
            tasks_of, page.sessions, order, keeps_alike=keeps
        )
        return await self._page(
            "tasks.html",
            visitor,
            tasks=tasks,
            known=known,
            without=without,
            missing=page.missing,
            unknown=sum(map(reward_unknown, page.sessions)),
            orders=ORDERS,
            order=order,
        )

    async def _show_group(self, visitor: Visitor, query: Mapping[str, str]) -> Reply:
        if not query.get("group_id"):
            # After a login the browser comes back without the query.
            return Reply(status=303, headers={"Location": f"{ROOT}/sessions"})
        tenant = query.get("tenant", "")
        found = await read_group(self._ranks, visitor, query["group_id"], tenant)
        advantages, words = advantages_of(found, self._train)
        return await self._page(
            "group.html", visitor, group=found, tenant=tenant, advantages=advantages, words=words
        )

    async def _show_session(
        self, visitor: Visitor, session_id: str, query: Mapping[str, str]
    ) -> Reply:
        start = _number(query, "start")
        found = await read_trajectory(self._ranks, visitor, session_id, start)
        advantage = await read_advantage(self._ranks, visitor, found.info, self._train)
        return await self._page(
            "session.html", visitor, session=found, size=PAGE, advantage=advantage
        )

    async def _show_tokens(
        self, visitor: Visitor, session_id: str, interaction_id: str, query: Mapping[str, str]
    ) -> Reply:
        rest = f"/interactions/{quote(interaction_id, safe='')}/tokens"
        start = _number(query, "start")
        return _json(await self._ranks.of_session(visitor, session_id, rest, start=start))

    async def _static(self, request: web.BaseRequest, name: str) -> Reply:
        def find() -> tuple[bytes, str] | None:
            from router.dashboard.render import static_files, static_version

            content = static_files().get(name)
            return None if content is None else (content, static_version(name))

        found = await asyncio.to_thread(find)
        if found is None:
            raise NotFound("there is no such file")
        content, version = found
        tag = f'"{version}"'
        # Pages link to a version, for which no browser need ask twice.
        kept = _query(request).get("v") == version
        headers = {"ETag": tag, "Cache-Control": _FOR_EVER if kept else "no-cache"}
        kind = _TYPES[name.rpartition(".")[2]]
        if request.headers.get(hdrs.IF_NONE_MATCH) == tag:
            return Reply(status=304, kind=kind, headers=headers)
        return Reply(content, kind=kind, headers=headers)

    async def _page(
        self,
        name: str,
        visitor: Visitor | None,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
        **values: Any,
    ) -> Reply:
        def make() -> bytes:
            # Imported with the first page: a router that shows none has no use for it.
            from router.dashboard.render import page

            return page(name, visitor=visitor, trial=self._trial, **values)

        body = await asyncio.to_thread(make)
        if self._compiled is None:
            self._compiled = asyncio.create_task(_compile_templates())
        return Reply(body, status, headers=dict(headers or {}))


async def _compile_templates() -> None:
    from router.dashboard.render import compile_templates

    # The first page comes first, with all that it loads.
    await asyncio.sleep(_COMPILE_AFTER)
    await asyncio.to_thread(compile_templates)


def _visitor_of(caller: Caller, key: str, request: web.BaseRequest) -> Visitor:
    """Return a key's holder; Forbidden for a key of a scope that the dashboard is not for."""
    if caller.scope not in (Scope.ADMIN, Scope.TENANT):
        raise Forbidden(
            f"a key of scope {caller.scope} cannot be used here: log in with an admin's or a "
            "tenant's"
        )
    return Visitor(key, caller.name, caller.tenant, request.remote or "")


def _require_operator(visitor: Visitor) -> None:
    if not visitor.operates:
        raise Forbidden("this page is the operator's: it shows all tenants' figures")


def _query(request: web.BaseRequest) -> dict[str, str]:
    try:
        text = request.raw_path.partition("?")[2]
        return dict(parse_qsl(text, max_num_fields=_MAX_FIELDS))
    except ValueError:
        raise InvalidRequest("the query cannot be read; follow the page's links") from None


def _number(query: Mapping[str, str], name: str) -> int:
    text = query.get(name, "0")
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise InvalidRequest(f"{name} must be a whole number, not {text[:20]!r}")
    return int(text)


def _json(data: Any, status: int = 200) -> Reply:
    return Reply(orjson.dumps(data), status, "application/json")
