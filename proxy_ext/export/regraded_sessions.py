"""The sessions of `any-agent regrade --train`: recorded calls with another grader's rewards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from any_agent.record import is_frozen, strip_content
from any_agent.types import Trajectory
from proxy_ext.archive.records import ArchiveRecord
from proxy_ext.export.choice import ENDED, is_candidate
from proxy_ext.export.reader import RunSessions
from proxy_ext.sessions.rewards import combined


class RegradedSessions:
    """Iterates over those of the graded sessions that may be trained on."""

    def __init__(self, run: RunSessions, lines: Mapping[str, Mapping[str, Any]]) -> None:
        """``lines`` are those of the file, by session."""
        self._run = run
        self._lines = lines
        self.left_out: Counter[str] = Counter()
        """The number of graded sessions that may not be trained on, by the reason."""

    def __iter__(self) -> Iterator[Trajectory]:
        # What is damaged was reported when it was graded.
        for found, record in self._run.read(lambda _: None):
            if (line := self._lines.get(found.session_id)) is None:
                continue
            if (why := _why_not(record.session, line)) is not None:
                self.left_out[why] += 1
            else:
                yield self._trajectory(record, line)

    def _trajectory(self, record: ArchiveRecord, line: Mapping[str, Any]) -> Trajectory:
        """Return a session as a lease would have it, had it had these rewards."""
        session, weights = record.session, self._run.settings.sessions.reward_weights
        of_calls = {id: own for id, own in line["rewards"].items() if isinstance(own, dict)}
        # Training needs no texts.
        calls = [strip_content(call) for call in record.interactions if not is_frozen(call)]
        for call in calls:
            own = of_calls.get(call.id)
            call.reward = combined(own, weights) if own is not None else None
        return Trajectory(
            session_id=session["id"],
            group_id=session["group_id"] or session["id"],
            interactions=calls,
            final_reward=None if of_calls else line["new"],
            task_id=session["task_id"],
            metadata=session["metadata"],
        )


def _why_not(session: Mapping[str, Any], line: Mapping[str, Any]) -> str | None:
    """Return why a session may not be trained on; None if it may."""
    if session["mode"] != "train":
        return f"of mode {session['mode']}"
    if not is_candidate(session, None):
        return str(session["reason"] or session["state"])
    # Its grade may be of fewer calls.
    return None if line["state"] in ENDED else "it went on after it was graded"
