"""Traces of sessions, sent by OpenTelemetry's SDK (`tracing.endpoint`); the spans are those of
:mod:`proxy_ext.spans`.

A call's span may leave before the session's, and a restart goes on with the same trace. The SDK's
own thread sends spans. Nothing waits for it: beyond a bound further spans are dropped.
"""

from __future__ import annotations

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
from any_agent.types import Interaction
from proxy_ext.journal import SessionRow, SetReward, Statement
from proxy_ext.sessions.session import RecordedSession
from proxy_ext.spans import SCOPE, Span, call_span, resource_of, reward_span, session_span

log = logging.getLogger(__name__)

MAX_WAITING = 2048  # spans
SEND_SECONDS = 3.0  # for one batch, its retries included
_SCOPE = InstrumentationScope(SCOPE)


class SessionTraces:
    """Makes the spans of what is durable, as a listener to the sessions."""

    def __init__(self, config: Config, *, part: str, exporter: SpanExporter | None = None) -> None:
        """``exporter``: by default that of `tracing.endpoint`."""
        self._content = config.tracing.content
        self._model = config.model.name
        self.outcomes: Counter[str] = Counter()
        self._resource = Resource.create(dict(resource_of(config, part)))
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
        prompt, messages = interaction.prompt_delta_ids, interaction.message_delta
        if session is not None:
            prompt = session.tree.prompt_ids(interaction.id)
            messages = session.tree.messages(interaction.id) if self._content else []
        self._add(
            call_span(
                session.row if session is not None else None,
                interaction,
                model=self._model,
                tenant=tenant,
                prompt_tokens=len(prompt),
                messages=messages if self._content else None,
                ended=time.time(),
            )
        )

    def on_write(
        self, before: SessionRow, after: SessionRow, statements: Iterable[Statement]
    ) -> None:
        for each in statements:
            if isinstance(each, SetReward) and each.value is not None:
                self._add(reward_span(after, each))
        if before.ended_at is None and after.ended_at is not None:
            self._add(session_span(after, after.ended_at))

    def _add(self, span: Span) -> None:
        """Queue a span, if there is room for it."""
        if self._added - self.outcomes["sent"] - self.outcomes["failed"] >= MAX_WAITING:
            self.outcomes["dropped"] += 1
            return
        self._added += 1
        self._processor.on_end(self._readable(span))

    def _readable(self, span: Span) -> ReadableSpan:
        parent = None if span.parent_id is None else _context(span.trace_id, span.parent_id)
        return ReadableSpan(
            span.name,
            context=_context(span.trace_id, span.span_id),
            parent=parent,
            resource=self._resource,
            attributes=span.attributes,
            kind=SpanKind.SERVER if span.server else SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR, span.why) if span.failed else Status(StatusCode.UNSET),
            start_time=int(span.began * 1e9),
            end_time=int(span.ended * 1e9),
            instrumentation_scope=_SCOPE,
        )


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


def _context(trace: bytes, span: bytes) -> SpanContext:
    ids = int.from_bytes(trace), int.from_bytes(span)
    return SpanContext(*ids, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
