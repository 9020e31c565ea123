"""A running service under examination: a real engine, a real proxy, and faults in between."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest

from any_agent.cli.main import main
from any_agent.doctor.service import service_laws
from any_agent.doctor.verdict import CheckOutcome, Verdict, broken
from tests.support.errors import fails_with
from tests.support.middleman import between
from tests.support.ports import own_port
from tests.support.real_parts import proxy_process, write_config

pytestmark = pytest.mark.service


@pytest.fixture(scope="module")
def service(
    engine: str, tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """A service that trains."""
    config = write_config(tmp_path_factory.mktemp("service"), tiny_model_dir)
    with proxy_process(config, engine, own_port()) as (_, url):
        yield url


def sessions(service: str) -> list[dict[str, Any]]:
    return list(httpx.get(f"{service}/rl/v1/sessions").json())


async def test_a_real_service_is_sound_and_undisturbed(service: str) -> None:
    run, verdicts = await service_laws(service, None)
    assert run is not None and run.state == "training"
    found = {v.case: v for v in verdicts}
    assert not broken(verdicts), broken(verdicts)
    cases = {"answers", "whole answer", "stream", "next turn", "tools", "refusals", "record"}
    assert {c for c, v in found.items() if v.outcome is CheckOutcome.PASSED} >= cases
    assert "versions 0 to 0" in found["record"].seen
    listed = await asyncio.to_thread(sessions, service)
    assert {(s["mode"], s["state"]) for s in listed} == {("eval", "aborted")}


def failed(verdicts: list[Verdict]) -> dict[str, str]:
    return {v.case: v.seen for v in broken(verdicts)}


async def test_a_service_that_tells_too_little_or_takes_anything_fails(service: str) -> None:
    def tamed(body: dict[str, Any]) -> None:
        body.pop("modalities", None)

    def uncounted(answer: dict[str, Any]) -> None:
        if "usage" in answer:
            answer["usage"]["total_tokens"] += 1

    async with between(service, answered=uncounted) as url:
        _, verdicts = await service_laws(url, None)
    found = failed(verdicts)
    assert "x-any-agent-interaction" in found["whole answer"]
    assert "x-any-agent-interaction" in found["stream"]
    assert "refusals" not in found and "record" not in found
    async with between(service, asked=tamed) as url:
        _, verdicts = await service_laws(url, None)
    assert "unsupported_parameter" in failed(verdicts)["refusals"]


async def test_a_session_is_ended_whatever_happens(
    service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(*_: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr("any_agent.doctor.service.LAW", Mock(judge=explode, passed=lambda *_: None))
    with fails_with(RuntimeError, "boom"):
        await service_laws(service, None)
    listed = await asyncio.to_thread(sessions, service)
    assert {s["state"] for s in listed} == {"aborted"}


def test_the_command_checks_a_service_and_its_engine(
    service: str, engine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--url", service, "--engine", engine]) == 0
    out = capsys.readouterr().out
    assert f"service    {service}" in out
    assert "0, as the run's newest" in out
    assert main(["doctor", "--url", f"http://127.0.0.1:{own_port()}"]) == 1
    out = capsys.readouterr().out
    assert "FAILED service, answers: " in out
