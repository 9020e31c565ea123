"""The prompt of a call: its parent's ids continued exactly, or rendered anew.

Finding the parent costs as much as the request's new messages.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from any_agent.chat import ChatFormat, chain_keys, key_parts, reasoning_of, text_of
from any_agent.chat.conversation_hash import canonical_bytes
from any_agent.chat.tool_visibility import tool_visibility
from any_agent.completions.params.call import ChatCall
from any_agent.errors import ContextLengthExceeded, UnsupportedParameter
from any_agent.record import (
    InteractionTree,
    RequestPrefix,
    has_reasoning,
    lacks_texts,
    was_received,
)
from any_agent.types import BranchReason, Continuation, IdArray, Interaction, Message, id_array

_MAX_JSON = 1 << 20
"""Bytes of messages that even a smaller context may get: templates leave reasoning out."""


@dataclass(frozen=True, slots=True)
class ParentMatch:
    """The interaction that a request continues, and its size, before anything is rendered."""

    key: bytes
    """The chain key of the request's messages and tools."""
    parent: Interaction | None = None
    covered: int = 0
    """The number of leading messages that the parent has; of a legacy prompt, its bytes."""
    reason: BranchReason | None = None
    """The reason why nothing, or nothing longer, is continued; None for a session's first call."""
    new_characters: int = 0
    """The size of the JSON to render, with calls, names and reasoning; of the text to encode."""
    characters: int = 0
    """The size of the whole request, for a rendering of more than the new messages."""
    noted: tuple[bytes, RequestPrefix] | None = None
    """The prefix to remember for the next request, once this one is rendered."""


def find_parent(
    call: ChatCall,
    tree: InteractionTree | None,
    *,
    context_length: int,
    longest_token: int,
    template: bytes = b"",
    nameless: Collection[str] = (),
) -> ParentMatch:
    """Find the latest interaction whose messages and answer the request continues.

    The longest recorded prefix wins; of equal answers the one whose reasoning the request has,
    then the one that it names, then the latest that was received. A prefix that an earlier request
    of the tree has, byte for byte, is not read again. ``template`` distinguishes different
    renderings of the same messages, and ``nameless`` has the roles whose names none of them shows.
    ContextLengthExceeded for a request that cannot fit, however it
    is tokenised.
    """
    messages = call.messages
    if len(messages) > context_length:
        # Each message is a token at least; hashing millions of empty ones takes half a minute.
        raise ContextLengthExceeded(
            f"this model's maximum context length is {context_length} tokens, but there "
            f"are {len(messages)} messages; send fewer",
            param=call.prompt_parameter,
        )
    begun, digest = None, None
    if tree is not None:
        begun, digest = tree.seen.find(messages, [call.tools, template.hex()])
    known = begun.messages if begun is not None else 0
    new = messages[known:]
    characters = characters_of(new) + (begun.characters if begun is not None else 0)
    if characters > context_length * longest_token:
        raise ContextLengthExceeded(
            f"this model's maximum context length is {context_length} tokens, but the "
            f"messages are {characters} characters long; shorten them",
            param=call.prompt_parameter,
        )
    tools = len(canonical_bytes(call.tools)) if call.tools else 0
    whole = _json_size(new) + (begun.json_size if begun is not None else 0)
    if whole + tools > max(context_length * longest_token, _MAX_JSON):
        raise ContextLengthExceeded(
            f"this model's maximum context length is {context_length} tokens, but the "
            f"messages and tools are {whole + tools} bytes long; shorten them",
            param=call.prompt_parameter,
        )
    if tree is None:
        return ParentMatch(b"", new_characters=whole + tools, characters=whole + tools)
    keys = chain_keys(
        new,
        call.tools,
        start=begun.key if begun is not None else None,
        before=messages[:known],
        template=template,
        nameless=nameless,
    )
    key = keys[-1] if keys or begun is None else begun.key
    search = _Search(tree, messages, known, keys, begun, call.goes_on_from)
    parent, covered = search.parent()
    reason = search.reason
    if parent is None and reason is None and len(tree):
        reason = _root_reason(tree, messages, key)
    noted = None
    if digest is not None and any(key_parts(key)[0]):
        # Leading system messages alone would be joined with a system message that follows.
        at = (tree.key(parent.id) or b"", covered) if parent is not None else None
        unlike = frozenset(search.unlike)
        noted = digest, RequestPrefix(len(messages), key, characters, whole, at, unlike)
    added = _json_size(messages[covered:]) if parent is not None else whole + tools
    return ParentMatch(key, parent, covered, reason, added, whole + tools, noted)


