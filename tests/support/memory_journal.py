"""A journal in memory: the example of docs/how-to/extend.md, for tests and experiments.

Each commit copies the tables, applies its statements to the copy and puts it in their place, so it
writes all of them or none. Everything is lost with the process.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from any_agent.errors import StoreUnavailable
from any_agent.record import pack_interaction, unpack_interaction
from any_agent.types import TERMINAL_STATES, SessionState
from proxy_ext.journal import (
    EXPORT_OWNER,
    AnswerRow,
    ArchiveContent,
    DropAnswers,
    EraseContent,
    JournalStats,
    MarkDelivered,
    NumberedRow,
    PutAnswer,
    PutInteraction,
    PutMeta,
    PutSession,
    RewardRow,
    SessionPage,
    SetAwaiting,
    SetReward,
    SetState,
    StoredInteraction,
    StoredRequest,
    register_journal,
)


@dataclass
class Tables:
    sessions: dict[str, Any] = field(default_factory=dict)
    interactions: dict[str, dict[str, Any]] = field(default_factory=dict)
    rewards: list[tuple[str, RewardRow]] = field(default_factory=list)
    answers: dict[tuple[str, str], AnswerRow] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)

    def copy(self):
        calls = {id: dict(call) for id, call in self.interactions.items()}
        return Tables(
            dict(self.sessions), calls, list(self.rewards), dict(self.answers), dict(self.meta)
        )

    def change(self, ids, **fields):
        self.sessions |= {
            id: replace(self.sessions[id], **fields) for id in ids if id in self.sessions
        }

    def drop_content(self, ids, content):
        self.interactions = {i: c for i, c in self.interactions.items() if c["session"] not in ids}
        self.change(ids, content=content, metadata={})

    def apply(self, statement):
        s = statement
        match s:
            case PutSession(row):
                if row.id in self.sessions:
                    raise StoreUnavailable(f"session {row.id} exists")
                self.sessions[row.id] = row
            case SetState():
                fields = {"reason": s.reason, "owner": s.owner, "step": s.step, "ended_at": s.at}
                self.change(s.session_ids, state=s.state, awaits_until=None, **fields)
            case SetAwaiting(id, until):
                self.change([id], state=SessionState.AWAITING_REWARD, awaits_until=until)
            case PutInteraction(interaction, key, mark):
                call = self.interactions.setdefault(interaction.id, {"delivered": False})
                call["session"], call["data"] = (
                    interaction.session_id,
                    pack_interaction(interaction),
                )
                call["reward"] = interaction.reward
                call["key"] = key or call.get("key")
                call["mark"] = mark or call.get("mark")
            case SetReward():
                given = RewardRow(s.interaction_id, s.name, s.value, s.by, s.at, s.text)
                self.rewards.append((s.session_id, given))
                if s.combined is None:
                    return
                if s.interaction_id is None:
                    self.change([s.session_id], final_reward=s.combined)
                else:
                    self.interactions[s.interaction_id]["reward"] = s.combined
            case MarkDelivered(ids):
                for id in ids:
                    self.interactions[id]["delivered"] = True
            case PutAnswer():
                if (s.scope, s.key) in self.answers:
                    raise StoreUnavailable("the request has an answer")
                fields = (s.request_hash, s.status, s.body, s.created_at)
                self.answers[s.scope, s.key] = AnswerRow(s.scope, s.key, *fields)
            case DropAnswers(before):
                self.answers = {k: a for k, a in self.answers.items() if a.created_at >= before}
            case EraseContent(ids):
                self.drop_content(ids, "deleted")
                self.rewards = [
                    (id, replace(given, text=None) if id in ids else given)
                    for id, given in self.rewards
                    if id not in ids or given.value is not None
                ]
            case ArchiveContent(ids):
                self.drop_content(ids, "archived")
                self.rewards = [reward for reward in self.rewards if reward[0] not in ids]
            case PutMeta(key, value):
                self.meta[key] = value


class MemoryJournal:
    def __init__(self, tables: list[Tables]):
        self.stats = JournalStats()
        self._tables = tables

    @property
    def now(self) -> Tables:
        return self._tables[-1]

    async def commit(self, *statements):
        tables = self.now.copy()
        for statement in statements:
            tables.apply(statement)
        self._tables[:] = [tables]
        self.stats.writes += 1

    def rows(self, test):
        return [row for row in self.now.sessions.values() if test(row)]

    async def sessions(self, states):
        wanted = set(states)
        return self.rows(lambda row: row.state in wanted)

    async def session(self, session_id):
        return self.now.sessions.get(session_id)

    async def session_of_lane(self, lane):
        return next(iter(reversed(self.rows(lambda row: row.lane == lane))), None)

    async def group(self, group_id):
        return self.rows(lambda row: row.group_id == group_id)

    async def group_ids(self):
        return list(dict.fromkeys(row.group_id for row in self.rows(lambda row: row.group_id)))

    async def unfilled_groups(self, since, *, left):
        recent = self.rows(lambda row: row.group_id and row.created_at >= since)
        sizes = {row.group_id: row.group_size for row in recent}
        present = [row.group_id for row in recent if row.owner != left]
        return [id for id, size in sizes.items() if present.count(id) < size]

    async def last_session(self, prefix):
        return max((id for id in self.now.sessions if id.startswith(prefix)), default=None)

    async def last_number(self, prefix):
        ends = [id.removeprefix(prefix) for id in self.now.sessions if id.startswith(prefix)]
        return max((int(end) for end in ends if end.isdecimal()), default=None)

    async def counts(self):
        counts: dict[tuple[str, SessionState], int] = {}
        for row in self.now.sessions.values():
            key = (str(row.mode), row.state)
            counts[key] = counts.get(key, 0) + 1
        return counts

    def numbered(self):
        return [NumberedRow(k, row) for k, row in enumerate(self.now.sessions.values(), 1)]

    async def ended(self, *, before, oldest_step, limit):
        def unneeded(row):
            over = row.state in TERMINAL_STATES and (row.ended_at or before) < before
            if row.content != "stored" or not over:
                return False
            if row.state is SessionState.TRAINED and row.owner == EXPORT_OWNER:
                return True
            if row.state in (SessionState.TRAINED, SessionState.REJECTED) and row.step is not None:
                return oldest_step is not None and row.step <= oldest_step
            return row.state is not SessionState.TRAINED

        return [each for each in self.numbered() if unneeded(each.row)][:limit]

    async def page(self, wanted, *, before, limit):
        fields = {
            name: getattr(wanted, name)
            for name in ("state", "task_id", "group_id", "tenant", "mode")
        }
        found = []
        for each in reversed(self.numbered()):
            fits = all(v is None or getattr(each.row, name) == v for name, v in fields.items())
            if fits and (before is None or each.number < before):
                calls = len(await self.interactions(each.row.id))
                _, given = await self.reward_parts(each.row.id, None)
                found.append(NumberedRow(each.number, each.row, calls, given))
        return SessionPage(found[:limit], found[limit - 1].number if len(found) > limit else None)

    async def last_step(self):
        taken = self.rows(lambda row: row.state in (SessionState.TRAINED, SessionState.REJECTED))
        return max((row.step for row in taken if row.step is not None), default=None)

    async def number(self, session_id):
        return next((each.number for each in self.numbered() if each.row.id == session_id), None)

    def calls(self, session_id):
        calls = self.now.interactions.items()
        return [(id, call) for id, call in calls if call["session"] == session_id]

    async def interactions(self, session_id):
        out = []
        for _, call in self.calls(session_id):
            interaction = unpack_interaction(call["data"])
            interaction.reward = call["reward"]
            out.append(StoredInteraction(interaction, call["key"]))
        return out

    async def session_of_interaction(self, interaction_id):
        return self.now.interactions.get(interaction_id, {}).get("session")

    async def requests(self, session_id):
        calls = self.calls(session_id)
        return [StoredRequest(id, c["mark"], c["delivered"]) for id, c in calls if c["mark"]]

    async def rewards(self, session_id, *, last=None):
        found = [row for id, row in self.now.rewards if id == session_id]
        return found if last is None else found[-last:]

    async def reward_parts(self, session_id, interaction_id):
        given = await self.rewards(session_id)
        given = [r for r in given if r.value is not None]
        return {r.name: r.value for r in given if r.interaction_id == interaction_id}, len(given)

    async def answer(self, scope, key):
        return self.now.answers.get((scope, key))

    async def meta(self, key):
        return self.now.meta.get(key)

    async def trim(self):
        return 0

    async def retry_full(self):
        pass

    def size(self):
        return 0

    async def close(self):
        pass


_KEPT: dict[str, list[Tables]] = {}
register_journal("memory", lambda url: MemoryJournal(_KEPT.setdefault(url, [Tables()])))
