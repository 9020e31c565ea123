"""The `/rl` routes: sessions and rewards for agents, leases and weights for the trainer."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Query
from starlette.requests import Request
from starlette.responses import Response

from any_agent.errors import AnyAgentError, InvalidRequest
from any_agent.protocol import (
    Abort,
    Ack,
    Acked,
    Capacity,
    ExportTrajectories,
    Finalize,
    Lease,
    Pause,
    PublishedVersion,
    RewardSet,
    RunInfo,
    SessionInfo,
    SessionStarted,
    SetCapacity,
    SetReward,
    SetRun,
    StartSession,
)
from any_agent.record import InteractionTree, export_rows, pack_trajectories, propagate_rewards
from any_agent.record import to_json as row_to_json
from any_agent.types import SessionMode, SessionState, Trajectory
from proxy_ext.service import Service
from proxy_ext.session import EXPORT_OWNER
from proxy_ext.wire.http import JSONResponse, while_present

router = APIRouter(prefix="/rl/v1")
MSGPACK = "application/x-msgpack"


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def admin_service(request: Request) -> Service:
    service = service_of(request)
    service.auth.require_admin(request)
    return service


Anyone = Annotated[Service, Depends(service_of)]
Admin = Annotated[Service, Depends(admin_service)]
# Everything in these bodies has a default, so none is needed.
Start = Annotated[StartSession, Body(default_factory=StartSession)]
End = Annotated[Finalize, Body(default_factory=Finalize)]
Stop = Annotated[Abort, Body(default_factory=Abort)]
SessionQuery = Annotated[str | None, Query(alias="session_id")]


# -- agents ------------------------------------------------------------------------------------


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


# -- operators ---------------------------------------------------------------------------------


@router.get("/sessions")
async def list_sessions(
    service: Admin, limit: Annotated[int, Query(ge=1, le=1000)] = 100
) -> list[SessionInfo]:
    """Live sessions (open, finalized, leased), newest first."""
    live = list(service.sessions.live.values())[-limit:]
    return [session.info() for session in reversed(live)]


@router.post("/export_trajectories")
async def export(body: ExportTrajectories, service: Admin) -> Response:
    """Finalized sessions as tensors (JSON lists), rewards run back through the tree.

    It leases what it exports; `/rl/v1/ack` with owner "export" ends them.
    """
    earlier = service.leases.held_by(EXPORT_OWNER)
    trajectories = await service.leases.lease_sessions(body.session_ids, EXPORT_OWNER)
    try:
        out = _exported(trajectories, body)
    except AnyAgentError:
        fresh = [t.session_id for t in trajectories if t.session_id not in earlier]
        await service.leases.give_back(fresh, EXPORT_OWNER)
        raise
    return JSONResponse({"style": body.style, "discount": body.discount, "trajectories": out})


def _exported(trajectories: list[Trajectory], body: ExportTrajectories) -> dict[str, Any]:
    """Session id -> interaction id -> row."""
    out: dict[str, Any] = {}
    for t in trajectories:
        rewards = propagate_rewards(
            t.interactions, discount=body.discount, final_reward=t.final_reward
        )
        tree = InteractionTree.from_interactions(t.interactions)
        rows = export_rows(tree, rewards, body.style)
        out[t.session_id] = {id: row_to_json(row) for id, row in rows.items()}
    return out


# -- trainer -----------------------------------------------------------------------------------


@router.get("/capacity")
async def get_capacity(service: Admin) -> Capacity:
    return service.leases.capacity()


@router.put("/capacity")
async def set_capacity(body: SetCapacity, service: Admin) -> Capacity:
    """Cap the train sessions ever admitted here; renews the owner's leases."""
    return await service.leases.set_capacity(body)


@router.post("/lease", response_class=Response)
async def lease(body: Lease, request: Request, service: Admin) -> Response:
    """Closed groups as msgpack (`any_agent.record.codec`); 204 when none came in time."""
    trajectories = await while_present(request, service.leases.lease(body))
    if not trajectories:
        return Response(status_code=204)
    return Response(pack_trajectories(trajectories), media_type=MSGPACK)


@router.post("/ack")
async def ack(body: Ack, service: Admin) -> Acked:
    """Sessions trained on, or rejected with a reason."""
    return Acked(acked=await service.leases.ack(body))


@router.post("/pause")
async def pause(body: Pause, service: Admin) -> RunInfo:
    """Stop sampling for a weight update; calls wait."""
    await service.run.pause(body.ttl)
    return service.run.info


@router.post("/version")
async def publish_version(body: PublishedVersion, service: Admin) -> RunInfo:
    """The engine holds these weights now."""
    await service.run.publish(body)
    return service.run.info


@router.get("/version")
async def get_version(request: Request, service: Anyone) -> dict[str, int]:
    await service.auth.session_or_none(request)
    return {"version": service.run.version, "step": service.run.step}


@router.post("/resume")
async def resume(service: Admin) -> RunInfo:
    """Go on sampling."""
    await service.run.resume()
    return service.run.info


@router.put("/run")
async def set_run(body: SetRun, service: Admin) -> RunInfo:
    """The run's state and newest checkpoint, told by the trainer."""
    await service.run.set_run(body)
    if service.run.state == "training":
        service.sessions.admission.reopen()
    else:
        service.sessions.admission.close(service.run.not_training())
    return service.run.info


def _one(in_body: str | None, in_query: str | None) -> str | None:
    if in_body and in_query and in_body != in_query:
        raise InvalidRequest("session_id differs between body and query", code="session_mismatch")
    return in_body or in_query


def stats(service: Service) -> dict[str, Any]:
    """Counts for `/healthz`."""
    live = service.sessions.live.values()
    return {
        "open": sum(s.state is SessionState.OPEN for s in live),
        "open_train": sum(
            s.state is SessionState.OPEN and s.mode is SessionMode.TRAIN for s in live
        ),
        "buffered": sum(s.state is not SessionState.OPEN for s in live),
        "calls": len(service.calls),
    }
