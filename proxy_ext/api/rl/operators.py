"""The `/rl` routes of operators: the list of sessions, their export, and the next task to run."""

from __future__ import annotations

import asyncio
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
from any_agent.rewards.next_task import draw, facts_of
from any_agent.types import SessionState, Trajectory
from proxy_ext.api.rl.strict_body import Anyone, StrictRoute, Who
from proxy_ext.auth import SESSIONS_SCOPE_KEY
from proxy_ext.journal.base import EXPORT_OWNER, NumberedRow, SessionFilter
from proxy_ext.sessions.groups import group_key
from proxy_ext.sessions.session import public_fields
from proxy_ext.web.exchange import JSONResponse

_LATEST = 1000
"""Sessions that are looked at where no task is named."""
_GROUPS_OF_TASK, _MOST_OF_TASK = 4, 256
"""Groups of each named task that are looked at, if they have the usual size, and sessions at
most."""

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
    lines = [_line(each).model_dump(mode="json") for each in page.rows]
    return JSONResponse(lines, headers=headers)


def _line(each: NumberedRow) -> SessionLine:
    row = each.row
    rewards = [r for r in (row.final_reward, each.interaction_reward) if r is not None]
    return SessionLine(
        **public_fields(row),
        number=each.number,
        interactions=each.interactions,
        rewards_given=each.rewards_given if row.content == "stored" else each.rewards_given or None,
        reward=sum(rewards) if rewards else None,
    )


@router.get("/tasks/next")
async def next_task(
    service: Anyone, caller: Who, query: Annotated[AskNextTask, Query()]
) -> NextTask:
    """Choose among these tasks, or those of the latest sessions, the one to run next.

    It is drawn at random: a task whose last group taught nothing (its sessions scored alike, or
    none could be trained on) half as often, after two or three in a row a quarter or an eighth as
    often. A tenant's key has the tenant's own sessions in view.
    """
    page, names = service.journal.page, list(dict.fromkeys(query.task_id))
    lines: dict[str, list[SessionLine]] = {name: [] for name in names}
    each = min(_GROUPS_OF_TASK * service.config.sessions.group_size, _MOST_OF_TASK)
    if names:
        wanted = [SessionFilter(task_id=name, tenant=caller.tenant) for name in names]
        pages = await asyncio.gather(*(page(one, before=None, limit=each) for one in wanted))
    else:
        latest = SessionFilter(tenant=caller.tenant)
        pages = [await page(latest, before=None, limit=_LATEST)]
    for line in (_line(one) for found in pages for one in found.rows):
        if line.task_id is not None and line.mode == "train":
            lines.setdefault(line.task_id, []).append(line)
    if not lines:
        raise NotFound(
            "no train session that this key may see has a task_id: name the tasks to choose from, "
            "as ?task_id=a&task_id=b",
            code="no_known_task",
        )
    keeps = service.config.train.dynamic_sampling == "keep"
    return draw([facts_of(name, found, keeps_alike=keeps) for name, found in lines.items()])


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
