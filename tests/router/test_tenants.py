"""Tenants of a service of two ranks: one list, and nothing of anybody else's."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from any_agent.auth.key_store import create_key
from any_agent.chat import ChatFormat
from any_agent.client.rl_client import RLClient
from any_agent.errors import Forbidden, NotFound
from any_agent.keys import rank_of_session
from any_agent.launcher.trial import trial_dir
from tests.router.test_two_ranks import Pair, running_pair
from tests.support.proxy import LIMIT


async def test_a_tenant_sees_its_own_over_all_ranks(tmp_path: Path, chat: ChatFormat) -> None:
    async with running_pair(tmp_path, chat, "server.admin_key=operator-secret") as pair:
        await pair.admit(10)
        await tenants_of(pair)


async def tenants_of(pair: Pair) -> None:
    path = trial_dir(pair.config).keys
    keys = {name: create_key(path, "tenant", tenant=name)[0] for name in ("alice", "bob")}
    opened: dict[str, set[str]] = {}
    for name, key in keys.items():
        opened[name] = {await session_of(pair, key) for _ in range(4)}
        assert {rank_of_session(id) for id in opened[name]} == {0, 1}
        async with RLClient(pair.url, admin_key=key, trust_env=False) as client:
            with pytest.raises(Forbidden):
                await client.get_capacity()
    async with httpx.AsyncClient(base_url=pair.url, timeout=LIMIT, trust_env=False) as http:
        for name, key in {**keys, "": "operator-secret"}.items():
            answer = await http.get("/rl/v1/sessions", headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == 200, answer.text
            seen = {session["session_id"] for session in answer.json()}
            assert seen == (opened[name] if name else opened["alice"] | opened["bob"])
    async with RLClient(pair.url, admin_key=keys["bob"], trust_env=False) as client:
        for id in opened["alice"]:
            with pytest.raises(NotFound):
                await client.session_info(id)


async def session_of(pair: Pair, key: str) -> str:
    """A new session, opened without an idempotency key, which would choose its rank."""
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=pair.url, timeout=LIMIT, trust_env=False) as http:
        answer = await http.post("/rl/v1/start_session", json={}, headers=headers)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["session_id"])
