"""One session of a service, from its start to its export, under the documented routes."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import logging
import re
import time
import uuid
from collections.abc import Callable
from hashlib import blake2b
from types import TracebackType
from typing import Any, Literal, Self

import aiohttp
import numpy as np
import numpy.typing as npt

from any_agent import errors
from any_agent.client.backoff import jittered
from any_agent.record import InteractionWithTokenLogpReward
from any_agent.runtime.logs import Redactor

log = logging.getLogger(__name__)

_TASK = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,47}")
_DTYPES = {"torch.int32": "<i4", "torch.float32": "<f4", "torch.bool": "?"}
_SAID = ("messages", "output_message_list", "completion", "model_response", "parent_id")
"""What is exported of an interaction beside its tensors; older services tell nothing of it."""
_RETRY_DELAY = (429, 502, 503, 504)
_NO_SLOT = "no_capacity"
_ANSWER_TIMEOUT = 60.0
"""Seconds of one request; an export may have to wait for calls that are ending."""
_EXPORT_TIMEOUT = 300.0
_HEARTBEAT = 60.0
"""Seconds between signs of life, of an agent that is busy elsewhere."""


class OpenAIProxyClient:
    """A session of the service at ``base_url``: open inside the ``async with``, exported after it.

    ``session`` is the caller's HTTP session, ``admin_api_key`` an admin's or a trainer's (a
    function for one that changes, None where the service has no keys). An exception inside the
    block aborts the session: nothing of it is trained on. In the mode ``eval`` it needs no grant,
    is sampled as the agent asks, and is never trained on. A service that is full or away is waited
    for, ``patience`` seconds at each request, and nothing happens twice.

    Methods raise the AnyAgentError that the service answered.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        base_url: str,
        task_id: str,
        admin_api_key: str | Callable[[], str] | None = None,
        *,
        mode: Literal["train", "eval"] = "train",
        patience: float = 300.0,
    ) -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self.task_id = task_name(task_id)
        self.mode = mode
        self.session_id: str | None = None
        self.interaction_count = 0
        """Model calls of the session, once it has ended."""
        self.called: bool | None = None
        """True if there were any, also once it is aborted; None while that is unknown."""
        self._session = session
        self._admin_key = admin_api_key
        self._patience = patience
        self._key: str | None = None
        self._alive: asyncio.Task[None] | None = None

    @property
    def session_api_key(self) -> str:
        """What the agent takes as its API key; ValueError before the session is open."""
        if self._key is None:
            raise ValueError("the session is not open: use the client in an async with")
        return self._key

    @property
    def session_url(self) -> str:
        """The agent's base URL, `http://host:port/<key>/v1`: it names the session, whatever key the
        agent sends. ValueError before the session is open."""
        return f"{self.base_url}/{self.session_api_key}/v1"

    async def grant_capacity(self) -> None:
        """Let one more session open, at the rank that serves this task."""
        await self._post("/grant_capacity", {"task_id": self.task_id}, self._admin_key)

    async def __aenter__(self) -> Self:
        """Open it; where the grant was taken by somebody else, another one is made."""
        deadline = time.monotonic() + self._patience
        while True:
            try:
                opened = await self._open()
                break
            except errors.TooManyRequests as error:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(jittered(error.retry_after or 1.0, 0.8, 1.2))
                if error.code == _NO_SLOT and self.mode == "train":
                    await self.grant_capacity()
        self.session_id = str(opened["session_id"])
        self._key = str(opened["api_key"])
        self._alive = asyncio.create_task(self._keep_alive())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stop_heartbeat()
        if error is not None:
            await self._put_away("abort", error)
            return
        try:
            ended = await self._post("/rl/end_session", {}, self.session_api_key)
        except BaseException as refused:
            await self._put_away("abort", refused)
            raise
        self.interaction_count = int(ended["interaction_count"])
        self.called = self.interaction_count > 0

    async def set_reward(self, completion_id: str, reward: float) -> None:
        """Reward one completion or response, by its id; NotFound if the session has none such."""
        body = {"interaction_id": completion_id, "reward": reward}
        await self._post("/rl/set_reward", body, self.session_api_key)

    async def set_last_reward(self, reward: float) -> None:
        """Reward the last one; Unprocessable (`no_interactions`) if there is none."""
        await self._post("/rl/set_reward", {"reward": reward}, self.session_api_key)

    async def export_interactions(
        self, discount: float = 1.0, style: str = "individual"
    ) -> dict[str, InteractionWithTokenLogpReward]:
        """What was recorded, by id, with final rewards; after the session has ended.

        Whatever a service does not tell of an interaction, beside its tensors, is None.

        ``individual``: every interaction; ``concat``: each path's leaf, Unprocessable where a path
        is not token-exact.
        """
        if self.session_id is None:
            raise ValueError("there is no session to export yet: open it first")
        body = {"session_id": self.session_id, "discount": discount, "style": style}
        answer = await self._post(
            "/export_trajectories", body, self._admin_key, limit=_EXPORT_TIMEOUT
        )
        return exported_interactions(answer)

    async def discard(self, error: BaseException) -> None:
        """Let go of an ended session that this kept from being exported: it would wait for that
        for ever."""
        if self.mode == "train":
            await self._put_away("veto", error)

    # ------------------------------------------------------------------------------------------

    async def _open(self) -> dict[str, Any]:
        body: dict[str, Any] = {"task_id": self.task_id}
        if self.mode == "eval":
            body["mode"] = "eval"
            return await self._post("/rl/v1/start_session", body, self._admin_key)
        return await self._post("/rl/start_session", body, self._admin_key, waits_for_slot=False)

    async def _keep_alive(self) -> None:
        path = f"/rl/v1/sessions/{self.session_id}/heartbeat"
        while True:
            await asyncio.sleep(_HEARTBEAT)
            try:
                await self._post(path, {}, self.session_api_key)
            except errors.AnyAgentError as error:
                # The next request says what it means for the episode.
                log.debug("heartbeat of %s: %s", self.session_id, error.message)

    async def _stop_heartbeat(self) -> None:
        if self._alive is not None:
            self._alive.cancel()
            await asyncio.wait([self._alive])

    async def _put_away(self, how: Literal["abort", "veto"], error: BaseException) -> None:
        """Nobody may wait long for it: a session that nobody ends expires, and what a trainer
        leaves behind is put away at its next start."""
        path, body = f"/rl/v1/sessions/{self.session_id}/{how}", {"reason": _reason(error)}
        request = self._post(path, body, self.session_api_key, patience=2.0, limit=5.0)
        try:
            ended = await asyncio.shield(request)
            self.called = bool(ended.get("interactions", True))
        except errors.AnyAgentError as refused:
            # One that is over, or handed out, needs nothing more: the end of a run cuts many there.
            settled = isinstance(refused, errors.SessionClosed | errors.Conflict)
            level = logging.INFO if settled else logging.WARNING
            log.log(level, "session %s is left as it is: %s", self.session_id, refused.message)

    async def _post(
        self,
        path: str,
        body: dict[str, Any],
        key: str | Callable[[], str] | None,
        *,
        limit: float = _ANSWER_TIMEOUT,
        patience: float | None = None,
        waits_for_slot: bool = True,
    ) -> dict[str, Any]:
        """The answer to a request that happens once however often it is sent."""
        headers = {"Idempotency-Key": uuid.uuid4().hex}
        if key is not None:
            headers["Authorization"] = f"Bearer {key() if callable(key) else key}"
        deadline = time.monotonic() + (self._patience if patience is None else patience)
        delay = 0.1
        while True:
            error = await self._sent(path, body, headers, limit)
            if isinstance(error, dict):
                return error
            no_slot = isinstance(error, errors.TooManyRequests) and not waits_for_slot
            wait = max(delay, error.retry_after or 0.0)
            if error.status not in _RETRY_DELAY or no_slot or time.monotonic() + wait > deadline:
                raise error
            await asyncio.sleep(jittered(wait, 1.0, 1.2))
            delay = min(2 * delay, 5.0)

    async def _sent(
        self, path: str, body: dict[str, Any], headers: dict[str, str], limit: float
    ) -> dict[str, Any] | errors.AnyAgentError:
        """The answer, or the error that it is."""
        timeout = aiohttp.ClientTimeout(total=limit)
        url = self.base_url + path
        try:
            async with self._session.post(
                url, json=body, headers=headers, timeout=timeout
            ) as answer:
                content = await answer.read()
                if answer.status < 400:
                    return dict(json.loads(content))
                after = answer.headers.get("Retry-After")
                error = errors.from_response(answer.status, content, after)
        except (aiohttp.InvalidURL, ValueError) as bad:
            raise errors.ConfigError(
                f"{self.base_url} is no URL of a service ({bad}): it is like http://127.0.0.1:8000"
            ) from bad
        except (aiohttp.ClientError, TimeoutError) as away:
            return errors.ServiceUnavailable(
                f"{self.base_url} does not answer ({type(away).__name__}); is the service running?"
            )
        return error


