"""The numbers of calls that are trained on and that are not, by reason, and of conversations that
were begun anew: of sessions, and lately."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from any_agent.record.reward_propagation import discarded
from any_agent.types import BranchReason, Continuation, Interaction

DISCARDED = "discarded"
"""The reason of an answer that was not continued while another one to its request was."""
_NEW: BranchReason = "new_conversation"
_RECENT = 64  # sessions that a notice is about
_FEWEST = 4  # sessions before there is one
_DOCUMENT = "docs/reference/calls.md"

log = logging.getLogger(__name__)


class CallCounts(NamedTuple):
    """The calls of one session."""

    trained: int
    """Calls whose tokens may enter the loss."""
    untrained: Mapping[str, int]
    """The others, by reason."""
    continued: int
    """Calls that continue another one's tokens."""
    roots: int
    """Prompts that continue no call's tokens."""
    root_reasons: Mapping[str, int]
    """The roots behind the first, by the reason why they continue no call."""

    @property
    def broken(self) -> Mapping[str, int]:
        """The roots whose conversation had begun before, by reason."""
        return {reason: count for reason, count in self.root_reasons.items() if reason != _NEW}


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
    roots: dict[bytes, str] = {}
    for n in nodes:
        if n.parent_id is None:
            # Several answers to one prompt are one root.
            roots.setdefault(n.prompt_delta_ids.tobytes(), n.branch_reason or _NEW)
    return CallCounts(
        len(nodes) - len(untrained),
        Counter(map(str, untrained.values())),
        sum(n.continuation is Continuation.EXACT for n in nodes),
        len(roots),
        Counter(list(roots.values())[1:]),
    )


class _RecentSessions:
    """The last sessions, and what ails most of them; ``text`` says it of ``{why}``."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._last: deque[Mapping[str, int]] = deque(maxlen=_RECENT)
        self._told = False
        self.notice: str | None = None

    def add(self, ailing: Mapping[str, int]) -> None:
        """Count a session, with the reasons of its calls if it ails."""
        self._last.append(ailing)
        before, self.notice = self.notice, self._describe()
        if before is None and self.notice is not None:
            log.warning("%s", self.notice)

    def is_new(self) -> bool:
        """Return whether there is a notice that there was not at the last call."""
        told, self._told = self._told, self.notice is not None
        return self._told and not told

    def _describe(self) -> str | None:
        ailing = [reasons for reasons in self._last if reasons]
        if len(self._last) < _FEWEST or 2 * len(ailing) <= len(self._last):
            return None
        calls: Counter[str] = Counter()
        for reasons in ailing:
            calls.update(reasons)
        why = ", ".join(f"{count} {reason}" for reason, count in calls.most_common(4))
        return f"{len(ailing)} of the last {len(self._last)} sessions {self._text.format(why=why)}"


class TrainabilityWatch:
    """Notices when the calls of most sessions are not trained on, or do not continue each other,
    and logs why."""

    def __init__(self) -> None:
        self.sessions: Counter[str] = Counter()
        """Sessions with more calls that are not trained on than calls that are, by the reason of
        most of these."""
        self._untrained = _RecentSessions(
            "have more calls that are not trained on ({why}) than calls that are: "
            f"{_DOCUMENT}#untrainable-interactions has the reasons"
        )
        self._broken = _RecentSessions(
            "have more calls that begin their conversation anew ({why}) than calls that continue "
            "it: each is trained as a conversation of one turn, which no reward of a later call "
            f"reaches; {_DOCUMENT}#continuation has the reasons"
        )

    def add(self, counts: CallCounts) -> None:
        """Count a session that is ready for training."""
        lost = sum(counts.untrained.values()) > counts.trained
        if lost:
            self.sessions[max(counts.untrained, key=lambda why: counts.untrained[why])] += 1
        self._untrained.add(counts.untrained if lost else {})
        broken = counts.broken
        self._broken.add(broken if sum(broken.values()) > counts.continued else {})

    @property
    def notices(self) -> list[str]:
        """The present state of affairs, as far as it is wrong with most of the last sessions."""
        return [each.notice for each in (self._untrained, self._broken) if each.notice is not None]

    def take_notices(self) -> list[str]:
        """Return the notices that are new since the last call."""
        new = [each for each in (self._untrained, self._broken) if each.is_new()]
        return [each.notice for each in new if each.notice is not None]
