"""The `/rl` routes of operators: what there is, and its export as tensors."""

from __future__ import annotations

from itertools import islice
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from any_agent.errors import AnyAgentError
from any_agent.protocol import ExportTrajectories, SessionInfo
from any_agent.record import InteractionTree, export_rows, propagate_rewards
from any_agent.record import to_json as row_to_json
from any_agent.types import Trajectory
from proxy_ext.auth import SESSIONS_SCOPE_KEY, is_callers
from proxy_ext.lifecycle import EXPORT_OWNER
from proxy_ext.rl.common import Anyone, Who
from proxy_ext.rl.strict import StrictRoute
from proxy_ext.wire.http import JSONResponse

router = APIRouter(prefix="/rl/v1", route_class=StrictRoute)


@router.get("/sessions")
async def list_sessions(
    service: Anyone, caller: Who, limit: Annotated[int, Query(ge=1, le=1000)] = 100
) -> list[SessionInfo]:
    """Live sessions (open, finalized, leased), newest first; a tenant's own for its keys."""
    newest = reversed(service.sessions.live.values())
    shown = (s for s in newest if is_callers(s, caller))
    return [session.info() for session in islice(shown, limit)]


@router.post("/export_trajectories")
async def export(body: ExportTrajectories, request: Request, service: Anyone) -> Response:
    """Finalized sessions as tensors (JSON lists), rewards run back through the tree.

    It leases what it exports; `/rl/v1/ack` with owner "export" ends them.
    """
    request.scope[SESSIONS_SCOPE_KEY] = body.session_ids
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
