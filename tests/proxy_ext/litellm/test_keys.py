"""LiteLLM's virtual keys in a rank: its own checks of them, on keys of a stand-in for the client of
its database."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.support import litellm
from tests.support.frozen import ANSWER_USD, PRICE, refused
from tests.support.proxy import HELLO, until

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

INPUT_USD, OUTPUT_USD = 0.5, 0.25
LONG_AGO = "2020-01-01T00:00:00+00:00"
KEYS: dict[str, dict[str, Any]] = {
    "sk-rich": {"user_id": "ann", "max_budget": 1e6},
    "sk-poor": {"max_budget": 1.0},
    "sk-other": {},
    "sk-planner-only": {"models": ["planner"]},
    "sk-blocked": {"blocked": True},
    "sk-expired": {"expires": LONG_AGO},
}


def hash_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


class Rank(litellm.Rank):
    async def open(self, key: str) -> httpx.Response:
        body = {"mode": "eval"}
        return await self.http.post("/rl/v1/start_session", json=body, headers=bearer(key))

    async def opened(self, key: str) -> tuple[str, str]:
        answer = await self.open(key)
        assert answer.status_code == 200, answer.text
        return answer.json()["session_id"], answer.json()["api_key"]

    async def call(self, key: str, model: str = "policy", **fields: Any) -> httpx.Response:
        body = {"model": model, "messages": HELLO, "max_tokens": 4, **fields}
        return await self.http.post("/v1/chat/completions", json=body, headers=bearer(key))

    async def spent(self, key: str, *, rows: int = 1) -> list[dict[str, Any]]:
        """Return the rows of LiteLLM's log for a key, once there are so many."""

        def found() -> list[dict[str, Any]] | None:
            text = (self.folder / "spending.jsonl").read_text()
            lines = [json.loads(line) for line in text.splitlines()]
            # Refusals have rows, too, without a cost.
            of_key = [r for r in lines if r["api_key"] == hash_of(key) and r["spend"]]
            return of_key if len(of_key) >= rows else None

        return list(await until(found))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rank(
    tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path
) -> AsyncIterator[Rank]:
    def change(data: dict[str, Any]) -> None:
        data["model_list"][0]["litellm_params"] |= PRICE
        data["litellm_settings"]["callbacks"] = ["callbacks.log", "litellm_database.log"]
        # In an included file a database may be named.
        data["include"] = ["more.yaml"]

    folder = tmp_path_factory.mktemp("keys")
    (folder / "keys.json").write_text(json.dumps({hash_of(k): v for k, v in KEYS.items()}))
    (folder / "spending.jsonl").touch()
    shutil.copy(Path(litellm.__file__).with_name("litellm_database.py"), folder)
    (folder / "more.yaml").write_text("{}")
    own = {"policy_input_cost_per_token": INPUT_USD, "policy_output_cost_per_token": OUTPUT_USD}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEST_KEYS", str(folder / "keys.json"))
        patch.setenv("TEST_SPENDING", str(folder / "spending.jsonl"))
        async with litellm.running(folder, tiny_model_dir, change, own=own) as made:
            rank = Rank(**vars(made))
            async with asyncio.timeout(30):
                while (await rank.open("sk-other")).status_code != 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            yield rank
    log = (folder / "ours" / "proxy.log").read_text()
    assert not [key for key in KEYS if key in log]


async def test_a_session_of_a_key_is_counted_for_it(rank: Rank) -> None:
    id, key = await rank.opened("sk-rich")
    answer = await rank.call(key)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    (row,) = await rank.spent("sk-rich")
    assert row["spend"] == pytest.approx(
        INPUT_USD * usage["prompt_tokens"] + OUTPUT_USD * usage["completion_tokens"]
    )
    assert row["model"] == "policy" and row["total_tokens"] == usage["total_tokens"]
    assert row["request_id"] == answer.headers["x-any-agent-interaction"]
    assert row["user"] == "ann"
    shown = (await rank.http.get(f"/rl/v1/sessions/{id}")).json()
    assert shown["tenant"] == hash_of("sk-rich")
    planned = await rank.call(key, "planner")
    assert planned.status_code == 200, planned.text
    row = (await rank.spent("sk-rich", rows=2))[1]
    assert row["model_group"] == "planner" and row["spend"] == pytest.approx(ANSWER_USD)


