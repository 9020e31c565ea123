"""A rank with an operator's LiteLLM configuration: one process for all tests of this file."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from any_agent.config import load_resolved
from any_agent.launcher.trial import trial_dir
from any_agent.types import Interaction
from proxy_ext.journal.reader import ExportFilter, JournalReader, StoredSession
from tests.support import litellm
from tests.support.frozen import ANSWER_USD, BODIES, PRICE, refused
from tests.support.proxy import HELLO, until

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

IMAGE_USD = 1.5
MAX_CALLS = 3
IMAGE = {"model": "painter", "prompt": "a cat"}
COUNTS = ("input_tokens", "output_tokens", "prompt_tokens", "completion_tokens")


class Rank(litellm.Rank):
    async def open(self, **fields: Any) -> tuple[str, dict[str, str]]:
        body = {"mode": "eval", **fields}
        response = await self.http.post("/rl/v1/start_session", json=body)
        assert response.status_code == 200, response.text
        told = response.json()
        return told["session_id"], {"Authorization": f"Bearer {told['api_key']}"}

    async def chat(self, key: dict[str, str], model: str, **fields: Any) -> httpx.Response:
        body = {"model": model, "messages": HELLO, **fields}
        return await self.http.post("/v1/chat/completions", json=body, headers=key)

    async def paint(self, key: dict[str, str], **options: Any) -> httpx.Response:
        path = "/v1/images/generations"
        return await self.http.post(path, json=IMAGE, headers=key, **options)

    def told_of(self, session_id: str) -> list[dict[str, Any]]:
        """The record of each call of LiteLLM's models."""
        return [kept.request["frozen"] for kept in self.recorded(session_id)]

    def recorded(self, session_id: str) -> list[Interaction]:
        config = load_resolved(self.folder / "ours" / "config.yaml", {})
        journal = JournalReader(trial_dir(config).journal(0))
        try:
            stored = list(journal.sessions(ExportFilter()))
        finally:
            journal.close()
        (found,) = [s for s in stored if isinstance(s, StoredSession) and s.row.id == session_id]
        return found.interactions


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rank(
    tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path
) -> AsyncIterator[Rank]:
    def change(data: dict[str, Any]) -> None:
        planner = data["model_list"][0]["litellm_params"]
        params = dict(planner)
        planner |= PRICE
        text = {**planner, "model": "text-completion-openai/gpt-3.5-turbo-instruct"}
        cached = {**planner, "cache": {"use-cache": True}}
        data["model_list"] += [
            {"model_name": "learner", "litellm_params": {"model": "any-agent/policy"}},
            {"model_name": "text", "litellm_params": text},
            {"model_name": "cached", "litellm_params": cached},
            {
                "model_name": "painter",
                "litellm_params": {**params, "model": "openai/dall-e-3"},
                "model_info": {"mode": "image_generation", "output_cost_per_image": IMAGE_USD},
            },
        ]
        settings = data["litellm_settings"]
        settings |= {"cache": True, "cache_params": {"type": "local", "mode": "default_off"}}

    folder = tmp_path_factory.mktemp("rank")
    frozen = {"session_usd": 1.0, "timeout": 20.0, "max_calls": MAX_CALLS}
    own = {
        "policy_input_cost_per_token": 0.5,
        "policy_output_cost_per_token": 0.25,
        "policy_guardrails": ["before", "after", "strict"],
        "policy_vetoes": ["strict"],
    }
    async with litellm.running(folder, tiny_model_dir, change, frozen=frozen, own=own) as made:
        yield Rank(**vars(made))
    log = (folder / "ours" / "proxy.log").read_text()
    assert litellm.SECRET not in log and litellm.ADMIN not in log


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_a_call_is_recorded_with_its_cost(rank: Rank, path: str, stream: bool) -> None:
    id, key = await rank.open()
    body = {"model": "planner", **BODIES[path], "stream": stream}
    response = await rank.http.post(path, json=body, headers=key)
    assert response.status_code == 200, response.text
    assert response.headers["x-any-agent-session"] == id
    (kept,) = rank.recorded(id)
    assert kept.id == response.headers["x-any-agent-interaction"]
    assert kept.untrainable_reason == "frozen_model" and not len(kept.output_ids)
    assert "Good enough." in json.dumps(kept.output_message)
    told = kept.request["frozen"]
    assert told["model"] == "planner"
    assert told["estimated"] is False
    assert sorted(n for k, n in told["usage"].items() if k in COUNTS) == [3, 7]
    assert told["cost_usd"] == pytest.approx(ANSWER_USD)
    chat = path.endswith("completions")
    assert told["provider_model"] == ("gpt-4o-mini-0613" if chat else "gpt-4o-mini")
    # LiteLLM takes the usage out of a stream whose client did not request it.
    assert ("usage" in response.text) is not (stream and chat)


