"""`OpenAIProxyClient`: one session of a service, from its start to its export."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import logging
import re
from collections.abc import Callable
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal, Self

import httpx
import numpy as np
import numpy.typing as npt

from any_agent import errors
from any_agent.client.aiohttp_transport import AiohttpTransport
from any_agent.client.backoff import wait_for_slot
from any_agent.client.rl_client import RLClient
from any_agent.record import InteractionWithTokenLogpReward
from any_agent.runtime.logs import Redactor

if TYPE_CHECKING:
    import aiohttp

log = logging.getLogger(__name__)

_TASK = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,47}")
_DTYPES = {"torch.int32": "<i4", "torch.float32": "<f4", "torch.bool": "?"}
_CONTENT = ("messages", "output_message_list", "completion", "model_response", "parent_id")
"""Fields of an exported interaction beside its tensors; older services leave them out."""
_NO_SLOT = "no_capacity"
_EXPORT_SLACK = 240.0
"""Seconds beyond a request's usual timeout: an export may wait for calls that are ending."""
HEARTBEAT = 60.0  # seconds between heartbeats while the agent is busy elsewhere
_ABORT_TIMEOUT = 7.0
_CALL_ERRORS = {"APIError", "ClientError", "RequestException", "URLError"}
"""Names, which need no import, of the errors of OpenAI's and Anthropic's SDKs, of aiohttp, requests
and urllib."""


