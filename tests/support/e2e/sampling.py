"""Samples of what a service's parts hold while it runs, and of how that grows."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
import psutil
from prometheus_client.parser import text_string_to_metric_families

from any_agent.launcher import Node
from any_agent.rundir.layout import RunDir

MB = float(1 << 20)


@dataclass(frozen=True, slots=True)
class Bound:
    """The most that something may grow in an hour, and at all in a run too short to tell."""

    per_hour: float
    slack: float
    unit: str
    scale: float = 1.0
    """Units of the sample in one of ``unit``."""


BOUNDS = {
    "memory": Bound(32.0, 24.0, "MB", MB),
    "descriptors": Bound(8.0, 48.0, ""),
    "threads": Bound(2.0, 8.0, ""),
    "lag": Bound(5.0, 20.0, "ms", 1e-3),
}
"""For each part."""
DISK_PER_SESSION = {"journal": 4096.0, "archive": 4096.0, "logs": 2048.0, "other": 1024.0}
"""The most bytes of the run's folder by which it may grow for each session that was opened."""
DISK_SLACK = 16 * MB


@dataclass(slots=True)
class Series:
    """One figure of one process over time."""

    name: str
    kind: str
    pid: int
    at: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Trend:
    """How a figure changed over the second half of a run."""

    name: str
    kind: str
    first: float
    last: float
    per_hour: float
    hours: float
    judged: bool
    """Its process lived for most of that time."""

    @property
    def problem(self) -> str | None:
        """How it grew beyond its bound; None for a figure that stays."""
        bound = BOUNDS[self.kind]
        grown = self.per_hour * self.hours
        if not self.judged or self.per_hour <= bound.per_hour * bound.scale:
            return None
        if grown <= bound.slack * bound.scale:
            return None
        return f"{self.name}: {self.kind} grows by {self.per_hour / bound.scale:.1f} {bound.unit}/h"


def slope(at: Iterable[float], values: Iterable[float]) -> float:
    """The median of the slopes between all pairs of points (Theil and Sen), 0 for one point.

    A quarter of the points may be anything, such as those of a moment after a fault.
    """
    x, y = np.asarray(list(at), float), np.asarray(list(values), float)
    i, j = np.triu_indices(len(x), k=1)
    apart = x[j] > x[i]
    if not apart.any():
        return 0.0
    return float(np.median((y[j] - y[i])[apart] / (x[j] - x[i])[apart]))


