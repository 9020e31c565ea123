"""Traces of sessions at a real collector's HTTP: protobuf, as the OTLP exporter sends it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from any_agent.errors import ConfigError
from proxy_ext import tracing
from tests.support.errors import fails_with
from tests.support.journal import make_interaction
from tests.support.otlp import Collector, collector, values
from tests.support.proxy import Proxy, config_for, until
from tests.support.proxy_fixtures import Start
from tests.support.scripted_engine import ScriptedEngine
from tests.support.sessions import finalize

__all__ = ["collector"]
ASKED = "a question of the agent's own"


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let spans leave soon."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")


async def episode(proxy: Proxy, **opened: Any) -> tuple[str, str]:
    """Ask once, reward and finalize; return the ids of session and call."""
    session = await proxy.open(**opened)
    asked = [{"role": "user", "content": ASKED}]
    done = await proxy.complete(session["api_key"], asked, max_tokens=5)
    reward = {"reward": 0.5, "completion_id": done["id"]}
    given = await proxy.post("/rl/v1/set_reward", reward, session["api_key"])
    assert given.status_code == 200, given.text
    await finalize(proxy, session)
    return session["session_id"], done["id"]


async def test_a_session_is_a_trace(
    start: Start, engine: ScriptedEngine, collector: Collector
) -> None:
    proxy = await start(f"tracing.endpoint={collector.url}/v1/traces")
    session, call = await episode(proxy, mode="eval", task_id="sums")
    await until(lambda: len(collector.spans) >= 3)
    shown = (await proxy.http.get("/metrics")).text
    assert 'any_agent_trace_spans_total{outcome="sent",rank="0"} 3.0' in shown
    model = proxy.service.config.model.name
    by_name = {span.name: span for span in collector.spans}
    root, asked, reward = (
        by_name[name] for name in ("invoke_agent sums", f"chat {model}", "reward")
    )
    assert {span.trace_id for span in (root, asked, reward)} == {root.trace_id}
    assert (asked.parent_span_id, reward.parent_span_id, root.parent_span_id) == (
        root.span_id,
        root.span_id,
        b"",
    )
    assert root.start_time_unix_nano <= asked.start_time_unix_nano
    assert asked.start_time_unix_nano < asked.end_time_unix_nano <= root.end_time_unix_nano
    about = values(asked.attributes)
    assert about["gen_ai.operation.name"] == "chat"
    assert about["gen_ai.conversation.id"] == session
    assert about["gen_ai.response.id"] == call
    assert about["gen_ai.response.finish_reasons"] == ["length"]
    assert about["gen_ai.usage.output_tokens"] == 5
    assert about["gen_ai.usage.input_tokens"] == len(engine.requests[-1]["input_ids"])
    assert (about["any_agent.mode"], about["any_agent.task_id"]) == ("eval", "sums")
    assert values(reward.attributes)["gen_ai.evaluation.score.value"] == 0.5
    assert values(root.attributes)["any_agent.state"] == "evaluated"
    assert collector.resources[0]["service.instance.id"] == "rank-0"
    assert ASKED not in str(collector.spans), "content is off by default"


async def test_content_is_traced_where_the_setting_asks_for_it(
    start: Start, tmp_path: Path, collector: Collector
) -> None:
    wanted = (f"tracing.endpoint={collector.url}/v1/traces", "tracing.content=true")
    await episode(await start(*wanted), mode="eval")
    await until(lambda: len(collector.spans) >= 3)
    (asked,) = [span for span in collector.spans if span.name.startswith("chat")]
    told = json.loads(values(asked.attributes)["gen_ai.input.messages"])
    assert told == [{"role": "user", "parts": [{"type": "text", "content": ASKED}]}]
    (answer,) = json.loads(values(asked.attributes)["gen_ai.output.messages"])
    assert answer["role"] == "assistant"
    with fails_with(ConfigError, "sessions.store_content"):
        config_for(tmp_path, *wanted, "sessions.store_content=false")


async def test_a_failing_trace_collector_harms_no_call(
    start: Start, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "SEND_SECONDS", 2.0)
    monkeypatch.setattr(tracing, "MAX_WAITING", 4)
    collector.ill = True
    proxy = await start(f"tracing.endpoint={collector.url}/v1/traces")
    traces = proxy.service.traces
    assert traces is not None
    for _ in range(6):
        await episode(proxy, mode="eval")
    await until(lambda: traces.outcomes["failed"] > 0)
    assert traces.outcomes["dropped"] > 0
    collector.ill = False
    await episode(proxy, mode="eval")
    await until(lambda: traces.outcomes["sent"] > 0)


def test_a_tool_call_and_its_answer_are_traced_as_parts(tmp_path: Path) -> None:
    call = {"id": "c1", "function": {"name": "look", "arguments": "{}"}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"}
    answer = {"role": "tool", "tool_call_id": "c1", "content": "seen"}
    config = config_for(tmp_path, "tracing.endpoint=http://c/v1/traces", "tracing.content=true")
    exporter = InMemorySpanExporter()
    traces = tracing.SessionTraces(config, part="rank-0", exporter=exporter)
    interaction = make_interaction("i", "s")
    interaction.message_delta = [asked, answer]
    traces.on_call(None, interaction, None)
    traces.close()
    (span,) = exporter.get_finished_spans()
    assert span.attributes is not None
    assert json.loads(str(span.attributes["gen_ai.input.messages"])) == [
        {
            "role": "assistant",
            "parts": [
                {"type": "reasoning", "content": "hm"},
                {"type": "tool_call", "id": "c1", "name": "look", "arguments": "{}"},
            ],
        },
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "seen"}]},
    ]


def test_an_invalid_tracing_endpoint_is_refused_without_showing_its_secret(tmp_path: Path) -> None:
    for url, why in (
        ("collector:4318", "https URL"),
        ("http://me:secret@c/v1/traces", "OTLP_HEADERS"),
    ):
        with fails_with(ConfigError, why) as refused:
            config_for(tmp_path, f"tracing.endpoint={url}")
        assert "secret" not in refused.value.message
