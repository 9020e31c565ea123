"""The conversations of a session, message by message, for the formats that have no tokens alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from any_agent.chat.message_validation import validate_messages, validate_tools
from any_agent.errors import Unprocessable
from any_agent.record import discarded, lacks_texts
from any_agent.types import Interaction, Message, Tool
from proxy_ext.export.reader import Credited


class Turn(NamedTuple):
    """One message of a conversation, in the form that chat templates take."""

    message: Message
    call: Interaction | None
    """The call that sampled it; None for what the agent sent, earlier answers among it."""
    repeated: bool
    """True if an earlier conversation of the session has the same call."""

    @property
    def trained(self) -> bool:
        """True for an answer of the model that may be trained on and is new."""
        return self.call is not None and self.call.trainable and not self.repeated


class Dialogue(NamedTuple):
    """A path through a session's tree, from its first message to an answer that none continued."""

    turns: list[Turn]
    tools: list[Tool] | None

    @property
    def last(self) -> Interaction:
        call = self.turns[-1].call
        assert call is not None
        return call


def dialogues(found: Credited) -> Iterator[Dialogue]:
    """Iterate over the conversations of a session, without discarded calls.

    Raises Unprocessable if the texts were not kept, and InvalidRequest for a message that no
    template takes.
    """
    tree = found.tree
    gone = discarded(tree)
    kept = [node for node in tree if node.id not in gone]
    continued = {node.parent_id for node in kept}
    seen: set[str] = set()
    for leaf in kept:
        if leaf.id in continued:
            continue
        path = tree.path(leaf.id)
        if any(map(lacks_texts, path)):
            raise Unprocessable("its texts were not kept (sessions.store_content)")
        calls = [call for node in path for call in (*[None] * len(node.message_delta), node)]
        messages = validate_messages([*tree.messages(leaf.id), leaf.output_message])
        turns = [
            Turn(message, call, call is not None and call.id in seen)
            for message, call in zip(messages, calls, strict=True)
        ]
        seen |= {node.id for node in path}
        yield Dialogue(turns, validate_tools(path[0].tools))
