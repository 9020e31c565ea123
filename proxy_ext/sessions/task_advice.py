"""The facts by which the next task to run is chosen, as one rank's journal tells them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence

from any_agent.config import Config
from any_agent.protocol.rl import SessionLine
from any_agent.protocol.tasks import TaskFacts
from any_agent.rewards.next_task import facts_of
from any_agent.types import SessionMode
from proxy_ext.journal import Journal
from proxy_ext.journal.base import NumberedRow, SessionFilter
from proxy_ext.sessions.session import session_line

_MOST = 1000
"""Sessions that are looked at for one answer."""
_PAGE = 250
"""Sessions that are read at once, while other reads of the journal wait."""
_GROUPS_OF_TASK = 4
"""Groups of each named task that are looked at, if they have the usual size."""
KEPT_SECONDS = 1.0
"""Time for which facts are kept: anyone who may open sessions may ask, and a read is costly."""
_MOST_KEPT = 64


class TaskAdvice:
    """Reads the facts about tasks, for one caller at a time."""

    def __init__(self, journal: Journal, config: Config) -> None:
        self._journal = journal
        self._of_task = min(_GROUPS_OF_TASK * config.sessions.group_size, _PAGE)
        train = config.train
        # A teacher, or the reference alone, teaches whatever the rewards are.
        by_rewards = train.reward_coef > 0 and not train.teacher_coef
        self._keeps_alike = train.dynamic_sampling == "keep" and by_rewards
        self._discounts = config.train.discount != 1
        self._reading = asyncio.Lock()
        self._kept: dict[tuple[str | None, tuple[str, ...]], tuple[float, list[TaskFacts]]] = {}

    async def facts(self, names: Iterable[str], tenant: str | None) -> list[TaskFacts]:
        """Return what is known of these tasks, or of those of the latest sessions; of a tenant's
        own sessions alone, if one is given."""
        key = (tenant, wanted := tuple(dict.fromkeys(names)))
        async with self._reading:
            now = time.monotonic()
            self._kept = {k: v for k, v in self._kept.items() if now - v[0] < KEPT_SECONDS}
            if key not in self._kept:
                rows = await self._read(wanted, tenant)
                facts = await asyncio.to_thread(self._told, wanted, rows)
                while len(self._kept) >= _MOST_KEPT:
                    del self._kept[next(iter(self._kept))]
                self._kept[key] = (now, facts)
            return self._kept[key][1]

    async def _read(self, names: Sequence[str], tenant: str | None) -> list[NumberedRow]:
        rows: list[NumberedRow] = []
        mode = str(SessionMode.TRAIN)
        # One after another: other reads have their turn in between.
        for name in names:
            wanted = SessionFilter(task_id=name, tenant=tenant, mode=mode)
            limit = min(self._of_task, _MOST // len(names))
            rows += (await self._journal.page(wanted, before=None, limit=limit)).rows
        if names:
            return rows
        latest, before = SessionFilter(tenant=tenant, mode=mode), None
        for _ in range(_MOST // _PAGE):
            page = await self._journal.page(latest, before=before, limit=_PAGE)
            rows += page.rows
            if (before := page.before) is None:
                break
        return rows

    def _told(self, names: Sequence[str], rows: Sequence[NumberedRow]) -> list[TaskFacts]:
        lines: dict[str, list[SessionLine]] = {name: [] for name in names}
        unscored: set[str] = set()
        for each in rows:
            if each.row.task_id is not None:
                lines.setdefault(each.row.task_id, []).append(session_line(each))
                # A score is the mean over a session's calls of what is credited to them.
                if self._discounts or each.interaction_reward is not None:
                    unscored.add(each.row.id)
        return [
            facts_of(name, found, keeps_alike=self._keeps_alike, unscored=unscored)
            for name, found in lines.items()
        ]