async def test_a_stream_costs_what_its_usage_says_and_without_one_an_estimate(rank: Rank) -> None:
    wanted = {"stream_options": {"include_usage": True}}
    for reported, options in ((True, wanted), (False, wanted), (False, {})):
        id, key = await rank.open()
        rank.provider.said_usage = reported
        try:
            assert (await rank.chat(key, "planner", stream=True, **options)).is_success
        finally:
            rank.provider.said_usage = True
        (told,) = rank.told_of(id)
        assert told["estimated"] is not reported and told["usage"]["total_tokens"] > 0
        assert not reported or told["cost_usd"] == pytest.approx(ANSWER_USD)


async def test_a_provider_of_text_completions_is_asked_for_usage(rank: Rank) -> None:
    id, key = await rank.open()
    body = {"model": "text", "prompt": "Once", "stream": True}
    response = await rank.http.post("/v1/completions", json=body, headers=key)
    assert response.is_success and "usage" not in response.text
    assert response.text.rstrip().endswith("[DONE]")
    assert rank.provider.bodies[-1]["stream_options"] == {"include_usage": True}
    (told,) = rank.told_of(id)
    assert told["estimated"] is False and told["usage"]["prompt_tokens"] == 7
    assert told["cost_usd"] == pytest.approx(ANSWER_USD)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_of_the_cache_costs_nothing(rank: Rank, stream: bool) -> None:
    id, key = await rank.open()
    before = len(rank.provider.requests)
    talk = [{"role": "user", "content": f"remember this {stream}"}]
    for _ in range(2):
        assert (await rank.chat(key, "cached", messages=talk, stream=stream)).is_success
        # LiteLLM stores a streamed answer after its end.
        await asyncio.sleep(0.2)
    assert len(rank.provider.requests) == before + 1
    told = [(each["cost_usd"], each["usage"]["total_tokens"]) for each in rank.told_of(id)]
    assert told == [(pytest.approx(ANSWER_USD), 10), (0.0, 10)]


async def test_a_fallback_answers_and_is_recorded_once_with_its_usage(rank: Rank) -> None:
    for stream in (False, True):
        id, key = await rank.open()
        before = len(rank.provider.requests)
        rank.provider.fail("500")
        response = await rank.chat(key, "planner", stream=stream)
        assert response.status_code == 200
        assert stream or response.headers["x-litellm-attempted-fallbacks"] == "1"
        assert len(rank.provider.requests) == before + 2
        (told,) = rank.told_of(id)
        assert told["provider_model"] == "gpt-4o-0613"
        assert told["estimated"] is False and told["usage"]["total_tokens"] == 10


async def test_only_the_policys_calls_of_a_session_are_trained_on(rank: Rank) -> None:
    id, key = await rank.open()
    assert (await rank.chat(key, "planner")).status_code == 200
    for name in ("policy", "learner"):
        assert (await rank.chat(key, name, max_tokens=4)).status_code == 200
    kinds = [each.untrainable_reason for each in rank.recorded(id)]
    assert kinds == ["frozen_model", None, None]
    # With an entry of the policy no other name means it.
    refused(await rank.chat(key, "gpt-unknown"), 404, "model_not_found")
    deployed = (await rank.http.get("/model/info")).json()["data"]
    assert "any-agent/policy" not in str(deployed[1:]), "LiteLLM routes nothing to it"


