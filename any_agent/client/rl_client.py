"""The HTTP client of the `/rl` routes, for agents' drivers and for the trainer."""

from __future__ import annotations

import json
import logging
import ssl
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Literal, Self, TypeVar
from urllib.parse import quote, urlencode

import httpx
from pydantic import BaseModel, ValidationError

from any_agent import errors
from any_agent.client.aiohttp_transport import AiohttpTransport, Response
from any_agent.client.backoff import Backoff, wait_for_slot
from any_agent.client.service_url import names_file, url_file
from any_agent.protocol.rl import (
    AFTER_HEADER,
    API_HEADER,
    API_VERSION,
    EPOCH_HEADER,
    IDEMPOTENCY_KEY,
    UNREACHABLE_HEADER,
    Abort,
    Feedback,
    FeedbackGiven,
    Finalize,
    Heartbeat,
    ListSessions,
    RewardSet,
    SessionContent,
    SessionDetails,
    SessionInfo,
    SessionLine,
    SessionStarted,
    SetReward,
    StartSession,
    Veto,
)
from any_agent.protocol.tasks import AskNextTask, NextTask
from any_agent.protocol.training import (
    Ack,
    Acked,
    Capacity,
    Lease,
    Pause,
    PublishedVersion,
    Rejection,
    RunInfo,
    SetCapacity,
    SetRun,
)

T = TypeVar("T", bound=BaseModel)

_LOST_OR_UNREACHABLE = (502, 503, 504)
"""Statuses of requests that may have taken effect, or that did not arrive."""

_GATEWAYS = (413, 429, *_LOST_OR_UNREACHABLE)
"""Statuses of a proxy in front of the service."""

log = logging.getLogger(__name__)

SILENCE = 2.0
"""Seconds of waiting after which a word is said."""
_TELL_EVERY = 30.0
"""Seconds between two lines about a run that is waited for."""
_told_at: dict[str, float] = {}
"""The time of the last such line by the error's code."""
_MAX_ANSWERED = 1024
_answered: set[str] = set()
"""The addresses that have answered this process."""
_waited_for: set[str] = set()
"""The addresses of which this process has said that it waits for them: many sessions may wait."""


