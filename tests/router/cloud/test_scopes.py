"""Every route of the cloud with every kind of key: what is another's is not there."""

from __future__ import annotations

import secrets

from any_agent.keys import KeySigner
from tests.router.cloud.conftest import ADMIN, Client, Opening
from tests.support.waiting import until

ROUTES = (
    ("POST", "/rl/v1/accounts", {"admin": 400}),
    ("GET", "/rl/v1/accounts", {"admin": 200}),
    ("DELETE", "/rl/v1/accounts/nobody", {"admin": 404}),
    ("POST", "/rl/v1/accounts/nobody/keys", {"admin": 404}),
    ("DELETE", "/rl/v1/accounts/nobody/keys/00000000", {"admin": 404}),
    ("GET", "/rl/v1/usage", {"admin": 200, "alice": 200, "bob": 200}),
    ("GET", "/metrics", {"admin": 200}),
    ("GET", "/rl/v1/account", {"alice": 200, "bob": 200}),
    ("POST", "/rl/v1/runs", {"alice": 400, "bob": 400}),
    ("GET", "/rl/v1/runs", {"admin": 200, "alice": 200, "bob": 200}),
    ("GET", "/rl/v1/runs/{run}", {"admin": 200, "alice": 200, "bob": 404}),
    ("POST", "/rl/v1/runs/{run}/stop", {"admin": 202, "alice": 202, "bob": 404}),
    ("POST", "/rl/v1/runs/{run}/start", {"admin": 202, "alice": 202, "bob": 404}),
    ("DELETE", "/rl/v1/runs/{run}", {"admin": 0, "alice": 0, "bob": 404}),
    ("GET", "/runs/exp/trial-1/rl/v1/run", {"alice": 200, "bob": 404, "alice's session": 200}),
    ("POST", "/v1/chat/completions", {"alice": 200, "bob": 404, "alice's session": 200}),
)
"""Method, path, and the status for each kind of key that is not refused with 401 or 403; 0: it
would end the run, and is not asked."""


async def test_every_route_answers_each_key_as_the_table_says(opening: Opening) -> None:
    async with opening(default=None) as cloud:
        alice, bob = await cloud.account("alice"), await cloud.account("bob")
        run = await cloud.run(alice, model="tiny", preset="grpo")
        opened = await cloud.ask("POST", "/rl/v1/start_session", alice, {})
        session = str(opened.json()["api_key"])
        keys = {
            "admin": ADMIN,
            "alice": alice,
            "bob": bob,
            "alice's session": session,
            "nobody": "",
            "forged": f"{alice[:-1]}{'0' if alice[-1] != '0' else '1'}",
            "of another service": "sk-proj-something",
            "a forged session": KeySigner(secrets.token_bytes(32), run["id"]).mint(0)[1],
            "a session of no run": KeySigner(secrets.token_bytes(32), "0badc0de").mint(0)[1],
        }
        cells = 0
        for method, path, allowed in ROUTES:
            for kind, key in keys.items():
                if allowed.get(kind) == 0:
                    continue
                answer = await cloud.ask(method, path.format(run=run["id"]), key, {"x": 1})
                if kind in allowed:
                    assert answer.status_code == allowed[kind], (kind, method, path, answer.text)
                else:
                    assert answer.status_code in (401, 403), (kind, method, path, answer.text)
                cells += 1
        assert cells == len(ROUTES) * len(keys) - 2


async def test_another_account_sees_nothing_of_a_run(opening: Opening) -> None:
    async with opening() as cloud:
        alice, bob = await cloud.account("alice"), await cloud.account("bob")
        run = await cloud.run(alice, "hidden")
        assert (await cloud.ask("GET", "/rl/v1/runs", bob)).json() == {"runs": []}
        for path in ("/runs/hidden/trial-1/v1/models", f"/rl/v1/runs/{run['id']}"):
            answer = await cloud.ask("GET", path, bob)
            assert answer.status_code == 404
            assert "alice" not in answer.text
        mine = (await cloud.ask("GET", f"/rl/v1/runs/{run['id']}", alice)).text
        # Where it lies on the operator's machine is the operator's alone.
        assert str(cloud.root) not in mine


