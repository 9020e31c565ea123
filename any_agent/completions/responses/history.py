"""What a request names of its session's record: the previous answer, and single items."""

from __future__ import annotations

from typing import Any

from any_agent.chat import text_of
from any_agent.chat.conversation_hash import is_leading_system
from any_agent.completions.responses.input_items import ITEM_ID
from any_agent.completions.responses.output_items import items_of
from any_agent.errors import InvalidRequest, NotFound
from any_agent.record import InteractionTree, lacks_texts
from any_agent.types import Interaction, Message

ID_PREFIX = "resp_"
RECORD = "responses"
"""Where an interaction's request keeps what its answer repeats."""
DELETED = "deleted"
"""There: its agent wants it to be told of no more."""


def messages_before(id: str, tree: InteractionTree | None) -> list[Message]:
    """The conversation up to and with an answer of the session, without its instructions.

    Raises:
        NotFound: the session has no such answer.
        InvalidRequest: its texts were not kept.
    """
    interaction = tree.get(id) if tree is not None else None
    if (
        tree is None
        or interaction is None
        or "text" in interaction.request
        or is_deleted(interaction)
    ):
        raise NotFound(
            f"previous_response_id {id[:80]!a} is no answer of this session",
            code="previous_response_not_found",
            param="previous_response_id",
        )
    require_texts(interaction, "previous_response_id")
    _, messages = parted(interaction, tree)
    return [*messages, interaction.output_message]


def parted(interaction: Interaction, tree: InteractionTree) -> tuple[str | None, list[Message]]:
    """A request's `instructions`, and its other messages, as the record words them.

    The system messages that begin a conversation are one to a tree, however they are cut: its own
    may be cut where an earlier request's instructions, or none, ended. Their lines are the same.
    """
    messages = tree.messages(interaction.id)
    lines = interaction.request.get(RECORD, {}).get("instructions")
    if not isinstance(lines, int):
        return None, messages
    if lines is True:
        # Recorded before lines were counted.
        lines = full_lines(text_of(messages[0].get("content")) or "")
    said: list[str] = []
    for k, message in enumerate(messages):
        if not is_leading_system(message) or (said and not lines):
            return "\n".join(said), messages[k:]
        head, rest = _cut(text_of(message["content"]) or "", lines)
        said.append(head)
        lines -= full_lines(head)
        if rest:
            return "\n".join(said), [{"role": "system", "content": rest}, *messages[k + 1 :]]
    return "\n".join(said), []


def full_lines(text: str) -> int:
    """Its lines that are not blank: to a tree the others are none."""
    return sum(not _is_blank(line) for line in text.split("\n"))


def _cut(text: str, lines: int) -> tuple[str, str]:
    """What it says in so many lines, and in those that follow."""
    split = text.split("\n")
    for k, line in enumerate(split):
        if not _is_blank(line):
            if not lines:
                return "\n".join(split[:k]).rstrip("\n"), "\n".join(split[k:])
            lines -= 1
    return text, ""


def _is_blank(line: str) -> bool:
    return not line or line.isspace()


def is_deleted(interaction: Interaction) -> bool:
    """Whether its agent deleted it."""
    return bool(interaction.request.get(RECORD, {}).get(DELETED))


class ItemHistory:
    """Resolves one request's references to items of the session's answers, each of which it may
    name once: else a small request would be a conversation of gigabytes."""

    def __init__(self, tree: InteractionTree | None) -> None:
        self._tree = tree
        self._named: set[str] = set()

    def __call__(self, id: str, where: str) -> dict[str, Any]:
        """The item. NotFound, naming it; InvalidRequest where its texts were not kept, or for one
        that was named before."""
        if id in self._named:
            raise InvalidRequest(
                f"{where}: the item {id[:80]!a} is in the input twice; leave one out",
                code="duplicate_item",
                param=where,
            )
        self._named.add(id)
        match = ITEM_ID.fullmatch(id)
        interaction = (
            self._tree.get(ID_PREFIX + match[1]) if self._tree is not None and match else None
        )
        if match is not None and interaction is not None and not is_deleted(interaction):
            require_texts(interaction, where)
            items = items_of(interaction)
            k = int(match[2])
            if k < len(items) and items[k]["id"] == id:
                return items[k]
        raise NotFound(
            f"{where}: there is no item {id[:80]!a} in this session's answers; send it whole",
            code="item_not_found",
            param=where,
        )


def require_texts(interaction: Interaction, param: str) -> None:
    """InvalidRequest for an answer whose texts were not kept."""
    if lacks_texts(interaction):
        raise InvalidRequest(
            "this run keeps no texts (sessions.store_content), so an answer cannot be gone on from "
            "by its id: send the whole conversation as input",
            code="content_not_stored",
            param=param,
        )
