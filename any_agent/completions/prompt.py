"""The prompt of a call: its parent's ids continued exactly, or rendered anew."""

from __future__ import annotations

from dataclasses import dataclass

from any_agent.chat import ChatFormat, text_of
from any_agent.completions.params import ChatCall
from any_agent.errors import ContextLengthExceeded
from any_agent.record import InteractionTree
from any_agent.types import Continuation


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's ids, and what of them the parent has already."""

    ids: list[int]
    inherited: int = 0
    """Leading ids that are the parent's prompt and output."""
    parent_id: str | None = None
    covered: int = 0
    """Leading messages that the parent has."""
    continuation: Continuation = Continuation.ROOT
    branch_reason: str | None = None


def require_plausible(call: ChatCall, chat: ChatFormat, context_length: int) -> None:
    """Refuse what cannot fit, however it is tokenised, before the cost of tokenising it."""
    if len(call.messages) > context_length:
        # Each is a token at least. Millions of empty ones would be hashed for half a minute.
        raise ContextLengthExceeded(
            f"this model's maximum context length is {context_length} tokens, but there "
            f"are {len(call.messages)} messages; send fewer",
            param="messages",
        )
    characters = sum(
        len(text_of(message.get("content")) or "")
        for message in call.messages
        if isinstance(message, dict)
    )
    if characters > context_length * chat.longest_token:
        raise ContextLengthExceeded(
            f"this model's maximum context length is {context_length} tokens, but the "
            f"messages are {characters} characters long; shorten them",
            param="messages",
        )


def find_prompt(
    call: ChatCall, keys: list[bytes], tree: InteractionTree | None, chat: ChatFormat
) -> Prompt:
    """The parent's ids continued exactly, else the messages rendered anew, with the reason."""
    found = tree.find(keys, call.messages) if tree is not None else None
    if found is None or tree is None:
        return Prompt(chat.render(call.messages, call.tools))
    parent, covered = found
    new = call.messages[covered:]
    reason = "no message follows the recorded answer"
    if new:
        before = tree.prompt_ids(parent.id).tolist()
        output = parent.output_ids.tolist()
        # None unless the ids begin with all of before + output: it compares them.
        ids = chat.bridge(before, output, new, call.tools)
        if ids is not None:
            inherited = len(before) + len(output)
            return Prompt(ids, inherited, parent.id, covered, Continuation.EXACT)
        reason = "the template cannot continue the earlier ids"
    ids = chat.render(call.messages, call.tools)
    return Prompt(ids, continuation=Continuation.BRANCH, branch_reason=reason)