async def test_a_forged_session_key_starts_no_run(opening: Opening) -> None:
    async with opening() as cloud:
        alice = await cloud.account("alice")
        run = await cloud.run(alice)
        forged = KeySigner(secrets.token_bytes(32), run["id"]).mint(0)[1]
        assert (await cloud.ask("POST", "/v1/chat/completions", forged, {})).status_code == 401
        assert await cloud.state(alice, run["id"]) == "idle"
        assert not cloud.folder(run).exists()


async def test_a_revoked_key_opens_nothing_here_nor_at_a_run(opening: Opening) -> None:
    async with opening() as cloud:
        alice = await cloud.account("alice")
        again = await cloud.ask("POST", "/rl/v1/accounts/alice/keys", ADMIN, {})
        other = again.json()
        run = await cloud.run(alice)
        assert (await _known(cloud, other["api_key"])) is True
        gone = await cloud.ask("DELETE", f"/rl/v1/accounts/alice/keys/{other['id']}", ADMIN)
        assert gone.json()["revoked_at"] is not None
        assert (await cloud.ask("GET", "/rl/v1/run", other["api_key"])).status_code == 401
        stored = (cloud.folder(run) / "keys.json").read_text()
        assert "revoked_at" in stored
        assert other["api_key"] not in stored
        assert (await _known(cloud, alice)) is True


async def test_an_account_without_a_valid_key_is_still_the_operators_to_change(
    opening: Opening,
) -> None:
    async with opening() as cloud:
        alice = await cloud.account("alice")
        session = (await cloud.ask("POST", "/rl/v1/start_session", alice, {})).json()["api_key"]
        key = (await cloud.ask("GET", "/rl/v1/account", alice)).json()["keys"][0]
        await cloud.ask("DELETE", f"/rl/v1/accounts/alice/keys/{key['id']}", ADMIN)
        assert (await cloud.ask("POST", "/v1/chat/completions", session, {})).status_code == 401
        assert (await cloud.ask("POST", "/rl/v1/accounts", ADMIN, {"name": "alice"})).json()[
            "error"
        ]["code"] == "account_exists"
        again = await cloud.ask("POST", "/rl/v1/accounts/alice/keys", ADMIN, {})
        assert await _known(cloud, again.json()["api_key"])
        assert (await cloud.ask("DELETE", "/rl/v1/accounts/alice", ADMIN)).status_code == 202


async def test_no_key_is_in_a_log(opening: Opening) -> None:
    async with opening() as cloud:
        alice = await cloud.account("alice")
        session = (await cloud.ask("POST", "/rl/v1/start_session", alice, {})).json()["api_key"]
        path = f"/runs/other/trial-1/{session}/v1/chat/completions"
        assert (await cloud.ask("POST", path, "DUMMY", {})).status_code == 403
    texts = [path.read_bytes() for path in (cloud.root / ".cloud").iterdir() if path.is_file()]
    assert any(b"/runs/other/trial-1/" in text for text in texts)
    for key in (session, alice, ADMIN):
        assert not any(key.encode() in text for text in texts)


async def test_a_deleted_account_is_erased_with_its_runs_and_its_keys(opening: Opening) -> None:
    async with opening() as cloud:
        alice, bob = await cloud.account("alice"), await cloud.account("bob")
        for experiment in ("one", "two"):
            await cloud.run(alice, experiment)
            assert (await cloud.ask("GET", "/rl/v1/run", alice)).status_code == 200
        await cloud.ask("GET", "/rl/v1/run", bob)
        gone = await cloud.ask("DELETE", "/rl/v1/accounts/alice", ADMIN)
        assert (gone.status_code, gone.json()["runs"]) == (202, 2)
        assert (await cloud.ask("GET", "/rl/v1/run", alice)).status_code == 401
        await until(lambda: not (cloud.root / "alice").exists(), "the files' end")
        await until(lambda: _only(cloud, "bob"), "the runs' end")
        await until(lambda: _made(cloud, "alice"), "a new account of this name")


async def _only(cloud: Client, account: str) -> bool:
    runs = (await cloud.ask("GET", "/rl/v1/runs", ADMIN)).json()["runs"]
    return [run["account"] for run in runs] == [account]


async def _known(cloud: Client, key: str) -> bool:
    return bool((await cloud.ask("GET", "/rl/v1/run", key)).json()["known"])


async def _made(cloud: Client, name: str) -> bool:
    answer = await cloud.ask("POST", "/rl/v1/accounts", ADMIN, {"name": name})
    return answer.status_code == 201
