"""The numbers of calls that are trained on and that are not, by reason: of sessions, and lately."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from any_agent.record.reward_propagation import discarded
from any_agent.types import Interaction

DISCARDED = "discarded"
"""The reason of an answer that was not continued while another one to its request was."""
_RECENT = 64  # sessions that a notice is about
_FEWEST = 4  # sessions before there is one
_DOCUMENT = "docs/reference/calls.md#untrainable-interactions"

log = logging.getLogger(__name__)


class CallCounts(NamedTuple):
    """The calls of one session."""

    trained: int
    """Calls whose tokens may enter the loss."""
    untrained: Mapping[str, int]
    """The others, by reason."""


def count_calls(
    interactions: Iterable[Interaction], undelivered: Collection[str] = ()
) -> CallCounts:
    """Count a session's calls; ``undelivered``: ids of answers that are about to be marked so."""
    nodes = list(interactions)
    untrained: dict[str, str | None] = {
        n.id: "undelivered" if n.id in undelivered else n.untrainable_reason
        for n in nodes
        if n.id in undelivered or n.untrainable_reason is not None
    }
    if len({n.parent_id for n in nodes}) < len(nodes):
        # Only one of several answers can be discarded.
        untrained = {**dict.fromkeys(discarded(nodes), DISCARDED), **untrained}
    return CallCounts(len(nodes) - len(untrained), Counter(map(str, untrained.values())))


class TrainabilityWatch:
    """Notices when the calls of most sessions are not trained on, and logs why."""

    def __init__(self) -> None:
        self.sessions: Counter[str] = Counter()
        """Sessions with more calls that are not trained on than calls that are, by the reason of
        most of these."""
        self.notice: str | None = None
        """The present state of affairs, if most of the last sessions are such."""
        self._told = False
        self._recent: deque[Mapping[str, int]] = deque(maxlen=_RECENT)

    def add(self, counts: CallCounts) -> None:
        """Count a session that is ready for training."""
        lost = sum(counts.untrained.values()) > counts.trained
        if lost:
            self.sessions[max(counts.untrained, key=lambda why: counts.untrained[why])] += 1
        self._recent.append(counts.untrained if lost else {})
        before, self.notice = self.notice, self._describe()
        if before is None and self.notice is not None:
            log.warning("%s", self.notice)

    def take_notice(self) -> str | None:
        """Return a notice that is new since the last call."""
        told, self._told = self._told, self.notice is not None
        return None if told else self.notice

    def _describe(self) -> str | None:
        lost = [reasons for reasons in self._recent if reasons]
        if len(self._recent) < _FEWEST or 2 * len(lost) <= len(self._recent):
            return None
        calls: Counter[str] = Counter()
        for reasons in lost:
            calls.update(reasons)
        why = ", ".join(f"{count} {reason}" for reason, count in calls.most_common(4))
        return (
            f"{len(lost)} of the last {len(self._recent)} sessions have more calls that are not "
            f"trained on ({why}) than calls that are: {_DOCUMENT} has the reasons"
        )
