"""Metrics as numbers: those of our own expositions, and rates that no restart bends."""

from __future__ import annotations

import pytest

from any_agent.runtime.metrics import Exposition, Metric
from proxy_ext import metrics as rank_metrics
from router.dashboard import scrape
from router.dashboard.scrape import Rates, Samples
from trainer import metrics as trainer_metrics

SESSIONS = Metric("any_agent_sessions", "gauge", "Sessions.", ("mode", "state"))
OTHER = Metric("any_agent_prompt_tokens_total", "counter", "Tokens.", ("mode",))


def test_what_an_exposition_says() -> None:
    values = {("train", 'a "quoted" state'): 3.0, ("eval", "open"): 2.0}
    text = Exposition("r", lambda: [(SESSIONS, values), (OTHER, {("train",): 7})], rank="0")
    found = Samples(text.render().decode())
    assert found.sum("sessions") == 5
    assert found.sum("sessions", mode="eval", state="open") == 2
    assert found.sum("prompt_tokens_total") == 0, "what no page shows is skipped"
    assert found.sum("made_up") == 0
    assert {labels["rank"] for labels, _ in found.each("sessions")} == {"0"}


def test_the_names_are_those_that_the_parts_export() -> None:
    exported = {m.name for m in (*rank_metrics.METRICS, *trainer_metrics.METRICS)}
    wanted = scrape.WANTED.pattern.removeprefix("any_agent_(").removesuffix(")").split("|")
    for name in wanted:
        assert name == "slots_.*" or f"any_agent_{name}" in exported, name


def test_rates_over_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(scrape.time, "monotonic", lambda: now)
    rates = Rates()
    assert rates.add({"calls": 10}) == {}
    now += 4
    assert rates.add({"calls": 30, "new": 5}) == {"calls": 5.0}
    now += 4
    assert rates.add({"calls": 2, "new": 9}) == {}, "the part has started again"
    now += 61
    assert rates.add({"calls": 8}) == {}, "nobody has looked for a minute"
