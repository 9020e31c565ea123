"""The recorded answers and items that a request names by their ids."""

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
"""The entry of an interaction's request with the fields that its answer repeats."""
DELETED = "deleted"  # the mark in that entry of an answer that its agent deleted


def messages_before(id: str, tree: InteractionTree | None) -> list[Message]:
    """Return the conversation up to and with an answer of the session, without its instructions.

    NotFound if the session has no such answer, InvalidRequest if its texts were not kept.
    """
    interaction = tree.get(id) if tree is not None else None
    if (
        tree is None
        or interaction is None
        or "text" in interaction.request
        or is_deleted(interaction)
    ):
        raise NotFound(
            f"previous_response_id {id[:80]!a} is not an answer of this session",
            code="previous_response_not_found",
            param="previous_response_id",
        )
    require_texts(interaction, "previous_response_id")
    _, messages = parted(interaction, tree)
    return [*messages, interaction.output_message]


def parted(interaction: Interaction, tree: InteractionTree) -> tuple[str | None, list[Message]]:
    """Return a request's `instructions`, and its other messages, from the record.

    A tree joins the system messages that begin a conversation: its own may be divided where an
    earlier request's instructions, or none, ended. Their lines are the same.
    """
    messages = tree.messages(interaction.id)
    lines = interaction.request.get(RECORD, {}).get("instructions")
    if not isinstance(lines, int):
        return None, messages
    if lines is True:
        # Recorded before lines were counted.
        lines = full_lines(text_of(messages[0].get("content")) or "")
    texts: list[str] = []
    for k, message in enumerate(messages):
        # A name that counts would have made it another conversation than the instructions'.
        leading = is_leading_system(message, nameless=("system",))
        if not leading or (texts and not lines):
            return "\n".join(texts), messages[k:]
        head, rest = _cut(text_of(message["content"]) or "", lines)
        texts.append(head)
        lines -= full_lines(head)
        if rest:
            return "\n".join(texts), [{"role": "system", "content": rest}, *messages[k + 1 :]]
    return "\n".join(texts), []


def full_lines(text: str) -> int:
    """Return the number of lines that are not blank: a tree ignores blank ones."""
    return sum(not _is_blank(line) for line in text.split("\n"))


def _cut(text: str, lines: int) -> tuple[str, str]:
    """Return the text of the first so many full lines, and of those that follow."""
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
    """Return True if the agent deleted the answer."""
    return bool(interaction.request.get(RECORD, {}).get(DELETED))


class ItemHistory:
    """Resolves one request's references to items of the session's answers.

    A request may name each item once: otherwise a small request could be a conversation of
    gigabytes.
    """

    def __init__(self, tree: InteractionTree | None) -> None:
        self._tree = tree
        self._named: set[str] = set()

    def __call__(self, id: str, where: str) -> dict[str, Any]:
        """Return the item; NotFound.

        InvalidRequest for an item whose texts were not kept, or that was named before.
        """
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
    """Raise InvalidRequest for an answer whose texts were not kept."""
    if lacks_texts(interaction):
        raise InvalidRequest(
            "this run keeps no texts (sessions.store_content), so no answer can be continued by "
            "its id: send the whole conversation as input",
            code="content_not_stored",
            param=param,
        )
