"""Calls with a key whose next session is being opened."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from any_agent.types import SessionState
from proxy_ext.journal import PutSession, SQLiteJournal, Statement
from proxy_ext.journal.writer import JournalJob
from tests.support.proxy import Proxy, until


class HeldOpens:
    """Holds the journal's writer before each new session's row, and counts who looks for one."""

    def __init__(self, journal: SQLiteJournal, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opening: str | None = None
        """The session whose row is being written."""
        self.looking = 0
        self._go = threading.Event()
        commit = journal.commit

        async def held(*statements: Statement) -> None:
            first = statements[0] if statements else None
            if isinstance(first, PutSession) and first.row.state is SessionState.OPEN:
                self._go.clear()
                journal.writer.submit(JournalJob(lambda _: self._go.wait(60), writes=True))
                self.looking, self.opening = 0, first.row.id
            await commit(*statements)

        def counted(look: Callable[[str], Awaitable[Any]]) -> Callable[[str], Awaitable[Any]]:
            def looked(name: str) -> Awaitable[Any]:
                self.looking += 1
                return look(name)

            return looked

        monkeypatch.setattr(journal, "commit", held)
        for name in ("session", "session_of_lane"):
            monkeypatch.setattr(journal, name, counted(getattr(journal, name)))

    def release(self) -> None:
        self.opening = None
        self._go.set()


async def test_a_call_reaches_the_session_that_is_just_being_opened(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks before the session is there and finds its row: no call may go to a ghost of it."""
    assert isinstance(proxy.service.journal, SQLiteJournal)
    held = HeldOpens(proxy.service.journal, monkeypatch)

    async def call(k: int, key: str | None, **headers: str) -> str:
        body = {"messages": [{"role": "user", "content": f"call {k}"}], "max_tokens": 2}
        response = await proxy.post("/v1/chat/completions", body, key, **headers)
        assert response.status_code == 200, response.text
        return str(response.json()["id"])

    key: str | None = None
    for _ in range(20):
        opening = asyncio.create_task(proxy.open(**({"api_key": key} if key else {})))
        id = await until(lambda: held.opening)
        calls = []
        if key is not None:
            calls = [asyncio.create_task(call(k, key)) for k in range(2)]
            # An operator may name any session.
            named = {"x-any-agent-session": id}
            calls.append(asyncio.create_task(call(2, None, **named)))
            await until(lambda: held.looking == 3)
        held.release()
        session = await opening
        assert session["session_id"] == id
        key = session["api_key"]
        answered = {*await asyncio.gather(*calls), await call(9, key)}
        await proxy.post("/rl/v1/finalize", {"final_reward": 1}, key)
        assert set((await proxy.export(id))[id]) == answered
        # With this the lane has no live session until its next one is opened.
        assert await proxy.client.ack(owner="export", trained=[id], rejected=[]) == 1
