"""A session as the spans of one trace, by OpenTelemetry's conventions for generative AI.

Its own span covers its life, each model call is a span below it, and each reward one without
length. Ids follow from the session's, the call's and the reward's, so that the same thing has the
same span whenever and wherever it is made: live (`tracing.endpoint`), after a restart, and in an
export.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from any_agent.config import Config
from any_agent.record import is_frozen
from any_agent.types import Interaction, Message, SessionMode
from proxy_ext.journal import SessionRow

SCOPE = "any_agent"
_FAILED = {"expired", "aborted"}
_ENDS = {"tool_calls": "tool_call", "function_call": "tool_call", "abort": "error"}
"""Finish reasons that the conventions' messages call otherwise."""


class Span(NamedTuple):
    """One span; times are seconds since the epoch."""

    name: str
    trace_id: bytes
    span_id: bytes
    parent_id: bytes | None
    server: bool
    """True for a span of the kind SERVER, which an agent's request began; else INTERNAL."""
    began: float
    ended: float
    attributes: dict[str, Any]
    """Texts, numbers, truth values, and lists of texts."""
    failed: bool = False
    why: str | None = None
    """The reason of a failure."""


class Reward(Protocol):
    """A reward as it was set, in the journal's row or its statement."""

    @property
    def interaction_id(self) -> str | None: ...
    @property
    def name(self) -> str | None: ...
    @property
    def value(self) -> float | None: ...
    @property
    def by(self) -> str: ...
    @property
    def at(self) -> float: ...


def resource_of(config: Config, part: str | None) -> dict[str, str]:
    """Return the attributes of what makes the spans; ``part``: the rank's name, if it is known."""
    run = f"{config.user}/{config.experiment}/{config.trial}"
    known = {"service.name": "any-agent", "service.instance.id": part, "any_agent.run": run}
    return {name: value for name, value in known.items() if value is not None}


def session_span(row: SessionRow, ended: float) -> Span:
    """Return a session's own span; ``ended``: the last that is known of one that is open."""
    state = str(row.state)
    attributes = {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.provider.name": SCOPE,
        "any_agent.state": state,
        "any_agent.reason": row.reason,
        "any_agent.reward": None if row.final_reward is None else float(row.final_reward),
        "any_agent.step": row.step,
    }
    span = _span(
        f"invoke_agent {row.task_id}" if row.task_id else "invoke_agent",
        row,
        own=None,
        attributes=attributes,
        began=row.created_at,
        ended=ended,
    )
    failed = state in _FAILED
    return span._replace(failed=failed, why=_text(row.reason) if failed and row.reason else None)


def call_span(
    row: SessionRow | None,
    call: Interaction,
    *,
    model: str,
    tenant: str | None,
    prompt_tokens: int,
    messages: Sequence[Message] | None,
    ended: float,
) -> Span:
    """Return a call's span; without a session it is a trace by itself.

    ``model``: the policy's name. ``messages``: all of the request's, which are then put into the
    span, with the answer; None for a span without content.
    """
    versions = call.output_versions
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": SCOPE,
        "gen_ai.request.model": call.model or model,
        "gen_ai.response.id": call.id,
        "gen_ai.response.finish_reasons": [call.finish_reason],
        "any_agent.version.first": int(versions[0]) if len(versions) else None,
        "any_agent.version.last": int(versions[-1]) if len(versions) else None,
        "any_agent.continuation": str(call.continuation),
        "any_agent.branch_reason": call.branch_reason,
        "any_agent.untrainable_reason": call.untrainable_reason,
        "any_agent.tenant": tenant,
    }
    if is_frozen(call):
        attributes |= _of_provider(call.request.get("frozen") or {})
        model = call.model
    else:
        attributes |= {
            "gen_ai.response.model": call.model if "adapter" in call.request else model,
            "gen_ai.request.temperature": call.gconfig.temperature,
            "gen_ai.request.top_p": call.gconfig.top_p,
            "gen_ai.request.max_tokens": call.gconfig.max_new_tokens,
            "gen_ai.usage.input_tokens": prompt_tokens,
            "gen_ai.usage.output_tokens": len(call.output_ids),
        }
    if messages is not None:
        (answer,) = _messages([call.output_message])
        answer["finish_reason"] = _ENDS.get(call.finish_reason, call.finish_reason)
        attributes["gen_ai.input.messages"] = json.dumps(_messages(messages))
        attributes["gen_ai.output.messages"] = json.dumps([answer])
    return _span(
        f"chat {model}",
        row,
        own=call.id,
        server=True,
        attributes=attributes,
        began=call.created_at,
        ended=ended,
    )