def task_name(task: object) -> str:
    """A task's name as sessions' ids can hold it: its own, or one that is made of it."""
    name = str(task)
    if _TASK.fullmatch(name):
        return name
    return f"task-{blake2b(name.encode(errors='replace'), digest_size=12).hexdigest()}"


def _reason(error: BaseException) -> str:
    """An error in the service's words; one of foreign code may hold anything, or not be told."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        text = type(error).__name__
    return Redactor().text(text)[:200].encode(errors="replace").decode()


def exported_interactions(answer: dict[str, Any]) -> dict[str, InteractionWithTokenLogpReward]:
    """Return the interactions of an answer of `/export_trajectories`, by id.

    Raises AnyAgentError for an answer that holds no tensors.
    """
    return InteractionWithTokenLogpReward.link(
        {id: _interaction(id, one) for id, one in answer["interactions"].items()}
    )


def _interaction(id: str, exported: dict[str, Any]) -> InteractionWithTokenLogpReward:
    tensors = {name: _array(one) for name, one in exported["tensor_dict"].items()}
    said = {name: exported.get(name) for name in _SAID}
    return InteractionWithTokenLogpReward.from_tensors(id, tensors, **said)


def _array(tensor: dict[str, Any]) -> npt.NDArray[Any]:
    try:
        flat = np.frombuffer(base64.b64decode(tensor["data"]), _DTYPES[tensor["dtype"]])
        return flat.reshape(tensor["shape"])
    except (KeyError, ValueError, binascii.Error) as error:
        raise errors.AnyAgentError(f"the service exported no tensor: {error!r}") from error