class RLClient:
    """A client of one service; every method raises the AnyAgentError of the service's response.

    ``url`` may be a function that returns the service's current address, or None while it is
    unknown: it is called at each attempt, because a service that restarts may move. It may also
    name a file that holds the address, ``file:///shared/run/url``. A connection that cannot be
    opened (the rank restarts), a lost reply and a 503 are retried for ``retry_for`` seconds, except
    for polls; each request that must not take effect twice has its own Idempotency-Key. Without
    ``trust_env`` proxies named in the environment are not used. ``admin_key`` (or a trainer's, or a
    tenant's) may be a function, too, for a key that changes. ``epoch`` is the number of the
    trainer's start: once the service knows of a later one, StaleOwner is raised. With
    ``first_contact`` an address that never answered this process is tried for so many seconds at
    most, and a wait of more than two seconds is logged as a warning. ``tls`` replaces
    the process's TLS context, ``http`` the client's own transport.
    """

    def __init__(
        self,
        url: str | Callable[[], str | None],
        *,
        admin_key: str | Callable[[], str] | None = None,
        epoch: int | None = None,
        timeout: float = 60.0,
        retry_for: float = 30.0,
        first_contact: float | None = None,
        trust_env: bool = True,
        tls: ssl.SSLContext | None = None,
        http: AiohttpTransport | None = None,
    ) -> None:
        self._unknown_address = "the service does not answer: its address is not known yet"
        self._refresh_url: Callable[[], object] = lambda: None
        if isinstance(url, str) and names_file(url):
            file = url_file(url, "url")
            url, self._refresh_url = file.now, file.read
            self._unknown_address = (
                f"no service has written its URL into {file.path}; is it running?"
            )
        self._where = url
        self._key = admin_key if callable(admin_key) else lambda: admin_key or ""
        self._epoch = {EPOCH_HEADER: str(epoch)} if epoch is not None else {}
        self._retry_for = retry_for
        self.first_contact = first_contact
        self._timeout = timeout
        self._http = http or AiohttpTransport(timeout=timeout, trust_env=trust_env, tls=tls)

    @property
    def url(self) -> str | None:
        """The service's current address; None while it is unknown."""
        url = self._where if isinstance(self._where, str) else self._where()
        return url.rstrip("/").removesuffix("/v1") if url is not None else None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def start_session(
        self, *, patience: float = 0.0, idempotency_key: str | None = None, **fields: Any
    ) -> SessionStarted:
        """Open a session (fields of :class:`StartSession`).

        While the service has no slot (429), repeat the request for up to ``patience`` seconds. Such
        a refusal means that nothing was opened, so the next attempt may go to another rank.

        For a day the service answers a request under the same ``idempotency_key`` with the same
        session, also to another process; without a key each call opens its own session. Raises
        WrongService if another service answers, or one that speaks another version.
        """
        body = StartSession(**fields)

        async def attempt() -> SessionStarted:
            self._refresh_url()
            response = await self.request(
                "POST", "/start_session", body, slack=body.wait, once=idempotency_key or True
            )
            _require_our_api(response, self.url)
            return _read(SessionStarted, response, self.url)

        return await wait_for_slot(attempt, patience=patience)

    async def set_reward(
        self,
        api_key: str,
        reward: float | dict[str, float],
        *,
        completion_id: str | None = None,
        session_id: str | None = None,
    ) -> RewardSet:
        """Reward a completion (default: the last one) with a number, or several by name.

        ``session_id`` names an earlier session of the same key.
        """
        reward = _as_reward(reward)
        body = checked(SetReward, reward=reward, completion_id=completion_id, session_id=session_id)
        return await self._call(RewardSet, "POST", "/set_reward", body, key=api_key, once=True)

    async def set_final_reward(
        self,
        api_key: str,
        final_reward: float | dict[str, float],
        *,
        session_id: str | None = None,
    ) -> RewardSet:
        """Reward the whole session; the reward can be revised until a trainer leases it."""
        final_reward = _as_reward(final_reward)
        body = checked(SetReward, final_reward=final_reward, session_id=session_id)
        return await self._call(RewardSet, "POST", "/set_reward", body, key=api_key, once=True)

    async def feedback(
        self,
        value: Literal["up", "down"] | float | None = None,
        *,
        text: str | None = None,
        completion_id: str | None = None,
        session_id: str | None = None,
        api_key: str | None = None,
    ) -> FeedbackGiven:
        """Set what a user thinks of an answer, or without its id of a session, as the reward named
        ``feedback``: thumbs ``up`` (1) or ``down`` (-1), or a number. ``text`` is what the user
        says, which is kept with the session; alone it sets no reward.

        Under a tenant's key, the client's own, an answer's id finds its session.
        """
        given = {"thumbs" if isinstance(value, str) else "score": value}
        about = {"completion_id": completion_id, "session_id": session_id}
        body = checked(Feedback, **given, text=text, **about)
        return await self._call(FeedbackGiven, "POST", "/feedback", body, key=api_key, once=True)

    async def finalize(
        self,
        api_key: str,
        final_reward: float | dict[str, float] | None = None,
        *,
        await_reward: bool = False,
        deadline: float | None = None,
        session_id: str | None = None,
        idempotency_key: str | None = None,
    ) -> SessionInfo:
        """End a session, or with ``await_reward`` only its calls: rewards may arrive then for
        ``deadline`` seconds (default: as long as the service allows).

        For a session that was finalized already, return its current state; Conflict
        (`already_finalized`) if it has another final reward. With an ``idempotency_key`` the
        request may be repeated, also by the caller's next process.
        """
        body = checked(
            Finalize,
            final_reward=final_reward,
            await_reward=await_reward,
            deadline=deadline,
            session_id=session_id,
        )
        once = idempotency_key or True
        return await self._call(SessionInfo, "POST", "/finalize", body, key=api_key, once=once)

    async def heartbeat(self, session: SessionStarted) -> Heartbeat:
        """Keep an open session from expiring while nothing else happens in it."""
        path = f"/sessions/{session.session_id}/heartbeat"
        return await self._call(Heartbeat, "POST", path, key=session.api_key, repeatable=True)

    async def abort(
        self,
        session: SessionStarted,
        reason: str = "aborted by the caller",
        *,
        keep_place: bool = False,
    ) -> SessionInfo:
        """Abort an open session. With ``keep_place`` another session may take its place in its
        group, which is one smaller otherwise."""
        path = f"/sessions/{session.session_id}/abort"
        body = Abort(reason=reason, keep_place=keep_place)
        return await self._call(SessionInfo, "POST", path, body, key=session.end_key, once=True)

    async def session_info(self, session_id: str, api_key: str | None = None) -> SessionInfo:
        """Return a session's state; without its own ``api_key`` an admin key is needed, if any is
        set.
        """
        return await self._call(
            SessionInfo, "GET", _path_of(session_id), key=api_key, repeatable=True
        )

    async def sessions(
        self, *, missing: Callable[[str], object] = lambda _: None, **filters: Any
    ) -> AsyncIterator[SessionLine]:
        """Yield sessions, newest first (filters of :class:`ListSessions`; ``limit`` is per page).

        ``missing`` is called with the ranks that did not answer.
        """
        after: str | None = filters.pop("after", "")
        while after is not None:
            wanted = ListSessions(**filters, after=after)
            query = urlencode(wanted.model_dump(exclude_defaults=True))
            response = await self.request("GET", f"/sessions?{query}", repeatable=True)
            if (away := response.headers.get(UNREACHABLE_HEADER)) is not None:
                missing(away)
            for line in json.loads(response.content):
                yield SessionLine.model_validate(line)
            after = response.headers.get(AFTER_HEADER)

    async def next_task(self, task_ids: Sequence[str] = ()) -> NextTask:
        """Return the task to run next among these, 32 at most, or among those of the latest
        sessions: tasks that taught nothing lately are drawn less.

        Raises NotFound (`no_known_task`) where none is named and none is known.
        """
        asked = checked(AskNextTask, task_id=list(task_ids))
        query = urlencode({"task_id": asked.task_id}, doseq=True)
        return await self._call(NextTask, "GET", f"/tasks/next?{query}", repeatable=True)

    async def overview(self) -> dict[str, Any]:
        """Return the state of the whole run, as the dashboard's overview shows it."""
        response = await self.request("GET", "/overview", repeatable=True)
        return dict(json.loads(response.content))

    async def session_details(self, session_id: str) -> SessionDetails:
        """Return the record of a session, with every reward that was set."""
        path = _path_of(session_id)
        return await self._call(SessionDetails, "GET", path, repeatable=True)

    async def session_content(self, session_id: str, api_key: str | None = None) -> SessionContent:
        """Return the messages of a session (under its own key, or the client's).

        Raises Conflict if they are not stored.
        """
        path = f"{_path_of(session_id)}/content"
        return await self._call(SessionContent, "GET", path, key=api_key, repeatable=True)

    async def abort_session(
        self, session_id: str, reason: str, *, keep_place: bool = False
    ) -> SessionInfo:
        """Abort an open session by its id."""
        path = f"{_path_of(session_id)}/abort"
        body = Abort(reason=reason, keep_place=keep_place)
        return await self._call(SessionInfo, "POST", path, body, once=True)

    async def veto_session(self, session_id: str, reason: str) -> SessionInfo:
        """Keep a finalized session out of training."""
        path = f"{_path_of(session_id)}/veto"
        return await self._call(SessionInfo, "POST", path, Veto(reason=reason), once=True)

    async def delete_session(self, session_id: str) -> SessionInfo:
        """Erase the record of a session."""
        return await self._call(SessionInfo, "DELETE", _path_of(session_id), repeatable=True)

    async def run_info(self) -> RunInfo:
        return await self._call(RunInfo, "GET", "/run", repeatable=True)

    async def get_capacity(self) -> Capacity:
        return await self._call(Capacity, "GET", "/capacity", repeatable=True)

    async def set_capacity(
        self,
        *,
        limit: int,
        ttl: float,
        owner: str,
        held: list[str],
        number: int = 0,
        retry_for: float | None = None,
    ) -> Capacity:
        """Set the rank's capacity. A short ``retry_for`` suits values that are soon out of date."""
        body = SetCapacity(limit=limit, ttl=ttl, owner=owner, held=held, number=number)
        return await self._call(
            Capacity, "PUT", "/capacity", body, repeatable=True, retry_for=retry_for
        )

    async def lease(self, *, owner: str, wait: float, max_groups: int = 1) -> bytes | None:
        """Lease closed groups: their packed trajectories (`any_agent.record`), or None."""
        body = Lease(owner=owner, wait=wait, max_groups=max_groups)
        response = await self.request("POST", "/lease", body, slack=wait)
        return response.content if response.status_code == 200 else None

    async def replay(self, *, owner: str, session_ids: list[str]) -> bytes:
        """Lease only these sessions, also trained ones; the result is packed as by `lease`.

        Raises Conflict naming the sessions that are not available.
        """
        body = Lease(owner=owner, wait=0, session_ids=session_ids, replay=True)
        return (await self.request("POST", "/lease", body, repeatable=True)).content

    async def ack(
        self,
        *,
        owner: str,
        trained: list[str],
        rejected: list[Rejection],
        step: int | None = None,
    ) -> int:
        """End all leases or none; Conflict if one of them was lost. ``step`` consumed them."""
        body = Ack(owner=owner, trained=trained, rejected=rejected, step=step)
        return (await self._call(Acked, "POST", "/ack", body, repeatable=True)).acked

    async def pause(self, *, ttl: float) -> None:
        await self.request("POST", "/pause", Pause(ttl=ttl), repeatable=True)

    async def publish_version(self, *, version: int, path: str, step: int) -> None:
        body = PublishedVersion(version=version, path=path, step=step)
        await self.request("POST", "/version", body, repeatable=True)

    async def resume(self) -> None:
        await self.request("POST", "/resume", repeatable=True)

    async def set_run(
        self,
        state: Literal["training", "finished", "serving"],
        *,
        step: int,
        checkpoint: str | None,
        oldest_step: int | None = None,
    ) -> None:
        body = SetRun(state=state, step=step, checkpoint=checkpoint, oldest_step=oldest_step)
        await self.request("PUT", "/run", body, repeatable=True)

    async def _call(
        self, answer: type[T], method: str, path: str, body: BaseModel | None = None, **how: Any
    ) -> T:
        response = await self.request(method, path, body, **how)
        return _read(answer, response, self.url)

    async def request(
        self,
        method: str,
        path: str,
        body: BaseModel | Mapping[str, Any] | None = None,
        *,
        key: str | None = None,
        slack: float = 0.0,
        once: bool | str = False,
        repeatable: bool = False,
        retry_for: float | None = None,
        base: str = "/rl/v1",
    ) -> Response:
        """Send a request to ``base`` + ``path`` and return its successful response.

        ``once``: the request must not take effect twice (a text is its Idempotency-Key);
        ``repeatable``: it may. Without either, a request that may have arrived is not repeated.
        ``key`` replaces the client's own. The service may take ``slack`` seconds beyond the usual
        timeout.
        """
        content = None
        if isinstance(body, BaseModel):
            content = body.model_dump_json(exclude_none=True)
        elif body is not None:
            content = json.dumps(body)
        headers = {} if key else dict(self._epoch)
        if content is not None:
            headers["Content-Type"] = "application/json"
        if once:
            headers[IDEMPOTENCY_KEY] = once if isinstance(once, str) else uuid.uuid4().hex
        patience = self._retry_for if retry_for is None else retry_for
        if self.first_contact is not None and self.url not in _answered:
            patience = min(patience, self.first_contact)
        backoff = Backoff(patience, first=0.05, longest=2.0)
        begun, told = time.monotonic(), self.first_contact is None
        while True:
            last = not backoff.allows(backoff.delay)
            url = self.url
            if not told and time.monotonic() - begun > SILENCE:
                told, name = True, url or "the service"
                if name not in _waited_for and len(_waited_for) < _MAX_ANSWERED:
                    _waited_for.add(name)
                    log.warning(
                        "waiting up to %g s for %s, which does not answer: a service that was just "
                        "started needs about half a minute; Ctrl-C ends the wait",
                        *(patience, name),
                    )
            if bearer := key or self._key():
                headers["Authorization"] = f"Bearer {bearer}"
            try:
                if url is None:
                    raise httpx.ConnectError(self._unknown_address)
                response = await self._http.request(
                    method,
                    f"{url}{base}{path}",
                    content=content,
                    headers=headers,
                    timeout=self._timeout + slack,
                )
                if url is not None and len(_answered) < _MAX_ANSWERED:
                    _answered.add(url)
                wait = _requested_wait(response, repeatable=bool(once or repeatable))
                if errors.RUN_STATE_HEADER in response.headers:
                    backoff.wait_for_run()
                    wait = _told_wait(response)
                if wait and backoff.allows(wait):
                    await backoff.wait_at_least(wait)
                    continue
                lost = response.status_code in _LOST_OR_UNREACHABLE
                if not lost or not (once or repeatable) or last:
                    break
            except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
                raise errors.ConfigError(
                    f"{url} is not the URL of a service: a URL begins with http:// or https://, "
                    "like http://127.0.0.1:8000"
                ) from error
            except httpx.TransportError as error:
                never_sent = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
                if not (once or repeatable or never_sent) or last:
                    raise errors.ServiceUnavailable(
                        f"{url} does not answer ({type(error).__name__}); is the service running"
                        f"{', and is it https' if str(url).startswith('https') else ''}?"
                        if url is not None
                        else self._unknown_address
                    ) from (None if never_sent else error)
                if never_sent:
                    self._refresh_url()
            await backoff.wait()
        if response.status_code < 400:
            return response
        status = response.status_code
        foreign = status in (404, 405) or not (status in _GATEWAYS or _has_error(response))
        if base == "/rl/v1" and foreign:
            # Every any-agent service has this route, so another server has answered.
            _require_our_api(response, url)
        refusal = errors.from_response(
            response.status_code, response.content, response.headers.get("retry-after")
        )
        missing = refusal.message.removeprefix("there is no route ")
        if missing.startswith(f"{base}/"):
            raise errors.WrongService(
                f"{url}: {refusal.message}: name the service's own URL, not that of a rank, and a "
                "service as new as this client"
            )
        if missing != refusal.message:
            raise errors.WrongService(
                f"{url} is not the URL of the service, only begins with it ({refusal.message}): "
                "name it as http://host:port, with /v1 at most"
            )
        raise refusal


