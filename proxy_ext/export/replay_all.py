"""`any-agent replay` over many sessions: how other weights change the recorded answers, in sum."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from any_agent.doctor.forward_pass import Forward
from any_agent.errors import ConfigError
from any_agent.inference.weights_source import WeightsSource
from proxy_ext.archive.records import ArchiveRecord
from proxy_ext.export.choice import group_of, score_of
from proxy_ext.export.forced_logprobs import call_logprobs, load_forward
from proxy_ext.export.reader import RunSessions, credited

_MOST_CHANGED = 5


@dataclass(frozen=True, slots=True)
class ReplayedSession:
    """The sampled tokens of one session under the recorded and under other weights."""

    session_id: str
    group: str
    score: float | None
    """The mean of its calls' rewards; None without a reward."""
    calls: int
    tokens: int
    recorded: float
    """The sum of the tokens' log-probabilities, as recorded, nats."""
    now: float
    """The same under the other weights."""
    difference_max: float
    """The largest absolute difference of a token."""

    @property
    def change(self) -> float:
        """The change of a token's log-probability, on average, nats."""
        return (self.now - self.recorded) / self.tokens


def replay_all(arguments: argparse.Namespace, sessions: RunSessions, source: WeightsSource) -> int:
    """Compare each of the chosen sessions; print the sum."""
    problems = 0

    def report(problem: str) -> None:
        nonlocal problems
        problems += 1
        print(problem, file=sys.stderr)

    forward = load_forward(source, arguments.device)
    found = []
    for _, record in sessions.read(report):
        try:
            one = _compared(record, forward, sessions.settings.train.discount)
        except ConfigError as error:
            report(f"session {record.session['id']} is left out: {error.message}")
            continue
        if one is not None:
            found.append(one)
    figures = summary_of(found)
    if arguments.json:
        against = {"version": source.weights.version, "path": str(source.weights.path)}
        print(json.dumps({"against": against, "problems": problems, **figures}))
    else:
        print(f"against   version {source.weights.version}: {source.weights.path}")
        print("\n".join(_shown(figures)))
    return 0 if found and not problems else 1


def _compared(record: ArchiveRecord, forward: Forward, discount: float) -> ReplayedSession | None:
    """Return the comparison of a session's tokens that training counts; None without any."""
    session = credited(record, discount)
    now = call_logprobs(session.tree, forward)
    # Tokens that training does not count were not sampled by the policy alone.
    calls = [node for node in session.tree if node.trainable]
    pairs = [
        (float(before), after)
        for node in calls
        for before, after, counts in zip(
            node.output_logprobs, now[node.id], node.loss_mask(), strict=True
        )
        if counts
    ]
    if not pairs:
        return None
    id = record.session["id"]
    return ReplayedSession(
        id,
        group_of(record.session, id),
        score_of(session),
        len(calls),
        len(pairs),
        math.fsum(before for before, _ in pairs),
        math.fsum(after for _, after in pairs),
        max(abs(after - before) for before, after in pairs),
    )


def summary_of(found: Sequence[ReplayedSession]) -> dict[str, Any]:
    """Return the figures over all sessions, and those of the better and the worse half of groups.

    A session is better, or worse, if its score is above, or below, the mean of its group: training
    should have made what it sampled more, or less, likely.
    """
    groups: defaultdict[str, list[float]] = defaultdict(list)
    for one in found:
        if one.score is not None:
            groups[one.group].append(one.score)
    means = {name: math.fsum(scores) / len(scores) for name, scores in groups.items()}
    above = [one for one in found if one.score is not None and one.score > means[one.group]]
    below = [one for one in found if one.score is not None and one.score < means[one.group]]
    ordered = sorted(found, key=lambda one: -abs(one.change))[:_MOST_CHANGED]
    return {
        "all": _sums(found),
        "above_the_mean": _sums(above),
        "below_the_mean": _sums(below),
        "most_changed": [asdict(one) | {"change": one.change} for one in ordered],
    }


def _sums(found: Sequence[ReplayedSession]) -> dict[str, Any]:
    tokens = sum(one.tokens for one in found)
    recorded, now = (math.fsum(getattr(one, side) for one in found) for side in ("recorded", "now"))
    return {
        "sessions": len(found),
        "calls": sum(one.calls for one in found),
        "tokens": tokens,
        "recorded_mean": recorded / tokens if tokens else None,
        "mean": now / tokens if tokens else None,
        "change": (now - recorded) / tokens if tokens else None,
        "difference_max": max((one.difference_max for one in found), default=None),
    }


_TITLES = {"all": "all", "above_the_mean": "better", "below_the_mean": "worse"}


def _shown(figures: dict[str, Any]) -> Iterator[str]:
    for name, title in _TITLES.items():
        sums = figures[name]
        text = f"{title:<9} {sums['sessions']} sessions, {sums['calls']} calls"
        if sums["tokens"]:
            text += (
                f", {sums['tokens']} tokens: mean {sums['mean']:.4f} nats, recorded "
                f"{sums['recorded_mean']:.4f}, change {sums['change']:+.4f}; a token differs by "
                f"{sums['difference_max']:.2g} at most"
            )
        yield text
    if figures["most_changed"]:
        yield "better and worse: above and below the mean score of their group; most changed:"
    for one in figures["most_changed"]:
        score = "no reward" if one["score"] is None else f"reward {one['score']:.4g}"
        yield f"  {one['session_id']}  {one['change']:+.4f} nats a token, {score}"
