"""Names of sessions and of tasks' groups, and the sampling seeds of calls.

Random; or, where a run is to be repeated bit for bit, derived from the run's seed, the rank, and
how many sessions were opened here before. The trainer orders its batches by these names.
"""

from __future__ import annotations

import secrets
from collections.abc import Container
from hashlib import sha256

from any_agent.config import Config
from any_agent.keys import SESSION_ID_PREFIX
from any_agent.types import SessionState
from proxy_ext.journal import Journal

_MOST_LOST = 1024
"""Numbers that may be missing from the journal, because their sessions failed to open."""


class Names:
    """Names of one rank. ``seed`` None: random ones, and no sampling seeds."""

    def __init__(self, rank: int, seed: int | None = None, *, opened: int = 0) -> None:
        self._rank = rank
        self._seed = seed
        self._opened = opened

    @classmethod
    async def recover(cls, config: Config, rank: int, journal: Journal) -> Names:
        """Go on after the sessions that the journal has."""
        if not config.rollout.deterministic:
            return cls(rank)
        names = cls(rank, config.train.seed)
        known = {row.id for row in await journal.sessions(SessionState)}
        for number in range(len(known) + _MOST_LOST):
            if names._session(number) in known:
                names._opened = number + 1
        return names

    def session(self) -> str:
        """A new session's id."""
        number = self._opened
        self._opened += 1
        return self._session(number)

    def generation(self, task_id: str, taken: Container[str]) -> str:
        """A new group of a task; none that is ``taken``.

        Those that ended took part in the count: some session was opened in each.
        """
        again = 0
        while True:
            part = self._hex(8, "group", task_id, self._opened, again)
            name = f"{task_id}~{part or secrets.token_hex(4)}"
            if name not in taken:
                return name
            again += 1

    def sampling_seed(self, session_id: str, number: int) -> int | None:
        """The seed of a session's call, by its number among the session's interactions."""
        part = self._hex(8, "call", session_id, number)
        return int(part, 16) >> 1 if part else None

    def _session(self, number: int) -> str:
        part = self._hex(16, "session", number) or secrets.token_hex(8)
        return f"{SESSION_ID_PREFIX}{self._rank}-{part}"

    def _hex(self, digits: int, *of: object) -> str:
        """Digits that follow from the seed; none without one."""
        if self._seed is None:
            return ""
        text = "\0".join(map(str, (self._seed, self._rank, *of)))
        return sha256(text.encode()).hexdigest()[:digits]
