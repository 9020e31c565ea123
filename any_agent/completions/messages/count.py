"""How many tokens a request's prompt has, by the policy's own template and tokenizer."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from any_agent.completions.completer import Completer
from any_agent.completions.params import ChatCall
from any_agent.completions.prepare import LONG_TEXT, LONG_WHOLE
from any_agent.completions.prompt import prompt_of
from any_agent.record import InteractionTree


async def count_tokens(
    completer: Completer, call: ChatCall, tree: InteractionTree | None = None
) -> int:
    """Of the prompt that the call would have now, also where it is too long for the context.

    Recorded ids stay as they are: what goes on from an interaction of ``tree`` has other ids than a
    first request with the same messages may have. Raises what rendering raises, and
    ContextLengthExceeded for what is too long to be rendered.
    """
    past = completer.find(call, tree)
    assert past.found is not None
    # It was not called: the next request is not to find it.
    found = replace(past.found, noted=None)

    def count() -> int:
        ids = prompt_of(call, found, tree, past.chat).ids
        if call.forced_call is None:
            return len(ids)
        return len(ids) + len(past.chat.forced_call_ids(ids, call.forced_call) or ())

    if past.new_characters > LONG_TEXT or found.characters > LONG_WHOLE:
        return await asyncio.to_thread(count)
    return count()
