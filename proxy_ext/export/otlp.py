"""Sessions as OpenTelemetry traces in OTLP's JSON, as its file exporter writes lines: each is one
ExportTraceServiceRequest."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from any_agent.config import Config
from any_agent.errors import Unprocessable
from any_agent.keys import rank_of_session
from any_agent.record import InteractionTree, is_frozen, lacks_texts
from any_agent.rundir.registry import rank_name
from proxy_ext.archive.records import ArchiveRecord
from proxy_ext.journal.base import RewardRow, SessionRow
from proxy_ext.spans import SCOPE, Span, call_span, resource_of, reward_span, session_span

_LINE_BYTES = 1 << 20
"""The size beyond which a session's next span is on another line: readers limit their lines."""
_INTERNAL, _SERVER, _ERROR = 1, 2, 2  # of OTLP's enumerations
Json = dict[str, Any]


class TraceLines:
    """Makes the lines of sessions."""

    def __init__(self, settings: Config, *, content: bool) -> None:
        """``settings``: the run's. ``content``: put the messages into the spans."""
        self._settings = settings
        self._content = content
        self.spans = 0

    def of(self, record: ArchiveRecord) -> Iterator[bytes]:
        """Yield a session's lines.

        Raises ValueError for a damaged session, and Unprocessable for one without the content that
        is wanted, before the first line.
        """
        if self._content and any(map(lacks_texts, record.interactions)):
            raise Unprocessable(
                "its texts were not kept (sessions.store_content): leave out --content"
            )
        row, rewards = _rows(record)
        rank = rank_of_session(row.id)
        part = rank_name(rank) if rank is not None else None
        resource = {"attributes": _attributes(resource_of(self._settings, part))}
        head = (
            f'{{"resourceSpans":[{{"resource":{json.dumps(resource)},'
            f'"scopeSpans":[{{"scope":{{"name":"{SCOPE}"}},"spans":['
        )
        waiting: list[str] = []
        size = 0
        for span in self._spans(record, row, rewards):
            self.spans += 1
            waiting.append(json.dumps(_json(span)))
            size += len(waiting[-1])
            if size > _LINE_BYTES:
                yield _line(head, waiting)
                waiting, size = [], 0
        if waiting:
            yield _line(head, waiting)

    def _spans(
        self, record: ArchiveRecord, row: SessionRow, rewards: list[RewardRow]
    ) -> Iterator[Span]:
        tree = InteractionTree.from_interactions(
            call for call in record.interactions if not is_frozen(call)
        )
        times = [row.created_at, *(call.created_at for call in record.interactions)]
        times += [reward.at for reward in rewards]
        yield session_span(row, row.ended_at if row.ended_at is not None else max(times))
        for call in record.interactions:
            tokens, messages = 0, call.message_delta
            if not is_frozen(call):
                tokens = len(tree.prompt_ids(call.id))
                messages = tree.messages(call.id) if self._content else []
            yield call_span(
                row,
                call,
                model=self._settings.model.name,
                tenant=row.tenant,
                prompt_tokens=tokens,
                messages=messages if self._content else None,
                # The record does not have a call's end.
                ended=call.created_at,
            )
        for reward in rewards:
            if reward.value is not None:
                yield reward_span(row, reward)


def _rows(record: ArchiveRecord) -> tuple[SessionRow, list[RewardRow]]:
    """Return a record's rows, but for what only its journal had."""
    try:
        row = SessionRow(lane="", expires_at=0.0, **record.session)
        return row, [RewardRow(**reward) for reward in record.rewards]
    except TypeError as error:
        raise ValueError(f"its record is damaged: {error}") from None


def _line(head: str, spans: list[str]) -> bytes:
    return f"{head}{','.join(spans)}]}}]}}]}}\n".encode()


def _json(span: Span) -> Json:
    """Return a span as OTLP's JSON: ids are hexadecimal, and 64-bit numbers are texts."""
    parent = {} if span.parent_id is None else {"parentSpanId": span.parent_id.hex()}
    status: Json = {"code": _ERROR} if span.failed else {}
    if span.why is not None:
        status["message"] = span.why
    return {
        "traceId": span.trace_id.hex(),
        "spanId": span.span_id.hex(),
        **parent,
        "name": span.name,
        "kind": _SERVER if span.server else _INTERNAL,
        "startTimeUnixNano": str(int(span.began * 1e9)),
        "endTimeUnixNano": str(int(span.ended * 1e9)),
        "attributes": _attributes(span.attributes),
        "status": status,
    }


def _attributes(values: Mapping[str, Any]) -> list[Json]:
    return [{"key": key, "value": _value(value)} for key, value in values.items()]


def _value(value: Any) -> Json:
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case list():
            return {"arrayValue": {"values": [_value(each) for each in value]}}
    return {"stringValue": str(value)}
