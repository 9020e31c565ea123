"""The `/rl` routes of operators: the list of sessions, their export, and the next task to run."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from any_agent.errors import AnyAgentError, Forbidden, NotFound
from any_agent.protocol.rl import AFTER_HEADER, ListSessions, SessionLine, write_places
from any_agent.protocol.tasks import AskNextTask, NextTask
from any_agent.protocol.training import ExportTrajectories
from any_agent.record import InteractionTree, export_rows, propagate_rewards
from any_agent.record import to_json as row_to_json
from any_agent.rewards.next_task import draw
from any_agent.types import SessionState, Trajectory
from proxy_ext.api.rl.strict_body import Anyone, StrictRoute, Who
from proxy_ext.auth import SESSIONS_SCOPE_KEY
from proxy_ext.journal.base import EXPORT_OWNER, SessionFilter
from proxy_ext.sessions.groups import group_key
from proxy_ext.sessions.session import session_line
from proxy_ext.web.exchange import JSONResponse

router = APIRouter(prefix="/rl/v1", route_class=StrictRoute)


@router.get("/sessions", response_model=list[SessionLine])
async def list_sessions(
    service: Anyone, caller: Who, query: Annotated[ListSessions, Query()]
) -> Response:
    """List sessions, open and ended, the newest first; a tenant's key lists the tenant's own.

    While there are more, the header `x-any-agent-after` has the `after` of the next page; a page
    may be short, or empty, without being the last one.
    """
    if caller.tenant is not None and query.tenant not in (None, caller.tenant):
        raise Forbidden(f"this key shows the sessions of tenant {caller.tenant} only")
    tenant = caller.tenant or query.tenant
    group = query.group_id and group_key(query.group_id, None, tenant).name
    page = await service.journal.page(
        SessionFilter(
            SessionState(query.state) if query.state else None,
            query.task_id,
            group,
            tenant,
            query.min_reward,
            query.max_reward,
            query.reason or None,
            query.created_after,
            query.created_before,
        ),
        before=query.places.get(service.rank),
        limit=query.limit,
    )
    headers = {}
    if page.before is not None:
        headers[AFTER_HEADER] = write_places({service.rank: page.before})
    lines = [session_line(each).model_dump(mode="json") for each in page.rows]
    return JSONResponse(lines, headers=headers)


@router.get("/tasks/next")
async def next_task(
    service: Anyone, caller: Who, query: Annotated[AskNextTask, Query()]
) -> NextTask:
    """Choose among these tasks, or those of the latest sessions, the one to run next.

    It is drawn at random: a task whose last group taught nothing (its sessions scored alike, or
    none could be trained on) half as often, after two or three in a row a quarter or an eighth as
    often. A tenant's key has the tenant's own sessions in view. An answer may be a second old.
    """
    facts = await service.task_advice.facts(query.task_id, caller.tenant)
    if not facts:
        raise NotFound(
            "no train session that this key may see has a task_id: name the tasks to choose from, "
            "as ?task_id=a&task_id=b",
            code="no_known_task",
        )
    return draw(facts)


class Exported(BaseModel):
    """Rows of `any_agent.record` as lists, by session and interaction."""

    style: Literal["individual", "concat"]
    discount: float
    trajectories: dict[str, dict[str, dict[str, Any]]]


@router.post("/export_trajectories", response_model=Exported)
async def export(body: ExportTrajectories, request: Request, service: Anyone) -> Response:
    """Export finalized sessions as tensors (JSON lists), with rewards propagated in their trees.

    The sessions are leased; `/rl/v1/ack` with owner "export" ends them.
    """
    request.scope[SESSIONS_SCOPE_KEY] = body.session_ids
    earlier = service.leases.leased_by(EXPORT_OWNER)
    trajectories = await service.leases.lease_sessions(body.session_ids, EXPORT_OWNER)
    try:
        out = _exported(trajectories, body)
    except AnyAgentError:
        fresh = [t.session_id for t in trajectories if t.session_id not in earlier]
        await service.leases.give_back(fresh, EXPORT_OWNER)
        raise
    return JSONResponse({"style": body.style, "discount": body.discount, "trajectories": out})


def _exported(trajectories: list[Trajectory], body: ExportTrajectories) -> dict[str, Any]:
    """Return the rows by session id and interaction id."""
    out: dict[str, Any] = {}
    for t in trajectories:
        rewards = propagate_rewards(
            t.interactions, discount=body.discount, final_reward=t.final_reward
        )
        tree = InteractionTree.from_interactions(t.interactions)
        rows = export_rows(tree, rewards, body.style)
        out[t.session_id] = {id: row_to_json(row) for id, row in rows.items()}
    return out
