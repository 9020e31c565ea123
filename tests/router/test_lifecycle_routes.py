"""What happens to a session, asked for at the one public URL: its home rank does it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from any_agent.chat import ChatFormat
from any_agent.client.rl_client import RLClient
from any_agent.keys import rank_of_session
from any_agent.protocol.rl import SessionStarted
from any_agent.types import SessionState
from tests.router.test_two_ranks import Pair, running_pair
from tests.support.proxy import HELLO, LIMIT


@pytest.fixture
async def pair(tmp_path: Path, chat: ChatFormat) -> AsyncIterator[Pair]:
    async with running_pair(tmp_path, chat) as pair:
        await pair.admit(100)
        yield pair


async def finished(client: RLClient, pair: Pair) -> SessionStarted:
    """A session with one call that awaits its reward, kept alive on the way."""
    session = await client.start_session()
    assert (await client.heartbeat(session)).session_id == session.session_id
    async with httpx.AsyncClient(base_url=pair.url, timeout=LIMIT) as http:
        response = await http.post(
            "/v1/chat/completions",
            json={"model": "m", "messages": HELLO, "max_tokens": 4},
            headers={"authorization": f"Bearer {session.api_key}"},
        )
    assert response.status_code == 200, response.text
    await client.finalize(session.api_key, await_reward=True)
    await client.set_reward(session.api_key, {"correct": 1})
    assert (await client.finalize(session.api_key)).state == "finalized"
    return session


async def test_every_rank_does_its_own(pair: Pair) -> None:
    async with RLClient(pair.url, timeout=LIMIT, retry_for=5) as client:
        sessions: list[SessionStarted] = []
        ranks: list[int | None] = []
        # The key of each open decides the rank, by chance.
        while len(sessions) < 3 or (set(ranks) != {0, 1} and len(sessions) < 64):
            sessions.append(await finished(client, pair))
            ranks.append(rank_of_session(sessions[-1].session_id))
        assert set(ranks) == {0, 1}
        for session in sessions[:2]:
            info = await client.veto_session(session.session_id, "by a test")
            assert (info.state, info.reason) == ("rejected", "vetoed: by a test")
        for session in sessions:
            info = await client.delete_session(session.session_id)
            assert (info.state, info.content) == ("rejected", "deleted")
            details = await client.session_details(session.session_id)
            assert [(r.name, r.value) for r in details.reward_history] == [("correct", 1)]
    for rank, proxy in pair.proxies.items():
        counts = proxy.service.sessions.counts
        assert counts.now["train", SessionState.REJECTED] == ranks.count(rank)
