"""Every journal keeps the contract, and so does the one that docs/how-to/extend.md names."""

from __future__ import annotations

from pathlib import Path

import pytest

from any_agent.errors import ConfigError, StoreBusy
from any_agent.rundir import RunDir
from any_agent.types import SessionState
from proxy_ext.journal import PutMeta, SQLiteJournal, open_journal
from tests.support.errors import fails_with
from tests.support.journal_contract import check_journal
from tests.support.memory_journal import MemoryJournal
from tests.support.proxy_fixtures import Start


async def test_sqlite_keeps_the_journals_contract(tmp_path: Path) -> None:
    url = RunDir(tmp_path / "a trial: é#?%").journal_url(0)
    await check_journal(lambda: open_journal(url))
    journal = open_journal(url)
    assert isinstance(journal, SQLiteJournal)
    await journal.close()
    with pytest.raises(StoreBusy):
        await journal.commit(PutMeta("x", 1))


async def test_the_documents_journal_keeps_the_contract() -> None:
    await check_journal(lambda: open_journal("memory://contract"))


async def test_a_rank_runs_on_the_journal_of_the_document(start: Start) -> None:
    url = "memory://rank-0"
    proxy = await start(journal_url=url)
    await proxy.admit(9)
    session = await proxy.open()
    answer = await proxy.complete(session["api_key"])
    await proxy.post("/rl/v1/finalize", {"final_reward": 0.5}, session["api_key"])
    (trajectory,) = await proxy.lease()
    assert trajectory.final_reward == 0.5
    assert [i.id for i in trajectory.interactions] == [answer["id"]]
    journal = open_journal(url)
    assert isinstance(journal, MemoryJournal)
    (row,) = await journal.sessions([SessionState.LEASED])
    assert row.id == session["session_id"]


def test_an_unknown_scheme_is_refused() -> None:
    with fails_with(ConfigError, "ftp://", "sqlite"):
        open_journal("ftp://host/0")
