"""The metrics of a cloud, at its `GET /metrics`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import TypeAlias

from any_agent.runtime.metrics import Metric, Reading, Value, Values
from router.cloud.job import STATES, state_of
from router.cloud.jobs import Jobs

_Row: TypeAlias = tuple[Metric, Callable[[Jobs], Value | Values]]


def _gauge(name: str, meaning: str, read: Callable[[Jobs], Value | Values], *labels: str) -> _Row:
    return Metric(f"any_agent_cloud_{name}", "gauge", meaning, labels), read


def _counter(name: str, meaning: str, read: Callable[[Jobs], Value | Values], *labels: str) -> _Row:
    return Metric(f"any_agent_cloud_{name}_total", "counter", meaning, labels), read


def _by_state(jobs: Jobs) -> Values:
    found = Counter(state_of(job, job.run) for job in jobs.by_id.values())
    return {(state,): found[state] for state in STATES}


_ROWS: tuple[_Row, ...] = (
    _gauge("runs", "Runs of all accounts by state.", _by_state, "state"),
    _gauge(
        "queued",
        "Runs that wait for a place.",
        lambda jobs: sum(job.position > 0 for job in jobs.by_id.values()),
    ),
    _gauge("places", "Runs that this machine serves at once.", lambda jobs: jobs.places),
    _gauge(
        "places_taken",
        "Places of runs that start, answer or stop.",
        lambda jobs: sum(job.takes_place for job in jobs.by_id.values()),
    ),
    _gauge(
        "requests_held",
        "Requests that wait until their run answers.",
        lambda jobs: sum(job.waiting for job in jobs.by_id.values()),
    ),
    _counter("starts", "Starts of runs.", lambda jobs: jobs.stats.starts),
    _counter(
        "ends",
        "Ends of runs by reason: idle (nothing asked for it), quiet or turn (another one waited), "
        "stopped or deleted by its owner, budget (it is used up), draining (the service stops), "
        "failed.",
        lambda jobs: {(reason,): number for reason, number in jobs.stats.ends.items()},
        "reason",
    ),
    (
        Metric(
            "any_agent_cloud_wait_seconds",
            "histogram",
            "Seconds that requests waited for a run that did not answer yet, by outcome: answered, "
            "refused, or left by the client.",
            ("outcome",),
        ),
        lambda jobs: {(outcome,): waits for outcome, waits in jobs.stats.waits.items()},
    ),
)
METRICS = tuple(metric for metric, _ in _ROWS)


def of_cloud(jobs: Jobs) -> Iterator[Reading]:
    """Yield the metrics of the runs and of the requests that wait for them."""
    yield from ((metric, read(jobs)) for metric, read in _ROWS)