class OpenAIProxyClient:
    """A session of the service at ``base_url``: open inside the ``async with``, exported after it.

    ``session`` is the caller's HTTP session, ``admin_api_key`` an admin's or a trainer's key (a
    function for a key that changes, None where the service requires no keys). An exception inside
    the block aborts the session: it is never trained on. In the mode ``eval`` the session needs no
    grant, is sampled as the agent asks, and is never trained on. Each request waits up to
    ``patience`` seconds for a service that is full or unreachable, and takes effect only once.

    Methods raise the AnyAgentError of the service's response.
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
        """Number of the session's model calls, once it has ended."""
        self.called: bool | None = None
        """True if there was any call, also after an abort; None while that is unknown."""
        self._client = RLClient(
            self.base_url,
            admin_key=admin_api_key,
            retry_for=patience,
            http=AiohttpTransport(session=session),
        )
        self._patience = patience
        self._key: str | None = None
        self._alive: asyncio.Task[None] | None = None

    @property
    def session_api_key(self) -> str:
        """The agent's API key; ValueError before the session is open."""
        if self._key is None:
            raise ValueError("the session is not open: use the client in an async with")
        return self._key

    @property
    def session_url(self) -> str:
        """The agent's base URL, `http://host:port/<key>/v1`, which names the session whatever key
        the agent sends. ValueError before the session is open."""
        return f"{self.base_url}/{self.session_api_key}/v1"

    async def grant_capacity(self) -> None:
        """Grant a slot for one more session at the rank that serves this task."""
        await self._call("/grant_capacity", {"task_id": self.task_id})

    async def __aenter__(self) -> Self:
        """Open the session; grant another slot where another session took the first one."""

        async def grant_again(error: errors.TooManyRequests, waited: float) -> None:
            if error.code == _NO_SLOT and self.mode == "train":
                await self.grant_capacity()

        self.session_id, self._key = await wait_for_slot(
            self._open, patience=self._patience, refused=grant_again
        )
        self._alive = asyncio.create_task(self._keep_alive())
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        await self._stop_heartbeat()
        if error is not None:
            await self._discard("abort", error)
            return
        try:
            ended = await self._call("/rl/end_session", {}, key=self.session_api_key)
        except BaseException as refused:
            await self._discard("abort", refused)
            raise
        self.interaction_count = int(ended["interaction_count"])
        self.called = self.interaction_count > 0

    async def set_reward(self, completion_id: str, reward: float) -> None:
        """Reward the completion or response of this id; NotFound if the session has none."""
        await self._reward({"completion_id": completion_id, "reward": reward})

    async def set_last_reward(self, reward: float) -> None:
        """Reward the last completion; Unprocessable (`no_interactions`) if there is none."""
        await self._reward({"reward": reward})

    async def export_interactions(
        self, discount: float = 1.0, style: str = "individual"
    ) -> dict[str, InteractionWithTokenLogpReward]:
        """Return the recorded interactions by id, with final rewards, after the session has ended.

        Fields beside the tensors that the service leaves out are None.

        ``individual``: every interaction; ``concat``: each path's leaf, Unprocessable where a path
        is not token-exact.
        """
        if self.session_id is None:
            raise ValueError("there is no session to export yet: open it first")
        body = {"session_id": self.session_id, "discount": discount, "style": style}
        exported = await self._call("/export_trajectories", body, slack=_EXPORT_SLACK)
        return exported_interactions(exported)

    async def discard(self, error: BaseException) -> None:
        """Veto an ended session whose export failed: it would wait for its export for ever."""
        if self.mode == "train":
            await self._discard("veto", error)

    async def _open(self) -> tuple[str, str]:
        """Return the id and the key of a new session."""
        # Whatever the service's default is: this client rewards the session by its own key.
        body = {"task_id": self.task_id, "rewards": "agent"}
        if self.mode == "eval":
            opened = await self._call("/rl/v1/start_session", body | {"mode": "eval"})
        else:
            opened = await self._call("/rl/start_session", body)
        return str(opened["session_id"]), str(opened["api_key"])

    async def _keep_alive(self) -> None:
        path = f"/rl/v1/sessions/{self.session_id}/heartbeat"
        while True:
            await asyncio.sleep(HEARTBEAT)
            try:
                await self._call(path, {}, key=self.session_api_key)
            except errors.AnyAgentError as error:
                # The next request will show this error.
                log.debug("cannot send the heartbeat of %s: %s", self.session_id, error.message)

    async def _stop_heartbeat(self) -> None:
        if self._alive is not None:
            self._alive.cancel()
            await asyncio.wait([self._alive])

    async def _reward(self, body: dict[str, Any]) -> None:
        await self._call("/rl/v1/set_reward", body, key=self.session_api_key)

    async def _discard(self, how: Literal["abort", "veto"], error: BaseException) -> None:
        """Abort or veto the session, within a bounded time and without raising.

        A session that is left open expires, and the next start of a trainer vetoes its leftovers.
        """
        path, body = f"/rl/v1/sessions/{self.session_id}/{how}", {"reason": _reason(error)}
        try:
            ended = await asyncio.shield(self._call_briefly(path, body))
            self.called = bool(ended.get("interactions", True))
        except errors.AnyAgentError as refused:
            # A closed or leased session needs no abort, which is usual at the end of a run.
            settled = isinstance(refused, errors.SessionClosed | errors.Conflict)
            level = logging.INFO if settled else logging.WARNING
            log.log(level, "cannot %s session %s: %s", how, self.session_id, refused.message)

    async def _call_briefly(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            async with asyncio.timeout(_ABORT_TIMEOUT):
                return await self._call(path, body, key=self.session_api_key, retry_for=2.0)
        except TimeoutError:
            raise errors.ServiceUnavailable(f"{self.base_url} does not answer in time") from None

    async def _call(self, path: str, body: dict[str, Any], **how: Any) -> dict[str, Any]:
        """Send a request that takes effect once, however often it is sent; return its answer."""
        response = await self._client.request("POST", path, body, once=True, base="", **how)
        try:
            answer = json.loads(response.content)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise errors.WrongService(
                f"the server at {self.base_url} (status {response.status_code}) did not answer "
                "with a JSON object: check the URL"
            )
        return answer


def is_of_call(error: BaseException) -> bool:
    """Return True for the error of a call to any server: the connection's, or the answer's."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, ConnectionError | httpx.HTTPError) or bool(_CALL_ERRORS & names)


def task_name(task: object) -> str:
    """Return a task's name in a form for session ids: its own, or a digest of it."""
    name = str(task)
    if _TASK.fullmatch(name):
        return name
    return f"task-{blake2b(name.encode(errors='replace'), digest_size=12).hexdigest()}"


def _reason(error: BaseException) -> str:
    """Return an error's text in a form that the service always accepts."""
    try:
        text = f"{type(error).__name__}: {error}".removesuffix(": ")
    except Exception:
        text = type(error).__name__
    if isinstance(error, asyncio.CancelledError):
        text = "its episode was cancelled: by a time limit, the end of its run, or its own program"
    return Redactor().text(text)[:200].encode(errors="replace").decode()


def exported_interactions(answer: dict[str, Any]) -> dict[str, InteractionWithTokenLogpReward]:
    """Return the interactions of a reply of `/export_trajectories` by id.

    Raises AnyAgentError for a reply without valid tensors.
    """
    return InteractionWithTokenLogpReward.link(
        {id: _interaction(id, one) for id, one in answer["interactions"].items()}
    )


def _interaction(id: str, exported: dict[str, Any]) -> InteractionWithTokenLogpReward:
    tensors = {name: _array(one) for name, one in exported["tensor_dict"].items()}
    content = {name: exported.get(name) for name in _CONTENT}
    role = exported.get("role", "")
    return InteractionWithTokenLogpReward.from_tensors(id, tensors, role=role, **content)


def _array(tensor: dict[str, Any]) -> npt.NDArray[Any]:
    try:
        flat = np.frombuffer(base64.b64decode(tensor["data"]), _DTYPES[tensor["dtype"]])
        return flat.reshape(tensor["shape"])
    except (KeyError, ValueError, binascii.Error) as error:
        raise errors.AnyAgentError(f"the service exported an invalid tensor: {error!r}") from error