class Sampler:
    """Samples the parts of a node, and the run's folder, until it is cancelled."""

    def __init__(self, node: Node, admin_key: str, *, sessions: Callable[[], int]) -> None:
        """``sessions``: the number of sessions that were opened until now."""
        self._node = node
        self._headers = {"Authorization": f"Bearer {admin_key}"}
        self._sessions = sessions
        self._series: dict[tuple[str, str, int], Series] = {}
        self._lag: dict[str, tuple[float, float]] = {}
        self.disk: list[tuple[float, int, dict[str, int]]] = []
        """Time, sessions, and bytes by kind of file."""
        self.began = self.ended = time.monotonic()

    async def run(self, every: float) -> None:
        async with httpx.AsyncClient(timeout=10, trust_env=False) as http:
            while True:
                due = time.monotonic() + every
                self.sample()
                with suppress(httpx.HTTPError):
                    await self._sample_lag(http)
                await asyncio.sleep(max(0.0, due - time.monotonic()))

    def sample(self) -> None:
        now = self.ended = time.monotonic()
        for name, part in self._node.parts.items():
            if part.state == "ready":
                with suppress(psutil.Error, OSError, KeyError):
                    self._sample_process(now, name, psutil.Process(part.pid))
        self.disk.append((now, self._sessions(), sizes(self._node.dir)))

    def _sample_process(self, now: float, name: str, process: psutil.Process) -> None:
        with process.oneshot():
            self._add(now, name, "memory", process.pid, anonymous(process.pid))
            self._add(now, name, "descriptors", process.pid, process.num_fds())
            self._add(now, name, "threads", process.pid, process.num_threads())

    async def _sample_lag(self, http: httpx.AsyncClient) -> None:
        """The mean lag of each part's event loop since the last sample."""
        answer = await http.get(f"{self._node.url}/metrics", headers=self._headers)
        answer.raise_for_status()
        now = time.monotonic()
        for name, (total, count) in lags(answer.text).items():
            before = self._lag.get(name, (0.0, 0.0))
            self._lag[name] = total, count
            if name in self._node.parts and count > before[1]:
                mean = (total - before[0]) / (count - before[1])
                self._add(now, name, "lag", self._node.parts[name].pid, mean)

    def _add(self, at: float, name: str, kind: str, pid: int, value: float) -> None:
        key = name, kind, pid
        series = self._series.setdefault(key, Series(name, kind, pid))
        series.at.append(at)
        series.values.append(float(value))

    def trends(self) -> list[Trend]:
        """How each part's last process changed over the second half."""
        half = (self.began + self.ended) / 2
        latest = {(s.name, s.kind): s for s in sorted(self._series.values(), key=lambda s: s.at[0])}
        return [trend(series, half, self.ended) for series in latest.values()]

    def disk_growth(self) -> dict[str, tuple[float, float, str | None]]:
        """By kind of file: (bytes at the end, bytes a session, what is wrong), second half."""
        half = (self.began + self.ended) / 2
        later = [sample for sample in self.disk if sample[0] >= half]
        sessions = [float(count) for _, count, _ in later]
        out = {}
        for kind, bound in DISK_PER_SESSION.items():
            values = [float(found[kind]) for _, _, found in later]
            each = slope(sessions, values)
            grown = each * (sessions[-1] - sessions[0])
            bad = each > bound and grown > DISK_SLACK
            problem = f"{kind} grows by {each:.0f} bytes a session" if bad else None
            out[kind] = values[-1], each, problem
        return out


def anonymous(pid: int) -> int:
    """The bytes of a process's memory that are backed by no file, swapped ones included.

    Its share of mapped libraries (PSS, and USS too) grows when other processes that map them end.
    """
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "VmSwap"))


def trend(series: Series, half: float, end: float) -> Trend:
    points = [p for p in zip(series.at, series.values, strict=True) if p[0] >= half]
    at, values = [p[0] for p in points], [p[1] for p in points]
    first = statistics.median(values[: max(1, len(values) // 4)] or [0.0])
    last = statistics.median(values[-max(1, len(values) // 4) :] or [0.0])
    spanned = at[-1] - at[0] if at else 0.0
    judged = len(at) >= 4 and spanned >= 0.7 * (end - half)
    per_hour = slope(at, values) * 3600
    return Trend(series.name, series.kind, first, last, per_hour, spanned / 3600, judged)


def lags(text: str) -> dict[str, tuple[float, float]]:
    """(sum, count) of each part's histogram of its event loop's lag, out of Prometheus's text."""
    sums: dict[str, float] = defaultdict(float)
    counts: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        if family.name == "any_agent_loop_lag_seconds":
            for sample in family.samples:
                name = part_of(sample.labels)
                if sample.name.endswith("_sum"):
                    sums[name] += sample.value
                elif sample.name.endswith("_count"):
                    counts[name] += sample.value
    return {name: (sums[name], counts[name]) for name in counts}


def part_of(labels: dict[str, str]) -> str:
    """The name of the part as the node has it."""
    part = labels.get("part", "")
    return f"rank-{labels['rank']}" if "rank" in labels else part


def sizes(run: RunDir) -> dict[str, int]:
    """Bytes of a run by kind of file: its journals, archives, logs, and the rest."""
    out = {"journal": 0, "archive": size(run.archive), "logs": size(run.logs), "other": 0}
    out["journal"] = size(run.journal(0).parent)
    inside = out["journal"] if run.journals is None else 0
    out["other"] = size(run.path) - out["archive"] - out["logs"] - inside
    return out


def size(folder: Path) -> int:
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.stat(os.path.join(path, name), follow_symlinks=False).st_size
    return total
