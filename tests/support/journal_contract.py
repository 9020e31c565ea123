"""What every journal keeps to: see :class:`proxy_ext.journal.Journal`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from any_agent.errors import StoreUnavailable
from any_agent.record import pack_interaction
from any_agent.types import SessionState
from proxy_ext.journal import (
    ArchiveContent,
    DropAnswers,
    EraseContent,
    Journal,
    MarkDelivered,
    PutAnswer,
    PutInteraction,
    PutMeta,
    PutSession,
    RequestMark,
    RewardRow,
    SessionFilter,
    SetAwaiting,
    SetReward,
    SetState,
    StoredRequest,
)
from tests.support.journal import make_interaction, make_row


async def check_journal(reopen: Callable[[], Journal]) -> None:
    """Run all checks; ``reopen`` opens the same journal again, after the last one was closed."""
    journal = reopen()
    await _writes_are_whole(journal)
    await _interactions_rewards_and_marks(journal)
    await _ids_and_groups(journal)
    await _answers(journal)
    await _content(journal)
    counts = await journal.counts()
    rows = await journal.sessions(list(SessionState))
    await journal.close()
    journal = reopen()
    assert await journal.counts() == counts
    assert await journal.sessions(list(SessionState)) == rows
    assert await journal.meta("run") == {"step": 3}
    await journal.close()


async def _writes_are_whole(journal: Journal) -> None:
    of = {"tenant": "t", "opened_by": "tenant t (key 1)", "pinned_version": 3, "clock": "boot 12.5"}
    first = make_row("s1", created_at=1.0, **of)
    second = make_row("s2", mode="eval", created_at=0.5)
    await journal.commit(PutSession(first), PutSession(second), PutMeta("run", {"step": 3}))
    with pytest.raises(StoreUnavailable):
        await journal.commit(PutMeta("run", {"step": 4}), PutSession(make_row("s1", task_id="t")))
    assert await journal.meta("run") == {"step": 3}
    assert await journal.meta("none") is None
    assert await journal.session("s1") == first
    assert await journal.session("none") is None
    assert await journal.sessions([SessionState.OPEN]) == [first, second]
    assert await journal.session_of_lane("lane-s2") == second
    assert await journal.counts() == {("train", "open"): 1, ("eval", "open"): 1}
    await journal.commit(PutSession(make_row("r1")), PutSession(make_row("r2")))
    await journal.commit(SetAwaiting("r1", 9.0))
    row = await journal.session("r1")
    assert row is not None
    assert (row.state, row.awaits_until) == (SessionState.AWAITING_REWARD, 9.0)
    await journal.commit(SetState(("r1", "r2"), SessionState.LEASED, "why", "owner", 4, 7.0))
    row = await journal.session("r1")
    assert row is not None
    assert (row.state, row.awaits_until) == (SessionState.LEASED, None)
    assert (row.reason, row.owner, row.step, row.ended_at) == ("why", "owner", 4, 7.0)
    assert await journal.last_step() is None, "a lease consumes nothing"
    await journal.commit(SetState(("r1",), SessionState.LEASED, owner="another"))
    row = make_row("r1", state=SessionState.LEASED, owner="another")
    assert await journal.session("r1") == row, "no reason, step or end is left of before"


async def _interactions_rewards_and_marks(journal: Journal) -> None:
    parent, mark = make_interaction("i1", "s1"), RequestMark(b"hash", 1)
    child = make_interaction("i2", "s1", parent_id="i1")
    await journal.commit(PutInteraction(parent, b"key", mark), PutInteraction(child))
    history = [
        SetReward("s1", "i1", "format", 0.5, "session", 1.5, combined=0.5),
        SetReward("s1", "i1", "format", 0.75, "session", 2.5, combined=0.75),
        SetReward("s1", None, None, -2.0, "admin", 3.5, combined=-2.0),
        SetReward(
            "s1", "i1", "feedback", None, "user", 4.5, combined=None, text="\0 no \U0001f44e"
        ),
        SetReward("s1", None, "feedback", 0.5, "user", 5.5, combined=-1.5, text="so so"),
    ]
    for statement in history:
        await journal.commit(statement)
    rows = [RewardRow(s.interaction_id, s.name, s.value, s.by, s.at, s.text) for s in history]
    assert await journal.rewards("s1") == rows
    assert await journal.rewards("s1", last=1) == rows[-1:]
    assert await journal.reward_parts("s1", "i1") == ({"format": 0.75}, 4), "words are no reward"
    assert await journal.reward_parts("s1", None) == (
        {None: -2.0, "feedback": 0.5},
        4,
    )
    assert await journal.reward_parts("s1", "i2") == ({}, 4)
    row = await journal.session("s1")
    assert row is not None and (row.final_reward, row.opened_by) == (-1.5, "tenant t (key 1)")
    assert await journal.requests("s1") == [StoredRequest("i1", mark, delivered=False)]
    await journal.commit(MarkDelivered(("i1",)))
    # Put again without key and mark: it is replaced at its old place, and these stay.
    parent.untrainable_reason, parent.reward = "undelivered", 0.75
    await journal.commit(PutInteraction(parent))
    assert await journal.requests("s1") == [StoredRequest("i1", mark, delivered=True)]
    stored = await journal.interactions("s1")
    assert [(i.interaction.id, i.interaction.reward, i.key) for i in stored] == [
        ("i1", 0.75, b"key"),
        ("i2", None, None),
    ]
    assert pack_interaction(stored[0].interaction) == pack_interaction(parent)
    assert await journal.session_of_interaction("i2") == "s1"
    assert await journal.session_of_interaction("i3") is None


async def _ids_and_groups(journal: Journal) -> None:
    members = [
        make_row(f"t-0-{k}", group_id="g", group_size=3, created_at=50.0 + k) for k in (9, 10)
    ]
    await journal.commit(*map(PutSession, members))
    assert await journal.group("g") == members
    assert await journal.group_ids() == ["g"]
    assert await journal.unfilled_groups(50.0, left="none") == ["g"]
    assert await journal.unfilled_groups(70.0, left="none") == []
    third = make_row("t-0-x", group_id="g", group_size=3, created_at=60.0)
    await journal.commit(PutSession(third))
    assert await journal.unfilled_groups(50.0, left="none") == []
    await journal.commit(SetState(("t-0-x",), SessionState.ABORTED, None, "none"))
    assert await journal.unfilled_groups(50.0, left="none") == ["g"]
    assert await journal.last_number("t-0-") == 10
    others = [("t-0-77-0-80", "lane"), ("t-1-99", "lane"), ("t-0.5", "lane")]
    for id, lane in others:
        await journal.commit(PutSession(make_row(id, lane=lane)))
    assert await journal.last_number("t-0-") == 10
    assert await journal.last_number("t-0-77-0-") == 80
    newest = await journal.session_of_lane("lane")
    assert newest is not None and newest.id == "t-0.5"
    assert await journal.last_number("u-0-") is None
    assert await journal.last_session("s") == "s2"
    numbers = [await journal.number(id) for id in ("s1", "s2", "t-0-9", "none")]
    assert numbers[3] is None
    assert numbers[:3] == sorted(numbers[:3])  # type: ignore[type-var]
    page = await journal.page(SessionFilter(group_id="g"), before=None, limit=2)
    assert [each.row.id for each in page.rows] == ["t-0-x", "t-0-10"]
    page = await journal.page(SessionFilter(group_id="g"), before=page.before, limit=9)
    assert [each.row.id for each in page.rows] == ["t-0-9"]
    page = await journal.page(SessionFilter(state=SessionState.LEASED), before=None, limit=9)
    assert [each.row.id for each in page.rows] == ["r2", "r1"]
    page = await journal.page(SessionFilter(), before=2, limit=9)
    (found,) = page.rows
    assert (found.row.id, found.interactions, found.rewards_given) == ("s1", 2, 4)


async def _answers(journal: Journal) -> None:
    await journal.commit(PutAnswer("scope", "key", b"hash", 200, b"body", 1.0))
    answer = await journal.answer("scope", "key")
    assert answer is not None
    assert (answer.request_hash, answer.status, answer.body) == (b"hash", 200, b"body")
    assert await journal.answer("other", "key") is None
    with pytest.raises(StoreUnavailable):
        await journal.commit(
            PutMeta("effect", 2), PutAnswer("scope", "key", b"other", 200, b"", 1.0)
        )
    assert await journal.meta("effect") is None
    await journal.commit(DropAnswers(1.0))
    assert await journal.answer("scope", "key") == answer
    await journal.commit(DropAnswers(1.5))
    assert await journal.answer("scope", "key") is None


async def _content(journal: Journal) -> None:
    for id, step in (("old", 3), ("new", 5)):
        await journal.commit(
            PutSession(make_row(id, state=SessionState.TRAINED, step=step, ended_at=10.0)),
            PutInteraction(make_interaction(f"i-{id}", id)),
            SetReward(id, f"i-{id}", None, 1.0, "me", 1.0, 1.0, "fine"),
            SetReward(id, None, "feedback", None, "me", 1.0, None, "words alone"),
        )
    assert await journal.last_step() == 5
    found = await journal.ended(before=20.0, oldest_step=4, limit=9)
    assert [each.row.id for each in found] == ["old"]
    await journal.commit(ArchiveContent(("old",)), EraseContent(("new",)))
    for id, content, rewards in (("old", "archived", 0), ("new", "deleted", 1)):
        row = await journal.session(id)
        assert row is not None
        assert (row.content, row.metadata) == (content, {})
        assert await journal.interactions(id) == []
        given = await journal.rewards(id)
        assert [(one.value, one.text) for one in given] == [(1.0, None)] * rewards
    assert len(await journal.interactions("s1")) == 2
    assert await journal.trim() >= 0
    await journal.retry_full()
    assert journal.size() >= 0
