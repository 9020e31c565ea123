"""The steps between a checked call and its first token, for the proxy and the direct client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from any_agent.completions.call_types import Prepared
from any_agent.completions.completer import Completer
from any_agent.completions.params.call import ChatCall
from any_agent.completions.parsed_request import ParsedRequest
from any_agent.completions.prompt import prompt_of
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
_NO_CAPABILITIES = Capabilities(**dict.fromkeys(Capabilities.names(), False))


async def parse_body(parse: Callable[[], T], size: int) -> T:
    """Parse a body of ``size`` bytes, in a thread if it is long, for its parts may be many."""
    return await asyncio.to_thread(parse) if size > LONG_WHOLE else parse()


async def check_request(
    completer: Completer, parse: Callable[[], ParsedRequest], size: int
) -> ParsedRequest:
    """Parse a body as :func:`parse_body`; UnsupportedParameter for what the engine cannot do."""
    request = await parse_body(parse, size)
    call, vocabulary = request.call, completer.chat.vocab_size
    try:
        require_supported(call, _NO_CAPABILITIES, vocab_size=vocabulary)
    except UnsupportedParameter:
        # Only such a call depends on the engine, which is asked then.
        can = await completer.engine.capabilities()
        require_supported(call, can, vocab_size=vocabulary)
        tag, bound = can.structural_tag, can.bound_tokens
        return replace(request, call=replace(call, structural_tag=tag, bound_tokens=bound))
    return request


async def prepare(completer: Completer, call: ChatCall, tree: InteractionTree | None) -> Prepared:
    """Prepare a call as :meth:`Completer.prepare` does, in a thread where there is much to render.

    A refusal names the parameter as the request does.
    """
    try:
        past = completer.find(call, tree)
        whole = sum(match.characters for match in past.matches)
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


def require_supported(call: ChatCall, engine: Capabilities, *, vocab_size: int) -> None:
    """Raise UnsupportedParameter for what the engine cannot do, InvalidRequest for a wrong id."""
    gconfig = call.gconfig
    form = call.format_parameter or "response_format"
    has_grammar = gconfig.grammar is not None
    for name, wanted, can in (
        ("top_logprobs" if call.messages else "logprobs", call.top_logprobs, engine.top_logprobs),
        ("min_p", gconfig.min_p, engine.min_p),
        ("logit_bias", gconfig.logit_bias, engine.logit_bias),
        (form, has_grammar, engine.grammar),
        ("frequency_penalty", gconfig.frequency_penalty, engine.penalties),
        ("presence_penalty", gconfig.presence_penalty, engine.penalties),
        ("repetition_penalty", gconfig.repetition_penalty != 1, engine.penalties),
    ):
        if wanted and not can:
            raise UnsupportedParameter(
                f"{name} is not supported by this engine: leave it out", param=name
            )
    if has_grammar and call.tools and not engine.structural_tag:
        raise UnsupportedParameter(
            f"{form} together with tools is not supported by this engine: leave one of them out, "
            "or start SGLang with --grammar-backend xgrammar",
            param=form,
        )
    ids = {"logit_bias": dict(gconfig.logit_bias), "stop_token_ids": gconfig.stop_token_ids}
    for name, tokens in ids.items():
        if any(token >= vocab_size for token in tokens):
            raise InvalidRequest(
                f"{name} has a token id beyond the vocabulary of {vocab_size}", param=name
            )


async def count_tokens(
    completer: Completer, call: ChatCall, tree: InteractionTree | None = None
) -> int:
    """Count the tokens of the prompt that the call would have now, even beyond the context length.

    Recorded ids stay as they are: a continuation of an interaction of ``tree`` may have other ids
    than a first request with the same messages. Raises what rendering raises, and
    ContextLengthExceeded for a conversation that is too long to be rendered.
    """
    past = completer.find(call, tree)
    # Counting is no call: the next request must not find this one.
    found = replace(past.matches[0], noted=None)

    def count() -> int:
        ids = prompt_of(call, found, tree, past.chat).ids
        if call.forced_call is None:
            return len(ids)
        return len(ids) + len(past.chat.forced_call_ids(ids, call.forced_call) or ())

    if past.new_characters > LONG_TEXT or found.characters > LONG_WHOLE:
        return await asyncio.to_thread(count)
    return count()
