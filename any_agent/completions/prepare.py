"""The steps between a checked call and its first token, for the proxy and the direct client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from any_agent.completions.call_types import Prepared
from any_agent.completions.completer import Completer
from any_agent.completions.params.call import ChatCall
from any_agent.completions.params.capability_check import require_supported
from any_agent.completions.parsed_request import ParsedRequest
from any_agent.engine import Capabilities
from any_agent.errors import AnyAgentError, InvalidRequest, UnsupportedParameter
from any_agent.record import InteractionTree

T = TypeVar("T")

LONG_TEXT = 65_536
"""Characters of new text beyond which a prompt is rendered in a thread: a megabyte takes a second.
"""
LONG_WHOLE = 4 * LONG_TEXT
"""Characters of a whole conversation beyond which it is rendered in a thread: where its new
messages alone cannot be rendered, all of it is."""
_NO_CAPABILITIES = Capabilities(
    top_logprobs=False,
    penalties=False,
    min_p=False,
    logit_bias=False,
    grammar=False,
    structural_tag=False,
)


async def parse_body(parse: Callable[[], T], size: int) -> T:
    """Parse a body of ``size`` bytes, in a thread if it is long, for its parts may be many."""
    return await asyncio.to_thread(parse) if size > LONG_WHOLE else parse()


async def check_request(
    completer: Completer, parse: Callable[[], ParsedRequest], size: int
) -> ParsedRequest:
    """Parse a body as :func:`parse_body`; UnsupportedParameter for what the engine cannot do."""
    request = await parse_body(parse, size)
    return replace(request, call=await _supported(completer, request.call))


async def _supported(completer: Completer, call: ChatCall) -> ChatCall:
    """Return the call as the engine can do it; ask the engine only if that matters.

    UnsupportedParameter for what it cannot do.
    """
    vocabulary = completer.chat.vocab_size
    try:
        require_supported(call, _NO_CAPABILITIES, vocab_size=vocabulary)
    except UnsupportedParameter:
        can = await completer.engine.capabilities()
        require_supported(call, can, vocab_size=vocabulary)
        return replace(call, structural_tag=can.structural_tag)
    return call


async def prepare(completer: Completer, call: ChatCall, tree: InteractionTree | None) -> Prepared:
    """Prepare a call as :meth:`Completer.prepare` does, in a thread where there is much to render.

    A refusal names the parameter as the request does.
    """
    try:
        past = completer.find(call, tree)
        whole = past.found.characters if past.found is not None else 0
        if past.new_characters > LONG_TEXT or whole > LONG_WHOLE:
            return await asyncio.to_thread(completer.prepare, call, tree, past)
        return completer.prepare(call, tree, past)
    except InvalidRequest as error:
        raise with_request_parameter(error, call) from None


def with_request_parameter(error: AnyAgentError, call: ChatCall) -> AnyAgentError:
    """Report an engine's or a renderer's refusal under the request parameter that caused it.

    Any other error is returned as it is.
    """
    if not isinstance(error, InvalidRequest) or error.param is None:
        return error
    if error.param == "grammar":
        name = call.format_parameter or "response_format"
        return InvalidRequest(f"{name}: {error.message}", code=error.code, param=name)
    if error.param in call.parameter_names:
        name, part = call.parameter_names[error.param]
        message = error.message.replace(f"{error.param}=false", part)
        return type(error)(message, code=error.code, param=name)
    if call.prompt_parameter != "messages" and error.param.partition("[")[0] == "messages":
        # The messages' parts have other names there, and were checked under those.
        error.param = call.prompt_parameter
    return error