def _of_provider(frozen: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the record of a frozen model's call has instead of tokens and sampling."""
    usage = frozen.get("usage") or {}
    return {
        "gen_ai.response.model": frozen.get("provider_model"),
        "gen_ai.usage.input_tokens": usage.get("prompt_tokens", usage.get("input_tokens")),
        "gen_ai.usage.output_tokens": usage.get("completion_tokens", usage.get("output_tokens")),
    }


def reward_span(row: SessionRow, reward: Reward) -> Span:
    """Return the span of one reward as it was set; words alone are none."""
    assert reward.value is not None
    value = float(reward.value)
    attributes = {
        "gen_ai.evaluation.name": reward.name or "reward",
        "gen_ai.evaluation.score.value": value,
        "gen_ai.response.id": reward.interaction_id,
        "any_agent.reward.by": reward.by,
    }
    # Exact numbers: several rewards may be set at one moment.
    own = f"reward-{float(reward.at)!r}-{reward.interaction_id}-{reward.name}-{value!r}"
    name = f"reward {reward.name}" if reward.name else "reward"
    return _span(name, row, own=own, attributes=attributes, began=reward.at, ended=reward.at)


def _span(
    name: str,
    row: SessionRow | None,
    *,
    own: str | None,
    attributes: dict[str, Any],
    began: float,
    ended: float,
    server: bool = False,
) -> Span:
    """Return a span; ``own`` distinguishes it from the others of its session, whose own span has
    none."""
    trace = _id(own or "" if row is None else row.id, 16)
    root = None if row is None else _id(row.id, 8)
    if own is None:
        assert root is not None
        id, parent = root, None
    else:
        id, parent = _id(own if row is None else row.id + own, 8), root
    shared = {} if row is None else _about(row)
    known = {
        key: _text(value) if isinstance(value, str) else value
        for key, value in (shared | attributes).items()
        if value is not None
    }
    return Span(_text(name), trace, id, parent, server, began, max(began, ended), known)


def _about(row: SessionRow) -> dict[str, Any]:
    return {
        "gen_ai.conversation.id": row.id,
        "any_agent.mode": str(SessionMode(row.mode)),
        "any_agent.task_id": row.task_id,
        "any_agent.group_id": row.group_id,
        "any_agent.tenant": row.tenant,
    }


def _id(text: str, size: int) -> bytes:
    """Return an id of so many bytes that follows from a text; it is not 0."""
    digest = hashlib.sha256(text.encode()).digest()[:size]
    return digest if any(digest) else bytes([*digest[1:], 1])


def _text(text: str) -> str:
    """Return a text that UTF-8 has: agents send lone surrogates."""
    return text.encode(errors="replace").decode()


def _messages(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Return messages as the conventions have them: a role and parts."""
    return [{"role": m.get("role", ""), "parts": _parts(m)} for m in messages]


def _parts(message: Message) -> list[dict[str, Any]]:
    """Return a message's parts; those to frozen models may have any JSON in any field."""
    content = message.get("content")
    texts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    parts: list[dict[str, Any]] = [
        {"type": "text", "content": str(part["text"])}
        for part in texts
        if isinstance(part, dict) and part.get("text")
    ]
    if message.get("role") == "tool":
        answer = "".join(part["content"] for part in parts)
        return [
            {
                "type": "tool_call_response",
                "id": message.get("tool_call_id"),
                "response": answer,
            }
        ]
    if message.get("reasoning_content"):
        parts.insert(0, {"type": "reasoning", "content": message["reasoning_content"]})
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = _object(_object(call).get("function"))
        parts.append(
            {
                "type": "tool_call",
                "id": _object(call).get("id"),
                "name": function.get("name"),
                "arguments": function.get("arguments"),
            }
        )
    return parts


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
