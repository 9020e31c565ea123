"""Anthropic's `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from any_agent.completions.messages import count_tokens, parse_count, parse_messages_request
from any_agent.completions.parsed_request import ParsedRequest
from any_agent.completions.prepare import parsed
from any_agent.errors import InvalidRequest, UnsupportedParameter
from any_agent.protocol.error_bodies import REQUEST_ID, request_id
from proxy_ext.api.model_call import ModelCallContext, serve
from proxy_ext.service import RankService
from proxy_ext.web.exchange import JSONResponse, read_json

_IN_ITS_WORDS = {"parallel_tool_calls": ("tool_choice", "tool_choice.disable_parallel_tool_use")}
"""What chat calls a parameter, and what it and the part of it that is meant are called here."""


async def messages(service: RankService, request: Request) -> Response:
    """One model call of a session, or, where nothing is trained, of nobody's."""
    try:
        response = await serve(service, request, _asked)
    except UnsupportedParameter as error:
        raise _as_anthropic_error(error) from None
    interaction = response.headers.get("x-any-agent-interaction", "")
    response.headers[REQUEST_ID] = "req_" + interaction.removeprefix("msg_")
    return response


async def count(service: RankService, request: Request) -> Response:
    """The tokens that a call with this body would have now. Nothing is sampled or recorded."""
    slot = service.calls.acquire_slot()
    try:
        session = await service.auth.session_or_none(
            request, request.query_params.get("session_id")
        )
        if session is not None:
            session.require_open()
        body = await read_json(request)
        if service.frozen.knows(body):
            raise InvalidRequest(
                "only the policy's tokens are counted here: a frozen model's provider counts its "
                "own, and says so in its answers' usage",
                param="model",
            )
        parse = partial(
            parse_count,
            body,
            model=service.config.model.name,
            known_settings=service.completer.chat.renderer.known_settings,
            unknown=service.config.server.unknown_parameters,
        )
        call = await parsed(parse, len(await request.body()))
        with service.sessions.trees.pinned(session) if session is not None else nullcontext():
            if session is not None:
                await service.sessions.load(session)
            tree = session.tree if session is not None else None
            await service.calls.render_turns.wait()
            tokens = await count_tokens(service.completer, call, tree)
        return JSONResponse({"input_tokens": tokens}, headers={REQUEST_ID: request_id()})
    finally:
        slot.release()


def _asked(asking: ModelCallContext) -> ParsedRequest:
    return parse_messages_request(asking.body, asking.rules, asking.service.completer.chat)


def _as_anthropic_error(error: UnsupportedParameter) -> UnsupportedParameter:
    """A refusal by what is behind the parser, under the name that the request has for it."""
    if error.param not in _IN_ITS_WORDS:
        return error
    name, part = _IN_ITS_WORDS[error.param]
    return UnsupportedParameter(
        error.message.replace(f"{error.param}=false", part), code=error.code, param=name
    )
