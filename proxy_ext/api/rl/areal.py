"""The routes that AReaL's documents name, with their bodies and answers, over our sessions.

A client written for AReaL needs only another URL. docs/reference/from-areal.md lists the
differences in meaning. Trajectories are tensors in base64, with their messages.
"""

from __future__ import annotations

import asyncio
import base64
import time
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import orjson
from fastapi import APIRouter, Body
from pydantic import BaseModel, ConfigDict, Field
from pydantic.types import StringConstraints
from starlette.requests import Request
from starlette.responses import Response

from any_agent.auth.access import Caller, Scope
from any_agent.errors import AnyAgentError, RunFinished, TooManyRequests
from any_agent.protocol.rl import (
    GRANT_ONLY_HEADER,
    Rewards,
    SessionInfo,
    SessionStarted,
    StartSession,
)
from any_agent.protocol.training import Ack
from any_agent.record import (
    InteractionTree,
    InteractionWithTokenLogpReward,
    chat_completion_of,
    propagate_rewards,
)
from any_agent.record.content_removal import lacks_texts
from any_agent.types import SessionMode, SessionState, Trajectory
from proxy_ext.admission.fleet_place import RouterChoice, choice_of
from proxy_ext.api.rl.strict_body import Anyone, Once, StrictRoute, Who, shaped
from proxy_ext.auth import SESSIONS_SCOPE_KEY
from proxy_ext.journal.base import EXPORT_OWNER, KeepAnswer, no_receipt
from proxy_ext.leases import trajectory
from proxy_ext.service import RankService
from proxy_ext.sessions.rewards import NO_PARTS, author, is_agent, parts_of
from proxy_ext.sessions.session import RecordedSession
from proxy_ext.sessions.slots import GrantedSlot
from proxy_ext.web.drain import draining
from proxy_ext.web.exchange import while_present

router = APIRouter(route_class=StrictRoute)

_REFRESH_WAIT = 115.0
"""Longest wait in seconds of a key's next session for a slot; AReaL's clients stop after 130."""
_SLICE = 2.0
"""Seconds of one wait for a slot that the trainer admits, before grants are checked again."""
_EXPORT_WAIT = 240.0
"""Longest wait in seconds of an export for its session's end; aiohttp's clients stop after 300."""
_EMPTY = "ended without a model call"

_TASK = "^[A-Za-z0-9][A-Za-z0-9._-]{0,47}$"
Task = Annotated[str, StringConstraints(pattern=_TASK)]
"""A task's name; it is shorter than other names because the session's id contains it."""


class _ArealBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ArealGrant(_ArealBody):
    task_id: Task | None = None
    """The task of the session: behind a router the slot is at the rank of the task's sessions."""
    change: Literal[-1, 1] = 1
    """-1 takes back a grant that is not used yet, so that a router can move it to another rank."""
    of: Literal["run", "others"] | None = None
    """The owner: `run` for the run's own trainer, `others` for all others; None: the caller."""


class ArealStart(_ArealBody):
    task_id: Task | None = None
    """None: the session is in no group, and its id begins with `task`."""
    api_key: str | None = None
    """An earlier session's key: that session ends, and the next one opens with the key."""
    grant_only: bool = False
    """Use only a slot of `/grant_capacity`."""
    rewards: Rewards | None = None
    """The same choice as in `/rl/v1/start_session`; the answer has no `judge_key`."""


class ArealStarted(BaseModel):
    session_id: str
    api_key: str


class ArealReward(_ArealBody):
    session_id: str | None = None
    reward: float = Field(ge=-1e6, le=1e6)
    interaction_id: str | None = None
    """None: the last interaction."""


class ArealDone(BaseModel):
    message: Literal["success"] = "success"


class ArealEnd(_ArealBody):
    session_id: str | None = None


class ArealEnded(ArealDone):
    interaction_count: int


