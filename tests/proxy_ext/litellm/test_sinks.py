"""LiteLLM's Langfuse and OpenTelemetry callbacks, with their own SDKs, before a local server that
speaks Langfuse's ingestion API and OTLP: both are told of each call once. The metrics of its
callback for Prometheus are the rank's."""

from __future__ import annotations

import ast
import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support import litellm
from tests.support.otlp import Collector, collector, values

__all__ = ["collector"]
pytestmark = pytest.mark.service

LANGFUSE, OTLP = "/api/public/otel/v1/traces", "/v1/traces"
ABOUT, PREFIX = "user_api_key_auth_metadata", "langfuse.observation.metadata."
USAGE, CALL = "langfuse.observation.usage_details", "litellm_call_id"


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
        answer = await litellm.call(http, key, model, stream=stream)
        calls.append(answer.headers["x-any-agent-interaction"])
    await litellm.end(http, key)
    return told["session_id"], told["group_id"], calls


async def test_each_call_is_told_once_to_every_sink(
    tmp_path: Path,
    tiny_model_dir: Path,
    environment: pytest.MonkeyPatch,
    collector: Collector,
) -> None:
    def change(data: dict[str, Any]) -> None:
        data["litellm_settings"]["callbacks"] = ["langfuse", "otel", "prometheus"]

    environment.setenv("LANGFUSE_HOST", collector.url)
    environment.setenv("OTEL_ENDPOINT", f"{collector.url}{OTLP}")
    async with litellm.running(tmp_path, tiny_model_dir, change) as rank:
        id, group, calls = await play(rank.http)
        await await_metrics(rank.http)
    spans = [values(span.attributes) for span in collector.spans]
    told = [*told_of(collector.paths, spans)]
    # The rank has ended, and with it the process of its callbacks: all that was told is here.
    for where in (LANGFUSE, OTLP):
        events = [about for path, about in told if path == where]
        kinds = Counter(about["any_agent_event"] for about in events)
        assert kinds == {"completion": 2, "reward": 1, "end": 1}, where
        assert {about["session_id"] for about in events} == {id}
        assert {about["group_id"] for about in events} == {group}
        done = [about for about in events if about["any_agent_event"] == "completion"]
        assert sorted(about["interaction_id"] for about in done) == sorted(calls[1:])
        assert [about["version"] for about in done] == [0, 0]
        (reward,) = (about for about in events if about["any_agent_event"] == "reward")
        assert reward["reward"] == 0.5
    planner = [span for span in spans if span.get(f"{PREFIX}{CALL}") == calls[0]]
    (usage,) = (json.loads(span[USAGE]) for span in planner)
    assert (usage["input"], usage["output"]) == (7, 3)
    assert sum("llm.openai.model" in span for span in spans) == 1


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


def told_of(paths: list[str], spans: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The policy's events: their path, and what they are about."""
    for path, span in zip(paths, spans, strict=True):
        text = span.get(f"{PREFIX}{ABOUT}" if path == LANGFUSE else f"metadata.{ABOUT}")
        about = ast.literal_eval(text.replace("null", "None")) if text else {}
        if "any_agent_event" in about:
            yield path, about
