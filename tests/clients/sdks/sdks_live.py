"""Each agents' SDK against a live service, step by step, as its table has it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.clients.client import Client, Running, running
from tests.clients.live import Live
from tests.clients.sdks.table import TABLE, Step

CASES = [
    pytest.param(client, api, step, id=f"{client[0].name}-{api}-{step.name}")
    for tried in TABLE
    for client in [(each, tried.told) for each in tried.clients]
    for step in tried.steps
    for api in step.apis or tried.apis
]


@pytest.fixture(scope="module")
def process(
    client: tuple[Client, bool], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    with running(client[0], tmp_path_factory.mktemp(client[0].name)) as process:
        yield process


@pytest.mark.parametrize(("client", "api", "step"), CASES, scope="module")
def test_an_agent_is_answered_as_its_sdk_expects_and_recorded_exactly(
    client: tuple[Client, bool], api: str, step: Step, process: Running, live: Live
) -> None:
    """All that it knows is a URL and a key; what it sends back goes on exactly."""
    live.engine.hush()
    for text in step.says:
        live.says(text)
    key, before = live.open()["api_key"], live.continued()
    base, keys = f"{live.url}/v1", {"OPENAI_API_KEY": key, "ANTHROPIC_API_KEY": key}
    variables = {"OPENAI_BASE_URL": base, "ANTHROPIC_BASE_URL": live.url, **keys}
    said = process.step(step.name, [api] if client[1] and not step.apis else [], variables)
    wanted = step.answer(live.tokens) if callable(step.answer) else step.answer
    assert {name: said.get(name) for name in wanted} == wanted
    recorded = dict(live.continued() - before)
    assert recorded == (recorded if step.recorded is None else step.recorded)
    assert "branch" not in recorded
