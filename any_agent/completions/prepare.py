"""What comes between a checked call and its first token, wherever the call came from."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from any_agent.completions.call_types import Prepared
from any_agent.completions.completer import Completer
from any_agent.completions.params import ChatCall, require_supported
from any_agent.completions.parsed_request import ParsedRequest
from any_agent.completions.refused import with_request_parameter
from any_agent.engine import Capabilities
from any_agent.errors import InvalidRequest, UnsupportedParameter
from any_agent.record import InteractionTree

T = TypeVar("T")

LONG_TEXT = 65_536
"""Characters; rendering a megabyte takes a second."""
LONG_WHOLE = 4 * LONG_TEXT
"""Of a whole conversation, which is rendered where its new messages alone cannot be."""
_NOTHING = Capabilities(
    top_logprobs=False,
    penalties=False,
    min_p=False,
    logit_bias=False,
    grammar=False,
    structural_tag=False,
)


async def parsed(parse: Callable[[], T], size: int) -> T:
    """The parsed body of ``size`` bytes; in a thread if it is long, for its parts may be many."""
    return await asyncio.to_thread(parse) if size > LONG_WHOLE else parse()


async def checked(
    completer: Completer, parse: Callable[[], ParsedRequest], size: int
) -> ParsedRequest:
    """As :func:`parsed`; UnsupportedParameter for what the engine cannot do."""
    asked = await parsed(parse, size)
    return replace(asked, call=await _supported(completer, asked.call))


async def _supported(completer: Completer, call: ChatCall) -> ChatCall:
    """The call as the engine can do it, which is asked only if that matters.

    UnsupportedParameter for what it cannot do.
    """
    vocabulary = completer.chat.vocab_size
    try:
        require_supported(call, _NOTHING, vocab_size=vocabulary)
    except UnsupportedParameter:
        can = await completer.engine.capabilities()
        require_supported(call, can, vocab_size=vocabulary)
        return replace(call, structural_tag=can.structural_tag)
    return call


async def prepare(completer: Completer, call: ChatCall, tree: InteractionTree | None) -> Prepared:
    """As :meth:`Completer.prepare`, in a thread where there is much to render.

    What it refuses is named as the request names it.
    """
    try:
        past = completer.find(call, tree)
        whole = past.found.characters if past.found is not None else 0
        if past.new_characters > LONG_TEXT or whole > LONG_WHOLE:
            return await asyncio.to_thread(completer.prepare, call, tree, past)
        return completer.prepare(call, tree, past)
    except InvalidRequest as error:
        raise with_request_parameter(error, call) from None