async def test_a_key_without_a_session_calls_nothing(rank: Rank) -> None:
    refused(await rank.call("sk-other"), 401, "no_session")
    assert (await rank.call("sk-other", "planner")).status_code == 401


async def test_a_key_over_its_budget_only_ends_what_it_has_opened(rank: Rank) -> None:
    id, key = await rank.opened("sk-poor")
    assert (await rank.call(key)).status_code == 200
    (row,) = await rank.spent("sk-poor")
    assert row["spend"] > 1.0
    # LiteLLM's consent to the call holds for a second.
    await asyncio.sleep(1.1)
    again = (await rank.call(key), await rank.call(key, stream=True), await rank.open("sk-poor"))
    for answer in again:
        assert "Budget has been exceeded! Key=key" in refused(answer, 429, "budget_exceeded")
    planned = await rank.call(key, "planner")
    # LiteLLM's own answer (litellm_settings.budget_exceeded_status_code).
    assert planned.status_code == 422 and "Budget has been exceeded! Key=key" in planned.text
    assert len(await rank.spent("sk-poor")) == 1
    # What it has opened can be seen, rewarded and ended, with either key.
    shown = await rank.http.get(f"/rl/v1/sessions/{id}", headers=bearer("sk-poor"))
    assert shown.status_code == 200
    reward = {"reward": 1.0, "session_id": id}
    for by, path, body in (
        ("sk-poor", "set_reward", reward),
        (key, "set_reward", reward),
        (key, "finalize", {}),
    ):
        answer = await rank.http.post(f"/rl/v1/{path}", json=body, headers=bearer(by))
        assert answer.status_code == 200, answer.text


async def test_a_key_for_other_models_calls_no_policy(rank: Rank) -> None:
    _, key = await rank.opened("sk-planner-only")
    assert "'policy' is not available" in refused(await rank.call(key), 403, "forbidden")
    assert (await rank.call(key, "planner")).status_code == 200
    assert (await rank.call(key, "backup")).status_code == 403


async def test_a_key_that_litellm_refuses_opens_nothing(rank: Rank) -> None:
    for key, said in (
        ("sk-nobodys", "not found in db"),
        ("sk-blocked", "Key is blocked"),
        ("sk-expired", "Expired Key"),
        (hash_of("sk-rich"), "not valid here"),
        ("another", "not valid here"),
    ):
        for answer in (await rank.open(key), await rank.call(key)):
            assert said in refused(answer, 401, "invalid_api_key")


async def test_a_key_has_the_rights_of_a_tenant(rank: Rank) -> None:
    id, key = await rank.opened("sk-rich")
    for other in ("sk-other", "sk-poor"):
        answer = await rank.http.get(f"/rl/v1/sessions/{id}", headers=bearer(other))
        refused(answer, 404, "session_not_found")
    own = await rank.http.get("/rl/v1/sessions", headers=bearer("sk-rich"))
    assert {each["tenant"] for each in own.json()} == {hash_of("sk-rich")}
    for path in ("/spend/logs", "/key/list", "/rl/v1/capacity"):
        refused(await rank.http.get(path, headers=bearer("sk-rich")), 403, "forbidden")
        refused(await rank.http.get(path, headers=bearer(key)), 403, "forbidden")


async def test_callbacks_learn_of_the_key_and_metrics_count_what_was_charged(rank: Rank) -> None:
    _, key = await rank.opened("sk-rich")
    answer = await rank.call(key)
    id = answer.headers["x-any-agent-interaction"]
    found = await until(lambda: [line for line in rank.told() if line["id"] == id])
    assert [line["about"]["user_api_key"] for line in found] == [hash_of("sk-rich")]
    counted = await litellm.events_counted(rank.http)
    assert counted["charged"] > 0 and counted["uncharged"] == 0
