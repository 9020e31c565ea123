"""Recorded answers of OpenAI's `/v1/responses`: their retrieval, deletion and input items."""

from __future__ import annotations

from dataclasses import replace

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from any_agent.completions.parsed_request import encode_whole, token_logprobs
from any_agent.completions.responses.stored_response import (
    answer_of,
    deleted_record,
    input_items,
    stored_encoder,
)
from any_agent.errors import InvalidRequest, UnsupportedParameter
from any_agent.record import InteractionTree
from proxy_ext.api.rl.strict_body import Anyone
from proxy_ext.journal import PutInteraction
from proxy_ext.service import RankService
from proxy_ext.sessions.session import RecordedSession
from proxy_ext.web.exchange import JSONResponse

router = APIRouter()

_MAX_PAGE = 100
_DEFAULT_PAGE = 20


@router.get("/responses/{response_id}", name="again")
async def response(response_id: str, request: Request, service: Anyone) -> Response:
    """Return a recorded answer of the session, whatever the session's state is."""
    if request.query_params.get("stream", "false") not in ("false", "0"):
        raise UnsupportedParameter(
            "a stored answer is not streamed: leave stream out", param="stream"
        )
    tree = await _tree(service, request, response_id)
    interaction = answer_of(response_id, tree)
    chat = service.completer.chat
    answer, call = stored_encoder(interaction, tree, token_logprobs(chat), chat)
    body = await encode_whole(answer, call, [interaction])
    return Response(body, media_type="application/json")


@router.delete("/responses/{response_id}", name="delete")
async def delete_response(response_id: str, request: Request, service: Anyone) -> Response:
    """Delete an answer: it can no longer be retrieved, or continued by its id.

    Its record stays a part of its session, until the whole session is deleted.
    """
    session = await _session(service, request, response_id)
    async with session.lock:
        session.require_open()
        await service.sessions.load(session)
        interaction = answer_of(response_id, session.tree)
        deleted = deleted_record(interaction)
        await service.journal.commit(PutInteraction(replace(interaction, request=deleted)))
        interaction.request = deleted
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


@router.get("/responses/{response_id}/input_items", name="items")
async def response_items(response_id: str, request: Request, service: Anyone) -> Response:
    """Return the input items of an answer, the latest first unless `order` is `asc`."""
    limit, order, after = _page(request)
    tree = await _tree(service, request, response_id)
    items = input_items(answer_of(response_id, tree), tree)
    if order == "desc":
        items.reverse()
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise InvalidRequest("after must be the id of one of the items", param="after")
        items = items[ids.index(after) + 1 :]
    page = items[:limit]
    return JSONResponse(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(items) > limit,
        }
    )


async def _session(service: RankService, request: Request, id: str) -> RecordedSession:
    """Return the caller's session; for an agent that opens none, the one with this answer."""
    named = request.query_params.get("session_id")
    session = await service.auth.session_or_none(request, named)
    caller = service.auth.caller(request)
    if session is None and service.implicit.accepts(caller):
        session = await service.implicit.session_of(caller, id)
    return session if session is not None else await service.auth.session(request, named)


async def _tree(service: RankService, request: Request, id: str) -> InteractionTree:
    """Return the tree of the caller's session; it stays in memory until the next `await`."""
    session = await _session(service, request, id)
    await service.sessions.load(session)
    return session.tree


def _page(request: Request) -> tuple[int, str, str | None]:
    query = request.query_params
    limit, order = query.get("limit", str(_DEFAULT_PAGE)), query.get("order", "desc")
    short = len(limit) <= len(str(_MAX_PAGE))
    if not (short and limit.isascii() and limit.isdigit() and 1 <= int(limit) <= _MAX_PAGE):
        raise InvalidRequest(f"limit must be from 1 to {_MAX_PAGE}", param="limit")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc", param="order")
    return int(limit), order, query.get("after")