async def test_a_call_above_the_spend_cap_of_its_session_is_refused(rank: Rank) -> None:
    _, key = await rank.open()
    for _ in range(3):
        assert (await rank.chat(key, "planner")).status_code == 200
    refused(await rank.chat(key, "planner"), 402, "spend_cap_exceeded")
    image = {"model": "planner", "input": "a"}
    moderated = await rank.http.post("/v1/moderations", json=image, headers=key)
    refused(moderated, 402, "spend_cap_exceeded")
    assert (await rank.chat(key, "policy", max_tokens=2)).status_code == 200


async def test_an_error_of_the_provider_reaches_the_client_and_a_hang_has_an_end(
    rank: Rank,
) -> None:
    id, key = await rank.open()
    rank.provider.fail("400")
    response = await rank.chat(key, "backup", temperature=9)
    assert response.status_code == 400 and "temperature is out of range" in response.text
    assert not rank.recorded(id)
    rank.provider.fail("hang")
    refused(await rank.chat(key, "any/gpt-slow"), 504, "provider_timeout")


async def test_a_client_that_leaves_ends_the_call_at_the_provider(rank: Rank) -> None:
    _, key = await rank.open()
    before, body = rank.provider.left, {"model": "any/gpt-x", "messages": HELLO}
    rank.provider.fail("hang")
    with pytest.raises(httpx.ReadTimeout):
        await rank.http.post("/v1/chat/completions", json=body, headers=key, timeout=1.0)
    await until(lambda: rank.provider.left > before)


async def test_the_policy_is_one_of_the_models_of_litellm(rank: Rank) -> None:
    listed = (await rank.http.get("/v1/models")).json()["data"]
    assert [listed[0]["id"], listed[0]["context_length"]] == ["policy", 2048]
    assert "planner" in {each["id"] for each in listed}
    for path in ("/model/info", "/v1/model/info"):
        first = (await rank.http.get(path)).json()["data"][0]
        assert first["model_name"] == "policy"
        assert first["model_info"]["version"] == 0
        assert first["model_info"]["max_input_tokens"] == 2048
    groups = (await rank.http.get("/model_group/info")).json()["data"]
    assert groups[0]["model_group"] == "policy" and len(groups) > 3
    health = (await rank.http.get("/health")).json()
    assert {"model": "policy", "version": 0} in health["healthy_endpoints"]
    _, key = await rank.open()
    areals = (await rank.http.get("/health", headers=key)).json()
    assert areals == {"status": "ok", "workers": 1}


async def test_the_web_page_of_litellm_is_for_admins_alone(rank: Rank) -> None:
    page = await rank.http.get("/ui/")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    found = re.search(r'src="(/[^"]*_next/[^"]*)"', page.text)
    assert found is not None
    script = await rank.http.get(found[1])
    assert script.status_code == 200 and "javascript" in script.headers["content-type"]
    _, key = await rank.open()
    for path in ("/ui/", found[1]):
        refused(await rank.http.get(path, headers=key), 403, "forbidden")


async def test_an_image_of_a_client_that_leaves_is_charged(rank: Rank) -> None:
    _, key = await rank.open()
    rank.provider.hold()
    try:
        with pytest.raises(httpx.ReadTimeout):
            await rank.paint(key, timeout=2.0)
    finally:
        rank.provider.go()
    async with asyncio.timeout(10):
        while (answer := await rank.chat(key, "backup")).status_code == 200:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    refused(answer, 402, "spend_cap_exceeded")
    assert answer.json()["error"]["spent_usd"] == pytest.approx(IMAGE_USD, rel=1e-3)


async def test_an_image_is_charged_before_its_answer(rank: Rank) -> None:
    _, key = await rank.open()
    answer = await rank.paint(key)
    assert answer.status_code == 200, answer.text
    assert answer.json()["data"][0]["b64_json"] == "aW1hZ2U="
    refused(await rank.chat(key, "planner"), 402, "spend_cap_exceeded")


