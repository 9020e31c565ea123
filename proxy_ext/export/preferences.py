"""Preferences: what two sessions of a group answered to the same prompt."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any, NamedTuple

from any_agent.chat.conversation_hash import normalise
from any_agent.chat.message_validation import reasoning_of, validate_messages, validate_tools
from any_agent.chat.template import convert_calls
from any_agent.errors import Unprocessable
from any_agent.record import discarded, lacks_texts
from any_agent.types import Message, Tool
from proxy_ext.export.choice import Pair
from proxy_ext.export.reader import Credited


class Conversation(NamedTuple):
    """The messages of a session from its first call on, and the tools that it had."""

    messages: list[Message]
    tools: list[Tool] | None


def conversation_of(found: Credited) -> Conversation:
    """Return the conversation that a session's first call began; of its branches the latest.

    Its messages have the form that chat templates take. Raises Unprocessable if the texts were not
    kept, and InvalidRequest for a message that no template takes.
    """
    tree = found.tree
    gone = discarded(tree)
    kept = [node for node in tree if node.id not in gone]
    if not kept or lacks_texts(kept[0]):
        raise Unprocessable("its texts were not kept (sessions.store_content)")
    known = {kept[0].id}
    last = kept[0]
    for node in kept:
        if node.parent_id in known:
            known.add(node.id)
            last = node
    messages = validate_messages([*tree.messages(last.id), last.output_message])
    return Conversation([*map(with_objects, messages)], validate_tools(kept[0].tools))


def with_objects(message: Message) -> Message:
    """Return a message whose calls have objects as arguments, which most templates expect."""
    if not message.get("tool_calls"):
        return message
    return convert_calls(message, objects=True, takes_broken=True)


def preference(
    pair: Pair, chosen: Conversation, rejected: Conversation, session: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a row of TRL's conversational preference format: prompt, chosen, rejected, tools.

    The prompt is what both conversations have in common, and the answers are the model's where
    they first differ: what users and tools said later is no answer. Raises Unprocessable if the
    conversations differ first in something else.
    """
    one, other = chosen.messages, rejected.messages
    if chosen.tools != rejected.tools:
        raise Unprocessable("they had different tools")
    differ = (k for k, (a, b) in enumerate(zip(one, other, strict=False)) if not _same(a, b))
    at = next(differ, min(len(one), len(other)))
    answers = [_answer(messages[at:]) for messages in (one, other)]
    if at == 0 or not all(answers):
        raise Unprocessable("no answer of the model is where they first differ")
    return {
        "prompt": one[:at],
        "chosen": answers[0],
        "rejected": answers[1],
        "tools": chosen.tools,
        "score_chosen": pair.chosen.score,
        "score_rejected": pair.rejected.score,
        "chosen_session_id": pair.chosen.session_id,
        "rejected_session_id": pair.rejected.session_id,
        "group_id": session["group_id"],
        "task_id": session["task_id"],
    }


def _same(one: Message, other: Message) -> bool:
    return normalise(one) == normalise(other) and reasoning_of(one) == reasoning_of(other)


def _answer(messages: Sequence[Message]) -> list[Message]:
    end = next((k for k, m in enumerate(messages) if m["role"] != "assistant"), len(messages))
    return list(messages[:end])


class WaitingConversations:
    """Conversations on disk that wait for the other one of their pair."""

    def __init__(self, file: IO[bytes], pairs: Sequence[Pair]) -> None:
        self._file = file
        self._pairs: defaultdict[str, list[Pair]] = defaultdict(list)
        for pair in pairs:
            self._pairs[pair.chosen.session_id].append(pair)
            self._pairs[pair.rejected.session_id].append(pair)
        self._places: dict[str, tuple[int, int]] = {}

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._pairs

    def add(
        self, session_id: str, conversation: Conversation
    ) -> Iterator[tuple[Pair, Conversation, Conversation]]:
        """Keep a conversation; yield the pairs that it completes."""
        self._places[session_id] = self._write(conversation)
        for pair in self._pairs[session_id]:
            chosen, rejected = pair.chosen.session_id, pair.rejected.session_id
            if chosen in self._places and rejected in self._places:
                yield pair, self._read(chosen), self._read(rejected)

    def _write(self, conversation: Conversation) -> tuple[int, int]:
        place = self._file.seek(0, 2)
        return place, self._file.write(json.dumps(conversation).encode())

    def _read(self, session_id: str) -> Conversation:
        place, size = self._places[session_id]
        self._file.seek(place)
        return Conversation(*json.loads(self._file.read(size)))
