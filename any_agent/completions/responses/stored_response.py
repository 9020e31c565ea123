"""A recorded answer told again, and what it was an answer to."""

from __future__ import annotations

from typing import Any

from any_agent.chat import ChatFormat, text_of
from any_agent.completions.call_types import Head
from any_agent.completions.encoders import ResponseEncoder
from any_agent.completions.encoders.logprobs import LogprobsEncoder
from any_agent.completions.encoders.output_order import OutputPart
from any_agent.completions.params.call import ChatCall
from any_agent.completions.responses.encoder import ResponsesEncoder
from any_agent.completions.responses.history import (
    DELETED,
    RECORD,
    is_deleted,
    parted,
    require_texts,
)
from any_agent.completions.responses.output_items import item_id, item_of
from any_agent.completions.responses.parse import DEFAULTS, ResponsesCall
from any_agent.completions.responses.tools import flat
from any_agent.errors import NotFound
from any_agent.record import InteractionTree
from any_agent.types import Interaction, Message


def answer_of(id: str, tree: InteractionTree | None) -> Interaction:
    """An answer of `/v1/responses`.

    Raises:
        NotFound: the session has none of that id.
        InvalidRequest: its texts were not kept.
    """
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
    """``request`` of an answer that its agent wants to be told of no more."""
    record = interaction.request
    return {**record, RECORD: {**record.get(RECORD, {}), DELETED: True}}


def response_again(
    interaction: Interaction, tree: InteractionTree, logprobs: LogprobsEncoder, chat: ChatFormat
) -> bytes:
    """The body that the answer had, from :func:`answer_of`'s."""
    return shape_again(interaction, tree, logprobs, chat)[0].whole([interaction])


def shape_again(
    interaction: Interaction, tree: InteractionTree, logprobs: LogprobsEncoder, chat: ChatFormat
) -> tuple[ResponseEncoder, ChatCall]:
    """The answer and its call, as `any_agent.completions.parsed_request.whole` encodes them."""
    asked = interaction.request[RECORD]
    recorded = interaction.request.get("recorded", {})
    repeated = {name: recorded[name] for name in DEFAULTS if name in recorded}
    repeated |= {name: asked[name] for name in DEFAULTS if name in asked}
    instructions, _ = parted(interaction, tree)
    if instructions is not None:
        repeated["instructions"] = instructions
    if "tools" not in repeated:
        repeated["tools"] = flat(tree.path(interaction.id)[0].tools)
    told = bool(asked.get("logprobs"))
    call = ChatCall(
        model=interaction.model,
        messages=[],
        tools=None,
        gconfig=interaction.gconfig,
        stream=False,
        include_usage=False,
        logprobs=told,
        top_logprobs=repeated.get("top_logprobs", 0) if told else 0,
    )
    head = Head(
        interaction.id,
        interaction.created_at,
        interaction.gconfig,
        len(tree.prompt_ids(interaction.id)),
    )
    responses = ResponsesCall(call, repeated, told, bool(asked.get("encrypted")))
    return ResponsesEncoder(responses, head, logprobs, chat), call


def input_items(interaction: Interaction, tree: InteractionTree) -> list[dict[str, Any]]:
    """What it was an answer to, without the instructions, in its order."""
    _, messages = parted(interaction, tree)
    out: list[dict[str, Any]] = []
    # Their ids are not those of answers: only these can be referred to.
    prefix = f"in{interaction.id.rpartition('_')[2]}"
    for message in messages:
        out += _items(message, prefix, len(out))
    return out


def _items(message: Message, prefix: str, at: int) -> list[dict[str, Any]]:
    role, content = message.get("role"), message.get("content")
    if role == "assistant":
        parts = []
        if reasoning := message.get("reasoning_content"):
            parts.append(OutputPart("reasoning", reasoning))
        if content:
            parts.append(OutputPart("content", _text(content)))
        parts += [OutputPart("call", call=call) for call in message.get("tool_calls") or ()]
        return [
            item_of(part, item_id(prefix, part.kind, at + k), "completed")
            for k, part in enumerate(parts)
        ]
    if role == "tool":
        return [
            {
                "id": item_id(prefix, "output", at),
                "type": "function_call_output",
                "status": "completed",
                "call_id": message.get("tool_call_id") or "",
                "output": _text(content),
            }
        ]
    return [
        {
            "id": item_id(prefix, "content", at),
            "type": "message",
            "status": "completed",
            "role": role,
            "content": [{"type": "input_text", "text": _text(content)}],
        }
    ]


def _text(content: Any) -> str:
    """A chat call's messages may hold parts."""
    return text_of(content) or ""
