"""The `/rl` routes of agents: open a session, reward it, end it, look at it."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Query
from starlette.requests import Request

from any_agent.errors import AnyAgentError, InvalidRequest
from any_agent.protocol import (
    Abort,
    Finalize,
    RewardSet,
    RunInfo,
    SessionInfo,
    SessionStarted,
    SetReward,
    StartSession,
)
from any_agent.types import SessionState
from proxy_ext.rl.common import Admin, Anyone
from proxy_ext.rl.strict import StrictRoute
from proxy_ext.service import Service
from proxy_ext.wire.http import while_present

router = APIRouter(prefix="/rl/v1", route_class=StrictRoute)
# Everything in these bodies has a default, so none is needed.
Start = Annotated[StartSession, Body(default_factory=StartSession)]
End = Annotated[Finalize, Body(default_factory=Finalize)]
Stop = Annotated[Abort, Body(default_factory=Abort)]
SessionQuery = Annotated[str | None, Query(alias="session_id")]


@router.post("/start_session")
async def start_session(body: Start, request: Request, service: Admin) -> SessionStarted:
    """Open a session; its key goes where the OpenAI key goes."""
    return await while_present(request, _start(body, service))


@router.get("/start_session")
async def start_session_by_query(
    request: Request, service: Admin, query: Annotated[StartSession, Query()]
) -> SessionStarted:
    """As POST, for people who type URLs; a key has no place in one."""
    if query.api_key is not None:
        raise InvalidRequest("send api_key in the body of a POST, not in a URL", param="api_key")
    return await while_present(request, _start(query, service))


async def _start(body: StartSession, service: Service) -> SessionStarted:
    try:
        if body.mode == "train":
            service.run.require_training()
        session, key = await service.opening.open(body)
    except AnyAgentError as error:
        service.opening.refused[error.code] += 1
        raise
    return SessionStarted(
        session_id=session.id,
        api_key=key,
        base_url=f"{service.public_url}/v1",
        mode=body.mode,
        version=service.run.version,
        group_id=session.row.group_id,
        task_id=session.row.task_id,
        expires_in=session.row.expires_at - session.row.created_at,
    )


@router.post("/set_reward")
async def set_reward(
    body: SetReward, request: Request, service: Anyone, query: SessionQuery = None
) -> RewardSet:
    """Reward a completion, by default the last one."""
    session = await service.auth.session(request, _one(body.session_id, query))
    if body.completion_id and body.interaction_id and body.completion_id != body.interaction_id:
        raise InvalidRequest("completion_id and interaction_id name different completions")
    wanted = body.interaction_id or body.completion_id
    interaction = await service.sessions.set_reward(session, body.reward, wanted)
    return RewardSet(session_id=session.id, interaction_id=interaction, reward=body.reward)


@router.post("/finalize")
async def finalize(
    body: End, request: Request, service: Anyone, query: SessionQuery = None
) -> SessionInfo:
    """End a session; its trajectory is handed to training."""
    session = await service.auth.session(request, _one(body.session_id, query))
    await service.sessions.finalize(session, body.final_reward)
    return session.info()


@router.get("/sessions/{session_id}")
async def get_session(session_id: str, request: Request, service: Anyone) -> SessionInfo:
    """What is recorded of a session: the caller's own, or any for the operator."""
    return await service.sessions.info(await service.auth.session(request, session_id))


@router.post("/sessions/{session_id}/abort")
async def abort(session_id: str, body: Stop, request: Request, service: Anyone) -> SessionInfo:
    """Throw a session away; its calls under way are aborted."""
    session = await service.auth.session(request, session_id)
    await service.sessions.end(session, SessionState.ABORTED, body.reason)
    return session.info()


@router.get("/run")
async def run_info(request: Request, service: Anyone) -> RunInfo:
    """What is trained here, and which checkpoint to load."""
    await service.auth.session_or_none(request)
    return service.run.info


def _one(in_body: str | None, in_query: str | None) -> str | None:
    if in_body and in_query and in_body != in_query:
        raise InvalidRequest("session_id differs between body and query", code="session_mismatch")
    return in_body or in_query
