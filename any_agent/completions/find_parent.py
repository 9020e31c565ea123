"""Which recorded interaction a request continues, or why none: at the cost of what is new in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from any_agent.chat import chain_keys, key_parts, reasoning_of, text_of
from any_agent.chat.conversation_hash import canonical_bytes
from any_agent.completions.params.call import ChatCall
from any_agent.errors import ContextLengthExceeded
from any_agent.record import (
    InteractionTree,
    RequestPrefix,
    has_reasoning,
    lacks_texts,
    was_received,
)
from any_agent.types import BranchReason, Interaction, Message

_MAX_JSON = 1 << 20
"""What a context that is smaller than this may be sent: templates leave reasoning out."""


@dataclass(frozen=True, slots=True)
class ParentMatch:
    """What was found out about a request, before anything is rendered."""

    key: bytes
    """Of the request's messages and tools."""
    parent: Interaction | None = None
    covered: int = 0
    """Leading messages that the parent has."""
    reason: BranchReason | None = None
    """Why nothing, or nothing longer, is continued; None if it is the session's first."""
    new_characters: int = 0
    """How much is to be rendered, as JSON: calls, names and reasoning are written, too."""
    characters: int = 0
    """The same of the whole request, for when its new messages alone will not do."""
    noted: tuple[bytes, RequestPrefix] | None = None
    """What the next request is to know of this one, once it is rendered."""


def find_parent(
    call: ChatCall,
    tree: InteractionTree | None,
    *,
    context_length: int,
    longest_token: int,
    template: bytes = b"",
) -> ParentMatch:
    """The latest interaction whose messages and answer the request goes on from.

    The longest recorded prefix wins; of equal answers the one whose reasoning the request has,
    then the one that it names, then the latest that was received. What an earlier request of the
    tree begins with, byte for byte, is not looked at again. ``template`` tells apart how the same
    messages are rendered.

    Raises:
        ContextLengthExceeded: it cannot fit, however it is tokenised.
    """
    messages = call.messages
    if len(messages) > context_length:
        # Each is a token at least. Millions of empty ones would be hashed for half a minute.
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
    characters = _characters(new) + (begun.characters if begun is not None else 0)
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
    )
    key = keys[-1] if keys or begun is None else begun.key
    search = _Search(tree, messages, known, keys, begun, call.goes_on_from)
    parent, covered = search.parent()
    reason = search.reason
    if parent is None and reason is None and len(tree):
        reason = _root_reason(tree, messages, key)
    noted = None
    if digest is not None and any(key_parts(key)[0]):
        # Leading system messages alone are one with whatever system message follows.
        at = (tree.key(parent.id) or b"", covered) if parent is not None else None
        unlike = frozenset(search.unlike)
        noted = digest, RequestPrefix(len(messages), key, characters, whole, at, unlike)
    added = _json_size(messages[covered:]) if parent is not None else whole + tools
    return ParentMatch(key, parent, covered, reason, added, whole + tools, noted)


class _Search:
    """Looks for the longest recorded prefix of a request, the last of whose keys are given."""

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
        """Interactions that said the same and reasoned otherwise."""
        self.reason: BranchReason | None = None
        """What is wrong with the longest one that is nearly a prefix."""

    def parent(self) -> tuple[Interaction | None, int]:
        """It, and how many messages it covers."""
        for key, covered in self._keys:
            self._compare_reasoning(key, self._messages[covered - 1])
        for key, covered in reversed(self._keys):
            if (found := self._at(key)) is not None:
                return found, covered
        if self._earlier is not None and (found := self._at(self._earlier[0])) is not None:
            return found, self._earlier[1]
        return None, 0

    def _compare_reasoning(self, key: bytes, message: Any) -> None:
        said = self._tree.with_messages(key)
        thought = reasoning_of(message) if said else ""
        if thought:
            self.unlike |= {i.id for i in said if not _reasoned_so(i, thought)}

    def _at(self, key: bytes) -> Interaction | None:
        said = self._tree.with_messages(key)
        same = [i for i in said if self._tree.key(i.id) == key]
        # What was cut off is not what the agent holds, so nothing can extend it.
        whole = [i for i in same if i.finish_reason != "abort"]
        alike = [i for i in whole if not self._is_unlike(i)] if self.unlike else whole
        if alike:
            named = (i for i in alike if i.id == self._named)
            received = (i for i in reversed(alike) if was_received(i))
            return next(named, None) or next(received, alike[-1])
        if said and self.reason is None:
            if same:
                self.reason = "assistant_rewritten" if whole else "parent_aborted"
            else:
                self.reason = self._changed(key, said)
        return None

    def _is_unlike(self, interaction: Interaction) -> bool:
        return any(i.id in self.unlike for i in self._tree.path(interaction.id))

    def _changed(self, key: bytes, said: Sequence[Interaction]) -> BranchReason:
        """In what the head of the conversation differs from the likeliest earlier one."""
        _, system, _ = key_parts(key)
        same_system = any(key_parts(self._tree.key(i.id) or b"")[1] == system for i in said)
        return "tools_changed" if same_system else "system_changed"


def _root_reason(tree: InteractionTree, messages: Sequence[Any], key: bytes) -> BranchReason:
    """Why a request that goes on from nothing recorded is not the session's first."""
    answers = any(isinstance(m, dict) and m.get("role") == "assistant" for m in messages)
    return "history_rewritten" if answers and tree.knows_head(key) else "new_conversation"


def _reasoned_so(interaction: Interaction, thought: str) -> bool:
    if has_reasoning(interaction.output_message, thought):
        return True
    if lacks_texts(interaction):
        return False
    return reasoning_of(interaction.output_message) == thought


def _characters(messages: Sequence[Any]) -> int:
    return sum(
        len(text_of(message.get("content")) or "")
        for message in messages
        if isinstance(message, dict)
    )


def _json_size(messages: Sequence[Any]) -> int:
    return sum(len(canonical_bytes(message)) for message in messages)