class _Search:
    """Searches for the longest recorded prefix of a request, whose last keys are given."""

    def __init__(
        self,
        tree: InteractionTree,
        messages: Sequence[Message],
        known: int,
        keys: list[bytes],
        begun: RequestPrefix | None,
        named: str | None,
    ) -> None:
        self._tree = tree
        self._named = named
        self._messages = messages
        self._keys = [(key, known + k + 1) for k, key in enumerate(keys)]
        self._earlier = begun.parent if begun is not None else None
        self.unlike = set(begun.unlike) if begun is not None else set[str]()
        """Interactions with the same answer and other reasoning."""
        self.reason: BranchReason | None = None
        """The reason why the longest near prefix is not continued."""

    def parent(self) -> tuple[Interaction | None, int]:
        """Return the parent, and the number of messages that it covers."""
        for key, covered in self._keys:
            self._compare_reasoning(key, self._messages[covered - 1])
        for key, covered in reversed(self._keys):
            if (found := self._at(key)) is not None:
                return found, covered
        if self._earlier is not None and (found := self._at(self._earlier[0])) is not None:
            return found, self._earlier[1]
        return None, 0

    def _compare_reasoning(self, key: bytes, message: Any) -> None:
        recorded = self._tree.with_messages(key)
        thought = reasoning_of(message) if recorded else ""
        if thought:
            self.unlike |= {i.id for i in recorded if not _reasoned_so(i, thought)}

    def _at(self, key: bytes) -> Interaction | None:
        recorded = self._tree.with_messages(key)
        same = [i for i in recorded if self._tree.key(i.id) == key]
        # The agent lacks the end of an answer that was cut off, so no request extends it.
        whole = [i for i in same if i.finish_reason != "abort"]
        alike = [i for i in whole if not self._is_unlike(i)] if self.unlike else whole
        if alike:
            named = (i for i in alike if i.id == self._named)
            received = (i for i in reversed(alike) if was_received(i))
            return next(named, None) or next(received, alike[-1])
        if recorded and self.reason is None:
            if same:
                self.reason = "assistant_rewritten" if whole else "parent_aborted"
            else:
                self.reason = self._changed(key, recorded)
        return None

    def _is_unlike(self, interaction: Interaction) -> bool:
        return any(i.id in self.unlike for i in self._tree.path(interaction.id))

    def _changed(self, key: bytes, recorded: Sequence[Interaction]) -> BranchReason:
        """Return the part of the head that differs from the likeliest earlier conversation."""
        _, system, _ = key_parts(key)
        same_system = any(key_parts(self._tree.key(i.id) or b"")[1] == system for i in recorded)
        return "tools_changed" if same_system else "system_changed"


def _root_reason(tree: InteractionTree, messages: Sequence[Any], key: bytes) -> BranchReason:
    """Return why a request without a recorded prefix is not the session's first."""
    answers = any(isinstance(m, dict) and m.get("role") == "assistant" for m in messages)
    return "history_rewritten" if answers and tree.knows_head(key) else "new_conversation"


def _reasoned_so(interaction: Interaction, thought: str) -> bool:
    if has_reasoning(interaction.output_message, thought):
        return True
    if lacks_texts(interaction):
        return False
    return reasoning_of(interaction.output_message) == thought


def characters_of(messages: Sequence[Any]) -> int:
    """Return the number of characters in the messages' texts."""
    return sum(
        len(text_of(message.get("content")) or "")
        for message in messages
        if isinstance(message, dict)
    )


def _json_size(messages: Sequence[Any]) -> int:
    return sum(len(canonical_bytes(message)) for message in messages)


_TAIL = 64  # ids at the end of the parent's prompt that the format may read


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's ids, and the number of them that it inherits from its parent."""

    ids: IdArray
    inherited: int = 0
    """The number of leading ids that are the parent's prompt and output."""
    parent_id: str | None = None
    covered: int = 0
    """The number of leading messages that the parent has."""
    continuation: Continuation = Continuation.ROOT
    branch_reason: BranchReason | None = None
    key: bytes = b""
    """The chain key of the request's messages and tools."""
    added: str = ""
    """The text of a legacy completion's prompt after the parent's (that of added ids, decoded)."""


def parent_of(
    call: ChatCall, tree: InteractionTree | None, chat: ChatFormat, *, context_length: int
) -> ParentMatch:
    """Find what the call continues, at little cost.

    ContextLengthExceeded if the call cannot fit, UnsupportedParameter for tools that the model's
    template does not show.
    """
    if call.tools:
        showing = tool_visibility(chat)
        if not (showing.tools or showing.calls):
            raise UnsupportedParameter(
                "this model's chat template shows no tools, so the model would not see them: leave "
                "tools out, and describe them in a message",
                param="tools",
            )
    return find_parent(
        call,
        tree,
        context_length=context_length,
        longest_token=chat.longest_token,
        template=chat.render_key,
        nameless=chat.nameless_roles,
    )


def prompt_of(
    call: ChatCall, found: ParentMatch, tree: InteractionTree | None, chat: ChatFormat
) -> Prompt:
    """Continue the parent's ids exactly, else render the messages anew and give the reason.

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
    """Return the parent's prompt and output with the ids of the new messages, if they fit on."""
    new = call.messages[found.covered :]
    if not new:
        return None
    before = tree.path_ids(parent.id)
    prompt_end = len(before) - len(parent.output_ids)
    *past, answer = call.messages[: found.covered]
    # Also what a forced call's long opening stands after.
    reach = _TAIL + parent.request.get("forced", 0)
    tail = before[max(0, prompt_end - reach) : prompt_end]
    added = chat.bridge(
        parent.output_ids, new, call.tools, answer=answer, prompt_tail=tail, past=past
    )
    if added is None:
        return None
    # Exact continuation holds by construction: the ids before are never changed.
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
