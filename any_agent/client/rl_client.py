"""The HTTP client of the `/rl` routes, for agents' drivers and for the trainer."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
import uuid
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, Literal, Self, TypeVar
from urllib.parse import quote, urlencode

import httpx
from pydantic import BaseModel, ValidationError

from any_agent import errors
from any_agent.client.aiohttp_transport import AiohttpTransport, Response
from any_agent.client.backoff import jittered
from any_agent.client.connection_pool import connections_to
from any_agent.client.service_url import names_file, url_file
from any_agent.protocol.rl import (
    AFTER_HEADER,
    API_HEADER,
    API_VERSION,
    EPOCH_HEADER,
    UNREACHABLE_HEADER,
    Abort,
    Ack,
    Acked,
    Capacity,
    Finalize,
    Heartbeat,
    Lease,
    ListSessions,
    Pause,
    PublishedVersion,
    Rejection,
    RewardSet,
    RunInfo,
    SessionContent,
    SessionDetails,
    SessionInfo,
    SessionLine,
    SessionStarted,
    SetCapacity,
    SetReward,
    SetRun,
    StartSession,
    Veto,
)

T = TypeVar("T", bound=BaseModel)

_LOST_OR_UNREACHABLE = (502, 503, 504)
"""Whether it happened is not known, or it did not."""


class RLClient:
    """One service, reached by URL; every call raises the AnyAgentError that the service answered.

    ``url`` may be a function that says where the service is now, or None while nobody knows: it
    is asked at each attempt, because a service that restarts may move. So is a file that holds it,
    named as ``file:///shared/run/url``. A connection that could not be made is tried again for
    ``retry_for`` seconds (a rank that restarts). So is a lost reply or a 503, but for polls: what
    must not happen twice has an Idempotency-Key of its own, and the rest may. Without ``trust_env``
    proxies named in the environment are not used. ``admin_key`` (or a trainer's, or a tenant's) may
    be a function, too, for a key that changes. ``epoch`` is the number of the trainer's start: once
    a later one was heard of, StaleOwner is raised. ``tls``: a context that is there already, as
    reading all authorities' certificates takes 30 ms. ``http``:
    what sends the requests instead of httpx, for those who send many.
    """

    def __init__(
        self,
        url: str | Callable[[], str | None],
        *,
        admin_key: str | Callable[[], str] | None = None,
        epoch: int | None = None,
        timeout: float = 60.0,
        retry_for: float = 30.0,
        trust_env: bool = True,
        tls: ssl.SSLContext | None = None,
        http: AiohttpTransport | None = None,
    ) -> None:
        self._nowhere = "the service does not answer: nobody has said yet where it is"
        self._look_again: Callable[[], object] = lambda: None
        if isinstance(url, str) and names_file(url):
            file = url_file(url, "url")
            url, self._look_again = file.now, file.read
            self._nowhere = f"no service has written its URL into {file.path}; is it running?"
        self._where = url
        self._key = admin_key if callable(admin_key) else lambda: admin_key or ""
        self._epoch = {EPOCH_HEADER: str(epoch)} if epoch is not None else {}
        self._retry_for = retry_for
        self._timeout = timeout
        self._http: AiohttpTransport | httpx.AsyncClient = http or httpx.AsyncClient(
            timeout=timeout,
            limits=httpx.Limits(max_connections=None),
            trust_env=trust_env,
            verify=True if tls is None else tls,
            transport=connections_to(
                url if isinstance(url, str) else None, trust_env=trust_env, tls=tls
            ),
        )

    @property
    def url(self) -> str | None:
        """Where the service is now; None while nobody knows."""
        url = self._where if isinstance(self._where, str) else self._where()
        return url.rstrip("/").removesuffix("/v1") if url is not None else None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    # -- agents --------------------------------------------------------------------------------

    async def start_session(
        self, *, patience: float = 0.0, idempotency_key: str | None = None, **fields: Any
    ) -> SessionStarted:
        """Open a session (fields of :class:`StartSession`).

        While the service has no slot (429), ask again for up to ``patience`` seconds. Such an
        answer says that nothing was opened, so the next one may be asked at another rank.

        Asked again under the same ``idempotency_key``, also by another process, the service
        answers with the same session, for a day; without one each call opens its own.
        WrongService if what answers is none of ours, or speaks another version.
        """
        body = StartSession(**fields)
        deadline = time.monotonic() + patience
        while True:
            self._look_again()
            try:
                response = await self._send(
                    "POST", "/start_session", body, slack=body.wait, once=idempotency_key or True
                )
                _require_our_api(response, self.url)
                return _read(SessionStarted, response, self.url)
            except errors.TooManyRequests as error:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise
                pause = jittered(error.retry_after or 1.0, 0.8, 1.2)
                await asyncio.sleep(min(pause, remaining))

    async def set_reward(
        self,
        api_key: str,
        reward: float | dict[str, float],
        *,
        completion_id: str | None = None,
        session_id: str | None = None,
    ) -> RewardSet:
        """A number, or several by name, for a completion (default: the last one).

        ``session_id``: an earlier session of the same key.
        """
        body = SetReward(reward=reward, completion_id=completion_id, session_id=session_id)
        return await self._call(RewardSet, "POST", "/set_reward", body, key=api_key, once=True)

    async def set_final_reward(
        self,
        api_key: str,
        final_reward: float | dict[str, float],
        *,
        session_id: str | None = None,
    ) -> RewardSet:
        """Of the whole session; can be revised until a trainer has it."""
        body = SetReward(final_reward=final_reward, session_id=session_id)
        return await self._call(RewardSet, "POST", "/set_reward", body, key=api_key, once=True)

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
        """End a session, or with ``await_reward`` its calls: rewards may come then for ``deadline``
        seconds (default: as long as the service allows).

        Of one that was finalized already it tells how it is now; Conflict (`already_finalized`) if
        another final reward stands. With an ``idempotency_key`` of the caller's it may be asked
        again, also by its next process.
        """
        body = Finalize(
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
        """Throw an open session away; ``keep_place``: another one may take its place in its group,
        which is one smaller otherwise."""
        path = f"/sessions/{session.session_id}/abort"
        body = Abort(reason=reason, keep_place=keep_place)
        return await self._call(SessionInfo, "POST", path, body, key=session.api_key, once=True)

    async def session_info(self, session_id: str, api_key: str | None = None) -> SessionInfo:
        """Any session's state; without its own ``api_key`` needs the admin's where there is one."""
        return await self._call(
            SessionInfo, "GET", _path_of(session_id), key=api_key, repeatable=True
        )

    # -- operators -----------------------------------------------------------------------------

    async def sessions(
        self, *, missing: Callable[[str], object] = lambda _: None, **filters: Any
    ) -> AsyncIterator[SessionLine]:
        """Sessions, newest first (filters of :class:`ListSessions`; ``limit`` is a page's).

        ``missing`` is told of ranks that did not answer.
        """
        after: str | None = filters.pop("after", "")
        while after is not None:
            wanted = ListSessions(**filters, after=after)
            query = urlencode(wanted.model_dump(exclude_defaults=True))
            response = await self._send("GET", f"/sessions?{query}", repeatable=True)
            if (away := response.headers.get(UNREACHABLE_HEADER)) is not None:
                missing(away)
            for line in json.loads(response.content):
                yield SessionLine.model_validate(line)
            after = response.headers.get(AFTER_HEADER)

    async def session_details(self, session_id: str) -> SessionDetails:
        """What is recorded of a session, with every reward that it was given."""
        path = _path_of(session_id)
        return await self._call(SessionDetails, "GET", path, repeatable=True)

    async def session_content(self, session_id: str, api_key: str | None = None) -> SessionContent:
        """What was said in a session (under its own key, or ours); Conflict if it is not kept."""
        path = f"{_path_of(session_id)}/content"
        return await self._call(SessionContent, "GET", path, key=api_key, repeatable=True)

    async def abort_session(
        self, session_id: str, reason: str, *, keep_place: bool = False
    ) -> SessionInfo:
        """Throw an open session away, by its id."""
        path = f"{_path_of(session_id)}/abort"
        body = Abort(reason=reason, keep_place=keep_place)
        return await self._call(SessionInfo, "POST", path, body, once=True)

    async def veto_session(self, session_id: str, reason: str) -> SessionInfo:
        """Keep a finalized session out of training."""
        path = f"{_path_of(session_id)}/veto"
        return await self._call(SessionInfo, "POST", path, Veto(reason=reason), once=True)

    async def delete_session(self, session_id: str) -> SessionInfo:
        """Erase what was recorded of a session."""
        return await self._call(SessionInfo, "DELETE", _path_of(session_id), repeatable=True)

    async def run_info(self) -> RunInfo:
        return await self._call(RunInfo, "GET", "/run", repeatable=True)

    # -- trainer -------------------------------------------------------------------------------

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
        """``retry_for``: less than the client's own, for what is soon out of date."""
        body = SetCapacity(limit=limit, ttl=ttl, owner=owner, held=held, number=number)
        return await self._call(
            Capacity, "PUT", "/capacity", body, repeatable=True, retry_for=retry_for
        )

    async def lease(self, *, owner: str, wait: float, max_groups: int = 1) -> bytes | None:
        """Packed trajectories of closed groups (`any_agent.record`), or None."""
        body = Lease(owner=owner, wait=wait, max_groups=max_groups)
        response = await self._send("POST", "/lease", body, slack=wait)
        return response.content if response.status_code == 200 else None

    async def replay(self, *, owner: str, session_ids: list[str]) -> bytes:
        """Lease just these sessions, also those that were trained on; packed as by `lease`.

        Raises Conflict naming those that cannot be had.
        """
        body = Lease(owner=owner, wait=0, session_ids=session_ids, replay=True)
        return (await self._send("POST", "/lease", body, repeatable=True)).content

    async def ack(
        self,
        *,
        owner: str,
        trained: list[str],
        rejected: list[Rejection],
        step: int | None = None,
    ) -> int:
        """End leases, all or none; Conflict if one of them was lost. ``step`` consumed them."""
        body = Ack(owner=owner, trained=trained, rejected=rejected, step=step)
        return (await self._call(Acked, "POST", "/ack", body, repeatable=True)).acked

    async def pause(self, *, ttl: float) -> None:
        await self._send("POST", "/pause", Pause(ttl=ttl), repeatable=True)

    async def publish_version(self, *, version: int, path: str, step: int) -> None:
        body = PublishedVersion(version=version, path=path, step=step)
        await self._send("POST", "/version", body, repeatable=True)

    async def resume(self) -> None:
        await self._send("POST", "/resume", repeatable=True)

    async def set_run(
        self,
        state: Literal["training", "finished", "serving"],
        *,
        step: int,
        checkpoint: str | None,
        oldest_step: int | None = None,
    ) -> None:
        body = SetRun(state=state, step=step, checkpoint=checkpoint, oldest_step=oldest_step)
        await self._send("PUT", "/run", body, repeatable=True)

    # ------------------------------------------------------------------------------------------

    async def _call(
        self, answer: type[T], method: str, path: str, body: BaseModel | None = None, **how: Any
    ) -> T:
        response = await self._send(method, path, body, **how)
        return _read(answer, response, self.url)

    async def _send(
        self,
        method: str,
        path: str,
        body: BaseModel | None = None,
        *,
        key: str | None = None,
        slack: float = 0.0,
        once: bool | str = False,
        repeatable: bool = False,
        retry_for: float | None = None,
    ) -> httpx.Response | Response:
        """``once``: it must not happen twice (a text is its Idempotency-Key); ``repeatable``: it
        may."""
        content = body.model_dump_json(exclude_none=True) if body is not None else None
        headers = {} if key else dict(self._epoch)
        if content is not None:
            headers["Content-Type"] = "application/json"
        if once:
            headers["Idempotency-Key"] = once if isinstance(once, str) else uuid.uuid4().hex
        deadline = time.monotonic() + (self._retry_for if retry_for is None else retry_for)
        delay = 0.05
        while True:
            late = time.monotonic() + delay > deadline
            url = self.url
            if bearer := key or self._key():
                headers["Authorization"] = f"Bearer {bearer}"
            try:
                if url is None:
                    raise httpx.ConnectError(self._nowhere)
                response = await self._http.request(
                    method,
                    f"{url}/rl/v1{path}",
                    content=content,
                    headers=headers,
                    timeout=self._timeout + slack,
                )
                if (wait := _quota_wait(response)) and time.monotonic() + wait < deadline:
                    await asyncio.sleep(jittered(wait, 1.0, 1.2))
                    continue
                if (
                    response.status_code not in _LOST_OR_UNREACHABLE
                    or not (once or repeatable)
                    or late
                ):
                    break
            except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
                raise errors.ConfigError(
                    f"{url} is no URL of a service: it begins with http:// or https://, like "
                    "http://127.0.0.1:8000"
                ) from error
            except httpx.TransportError as error:
                never_sent = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
                if not (once or repeatable or never_sent) or late:
                    raise errors.ServiceUnavailable(
                        f"{url} does not answer ({type(error).__name__}); is it running?"
                        if url is not None
                        else self._nowhere
                    ) from error
                if never_sent:
                    self._look_again()
            await asyncio.sleep(jittered(delay))
            delay = min(delay * 2, 2.0)
        if response.status_code in (404, 405):
            # Of a route of ours: whoever does not know it is somebody else.
            _require_our_api(response, url)
        if response.status_code >= 400:
            raise errors.from_response(
                response.status_code, response.content, response.headers.get("retry-after")
            )
        return response


def _read(answer: type[T], response: httpx.Response | Response, url: str | None) -> T:
    """WrongService if it is no such answer: something stands in the service's place."""
    try:
        return answer.model_validate_json(response.content)
    except ValidationError:
        raise errors.WrongService(
            f"what answers at {url} (status {response.status_code}) is no service of any-agent, or "
            "one of another version: check the URL"
        ) from None


def _require_our_api(response: httpx.Response | Response, url: str | None) -> None:
    """WrongService unless it is answered by a service that speaks our version."""
    version = response.headers.get(API_HEADER)
    if version == API_VERSION:
        return
    if version is None:
        raise errors.WrongService(
            f"what answers at {url} (status {response.status_code}) is no service of any-agent, or "
            "one that is older than this client: check the URL; a service is started by "
            "`any-agent serve` or `any-agent train`, of any-agent-rl at this client's version"
        )
    raise errors.WrongService(
        f"the service at {url} speaks version {version[:20]} of its API and this client version "
        f"{API_VERSION}: install the any-agent-rl that the service runs"
    )


def _quota_wait(response: httpx.Response | Response) -> float | None:
    """Seconds until the tenant's quota lets the same request in; None of any other answer."""
    if response.status_code != 429:
        return None
    error = errors.from_response(429, response.content, response.headers.get("retry-after"))
    return error.retry_after if error.code == "quota_exceeded" else None


def _path_of(session_id: str) -> str:
    return f"/sessions/{quote(session_id, safe='')}"
