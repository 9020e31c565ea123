"""What an interaction keeps of its request, beside messages, tools and sampling."""

from __future__ import annotations

from typing import Any, TypedDict

from any_agent.completions.params.call import ChatCall


class RequestRecord(TypedDict, total=False):
    """``Interaction.request``. Where texts are not kept, numbers and digests alone are."""

    overridden: dict[str, Any]
    """What the agent asked for and the run replaced, as ``gconfig`` names it; what was used stands
    in the interaction's ``gconfig``."""
    recorded: dict[str, Any]
    """Parameters without effect, as they came, and those whose effect is in the prompt's ids alone:
    ``reasoning_effort``, ``chat_template_kwargs``, ``tool_choice``; and
    ``parallel_tool_calls: false``, by which the answer ends after one call."""
    ignored: list[str]
    """Parameters that nobody here knows, by plain names; values that may be kept are among
    ``recorded``."""
    forced: int
    """How many ids at the prompt's end open the call that was forced: they are read as output, and
    are no output ids."""
    top_logprobs: dict[str, str]
    """The likeliest tokens at each position, if they were asked for: see ``PackedTop``."""
    order: list[list[Any]]
    """What the answer says in which order, where it is not reasoning, content, calls: see
    ``any_agent.completions.encoders.output_order``."""
    matched_stop: int
    """Which of ``gconfig.stop`` ended the answer."""
    responses: dict[str, Any]
    """Of a call of `/v1/responses`: what its answer repeats; ``instructions``: whether the first
    message is them."""
    mixed_cache: bool
    """Whether tokens of several versions were sampled over one cache (`update_mode: in_place`)."""
    text: dict[str, Any]
    """Of a legacy completion: digests by which a prompt that goes on from it is known."""


def recorded_of(call: ChatCall) -> dict[str, Any]:
    """The entry of that name."""
    recorded = dict(call.recorded)
    if call.template_kwargs:
        recorded["chat_template_kwargs"] = dict(call.template_kwargs)
    if call.forced_call is not None:
        recorded["tool_choice"] = call.forced_call or "required"
    if not call.parallel_tool_calls:
        recorded["parallel_tool_calls"] = False
    return recorded
