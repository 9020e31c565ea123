"""Recorded answers, encoded again, and the items that they answer."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from any_agent.chat import ChatFormat, text_of
from any_agent.completions.call_types import Head
from any_agent.completions.encoders.output_order import message_parts
from any_agent.completions.logprobs import LogprobsEncoder
from any_agent.completions.params.call import ChatCall
from any_agent.completions.parsed_request import ResponseEncoder
from any_agent.completions.responses.encoder import ResponsesEncoder
from any_agent.completions.responses.history import (
    DELETED,
    RECORD,
    is_deleted,
    parted,
    require_texts,
)
from any_agent.completions.responses.output_items import item_id, item_of, part_id
from any_agent.completions.responses.parse import DEFAULTS, ResponsesCall
from any_agent.completions.responses.tools import (
    CUSTOM_FORMATS,
    NAMESPACES,
    Names,
    flat_tools,
    names_of,
    own_call,
)
from any_agent.custom_calls import is_custom
from any_agent.errors import NotFound
from any_agent.record import InteractionTree
from any_agent.types import Interaction, Message


def answer_of(id: str, tree: InteractionTree | None) -> Interaction:
    """Return an answer of `/v1/responses`; NotFound, or InvalidRequest without its texts."""
    interaction = tree.get(id) if tree is not None else None
    if interaction is not None:
        require_texts(interaction, "response_id")
    if interaction is None or RECORD not in interaction.request or is_deleted(interaction):
        raise NotFound(
            f"there is no response {id[:80]!a} in this session",
            code="response_not_found",
            param="response_id",
        )
    return interaction


def deleted_record(interaction: Interaction) -> dict[str, Any]:
    """Return the ``request`` of an answer that its agent deletes."""
    record = interaction.request
    return {**record, RECORD: {**record.get(RECORD, {}), DELETED: True}}


def stored_encoder(
    interaction: Interaction, tree: InteractionTree, logprobs: LogprobsEncoder, chat: ChatFormat
) -> tuple[ResponseEncoder, ChatCall]:
    """Return the encoder of an answer from :func:`answer_of`, and the call that it answered."""
    kept = interaction.request[RECORD]
    recorded = interaction.request.get("recorded", {})
    repeated = {name: recorded[name] for name in DEFAULTS if name in recorded}
    repeated |= {name: kept[name] for name in DEFAULTS if name in kept}
    instructions, _ = parted(interaction, tree)
    if instructions is not None:
        repeated["instructions"] = instructions
    tools, groups = tree.path(interaction.id)[0].tools, kept.get(NAMESPACES, ())
    if "tools" not in repeated:
        repeated["tools"] = flat_tools(tools, groups, kept.get(CUSTOM_FORMATS, {}))
    logs = bool(kept.get("logprobs"))
    call = ChatCall(
        model=interaction.model,
        messages=[],
        tools=None,
        gconfig=interaction.gconfig,
        logprobs=logs,
        top_logprobs=repeated.get("top_logprobs", 0) if logs else 0,
    )
    head = Head(
        interaction.id,
        interaction.created_at,
        interaction.gconfig,
        len(tree.prompt_ids(interaction.id)),
    )
    responses = ResponsesCall(call, repeated, bool(kept.get("encrypted")), names_of(tools, groups))
    return ResponsesEncoder(responses, head, logprobs, chat), call


def input_items(interaction: Interaction, tree: InteractionTree) -> list[dict[str, Any]]:
    """Return the items that an answer answers, without the instructions, in their order."""
    _, messages = parted(interaction, tree)
    groups = interaction.request[RECORD].get(NAMESPACES, ())
    names = names_of(tree.path(interaction.id)[0].tools, groups)
    out: list[dict[str, Any]] = []
    # Their ids differ from those of answers: only those can be referred to.
    prefix = f"in{interaction.id.rpartition('_')[2]}"
    custom: set[Any] = set()
    for message in messages:
        custom |= {call["id"] for call in message.get("tool_calls") or () if is_custom(call)}
        out += _items(message, prefix, len(out), names, custom)
    return out


def _items(
    message: Message, prefix: str, at: int, names: Names, custom: Collection[Any]
) -> list[dict[str, Any]]:
    """Return a message's items; ``custom``: the ids of earlier calls of custom tools."""
    role = message.get("role")
    # The messages of a chat call may hold parts.
    text = text_of(message.get("content")) or ""
    if role == "assistant":
        calls = [own_call(call, names) for call in message.get("tool_calls") or ()]
        parts = message_parts({**message, "content": text, "tool_calls": calls})
        return [item_of(part, part_id(prefix, part, at + k)) for k, part in enumerate(parts)]
    if role == "tool":
        call_id = message.get("tool_call_id") or ""
        kind, type = "output", "function_call_output"
        if call_id in custom:
            kind, type = "custom_output", "custom_tool_call_output"
        item = {"id": item_id(prefix, kind, at), "type": type, "status": "completed"}
        return [{**item, "call_id": call_id, "output": text}]
    head = {"id": item_id(prefix, "content", at), "type": "message", "status": "completed"}
    return [{**head, "role": role, "content": [{"type": "input_text", "text": text}]}]
