"""LiteLLM's Langfuse and OpenTelemetry callbacks, with their own SDKs, before a local server that
speaks Langfuse's ingestion API and OTLP: both are told of each call once. The metrics of its
callback for Prometheus are the rank's."""

from __future__ import annotations

import ast
import asyncio
import gzip
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from prometheus_client.parser import text_string_to_metric_families

from tests.support import litellm

pytestmark = pytest.mark.service

LANGFUSE, OTLP = "/api/public/otel/v1/traces", "/v1/traces"
ABOUT, PREFIX = "user_api_key_auth_metadata", "langfuse.observation.metadata."
USAGE, CALL = "langfuse.observation.usage_details", "litellm_call_id"
HELLO = [{"role": "user", "content": "Hello."}]


class Sink:
    """Keeps the attributes of every span, by the path that it came to."""

    def __init__(self) -> None:
        self.url = ""
        self.spans: list[tuple[str, str, dict[str, Any]]] = []
        self.authorizations: set[str] = set()

    async def _take(self, request: web.Request) -> web.Response:
        body = await request.read()
        if request.headers.get("content-encoding") == "gzip" and body[:2] == b"\x1f\x8b":
            body = gzip.decompress(body)
        self.authorizations.add(request.headers.get("authorization", ""))
        message = trace_service_pb2.ExportTraceServiceRequest.FromString(body)
        for resource in message.resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    told = {each.key: _plain(each.value) for each in span.attributes}
                    self.spans.append((request.path, span.name, told))
        answer = trace_service_pb2.ExportTraceServiceResponse().SerializeToString()
        return web.Response(body=answer, content_type="application/x-protobuf")

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[None]:
        app = web.Application(client_max_size=64 << 20)
        for path in (LANGFUSE, OTLP):
            app.router.add_post(path, self._take)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        try:
            yield
        finally:
            await runner.cleanup()


def _plain(value: Any) -> Any:
    return getattr(value, value.WhichOneof("value") or "string_value")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("LANGFUSE_PUBLIC_KEY", "pk-test")
    monkeypatch.setenv("LANGFUSE_SECRET_KEY", "sk-test")
    monkeypatch.setenv("OTEL_EXPORTER", "otlp_http")
    return monkeypatch


async def play(http: httpx.AsyncClient) -> tuple[str, str, list[str]]:
    """A session with a call of the planner, two of the policy, a reward and an end; its id, its
    group, and the ids of its interactions."""
    fields = {"mode": "eval", "task_id": "task-7", "group_id": "g1", "group_size": 2}
    opened = await http.post("/rl/v1/start_session", json=fields)
    assert opened.status_code == 200, opened.text
    told = opened.json()
    key = {"Authorization": f"Bearer {told['api_key']}"}
    calls = []
    for model, stream in (("planner", True), ("policy", False), ("policy", True)):
        body = {"model": model, "messages": HELLO, "max_tokens": 4, "stream": stream}
        answer = await http.post("/v1/chat/completions", json=body, headers=key)
        assert answer.status_code == 200, answer.text
        calls.append(answer.headers["x-any-agent-interaction"])
    for path, body in (("set_reward", {"reward": 0.5}), ("finalize", {})):
        answer = await http.post(f"/rl/v1/{path}", json=body, headers=key)
        assert answer.status_code == 200, answer.text
    return told["session_id"], told["group_id"], calls


async def test_each_call_is_told_once(
    tmp_path: Path, tiny_model_dir: Path, environment: pytest.MonkeyPatch
) -> None:
    sink = Sink()

    def change(data: dict[str, Any]) -> None:
        data["litellm_settings"]["callbacks"] = ["langfuse", "otel", "prometheus"]

    async with sink.serve():
        environment.setenv("LANGFUSE_HOST", sink.url)
        environment.setenv("OTEL_ENDPOINT", f"{sink.url}{OTLP}")
        async with litellm.running(tmp_path, tiny_model_dir, change) as rank:
            id, group, calls = await play(rank.http)
            await await_metrics(rank.http)
    # The rank has ended, and with it the process of its callbacks: all that was told is here.
    for where in (LANGFUSE, OTLP):
        events = [about for path, about, _ in told_of(sink) if path == where]
        kinds = Counter(about["any_agent_event"] for about in events)
        assert kinds == {"completion": 2, "reward": 1, "end": 1}, where
        assert {about["session_id"] for about in events} == {id}
        assert {about["group_id"] for about in events} == {group}
        done = [about for about in events if about["any_agent_event"] == "completion"]
        assert sorted(about["interaction_id"] for about in done) == sorted(calls[1:])
        assert [about["version"] for about in done] == [0, 0]
        (reward,) = (about for about in events if about["any_agent_event"] == "reward")
        assert reward["reward"] == 0.5
    planner = [span for _, _, span in sink.spans if span.get(f"{PREFIX}{CALL}") == calls[0]]
    (usage,) = (json.loads(span[USAGE]) for span in planner)
    assert (usage["input"], usage["output"]) == (7, 3)
    assert sum("llm.openai.model" in span for _, _, span in sink.spans) == 1


async def await_metrics(http: httpx.AsyncClient) -> None:
    """Wait until LiteLLM's metrics show the calls' tokens, each where it was told."""
    name = "litellm_output_tokens_metric"
    async with asyncio.timeout(30):
        while True:
            text = (await http.get("/metrics")).text
            found: dict[tuple[str, str], float] = {}
            for family in text_string_to_metric_families(text):
                for sample in family.samples if family.name == name else ():
                    if sample.name.endswith("_total") and sample.value:
                        labels = sample.labels
                        found[labels["part"], labels["model"]] = sample.value
            if set(found) == {("rank-0", "gpt-4o-mini"), ("rank-0 callbacks", "policy")}:
                assert found["rank-0", "gpt-4o-mini"] == 3
                return
            await asyncio.sleep(0.2)


def told_of(sink: Sink) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """The policy's events: their path, what they are about, and their span's attributes."""
    for path, _, span in sink.spans:
        name = f"{PREFIX}{ABOUT}" if path == LANGFUSE else f"metadata.{ABOUT}"
        text = span.get(name)
        about = ast.literal_eval(text.replace("null", "None")) if text else {}
        if "any_agent_event" in about:
            yield path, about, span
