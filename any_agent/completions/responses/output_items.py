"""The output items of an answer of the Responses API."""

from __future__ import annotations

from typing import Any

from any_agent.completions.encoders.output_order import OutputPart, parts_of
from any_agent.types import Interaction

PREFIXES = {"reasoning": "rs", "content": "msg", "call": "fc", "output": "fco"}


def item_id(answer_id: str, kind: str, index: int) -> str:
    """Return ``msg_<the answer's hex>_<place>``: an item that comes back names its answer."""
    return f"{PREFIXES[kind]}_{answer_id.rpartition('_')[2]}_{index}"


def output_parts(interaction: Interaction) -> list[OutputPart]:
    """Return an answer's parts, at least one: an empty answer is an empty text to send back."""
    return parts_of(interaction) or [OutputPart("content")]


def items_of(interaction: Interaction) -> list[dict[str, Any]]:
    """Return the items as plain data without log-probabilities."""
    parts = output_parts(interaction)
    cut = interaction.finish_reason in ("length", "abort")
    return [
        item_of(
            part,
            item_id(interaction.id, part.kind, k),
            "incomplete" if cut and k == len(parts) - 1 else "completed",
        )
        for k, part in enumerate(parts)
    ]


def item_of(part: OutputPart, id: str, status: str) -> dict[str, Any]:
    if part.kind == "reasoning":
        content = [{"type": "reasoning_text", "text": part.text}]
        return {"id": id, "type": "reasoning", "summary": [], "content": content, "status": status}
    if part.kind == "content":
        text = {"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}
        return {
            "id": id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": [text],
        }
    assert part.call is not None
    function = part.call["function"]
    return {
        "id": id,
        "type": "function_call",
        "status": status,
        "call_id": part.call["id"],
        "name": function["name"],
        "arguments": function["arguments"],
    }
