"""Traces of sessions by OpenTelemetry, with its conventions for generative AI (`tracing.endpoint`).

A session is a trace: its span covers its life, each model call is a span below it, and each reward
one without length. Ids follow from the session's, so that a call's span may leave before the
session's, and a restart goes on with the same trace.

The SDK's own thread sends spans. Nothing waits for it: beyond a bound further spans are dropped.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from any_agent.config import Config
from any_agent.types import Interaction, Message, SessionMode
from proxy_ext.journal import SessionRow, SetReward, Statement
from proxy_ext.sessions.session import RecordedSession

log = logging.getLogger(__name__)

MAX_WAITING = 2048  # spans
SEND_SECONDS = 3.0  # for one batch, its retries included
_SCOPE = InstrumentationScope("any_agent")
_FAILED = {"expired", "aborted"}


class SessionTraces:
    """Makes the spans of what is durable, as a listener to the sessions."""

    def __init__(self, config: Config, *, part: str, exporter: SpanExporter | None = None) -> None:
        """``exporter``: by default that of `tracing.endpoint`."""
        self._content = config.tracing.content
        self._model = config.model.name
        self.outcomes: Counter[str] = Counter()
        run = f"{config.user}/{config.experiment}/{config.trial}"
        self._resource = Resource.create(
            {"service.name": "any-agent", "service.instance.id": part, "any_agent.run": run}
        )
        if exporter is None:
            exporter = OTLPSpanExporter(config.tracing.endpoint, timeout=SEND_SECONDS)
            # It says of each batch what `_Counting` says once.
            logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._added = 0
        counting = _Counting(exporter, self.outcomes)
        self._processor = BatchSpanProcessor(
            counting, max_queue_size=MAX_WAITING, max_export_batch_size=MAX_WAITING // 4
        )

    def close(self) -> None:
        """Send what waits, for a bounded time; it blocks."""
        self._processor.shutdown()  # type: ignore[no-untyped-call]

    def on_call(
        self, session: RecordedSession | None, interaction: Interaction, tenant: str | None
    ) -> None:
        gconfig, prompt = interaction.gconfig, interaction.prompt_delta_ids
        messages = interaction.message_delta
        if session is not None:
            prompt = session.tree.prompt_ids(interaction.id)
            messages = session.tree.messages(interaction.id) if self._content else []
        versions = interaction.output_versions
        answered = interaction.model if "adapter" in interaction.request else self._model
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "any_agent",
            "gen_ai.request.model": interaction.model or self._model,
            "gen_ai.response.model": answered,
            "gen_ai.response.id": interaction.id,
            "gen_ai.response.finish_reasons": [interaction.finish_reason],
            "gen_ai.request.temperature": gconfig.temperature,
            "gen_ai.request.top_p": gconfig.top_p,
            "gen_ai.request.max_tokens": gconfig.max_new_tokens,
            "gen_ai.usage.input_tokens": len(prompt),
            "gen_ai.usage.output_tokens": len(interaction.output_ids),
            "any_agent.version.first": int(versions[0]) if len(versions) else None,
            "any_agent.version.last": int(versions[-1]) if len(versions) else None,
            "any_agent.continuation": str(interaction.continuation),
            "any_agent.branch_reason": interaction.branch_reason,
            "any_agent.untrainable_reason": interaction.untrainable_reason,
            "any_agent.tenant": tenant,
        }
        if self._content:
            attributes["gen_ai.input.messages"] = _messages(messages)
            attributes["gen_ai.output.messages"] = _messages([interaction.output_message])
        self._add(
            f"chat {self._model}",
            session.row if session is not None else None,
            own=interaction.id,
            kind=SpanKind.SERVER,
            attributes=attributes,
            began=interaction.created_at,
            ended=time.time(),
        )

    def on_write(
        self, before: SessionRow, after: SessionRow, statements: Iterable[Statement]
    ) -> None:
        for number, each in enumerate(statements):
            if isinstance(each, SetReward):
                attributes = {
                    "gen_ai.evaluation.name": each.name or "reward",
                    "gen_ai.evaluation.score.value": each.value,
                    "gen_ai.response.id": each.interaction_id,
                    "any_agent.rewarded_by": after.rewarded_by,
                }
                own = f"reward-{each.at}-{number}"
                name = f"reward {each.name}" if each.name else "reward"
                self._add(name, after, own=own, attributes=attributes, began=each.at, ended=each.at)
        if before.ended_at is None and after.ended_at is not None:
            self._add_session(after)

    def _add_session(self, row: SessionRow) -> None:
        state = str(row.state)
        self._add(
            f"invoke_agent {row.task_id}" if row.task_id else "invoke_agent",
            row,
            own=None,
            attributes={
                "gen_ai.operation.name": "invoke_agent",
                "gen_ai.provider.name": "any_agent",
                "any_agent.state": state,
                "any_agent.reason": row.reason,
                "any_agent.reward": row.final_reward,
                "any_agent.step": row.step,
            },
            began=row.created_at,
            ended=row.ended_at or time.time(),
            status=Status(StatusCode.ERROR, row.reason) if state in _FAILED else None,
        )

    def _add(
        self,
        name: str,
        row: SessionRow | None,
        *,
        own: str | None,
        attributes: dict[str, Any],
        began: float,
        ended: float,
        kind: SpanKind = SpanKind.INTERNAL,
        status: Status | None = None,
    ) -> None:
        """Queue a span; ``own`` distinguishes it from the others of its session, whose own span has
        none. Without a session it is a trace by itself."""
        trace = _id(own or "" if row is None else row.id, 16)
        root = _context(trace, _id(row.id, 8)) if row is not None else None
        if own is None:
            assert root is not None
            context, parent = root, None
        else:
            context, parent = _context(trace, _id(own if row is None else row.id + own, 8)), root
        shared = {} if row is None else _about(row)
        known = {key: value for key, value in (shared | attributes).items() if value is not None}
        span = ReadableSpan(
            name,
            context=context,
            parent=parent,
            resource=self._resource,
            attributes=known,
            kind=kind,
            status=status or Status(StatusCode.UNSET),
            start_time=int(began * 1e9),
            end_time=int(max(began, ended) * 1e9),
            instrumentation_scope=_SCOPE,
        )
        if self._added - self.outcomes["sent"] - self.outcomes["failed"] >= MAX_WAITING:
            self.outcomes["dropped"] += 1
            return
        self._added += 1
        self._processor.on_end(span)


class _Counting(SpanExporter):
    """Counts what an exporter is given, and says once that it fails."""

    def __init__(self, inner: SpanExporter, outcomes: Counter[str]) -> None:
        self._inner = inner
        self._outcomes = outcomes
        self._failed = False

    def export(self, spans: Any) -> SpanExportResult:
        try:
            result = self._inner.export(spans)
        except Exception as error:
            log.warning("traces cannot be sent: %s", type(error).__name__)
            result = SpanExportResult.FAILURE
        sent = result is SpanExportResult.SUCCESS
        self._outcomes["sent" if sent else "failed"] += len(spans)
        if sent == self._failed:
            log.warning("traces are sent again" if sent else "traces cannot be sent; more are lost")
        self._failed = not sent
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()


def _about(row: SessionRow) -> dict[str, Any]:
    return {
        "gen_ai.conversation.id": row.id,
        "any_agent.mode": str(SessionMode(row.mode)),
        "any_agent.task_id": row.task_id,
        "any_agent.group_id": row.group_id,
        "any_agent.tenant": row.tenant,
    }


def _context(trace: int, span: int) -> SpanContext:
    return SpanContext(trace, span, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _id(text: str, size: int) -> int:
    """Return an id of so many bytes that follows from a text; it is not 0."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:size]) or 1


def _messages(messages: Iterable[Message]) -> str:
    """Return messages as the conventions have them: a role and parts."""
    return json.dumps([{"role": m.get("role", ""), "parts": _parts(m)} for m in messages])


def _parts(message: Message) -> list[dict[str, Any]]:
    content = message.get("content")
    texts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    parts: list[dict[str, Any]] = [
        {"type": "text", "content": part["text"]}
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
    for call in message.get("tool_calls") or ():
        function = call.get("function", {})
        parts.append(
            {
                "type": "tool_call",
                "id": call.get("id"),
                "name": function.get("name"),
                "arguments": function.get("arguments"),
            }
        )
    return parts
