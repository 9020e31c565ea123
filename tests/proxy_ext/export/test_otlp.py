"""`any-agent export --format otel`, read back by OpenTelemetry's own messages."""

from __future__ import annotations

import hashlib
import json
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes

from any_agent.record import frozen_id
from any_agent.types import Continuation, Interaction, SessionState, id_array
from proxy_ext.export import otlp
from proxy_ext.journal import PutInteraction, PutSession, SetReward
from proxy_ext.spans import call_span
from tests.support.archives import CALL, Rank, export_trial
from tests.support.journal import make_interaction, make_row
from tests.support.otlp import Collector, collector, values
from tests.support.proxy import until
from tests.support.proxy_fixtures import Start
from tests.support.sessions import finalize

__all__ = ["collector"]
_IDS = ("traceId", "spanId", "parentSpanId")


def read(line: dict[str, Any]) -> ExportTraceServiceRequest:
    """A line as the message; OTLP's JSON has ids in hexadecimal, protobuf's in base64."""
    for resource in line["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                for name in _IDS:
                    if name in span:
                        span[name] = b64encode(bytes.fromhex(span[name])).decode()
    # It refuses names that the message does not have.
    return ParseDict(line, ExportTraceServiceRequest())


def spans_of(lines: list[dict[str, Any]]) -> Iterator[Any]:
    for line in lines:
        for resource in read(line).resource_spans:
            for scope in resource.scope_spans:
                assert scope.scope.name == "any_agent"
                yield from scope.spans


NAMES = {v for k, v in vars(gen_ai_attributes).items() if k.startswith("GEN_AI_")}


def sha(text: str, size: int) -> bytes:
    return hashlib.sha256(text.encode()).digest()[:size]


def about(span: Any) -> dict[str, Any]:
    """A span's attributes, whose names the conventions have."""
    found = values(span.attributes)
    unknown = {n for n in found if n.startswith("gen_ai.")} - NAMES
    assert not unknown and len(found) == len(span.attributes)
    return found


def as_live(span: Any) -> dict[str, Any]:
    """What a live span and an exported one must have in common: the record has no end of a call."""
    end = None if span.name.startswith("chat") else span.end_time_unix_nano
    ids = (span.trace_id, span.span_id, span.parent_span_id)
    status = (span.status.code, span.status.message)
    return {
        "ids": ids,
        "name": span.name,
        "kind": span.kind,
        "times": (span.start_time_unix_nano, end),
        "status": status,
        "about": about(span),
    }


@pytest.mark.parametrize("content", [False, True])
async def test_exported_spans_are_the_live_ones(
    start: Start,
    tmp_path: Path,
    collector: Collector,
    monkeypatch: pytest.MonkeyPatch,
    content: bool,
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    live = f"tracing.endpoint={collector.url}/v1/traces"
    proxy = await start(live, f"tracing.content={content}", "user=u", "experiment=e", "trial=t")
    session = await proxy.open(mode="eval", task_id="sums")
    asked = [{"role": "user", "content": "a question"}]
    first = await proxy.complete(session["api_key"], asked, max_tokens=5)
    talk = [*asked, first["choices"][0]["message"], {"role": "user", "content": "and?"}]
    await proxy.complete(session["api_key"], talk, max_tokens=5)
    for reward in (1, 0.5):
        body = {"reward": reward, "completion_id": first["id"]}
        given = await proxy.post("/rl/v1/set_reward", body, session["api_key"])
        assert given.status_code == 200, given.text
    await finalize(proxy, session)
    aborted = await proxy.open(mode="eval")
    path = f"/rl/v1/sessions/{aborted['session_id']}/abort"
    ended = await proxy.post(path, {}, aborted["api_key"])
    assert ended.status_code == 200, ended.text
    await until(lambda: len(collector.spans) >= 6)
    option = ["--content"] if content else []
    done = export_trial(tmp_path, "--format", "otel", *option)
    assert done.code == 0 and "2 sessions" in done.said and "6 spans" in done.said
    again = export_trial(tmp_path, "--format", "otel", *option)
    assert again.lines == done.lines
    resource = read(json.loads(json.dumps(done.lines[0]))).resource_spans[0].resource
    shown = values(resource.attributes)
    assert shown.items() <= collector.resources[0].items() and shown["any_agent.run"] == "u/e/t"
    exported = {span.span_id: as_live(span) for span in spans_of(done.lines)}
    assert exported == {span.span_id: as_live(span) for span in collector.spans}
    assert len(exported) == 6
    texts = str([span["about"] for span in exported.values()])
    assert ("a question" in texts) is content


async def recorded(tmp_path: Path, *calls: Interaction, **row: Any) -> None:
    rank = await Rank(tmp_path / "u" / "e" / "t").start()
    fields = {"state": SessionState.TRAINED, "created_at": 4.0, "ended_at": 9.5, "step": 3}
    made = make_row("ses-0-00000000000000aa", **fields | row)
    await rank.journal.commit(PutSession(made), *map(PutInteraction, calls))
    rewards = (
        SetReward(made.id, calls[0].id, "style", 0.25, "judge", 7.0, 0.25),
        SetReward(made.id, None, None, 1.0, "agent", 8.0, 1.0),
    )
    await rank.journal.commit(*rewards)
    await rank.stop()


def call(id: str, parent: str | None = None, **fields: Any) -> Interaction:
    made = make_interaction(id, "ses-0-00000000000000aa", parent)
    return replace(made, **fields)


async def test_a_session_is_a_trace_of_its_calls_and_rewards(tmp_path: Path) -> None:
    one = call("one", created_at=5.25)
    two = call("two", "one", created_at=6.0, branch_reason=None, finish_reason="length")
    frozen = {"provider_model": "gpt-x", "usage": {"prompt_tokens": 7, "completion_tokens": 2}}
    judge = call(
        frozen_id(),
        output_ids=id_array([]),
        output_logprobs=one.output_logprobs[:0],
        output_versions=id_array([]),
        prompt_delta_ids=id_array([]),
        continuation=Continuation.ROOT,
        untrainable_reason="frozen_model",
        model="judge",
        request={"frozen": frozen},
        created_at=6.5,
    )
    await recorded(tmp_path, one, two, judge, group_id="g", tenant="them")
    done = export_trial(tmp_path, "--format", "otel")
    assert done.code == 0, done.said
    (line,) = done.lines
    assert list(line) == ["resourceSpans"]
    plain = line["resourceSpans"][0]["scopeSpans"][0]["spans"][0]
    id = "ses-0-00000000000000aa"
    assert plain["traceId"] == sha(id, 16).hex() and plain["spanId"] == sha(id, 8).hex()
    assert (plain["startTimeUnixNano"], plain["endTimeUnixNano"]) == ("4000000000", "9500000000")
    root, first, second, judged, style, final = spans_of(done.lines)
    assert {s.trace_id for s in (root, first, second, judged, style, final)} == {sha(id, 16)}
    assert root.parent_span_id == b"" and root.status.code == 0
    below = (first, second, judged, style, final)
    assert {s.parent_span_id for s in below} == {root.span_id}
    assert first.span_id == sha(id + "one", 8) and len({s.span_id for s in below}) == 5
    times = [(s.start_time_unix_nano, s.end_time_unix_nano) for s in below]
    assert times == [(int(at * 1e9),) * 2 for at in (5.25, 6.0, 6.5, 7.0, 8.0)]
    assert [s.kind for s in (root, *below)] == [1, 2, 2, 2, 1, 1]
    shared = {
        "gen_ai.conversation.id": id,
        "any_agent.mode": "train",
        "any_agent.group_id": "g",
        "any_agent.tenant": "them",
    }
    for span in (root, *below):
        assert shared.items() <= about(span).items()
    trained = {"any_agent.state": "trained", "any_agent.step": 3, "any_agent.reward": 1.0}
    assert trained.items() <= about(root).items()
    assert about(first) == shared | {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "any_agent",
        "gen_ai.request.model": "m",
        "gen_ai.response.model": about(second)["gen_ai.response.model"],
        "gen_ai.response.id": "one",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.request.temperature": 1.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.max_tokens": 7,
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 2,
        "any_agent.version.first": 0,
        "any_agent.version.last": 1,
        "any_agent.continuation": "root",
    }
    # The prompt of the second call has the first one's prompt and output.
    assert about(second)["gen_ai.usage.input_tokens"] == 3 + 2 + 3
    of_provider = {"gen_ai.response.model": "gpt-x", "gen_ai.usage.input_tokens": 7}
    assert of_provider.items() <= about(judged).items() and judged.name == "chat judge"
    assert "gen_ai.request.temperature" not in about(judged)
    assert (style.name, about(style)["gen_ai.evaluation.score.value"]) == ("reward style", 0.25)
    assert about(style)["gen_ai.response.id"] == "one"
    assert "gen_ai.response.id" not in about(final)


async def test_content_is_exported_only_where_it_is_asked_for(tmp_path: Path) -> None:
    said = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    one = call("one", output_message=said, finish_reason="tool_calls")
    told = [{"role": "tool", "tool_call_id": "c1", "content": "\ud800 three"}]
    await recorded(tmp_path, one, call("two", "one", message_delta=told))
    without = export_trial(tmp_path, "--format", "otel")
    assert "hé" not in json.dumps(without.lines, ensure_ascii=False)
    asked, given = [{"type": "text", "content": "hé"}], {"type": "tool_call_response", "id": "c1"}
    called = {"type": "tool_call", "id": "c1", "name": "add", "arguments": '{"a": 1}'}
    _, first, second, *_ = spans_of(export_trial(tmp_path, "--format", "otel", "--content").lines)
    assert json.loads(about(first)["gen_ai.input.messages"]) == [{"role": "user", "parts": asked}]
    assert json.loads(about(first)["gen_ai.output.messages"]) == [
        {"role": "assistant", "parts": [called], "finish_reason": "tool_call"}
    ]
    assert json.loads(about(second)["gen_ai.input.messages"]) == [
        {"role": "user", "parts": asked},
        {"role": "assistant", "parts": [called]},
        {"role": "tool", "parts": [{**given, "response": "\ud800 three"}]},
    ]
    for arguments in (
        ("--format", "jsonl", "--content"),
        ("--format", "otel", "--style", "concat"),
    ):
        assert export_trial(tmp_path, *arguments).code == 2


async def test_messages_of_any_form_to_a_frozen_model_are_exported(tmp_path: Path) -> None:
    odd: list[Any] = [
        {"role": "assistant", "tool_calls": [{"function": None}, {"function": "f"}, {"id": 1}]},
        {"role": "tool", "content": [{"type": "text", "text": 7}, {"type": "text", "text": ["x"]}]},
        {"role": "tool", "content": 7},
        # An item of the Responses API.
        {"tool_calls": {"a": 1}, "content": {"a": 1}},
        {"tool_calls": ["a"], "content": ["a"]},
    ]
    judge = call(frozen_id(), message_delta=odd, model="judge", request={"frozen": {}})
    await recorded(tmp_path, judge)
    done = export_trial(tmp_path, "--format", "otel", "--content")
    assert done.code == 0, done.said
    _, judged, *_ = spans_of(done.lines)
    shown = json.loads(about(judged)["gen_ai.input.messages"])
    called = {"type": "tool_call", "id": None, "name": None, "arguments": None}
    assert shown[0]["parts"] == [called, called, {**called, "id": 1}]
    assert [message["parts"][0]["response"] for message in shown[1:3]] == ["7['x']", "7"]


async def test_a_session_without_texts_is_exported_without_content_alone(tmp_path: Path) -> None:
    bare = {"message_delta": [], "output_message": {"role": "assistant"}}
    await recorded(tmp_path, call("one", **bare))
    assert len(list(spans_of(export_trial(tmp_path, "--format", "otel").lines))) == 4
    done = export_trial(tmp_path, "--format", "otel", "--content")
    assert (done.code, done.lines) == (1, []) and "store_content" in done.said


@pytest.mark.parametrize(
    ("row", "end", "code"),
    [
        ({"state": SessionState.OPEN, "ended_at": None, "step": None}, 8.0, 0),
        ({"state": SessionState.ABORTED, "reason": "gone", "step": None}, 9.5, 2),
    ],
)
async def test_the_life_of_a_session_ends_with_what_is_known_last(
    tmp_path: Path, row: dict[str, Any], end: float, code: int
) -> None:
    await recorded(tmp_path, call("one"), **row)
    root, *_ = spans_of(export_trial(tmp_path, "--format", "otel").lines)
    assert (root.end_time_unix_nano, root.status.code) == (int(end * 1e9), code)
    assert root.status.message == ("gone" if code else "")


async def test_a_long_session_has_several_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otlp, "_LINE_BYTES", 2000)
    calls = [call(f"c{k}", f"c{k - 1}" if k else None) for k in range(10)]
    await recorded(tmp_path, *calls)
    lines = export_trial(tmp_path, "--format", "otel").lines
    assert len(lines) > 3
    spans = list(spans_of(lines))
    assert len(spans) == len({span.span_id for span in spans}) == 13
    assert {span.trace_id for span in spans} == {spans[0].trace_id}


def test_a_name_that_utf_8_does_not_have_is_replaced() -> None:
    span = call_span(
        None,
        call("one", model="m\ud800"),
        model="p\ud800",
        tenant=None,
        prompt_tokens=3,
        messages=None,
        ended=6.0,
    )
    assert (span.name, span.attributes["gen_ai.request.model"]) == ("chat p?", "m?")
