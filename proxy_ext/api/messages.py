"""Anthropic's `/v1/messages/count_tokens`."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from any_agent.completions.messages.count import count_tokens
from any_agent.completions.messages.parse import parse_count
from any_agent.completions.prepare import parse_body
from any_agent.errors import InvalidRequest
from any_agent.protocol.error_bodies import REQUEST_ID, request_id
from proxy_ext.service import RankService
from proxy_ext.web.exchange import JSONResponse, read_json


async def count(service: RankService, request: Request) -> Response:
    """Count the tokens that a call with this body would have now; sample and record nothing."""
    slot = service.calls.acquire_slot()
    try:
        named = request.query_params.get("session_id")
        session = await service.auth.session_or_none(request, named)
        if session is not None:
            session.require_open()
        body = await read_json(request)
        if service.frozen.is_named_by(body):
            raise InvalidRequest(
                "only the policy's tokens are counted here: a frozen model's provider counts its "
                "own, and reports them in its answers' usage",
                param="model",
            )
        parse = partial(
            parse_count,
            body,
            model=service.config.model.name,
            known_settings=service.completer.chat.renderer.known_settings,
            unknown=service.config.server.unknown_parameters,
        )
        call = await parse_body(parse, len(await request.body()))
        with service.sessions.trees.pinned(session) if session is not None else nullcontext():
            if session is not None:
                await service.sessions.load(session)
            tree = session.tree if session is not None else None
            await service.calls.render_turns.wait()
            tokens = await count_tokens(service.completer, call, tree)
        return JSONResponse({"input_tokens": tokens}, headers={REQUEST_ID: request_id()})
    finally:
        slot.release()