class ArealExport(_ArealBody):
    session_id: str
    discount: float = Field(1.0, ge=0, le=1)
    style: Literal["individual", "concat"] = "individual"
    drop_retry_orphans: bool = False
    """Has no effect: answers that a retry replaced are never trained on here."""


class ArealHealth(BaseModel):
    status: Literal["ok"] = "ok"
    workers: int


class ArealTensor(BaseModel):
    type: Literal["tensor"]
    data: str
    """Base64 of the values, little-endian, row by row."""
    shape: list[int]
    """[1, tokens]; for `rewards` [1]."""
    dtype: str
    """`torch.int32`, `torch.float32` or `torch.bool`."""


class ArealModelResponse(BaseModel):
    """The engine's input and output, with a log-probability and a version per output token."""

    input_tokens: list[int]
    output_tokens: list[int]
    output_logprobs: list[float]
    output_versions: list[int]
    stop_reason: Literal["stop", "length", "abort"]


class ArealInteraction(BaseModel):
    tensor_dict: dict[str, ArealTensor]
    """`input_ids`, `loss_mask`, `logprobs`, `versions`, `attention_mask`, `rewards`."""
    reward: float
    """The reward, with the discounted rewards of later turns."""
    interaction_id: str
    parent_id: str | None
    """The interaction that this one continues."""
    role: str
    """The agent of the session that made the call; "" for one without a name."""
    messages: list[dict[str, Any]]
    """The request's messages; empty where the run keeps no texts (`sessions.store_content`)."""
    output_message_list: list[dict[str, Any]] | None
    """The answer, as a list of one message; null without texts."""
    completion: dict[str, Any] | None
    """The answer of any API as OpenAI's ChatCompletion; null without texts."""
    model_response: ArealModelResponse


class ArealTrajectories(BaseModel):
    interactions: dict[str, ArealInteraction]


End = Annotated[ArealEnd, Body(default_factory=ArealEnd)]
Start = Annotated[ArealStart, Body(default_factory=ArealStart)]
Grant = Annotated[ArealGrant, Body(default_factory=ArealGrant)]


@router.get("/health")
async def health(service: Anyone) -> ArealHealth:
    """Report that the process lives; behind the router, the number of ranks that serve."""
    return ArealHealth(workers=1)


@router.post("/grant_capacity", response_model=GrantedSlot)
async def grant_capacity(
    body: Grant, request: Request, service: Anyone, caller: Who, receipt: Once
) -> Response:
    """Allow `/rl/start_session` to open one more train session, without a group.

    Only the run's own trainer can use its grants. Conflict (`no_grant`) if there is none to take
    back.
    """
    sessions = service.sessions
    grants = sessions.grants_of(caller)
    if body.of is not None:
        grants = sessions.run_grants if body.of == "run" else sessions.grants
    if body.change > 0:
        choice = choice_of(request)
        await service.fleet.catch_up(choice)
        service.fleet.require_new(choice)
    return receipt.response(await grants.add(receipt.keep, body.change))


@router.post("/rl/start_session", response_model=ArealStarted)
async def start_session(
    body: Start, request: Request, service: Anyone, caller: Who, receipt: Once
) -> Response:
    """Open a session on a granted slot, else on one that the trainer admits, in its task's group.

    The key of an earlier session ends that session first.
    """
    keep = shaped(receipt.keep, _started)
    only = body.grant_only or GRANT_ONLY_HEADER in request.headers
    opening = _start(service, body, caller, keep, grant_only=only, choice=choice_of(request))
    return receipt.response(_started(await while_present(request, opening)))


