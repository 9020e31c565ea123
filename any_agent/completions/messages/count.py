"""How many tokens a request's prompt has, by the policy's own template and tokenizer."""

from __future__ import annotations

import asyncio

from any_agent.completions.begin import LONG_TEXT
from any_agent.completions.complete import Completer
from any_agent.completions.params import ChatCall
from any_agent.completions.prompt import prompt_of


async def count_tokens(completer: Completer, call: ChatCall) -> int:
    """Of a conversation's first request, also where it is too long for the context.

    Raises what rendering raises, and ContextLengthExceeded for what is too long to be rendered.
    """
    past = completer.find(call, None)
    assert past.found is not None
    found = past.found

    def count() -> int:
        ids = prompt_of(call, found, None, past.chat).ids
        if call.forced_call is None:
            return len(ids)
        return len(ids) + len(past.chat.forced_call_ids(ids, call.forced_call) or ())

    if past.new_characters > LONG_TEXT:
        return await asyncio.to_thread(count)
    return count()