async def test_calls_at_other_routes_are_bounded_with_the_others(rank: Rank) -> None:
    _, key = await rank.open()
    before = len(rank.provider.requests)
    rank.provider.hold()
    async with asyncio.TaskGroup() as group:
        images = [group.create_task(rank.paint(key)) for _ in range(MAX_CALLS)]
        try:
            await until(lambda: len(rank.provider.requests) == before + MAX_CALLS)
            refused(await rank.paint(key), 429, "too_many_calls")
            refused(await rank.chat(key, "planner"), 429, "too_many_calls")
        finally:
            rank.provider.go()
    assert [image.result().status_code for image in images] == [200] * MAX_CALLS


async def test_no_page_of_another_origin_is_let_in(rank: Rank) -> None:
    for path in ("/model/info", "/health/readiness"):
        answer = await rank.http.get(path, headers={"Origin": "https://evil.example"})
        assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_a_guardrail_refuses_a_prompt_of_the_policy(rank: Rank) -> None:
    id, key = await rank.open()
    before = len(rank.engine.requests)
    for text, said in (
        ("a forbidden word", "no such word here"),
        ("please rewrite", "would rewrite the messages"),
    ):
        answer = await rank.chat(key, "policy", messages=[{"role": "user", "content": text}])
        assert said in refused(answer, 422, "guardrail_refused")
    assert len(rank.engine.requests) == before and not rank.recorded(id)


async def test_an_answer_that_a_guardrail_refuses_is_never_trained_on(rank: Rank) -> None:
    id, key = await rank.open()
    talk = [{"role": "user", "content": "judge me"}]
    for stream in (False, True):
        answer = await rank.chat(key, "policy", messages=talk, max_tokens=4, stream=stream)
        assert answer.status_code == 200
    assert (await rank.chat(key, "policy", max_tokens=4)).status_code == 200
    reasons = [each.untrainable_reason for each in rank.recorded(id)]
    assert reasons == ["guardrail", "guardrail", None]


async def test_a_guardrail_vetoes_a_session(rank: Rank) -> None:
    capacity = {"limit": 10, "ttl": 60, "owner": "trainer"}
    assert (await rank.http.put("/rl/v1/capacity", json=capacity)).status_code == 200
    reached = {}
    for text in ("veto me", "judge me", "hello"):
        id, key = await rank.open(mode="train")
        for said in ("hello", text):
            talk = [{"role": "user", "content": said}]
            answer = await rank.chat(key, "policy", messages=talk, max_tokens=4)
            assert answer.status_code == 200
        end = {"final_reward": 1.0}
        done = await rank.http.post("/rl/v1/finalize", json=end, headers=key)
        assert done.status_code == 200, done.text
        marks = [each.untrainable_reason for each in rank.recorded(id)]
        reached[text] = (done.json()["state"], *marks)
    assert reached == {
        "veto me": ("rejected", None, "guardrail_veto"),
        "judge me": ("finalized", None, "guardrail"),
        "hello": ("finalized", None, None),
    }


async def test_callbacks_see_the_cost_of_each_of_the_policys_calls(rank: Rank) -> None:
    id, key = await rank.open(task_id="task-1")
    first = (await rank.chat(key, "policy", max_tokens=4)).json()
    talk = [*HELLO, first["choices"][0]["message"], {"role": "user", "content": "Again."}]
    answer = await rank.chat(key, "policy", messages=talk, max_tokens=4, stream=True)
    assert answer.status_code == 200

    def mine() -> list[dict[str, Any]]:
        return [line for line in rank.told() if line["about"].get("session_id") == id]

    await until(lambda: len(mine()) >= 2)
    lines = mine()
    assert [line["about"]["any_agent_event"] for line in lines] == ["completion"] * 2
    ordered = sorted(lines, key=lambda line: len(line["messages"]))
    for line, interaction in zip(ordered, rank.recorded(id), strict=True):
        assert line["id"] == line["about"]["interaction_id"] == interaction.id
        assert line["model"] == "policy" and line["about"]["task_id"] == "task-1"
        prompt, output = line["tokens"]
        assert output == len(interaction.output_ids)
        assert line["cost"] == pytest.approx(0.5 * prompt + 0.25 * output)
    assert ordered[0]["messages"][0] == HELLO[0]
    counted = await litellm.events_counted(rank.http)
    assert counted["told"] > 0 and not counted.get("failed")