async def _start(
    service: RankService,
    body: ArealStart,
    caller: Caller,
    keep: KeepAnswer,
    *,
    grant_only: bool,
    choice: RouterChoice,
) -> SessionStarted:
    if grant_only and not service.sessions.grants_of(caller).left:
        # Refused before an earlier session is ended for it.
        raise TooManyRequests("no slot is granted on this rank; try again", retry_after=2)
    ended = False
    if body.api_key is not None:
        # Shielded: a client that leaves now must not leave the journal ahead of the memory.
        ended = await asyncio.shield(_end_earlier(service, body.api_key, caller))
    deadline = time.monotonic() + (_REFRESH_WAIT if ended else 0.0)
    task = body.task_id or "task"
    while True:
        began = time.monotonic()
        wait = min(_SLICE, max(0.0, deadline - began))
        start = StartSession(
            task_id=body.task_id,
            group_size=None,
            ttl=None,
            wait=wait,
            api_key=body.api_key,
            rewards=body.rewards,
        )
        try:
            return await service.opening.open(
                start, caller, keep, areal_task=task, grant_only=grant_only, choice=choice
            )
        except (TooManyRequests, RunFinished) as error:
            # Without a training only grants give slots.
            hopeless = isinstance(error, RunFinished) and not service.sessions.grants.granted
            if hopeless or not wait or grant_only:
                raise
        # An open that is refused at once, as for a quota, has not waited.
        await asyncio.sleep(began + wait - time.monotonic())


async def _end_earlier(service: RankService, api_key: str, caller: Caller) -> bool:
    """End the key's session if it is open and the caller's; the open itself refuses other keys."""
    lane = service.auth.access.signer.verify(api_key)
    session = await service.sessions.by_lane(lane.id) if lane is not None else None
    if session is None or session.state is not SessionState.OPEN:
        return False
    if caller.scope is Scope.TENANT and session.row.tenant != caller.tenant:
        return False
    await _end(service, session, caller, no_receipt)
    return True


def _started(started: SessionStarted) -> ArealStarted:
    return ArealStarted(session_id=started.session_id, api_key=started.api_key)


@router.post("/rl/set_reward", response_model=ArealDone)
async def set_reward(
    body: ArealReward, request: Request, service: Anyone, caller: Who, receipt: Once
) -> Response:
    """Reward an interaction, by default the last one."""
    session = await service.auth.session(request, body.session_id)
    keep = shaped(receipt.keep, lambda _: ArealDone())
    parts = parts_of(body.reward)
    by = author(session.row, caller, gives=True)
    await service.rewards.set_reward(session, parts, body.interaction_id, by=by, keep=keep)
    return receipt.response(ArealDone())


@router.post("/rl/end_session", response_model=ArealEnded)
async def end_session(
    body: End, request: Request, service: Anyone, caller: Who, receipt: Once
) -> Response:
    """End a session; training gets its trajectory. A repeated end has the same answer."""
    session = await service.auth.session(request, body.session_id)
    over = await _over(service, session)
    if over is None:
        over = await _end(service, session, caller, receipt.keep)
    elif receipt.key is not None and service.endings.keeps_repeat(session):
        await receipt.store(over)
    return receipt.response(over)


async def _over(service: RankService, session: RecordedSession) -> ArealEnded | None:
    """Return the answer of the session's first end, if it was ended by this route."""
    if session.state in (SessionState.OPEN, SessionState.AWAITING_REWARD, SessionState.EXPIRED):
        return None
    if session.state is SessionState.ABORTED and session.row.reason != _EMPTY:
        return None
    await service.sessions.load(session)
    return ArealEnded(interaction_count=len(session.tree))


async def _end(
    service: RankService, session: RecordedSession, caller: Caller, keep: KeepAnswer
) -> ArealEnded:
    """Finalize a session; abort one without a model call, which has nothing to train on."""
    kept = shaped(keep, _ended)
    if is_agent(session.row, caller):
        return _ended(await service.endings.end_by_agent(session, caller, NO_PARTS, keep=kept))
    await service.sessions.load(session)
    if session.state is SessionState.OPEN and not len(session.tree) and not session.calls:
        info = await service.endings.abort(session, _EMPTY, keep=kept)
    else:
        info = await service.endings.finalize(session, by=caller.name, keep=kept)
    return _ended(info)


