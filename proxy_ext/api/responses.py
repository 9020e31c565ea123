"""OpenAI's `/v1/responses`: calls, and recorded answers told again."""

from __future__ import annotations

from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from any_agent.completions.parsed_request import encode_whole, token_logprobs
from any_agent.completions.responses.stored_response import (
    answer_of,
    deleted_record,
    input_items,
    shape_again,
)
from any_agent.errors import InvalidRequest, UnsupportedParameter
from any_agent.record import InteractionTree
from proxy_ext.journal import PutInteraction
from proxy_ext.service import RankService
from proxy_ext.sessions.session import RecordedSession
from proxy_ext.web.exchange import JSONResponse

_MOST = 100
"""Items of a page."""
_PAGE = 20


async def response(service: RankService, request: Request, id: str) -> Response:
    """An answer of the session once more, whatever has become of the session since."""
    if request.query_params.get("stream", "false") not in ("false", "0"):
        raise UnsupportedParameter(
            "an answer is told again whole: leave stream out", param="stream"
        )
    tree = await _tree(service, request, id)
    interaction = answer_of(id, tree)
    chat = service.completer.chat
    answer, call = shape_again(interaction, tree, token_logprobs(chat), chat)
    body = await encode_whole(answer, call, [interaction])
    return Response(body, media_type="application/json")


async def delete_response(service: RankService, request: Request, id: str) -> Response:
    """Nobody gets the answer by its id any more, nor goes on from it by name.

    What was recorded of it stays: it is a part of its session, which is deleted whole.
    """
    session = await _session(service, request, id)
    async with session.lock:
        session.require_open()
        await service.sessions.load(session)
        interaction = answer_of(id, session.tree)
        deleted = deleted_record(interaction)
        await service.journal.commit(PutInteraction(replace(interaction, request=deleted)))
        interaction.request = deleted
    return JSONResponse({"id": id, "object": "response", "deleted": True})


async def response_items(service: RankService, request: Request, id: str) -> Response:
    """What an answer is an answer to, the latest item first unless `order` is `asc`."""
    limit, order, after = _page(request)
    tree = await _tree(service, request, id)
    items = input_items(answer_of(id, tree), tree)
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
    """The caller's; of an agent that opens no sessions, the one which gave this answer."""
    named = request.query_params.get("session_id")
    session = await service.auth.session_or_none(request, named)
    caller = service.auth.caller(request)
    if session is None and service.implicit.accepts(caller):
        session = await service.implicit.session_of(caller, id)
    return session if session is not None else await service.auth.session(request, named)


async def _tree(service: RankService, request: Request, id: str) -> InteractionTree:
    """Of the caller's session; it is there until the next `await`."""
    session = await _session(service, request, id)
    await service.sessions.load(session)
    return session.tree


def _page(request: Request) -> tuple[int, str, str | None]:
    query = request.query_params
    limit, order = query.get("limit", str(_PAGE)), query.get("order", "desc")
    short = len(limit) <= len(str(_MOST))
    if not (short and limit.isascii() and limit.isdigit() and 1 <= int(limit) <= _MOST):
        raise InvalidRequest(f"limit must be from 1 to {_MOST}", param="limit")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc", param="order")
    return int(limit), order, query.get("after")