def checked(body: type[T], **fields: Any) -> T:
    """Return a request's body; InvalidRequest, as the service would answer, for a wrong field."""
    try:
        return body(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        what = first["msg"].removeprefix("Value error, ")
        if first["type"] == "string_pattern_mismatch":
            what = (
                f"{str(first['input'])[:80]!a} is no name: one has letters, digits, `.`, `_` and "
                "`-`, at most 64, and begins with a letter or a digit"
            )
        message = f"{where}: {what}" if where else what
        raise errors.InvalidRequest(message, param=where or None) from None


def _as_reward(given: Any) -> Any:
    """Return a reward in which bools are numbers, as in Python; InvalidRequest for None."""
    if given is None:
        raise errors.InvalidRequest("the reward is None: give a number, or several by name")
    if isinstance(given, dict):
        return {name: float(one) if isinstance(one, bool) else one for name, one in given.items()}
    return float(given) if isinstance(given, bool) else given


def _read(answer: type[T], response: Response, url: str | None) -> T:
    """Parse the response; WrongService if another server has answered."""
    try:
        return answer.model_validate_json(response.content)
    except ValidationError:
        raise errors.WrongService(
            f"the server at {url} (status {response.status_code}) is no service of any-agent, or "
            "one of another version: check the URL"
        ) from None


def _has_error(response: Response) -> bool:
    """Return whether a refusal has an error as the service writes it."""
    try:
        return isinstance(json.loads(response.content)["error"], dict)
    except (ValueError, KeyError, TypeError):
        return False


def _require_our_api(response: Response, url: str | None) -> None:
    """Raise WrongService unless a service of this API version has answered."""
    version = response.headers.get(API_HEADER)
    if version == API_VERSION:
        return
    if version is None:
        raise errors.WrongService(
            f"the server at {url} (status {response.status_code}) is no service of any-agent, or "
            "one that is older than this client: check the URL; start a service with "
            "`any-agent serve` or `any-agent train` of any-agent-rl at this client's version"
        )
    raise errors.WrongService(
        f"the service at {url} speaks version {version[:20]} of its API and this client version "
        f"{API_VERSION}: install the any-agent-rl that the service runs"
    )


def _requested_wait(response: Response, *, repeatable: bool) -> float | None:
    """Return the seconds after which a request that a rate limit refused (429) may be repeated.

    The limit is a tenant's quota, or that of a gateway before the service. None for the service's
    other refusals.
    """
    if response.status_code != 429:
        return None
    error = errors.from_response(429, response.content, response.headers.get("retry-after"))
    by_gateway = repeatable and API_HEADER not in response.headers
    return error.retry_after if error.code == "quota_exceeded" or by_gateway else None


def _told_wait(response: Response) -> float | None:
    """Return the seconds after which to ask again for a run, and log why it is waited for."""
    error = errors.from_response(
        response.status_code, response.content, response.headers.get("retry-after")
    )
    now = time.monotonic()
    if now - _told_at.get(error.code, -_TELL_EVERY) >= _TELL_EVERY:
        _told_at[error.code] = now
        log.warning("%s", error.message)
    return error.retry_after


def _path_of(session_id: str) -> str:
    return f"/sessions/{quote(session_id, safe='')}"
