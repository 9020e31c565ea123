from __future__ import annotations

import asyncio
import math
import time

from prometheus_client.parser import text_string_to_metric_families

from any_agent.runtime.metrics import (
    Exposition,
    Histogram,
    Metric,
    Reading,
    loop_lag_histogram,
    watch_loop_lag,
)

CALLS = Metric("any_agent_calls_total", "counter", "Calls that\nended.", ("outcome",))
OPEN = Metric("any_agent_open", "gauge", "Open ones.")
SECONDS = Metric("any_agent_call_seconds", "histogram", "How long they took.")


def samples(text: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (s.name, frozenset(s.labels.items())): s.value
        for family in text_string_to_metric_families(text.decode())
        for s in family.samples
    }


def test_what_is_read_is_what_a_scrape_sees() -> None:
    calls = {("done",): 1.0, ('od"d\n',): 2.0}
    took = Histogram((0.5, 2))

    def read() -> list[Reading]:
        return [(CALLS, calls), (OPEN, 3), (SECONDS, took)]

    shown = Exposition("rank-1", read, rank="1")
    for value in (0.5, 0.6, 2.0, 9.0, 0.1):
        took.observe(value)
    calls[("done",)] += 4
    now = samples(shown.render())
    rank = ("rank", "1")
    assert now["any_agent_calls_total", frozenset({rank, ("outcome", "done")})] == 5
    assert now["any_agent_calls_total", frozenset({rank, ("outcome", 'od"d\n')})] == 2
    assert now["any_agent_open", frozenset({rank})] == 3
    ends = {
        dict(labels)["le"]: value
        for (name, labels), value in now.items()
        if name == "any_agent_call_seconds_bucket"
    }
    assert ends == {"0.5": 2, "2": 4, "+Inf": 5}
    assert now["any_agent_call_seconds_count", frozenset({rank})] == 5
    assert math.isclose(now["any_agent_call_seconds_sum", frozenset({rank})], 12.2)


def test_each_family_is_described_once_and_processes_are_told_apart() -> None:
    text = Exposition("router", lambda: [(CALLS, {}), (OPEN, 1)]).render().decode()
    helps = [line.split()[2] for line in text.splitlines() if line.startswith("# HELP")]
    assert helps[:2] == ["any_agent_calls_total", "any_agent_open"]
    assert len(set(helps)) == len(helps)
    assert "_created" not in text
    one, two = (samples(Exposition(part, list).render()) for part in ("rank-0", "rank-1"))
    wanted = {"process_cpu_seconds_total", "process_resident_memory_bytes"}
    assert wanted <= {name for name, _ in one}
    assert not one.keys() & two.keys()


class Watched(Histogram):
    """Says when something is observed."""

    def __init__(self) -> None:
        super().__init__(loop_lag_histogram().bounds)
        self.worst = 0.0
        self.seen = asyncio.Event()

    def observe(self, value: float) -> None:
        super().observe(value)
        self.worst = max(self.worst, value)
        self.seen.set()


async def test_a_loop_that_is_blocked_is_late() -> None:
    lag = Watched()
    async with watch_loop_lag(lag, every=0.001):
        await asyncio.wait_for(lag.seen.wait(), 60)
        lag.seen.clear()
        # What the watch is there to find.
        time.sleep(0.3)  # noqa: ASYNC251
        await asyncio.wait_for(lag.seen.wait(), 60)
    assert lag.worst >= 0.29
    assert sum(lag.counts[lag.bounds.index(0.25) + 1 :]) >= 1
    assert len(asyncio.all_tasks()) == 1, "the watch ends with its context"
