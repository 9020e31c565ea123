"""The prompt of a call: its parent's ids continued exactly, or rendered anew."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from any_agent.chat import ChatFormat
from any_agent.chat.tool_visibility import tool_visibility
from any_agent.completions.find_parent import ParentMatch, find_parent
from any_agent.completions.params.call import ChatCall
from any_agent.errors import UnsupportedParameter
from any_agent.record import InteractionTree
from any_agent.types import BranchReason, Continuation, IdArray, Interaction, id_array

_TAIL = 64
"""Ids of the parent's prompt that the format may look at."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's ids, and what of them the parent has already."""

    ids: IdArray
    inherited: int = 0
    """Leading ids that are the parent's prompt and output."""
    parent_id: str | None = None
    covered: int = 0
    """Leading messages that the parent has."""
    continuation: Continuation = Continuation.ROOT
    branch_reason: BranchReason | None = None
    key: bytes = b""
    """Of the request's messages and tools."""


def parent_of(
    call: ChatCall, tree: InteractionTree | None, chat: ChatFormat, *, context_length: int
) -> ParentMatch:
    """What the call continues; costs little.

    Raises ContextLengthExceeded if it cannot fit, UnsupportedParameter for tools that the model
    would not be told of, and could not call.
    """
    if call.tools:
        showing = tool_visibility(chat)
        if not (showing.tools or showing.calls):
            raise UnsupportedParameter(
                "this model's chat template shows no tools, so the model would not be told of "
                "them: leave tools out, and describe them in a message",
                param="tools",
            )
    return find_parent(
        call,
        tree,
        context_length=context_length,
        longest_token=chat.longest_token,
        template=chat.render_key,
    )


def prompt_of(
    call: ChatCall, found: ParentMatch, tree: InteractionTree | None, chat: ChatFormat
) -> Prompt:
    """The parent's ids continued exactly, else the messages rendered anew, with the reason.

    In any thread. Raises InvalidRequest or TemplateError.
    """
    prompt = None
    reason = found.reason
    if found.parent is not None and tree is not None:
        prompt = _continued(call, found, found.parent, tree, chat)
        if prompt is None:
            reason = reason or _why_not(call, found, found.parent, chat)
    if prompt is None:
        ids = id_array(chat.render(call.messages, call.tools))
        how = Continuation.ROOT if found.parent is None else Continuation.BRANCH
        prompt = Prompt(ids, continuation=how, branch_reason=reason, key=found.key)
    if tree is not None and found.noted is not None:
        tree.seen.note(*found.noted)
    return prompt


def _continued(
    call: ChatCall, found: ParentMatch, parent: Interaction, tree: InteractionTree, chat: ChatFormat
) -> Prompt | None:
    """The ids of the parent's prompt and output, and those that the new messages add."""
    new = call.messages[found.covered :]
    if not new:
        return None
    before = tree.path_ids(parent.id)
    prompt_end = len(before) - len(parent.output_ids)
    *past, said = call.messages[: found.covered]
    tail = before[max(0, prompt_end - _TAIL) : prompt_end]
    added = chat.bridge(
        parent.output_ids, new, call.tools, answer=said, prompt_tail=tail, past=past
    )
    if added is None:
        return None
    # The law of exact continuation, by construction: what is before is never touched.
    ids = np.concatenate([before, id_array(added)], dtype=np.int32)
    how = Continuation.EXACT
    return Prompt(ids, len(before), parent.id, found.covered, how, key=found.key)


def _why_not(
    call: ChatCall, found: ParentMatch, parent: Interaction, chat: ChatFormat
) -> BranchReason:
    new = call.messages[found.covered :]
    if not new:
        return "no_new_message"
    if any(m.get("role") == "assistant" for m in new):
        return "assistant_rewritten"
    return chat.decline_reason(new)
