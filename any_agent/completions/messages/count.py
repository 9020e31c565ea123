"""Counts a prompt's tokens by the policy's own template and tokenizer."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from any_agent.completions.completer import Completer
from any_agent.completions.params.call import ChatCall
from any_agent.completions.prepare import LONG_TEXT, LONG_WHOLE
from any_agent.completions.prompt import prompt_of
from any_agent.record import InteractionTree


async def count_tokens(
    completer: Completer, call: ChatCall, tree: InteractionTree | None = None
) -> int:
    """Count the tokens of the prompt that the call would have now, even beyond the context length.

    Recorded ids stay as they are: a continuation of an interaction of ``tree`` may have other ids
    than a first request with the same messages. Raises what rendering raises, and
    ContextLengthExceeded for a conversation that is too long to be rendered.
    """
    past = completer.find(call, tree)
    assert past.found is not None
    # Counting is no call: the next request must not find this one.
    found = replace(past.found, noted=None)

    def count() -> int:
        ids = prompt_of(call, found, tree, past.chat).ids
        if call.forced_call is None:
            return len(ids)
        return len(ids) + len(past.chat.forced_call_ids(ids, call.forced_call) or ())

    if past.new_characters > LONG_TEXT or found.characters > LONG_WHOLE:
        return await asyncio.to_thread(count)
    return count()
