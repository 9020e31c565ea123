"""Prometheus metrics: their descriptions, their exposition, and the lag of the event loop.

The code that is measured counts in plain numbers, which become metrics when they are scraped. So a
model call costs a few additions, and a scrape sees a single moment.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, TypeAlias

from prometheus_client import REGISTRY, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Histogram:
    """Observations counted in buckets; ``bounds`` are the buckets' upper ends, ascending."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        """Observations per bucket; the last one counts everything above the last bound."""
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        return sum(self.counts)


Value: TypeAlias = float | Histogram
Values: TypeAlias = Mapping[tuple[str, ...], Value]
"""Values by the metric's label values, in the order of its labels."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric's name (a counter's ends in `_total`), its meaning, and its own labels."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    meaning: str
    labels: tuple[str, ...] = ()

    def family(self, values: Values, common: Mapping[str, str]) -> Family:
        """Return the metric as prometheus-client's type; all samples get the ``common`` labels."""
        names = (*common, *self.labels)
        shared = tuple(common.values())
        if self.kind == "histogram":
            out = HistogramMetricFamily(self.name, self.meaning, labels=names)
            for labels, value in values.items():
                assert isinstance(value, Histogram)
                ends = (*map(str, value.bounds), "+Inf")
                buckets = list(zip(ends, accumulate(value.counts), strict=True))
                out.add_metric((*shared, *labels), buckets, value.sum)
            return out
        plain = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        family = plain(self.name, self.meaning, labels=names)
        for labels, value in values.items():
            assert not isinstance(value, Histogram)
            family.add_metric((*shared, *labels), value)
        return family


Reading: TypeAlias = tuple[Metric, Value | Values]
"""A metric and its current value; a bare value for a metric without labels of its own."""


class Exposition(Collector):
    """The metrics of one part at `/metrics`, read at each scrape.

    All of its own metrics get the ``common`` labels; CPU, memory and open files of this process are
    labelled with its ``part``.
    """

    def __init__(self, part: str, read: Callable[[], Iterable[Reading]], **common: str) -> None:
        self._part = part
        self._read = read
        self._common = common
        self._process = ProcessCollector(registry=None)

    def collect(self) -> Iterable[Family]:
        for metric, now in self._read():
            values: Values = now if isinstance(now, Mapping) else {(): now}
            yield metric.family(values, self._common)
        for family in self._process.collect():
            family.samples = [
                sample._replace(labels={**sample.labels, "part": self._part})
                for sample in family.samples
            ]
            yield family

    def render(self) -> bytes:
        """Return every metric's current value as text of `CONTENT_TYPE`."""
        # Not prometheus-client's global registry: two parts may share a process.
        return generate_latest(self)


class RegisteredMetrics(Collector):
    """The metrics that a library has registered in this process, by the beginning of their names.

    All of them get the label ``part``.
    """

    def __init__(self, prefix: str, part: str) -> None:
        self._prefix = prefix
        self._part = part

    def collect(self) -> Iterable[Family]:
        for family in REGISTRY.collect():
            if family.name.startswith(self._prefix):
                family.samples = [
                    sample._replace(labels={**sample.labels, "part": self._part})
                    for sample in family.samples
                ]
                yield family

    def render(self) -> bytes:
        """Return their current values as text of `CONTENT_TYPE`; for a thread, as there may be
        many."""
        return generate_latest(self)


def merged(texts: Iterable[str]) -> str:
    """Merge several expositions: each family is described once, with all of its samples.

    The lines are not parsed: the streams must not wait while a run of many ranks is scraped.
    """
    heads: dict[str, dict[str, str]] = {}
    samples: dict[str, list[str]] = {}
    for text in texts:
        name = ""
        for line in text.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                kind, name = line.split(" ", 3)[1:3]
                heads.setdefault(name, {}).setdefault(kind, line)
            elif name and line.startswith(name):
                samples.setdefault(name, []).append(line)
    lines = [
        line for name, head in heads.items() for line in (*head.values(), *samples.get(name, ()))
    ]
    return "".join(f"{line}\n" for line in lines)


LOOP_LAG = Metric(
    "any_agent_loop_lag_seconds",
    "histogram",
    "Seconds by which the part's event loop was late, sampled ten times a second: for so long all "
    "streams of the part stood still.",
    ("part",),
)
_LAG_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_LAG_INTERVAL = 0.1
"""Seconds between samples. A longer block is always seen, a shorter one as often as it happens."""


def loop_lag_histogram() -> Histogram:
    """Return an empty histogram for :func:`watch_loop_lag`."""
    return Histogram(_LAG_BOUNDS)


@asynccontextmanager
async def watch_loop_lag(lag: Histogram, *, every: float = _LAG_INTERVAL) -> AsyncIterator[None]:
    """Observe the running loop's lag, in seconds, until the context ends."""
    watch = asyncio.create_task(_observe_lag(lag, every))
    try:
        yield
    finally:
        watch.cancel()
        await asyncio.wait([watch])


async def _observe_lag(lag: Histogram, every: float) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + every
        await asyncio.sleep(every)
        lag.observe(max(0.0, loop.time() - due))
