"""What the embedded engine refuses or fails at, as its client tells it, and in its log."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator

import pytest

from any_agent.engine import SGLangEngine
from any_agent.engine.base import agenerate
from any_agent.engine.embedded.engine import EmbeddedEngine
from any_agent.errors import EngineMismatch, InvalidRequest
from tests.support.engine.embedded import Serve, prompt, request
from tests.support.errors import fails_with


@pytest.fixture
async def client(engine: EmbeddedEngine, serve: Serve) -> AsyncIterator[SGLangEngine]:
    client = SGLangEngine(await serve(engine), decode=lambda _: "", update_wait=2)
    yield client
    await client.close()


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and "embedded" in record.name
    ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("regex", "why"),
    [("(", "not a grammar"), ("(a|aa|aaa){500,5000}b{5000}", "too complex to follow")],
)
async def test_a_refused_grammar(
    client: SGLangEngine, caplog: pytest.LogCaptureFixture, regex: str, why: str, stream: bool
) -> None:
    asked = request("r", prompt(5), grammar=json.dumps({"regex": regex}), max_new_tokens=40)
    with fails_with(InvalidRequest, why, param="grammar") as raised:
        [chunk async for chunk in client.generate(asked, stream=stream)]
    assert '{"error"' not in raised.value.message
    (line,) = said(caplog)
    assert "400 (grammar)" in line and why in line and len(line) < 400


@pytest.mark.parametrize("stream", [False, True])
async def test_an_output_that_leaves_its_grammar(
    engine: EmbeddedEngine,
    client: SGLangEngine,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    stream: bool,
) -> None:
    asked = request("r", prompt(5), grammar='{"regex": "[ab]{50}"}')
    processor = await engine.make_processor(asked)
    assert processor is not None and processor.grammar is not None
    processor.grammar.push(200)

    async def lost(_: object) -> object:
        return processor

    monkeypatch.setattr(engine, "make_processor", lost)
    with fails_with(EngineMismatch, "grammar") as raised:
        [chunk async for chunk in client.generate(asked, stream=stream)]
    assert raised.value.headers() == {"x-should-retry": "false"}
    (line,) = said(caplog)
    assert "failed with 500" in line


async def test_what_is_in_order_logs_nothing(
    client: SGLangEngine, caplog: pytest.LogCaptureFixture
) -> None:
    await agenerate(client, request("r", prompt(5)))
    assert said(caplog) == []