def _ended(info: SessionInfo) -> ArealEnded:
    return ArealEnded(interaction_count=info.interactions)


@router.post("/export_trajectories", response_model=ArealTrajectories)
async def export_trajectories(body: ArealExport, request: Request, service: Anyone) -> Response:
    """Return a session's interactions as tensors, once it has ended, for the caller to train on.

    An eval session may be exported any number of times, because it is not trained on.
    """
    request.scope[SESSIONS_SCOPE_KEY] = [body.session_id]
    session = await service.sessions.by_id(body.session_id)
    await while_present(request, _until_ended(service, session))
    return await _export(service, session, body)


async def _export(service: RankService, session: RecordedSession, body: ArealExport) -> Response:
    row = session.row
    if row.state is SessionState.ABORTED and row.reason == _EMPTY:
        return await exported([], body.discount, body.style)
    again = row.state is SessionState.TRAINED and row.owner == EXPORT_OWNER
    if (again or row.state is SessionState.EVALUATED) and row.content == "stored":
        # The first response may have been lost.
        await service.sessions.load(session)
        return await exported([trajectory(session)], body.discount, body.style)
    trajectories = await service.leases.lease_sessions([session.id], EXPORT_OWNER)
    try:
        response = await exported(trajectories, body.discount, body.style)
    except AnyAgentError:
        await service.leases.give_back([session.id], EXPORT_OWNER)
        raise
    await service.leases.ack(Ack(owner=EXPORT_OWNER, trained=[session.id]))
    return response


async def _until_ended(service: RankService, session: RecordedSession) -> None:
    """Wait for the session's end as long as clients do; after that the lease refuses it.

    Draining if the rank stops meanwhile.
    """
    if session.mode is not SessionMode.TRAIN:
        return
    ready = service.sessions.ready
    going_on = (SessionState.OPEN, SessionState.AWAITING_REWARD)
    try:
        async with asyncio.timeout(_EXPORT_WAIT), ready:
            await ready.wait_for(lambda: session.state not in going_on or service.calls.draining)
    except TimeoutError:
        pass
    if session.state in going_on and service.calls.draining:
        raise draining()


async def exported(trajectories: list[Trajectory], discount: float, style: str) -> Response:
    """Return the trajectories; Unprocessable if ``style`` is concat and a path not token-exact."""
    interactions: dict[str, Any] = {}
    for t in trajectories:
        rewards = propagate_rewards(t.interactions, discount=discount, final_reward=t.final_reward)
        tree = InteractionTree.from_interactions(t.interactions)
        found = InteractionWithTokenLogpReward.of_tree(tree, rewards, style)
        interactions |= {id: _exported(one, tree) for id, one in found.items()}
    # Each interaction has its whole prompt, so long sessions take a while.
    content = await asyncio.to_thread(orjson.dumps, {"interactions": interactions})
    return Response(content, media_type="application/json")


def _exported(one: InteractionWithTokenLogpReward, tree: InteractionTree) -> dict[str, Any]:
    node, response = tree[one.interaction_id], one.model_response
    assert response is not None
    has_texts = not any(map(lacks_texts, tree.path(node.id)))
    return {
        "tensor_dict": {name: _tensor(values) for name, values in one.row.items()},
        "reward": float(one.row["rewards"]),
        "interaction_id": node.id,
        "parent_id": node.parent_id,
        "role": node.role,
        "messages": one.messages if has_texts else [],
        "output_message_list": one.output_message_list if has_texts else None,
        "completion": chat_completion_of(node, len(response.input_tokens)) if has_texts else None,
        "model_response": {k: getattr(response, k) for k in ArealModelResponse.model_fields},
    }


def _tensor(values: npt.NDArray[Any]) -> dict[str, Any]:
    """Return one row as a batch of one."""
    little = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
    return {
        "type": "tensor",
        "data": base64.b64encode(little.tobytes()).decode(),
        "shape": [1, *values.shape],
        "dtype": f"torch.{values.dtype.name}",
    }
