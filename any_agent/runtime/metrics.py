"""Metrics in Prometheus's form: how a process describes its own and shows them.

What is measured keeps plain numbers; they are read, and become metrics, when somebody asks. So a
model call pays for a few additions, and a scrape always sees one moment.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, TypeAlias

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
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
        """The last one is of everything above the last bound."""
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        return sum(self.counts)


Value: TypeAlias = float | Histogram
Values: TypeAlias = Mapping[tuple[str, ...], Value]
"""By the values of the metric's labels, in their order."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric's name (a counter's ends in `_total`), its meaning, and its own labels."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    meaning: str
    labels: tuple[str, ...] = ()

    def family(self, values: Values, common: Mapping[str, str]) -> Family:
        """As prometheus-client has it; ``common`` labels are set on every sample."""
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
"""A metric and what it is now; a bare value for one without labels of its own."""


class _Own(Collector):
    """Reads a process's metrics at each scrape."""

    def __init__(self, read: Callable[[], Iterable[Reading]], common: Mapping[str, str]) -> None:
        self._read = read
        self._common = common

    def collect(self) -> Iterable[Family]:
        for metric, now in self._read():
            values: Values = now if isinstance(now, Mapping) else {(): now}
            yield metric.family(values, self._common)


class _ProcessMetrics(Collector):
    """CPU, memory and open files of this process, told apart from other parts' by ``part``."""

    def __init__(self, part: str) -> None:
        self._part = part
        self._inner = ProcessCollector(registry=None)

    def collect(self) -> Iterable[Family]:
        for family in self._inner.collect():
            family.samples = [
                sample._replace(labels={**sample.labels, "part": self._part})
                for sample in family.samples
            ]
            yield family


class Exposition:
    """What one part shows at `/metrics`. ``common`` labels go on all of its own metrics."""

    def __init__(self, part: str, read: Callable[[], Iterable[Reading]], **common: str) -> None:
        # Nothing of prometheus-client's own global registry: two parts may share a process.
        self._registry = CollectorRegistry()
        self._registry.register(_Own(read, common))
        self._registry.register(_ProcessMetrics(part))

    def render(self) -> bytes:
        """Every metric as it is now, as text of `CONTENT_TYPE`."""
        return generate_latest(self._registry)
