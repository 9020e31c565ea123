"""The laws of an engine, with a real one, and with faults planted in front of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from any_agent.chat import ChatFormat
from any_agent.cli.main import main
from any_agent.config import Config, ModelConfig
from any_agent.doctor.engine import engine_laws
from any_agent.doctor.verdict import CheckOutcome, Verdict, broken
from tests.support.middleman import between
from tests.support.ports import own_port

pytestmark = pytest.mark.service

DOCUMENT = Path(__file__).parents[2] / "docs" / "how-to" / "doctor.md"
Laws = dict[tuple[str, str], Verdict]


@pytest.fixture
def examined(tiny_model_dir: Path, chat: ChatFormat) -> Callable[..., Any]:
    config = Config(model=ModelConfig(path=str(tiny_model_dir)))

    async def examine(url: str, **more: Any) -> Laws:
        how = {"run": None, "published": None, **more}
        verdicts = await engine_laws(url, config, how.pop("chat", chat), **how)
        return {(v.law, v.case): v for v in verdicts}

    return examine


def failed(laws: Laws) -> set[tuple[str, str]]:
    assert all(v.seen and v.do for v in broken(laws.values()))
    return {key for key, verdict in laws.items() if verdict.failed}


async def test_a_real_engine_is_sound(engine: str, examined: Any) -> None:
    laws = await examined(engine, published=0)
    assert not failed(laws)
    passed = {key for key, v in laws.items() if v.outcome is CheckOutcome.PASSED}
    assert len(passed) >= 16


async def test_without_a_model_less_is_checked(engine: str, examined: Any) -> None:
    laws = await examined(engine, chat=None)
    assert not failed(laws)
    assert laws["tokenizer", "all"].outcome is CheckOutcome.UNCHECKED
    assert laws["logprobs", "two temperatures"].outcome is CheckOutcome.PASSED


async def test_an_engine_that_does_not_answer_fails_with_a_remedy(examined: Any) -> None:
    laws = await examined(f"http://127.0.0.1:{own_port()}")
    assert failed(laws) == {("engine", "answers")}
    assert "running" in laws["engine", "answers"].do


Change = Callable[[dict[str, Any]], None]
sent: list[int] = []


def at_one(body: dict[str, Any]) -> None:
    if body["sampling_params"]["temperature"]:
        body["sampling_params"]["temperature"] = 1.0


def halve(body: dict[str, Any]) -> None:
    body["input_ids"] = body["input_ids"][-1024:]


def cut(body: dict[str, Any]) -> None:
    sent[:] = [len(body["input_ids"])]
    body["input_ids"] = body["input_ids"][-64:]


def claim(answer: dict[str, Any]) -> None:
    if "meta_info" in answer:
        answer["meta_info"]["prompt_tokens"] = sent[0]


def misspelled(answer: dict[str, Any]) -> None:
    if "text" in answer:
        answer["text"] = answer["text"].swapcase()
    if "vocab_size" in answer:
        answer["vocab_size"] = 300


def renamed(answer: dict[str, Any]) -> None:
    if "model_path" in answer:
        answer["weight_version"] = "newest"


def endless(body: dict[str, Any]) -> None:
    body["sampling_params"].pop("stop", None)
    body["sampling_params"].pop("stop_token_ids", None)


FAULTS: dict[str, tuple[dict[str, Change], set[tuple[str, str]]]] = {
    "it truncates": ({"asked": halve}, {("input", "long prompt"), ("input", "too long a prompt")}),
    "it hides what it leaves out": (
        {"asked": cut, "answered": claim},
        {("logprobs", "forward pass, long prompt"), ("input", "too long a prompt")},
    ),
    "its logprobs are not scaled": (
        {"asked": at_one},
        {("logprobs", "two temperatures"), ("logprobs", "forward pass, T=0.7")},
    ),
    "another tokenizer": (
        {"answered": misspelled},
        {("tokenizer", "text"), ("tokenizer", "vocabulary")},
    ),
    "no version": ({"answered": renamed}, {("versions", "reported")}),
    "outputs do not end": ({"asked": endless}, {("stops", "stop string")}),
}
ALONE = ("it truncates", "its logprobs are not scaled", "another tokenizer")
"""Faults that break no other law."""


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_planted_fault_breaks_its_laws(engine: str, examined: Any, fault: str) -> None:
    changes, expected = FAULTS[fault]
    async with between(engine, **changes) as url:
        laws = await examined(url)
        if fault == "its logprobs are not scaled":
            assert ("logprobs", "two temperatures") in failed(await examined(url, chat=None))
    assert failed(laws) == expected if fault in ALONE else failed(laws) >= expected
    if fault == "it truncates":
        assert "--allow-auto-truncate" in laws["input", "long prompt"].do


async def test_a_version_that_is_stale_breaks_a_law(engine: str, examined: Any) -> None:
    laws = await examined(engine, published=3)
    assert failed(laws) == {("versions", "published")}


def rows(printed: str) -> list[tuple[str, ...]]:
    """Law and case of each."""
    return re.findall(r"^(\w+) +(\S.*?)  +(?:passed|failed|declined|not checked)", printed, re.M)


@pytest.mark.parametrize("as_json", [False, True])
def test_the_command_prints_the_documented_verdicts_of_a_sound_model(
    engine: str, tiny_model_dir: Path, as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["doctor", str(tiny_model_dir), "--engine", engine]
    assert main([*arguments, *["--json"] * as_json]) == 0
    out = capsys.readouterr().out
    if as_json:
        found = json.loads(out)
        assert found["sound"] is True and found["subject"]["engine"] == engine
        assert {"rendering", "logprobs", "aborts"} <= {v["law"] for v in found["verdicts"]}
    else:
        assert "failed" not in out
        documented = (DOCUMENT.read_text()).partition("## Output")[2].split("```")[3]
        shown, printed = rows(documented), rows(out)
        assert [row for row in printed if row in shown] == shown
        assert {law for law, _ in shown} == {law for law, _ in printed}
        sums = documented.rstrip().rpartition("\n")[2]
        assert len(printed) == sum(map(int, re.findall(r"\d+", sums)))


def test_an_engine_says_what_it_serves(
    engine: str, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--engine", engine]) == 0
    out = capsys.readouterr().out
    assert f"model      {tiny_model_dir}" in out and "continuation" in out
