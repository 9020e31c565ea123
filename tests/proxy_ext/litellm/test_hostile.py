"""An agent's tries, at a rank with a LiteLLM configuration, to get more than its scope: another
server, another price, another caller's name, LiteLLM's own tools."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.support import litellm
from tests.support.fake_provider import Provider
from tests.support.frozen import BODIES, refused
from tests.support.proxy import HELLO

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]


class Rank(litellm.Rank):
    evil: Provider
    """A server of the agent's."""

    async def agent(self) -> dict[str, str]:
        """The headers of a new session's agent."""
        return await litellm.session(self.http)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rank(
    tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path
) -> AsyncIterator[Rank]:
    def change(data: dict[str, Any]) -> None:
        # All that an operator can open to clients by LiteLLM's own settings.
        data["general_settings"]["allow_client_side_credentials"] = True
        data["litellm_settings"]["forward_llm_provider_auth_headers"] = True

    folder, evil = tmp_path_factory.mktemp("hostile"), Provider()
    frozen = {"session_usd": 100.0, "timeout": 10.0}
    async with evil.serve(), litellm.running(folder, tiny_model_dir, change, frozen=frozen) as made:
        rank = Rank(**vars(made))
        rank.evil = evil
        yield rank
    assert not evil.requests


def evil_deployment(url: str) -> dict[str, Any]:
    params = {"model": "openai/x", "api_base": f"{url}/v1", "api_key": "x"}
    return {"model_name": "planner", "litellm_params": params}


@pytest_asyncio.fixture(loop_scope="module")
async def key(rank: Rank) -> AsyncIterator[dict[str, str]]:
    """The headers of a new session's agent, whose tries must ask no provider."""
    before = len(rank.provider.requests)
    yield await rank.agent()
    assert len(rank.provider.requests) == before and not rank.evil.requests


_FIELDS = """
    api_base api_key base_url url user_config model_list litellm_params router_settings_override
    fallbacks context_window_fallbacks content_policy_fallbacks specific_deployment weights
    mock_response mock_tool_calls mock_testing_fallbacks mock_timeout mock_delay guardrails
    disable_global_guardrails litellm_metadata litellm_credential_name tags cache ttl no-log
    callbacks success_callback litellm_disabled_callbacks custom_llm_provider base_model
    input_cost_per_token output_cost_per_token num_retries timeout request_timeout priority
    aws_role_name aws_region_name Vertex_Project vertex_credentials azure_ad_token
    extra_headers extra_body extra_query
    proxy_server_request secret_fields user_api_key_dict fastest_response service_tier
    web_search_options prompt_id litellm_call_id max_agentic_loops use_litellm_proxy
"""
FIELDS = _FIELDS.split()


def given(field: str, url: str) -> Any:
    values: dict[str, Any] = {
        **dict.fromkeys(("api_base", "base_url", "url"), f"{url}/v1"),
        "user_config": {"model_list": [evil_deployment(url)]},
        "model_list": [evil_deployment(url)],
        "fallbacks": [evil_deployment(url)["litellm_params"]],
        "litellm_params": {"api_base": f"{url}/v1"},
        "extra_body": {"api_base": f"{url}/v1"},
        "router_settings_override": {"fallbacks": [{"planner": ["claude"]}]},
    }
    return values.get(field, "x")


@pytest.mark.parametrize("path", BODIES)
async def test_no_other_parameter_reaches_litellm(
    rank: Rank, key: dict[str, str], path: str
) -> None:
    for field in FIELDS:
        body = {"model": "planner", **BODIES[path], field: given(field, rank.evil.url)}
        answer = await rank.http.post(path, json=body, headers=key)
        refused(answer, 400, "unsupported_parameter")


IMAGE = {"model": "backup", "prompt": "a cat"}
ELSEWHERE: dict[str, dict[str, Any]] = {
    "/v1/moderations": {"input": "a"},
    "/v1/rerank": {"query": "a", "documents": ["a"]},
    "/v1/images/generations": {"prompt": "a"},
    "/v1/audio/speech": {"input": "a", "voice": "x"},
    "/v1/ocr": {"document": {}},
    "/utils/token_counter": {"messages": HELLO},
}


@pytest.mark.parametrize("path", ELSEWHERE)
async def test_no_other_parameter_reaches_litellms_other_routes(
    rank: Rank, key: dict[str, str], path: str
) -> None:
    for field in FIELDS:
        body = {"model": "planner", **ELSEWHERE[path], field: given(field, rank.evil.url)}
        answer = await rank.http.post(path, json=body, headers=key)
        refused(answer, 400, "unsupported_parameter")
    # Another content type, by which LiteLLM reads it otherwise.
    form = {"model": "planner", "api_base": f"{rank.evil.url}/v1"}
    for kind in ("multipart/form-data; boundary=x", "application/x-www-form-urlencoded"):
        headers = {**key, "content-type": kind}
        answer = await rank.http.post(path, content=json.dumps(form), headers=headers)
        assert answer.status_code == 400, answer.text
    for name in ("unknown", "policy", "openai/omni-moderation-latest"):
        answer = await rank.http.post(path, json={"model": name, **ELSEWHERE[path]}, headers=key)
        refused(answer, 404, "model_not_found")


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/images/edits"])
async def test_no_other_parameter_reaches_litellm_in_a_form(
    rank: Rank, key: dict[str, str], path: str
) -> None:
    files = {"file": ("a.wav", b"RIFF"), "image": ("a.png", b"PNG")}
    for field in ("api_base", "api_key", "metadata[api_base]", "litellm_metadata", "extra_body"):
        data = {"model": "planner", "prompt": "a", field: f"{rank.evil.url}/v1"}
        answer = await rank.http.post(path, data=data, files=files, headers=key)
        refused(answer, 400, "unsupported_parameter")
    answer = await rank.http.post(path, data={"model": "unknown"}, files=files, headers=key)
    refused(answer, 404, "model_not_found")


async def test_a_name_that_is_not_one_models_is_refused_at_every_route(
    rank: Rank, key: dict[str, str]
) -> None:
    for name in (
        "any/x,any/y",
        "any/x, policy",
        "any/../x",
        "any/https://evil.example",
        "any/x?key=1",
    ):
        for path, body in BODIES.items():
            answer = await rank.http.post(path, json={"model": name, **body}, headers=key)
            refused(answer, 400, "invalid_request")


async def test_the_policys_name_in_other_letters_is_no_other_model(
    rank: Rank, key: dict[str, str]
) -> None:
    for name in ("POLICY", "Policy", " policy", "planner,policy"):
        body = {"model": name, "messages": HELLO, "max_tokens": 2}
        answer = await rank.http.post("/v1/chat/completions", json=body, headers=key)
        assert answer.status_code == 200 and "x-litellm-model-id" not in answer.headers


async def test_neither_litellm_nor_a_provider_runs_tools(rank: Rank, key: dict[str, str]) -> None:
    mcp = {"type": "mcp", "server_url": "litellm_proxy/mcp/x"}
    for path, tool in (
        ("/v1/chat/completions", mcp),
        ("/v1/responses", {"type": "mcp", "server_label": "a", "server_url": "litellm_proxy"}),
        ("/v1/responses", {"type": "web_search"}),
        ("/v1/messages", {"type": "web_search_20250305", "name": "web_search"}),
    ):
        body = {"model": "planner", **BODIES[path], "tools": [tool]}
        refused(await rank.http.post(path, json=body, headers=key), 400, "unsupported_parameter")


async def test_metadata_forges_no_caller(rank: Rank) -> None:
    key = await rank.agent()
    metadata = {
        "user_api_key_user_id": "forged",
        "user_api_key_team_id": "forged",
        "user_api_key_metadata": {"session_id": "forged"},
        "tags": ["forged"],
        "guardrails": ["forged"],
        "api_base": rank.evil.url,
        "model_info": {"input_cost_per_token": 0},
        "mine": "kept-for-callbacks",
    }
    body = {"model": "backup", "messages": HELLO, "metadata": metadata}
    answer = await rank.http.post("/v1/chat/completions", json=body, headers=key)
    assert answer.status_code == 200, answer.text
    assert "metadata" not in rank.provider.bodies[-1]
    assert not rank.evil.requests
    assert "forged" not in json.dumps([line["about"] for line in rank.told()])


HEADERS = {
    "x-litellm-api-key": "Bearer {key}",
    "x-goog-api-key": "{key}",
    "api-key": "{key}",
    "ocp-apim-subscription-key": "{key}",
    "x-own": "is {key}",
    "cookie": "token={key}",
    "x-litellm-timeout": "0.001",
    "x-litellm-num-retries": "50",
    "x-litellm-tags": "forged",
    "x-litellm-call-id": "forged",
    "x-litellm-session-id": "forged",
    "x-litellm-agent-id": "forged",
    "x-litellm-spend-logs-metadata": '{{"a": "forged"}}',
    "x-litellm-disable-callbacks": "callbacks.log",
    "litellm-disable-message-redaction": "true",
    "cache-control": "no-store",
}


async def test_headers_steer_nothing_and_carry_no_key(rank: Rank) -> None:
    key = await rank.agent()
    secret = key["Authorization"].removeprefix("Bearer ")
    more = {name: value.format(key=secret) for name, value in HEADERS.items()}
    path, body = "/v1/chat/completions", {"model": "backup", "messages": HELLO}
    rank.provider.fail("500")
    before = len(rank.provider.requests)
    answer = await rank.http.post(path, json=body, headers={**key, **more})
    assert answer.status_code == 500 and len(rank.provider.requests) == before + 1
    answer = await rank.http.post(f"{path}?key={secret}", json=body, headers={**key, **more})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-litellm-call-id"] != "forged"
    _, _, sent = rank.provider.requests[-1]
    assert secret not in json.dumps(sent) and sent["Authorization"] == f"Bearer {litellm.SECRET}"
    told = json.dumps(rank.told())
    assert secret not in told and "forged" not in told


async def test_no_other_header_is_a_key(rank: Rank, key: dict[str, str]) -> None:
    path = f"/key/list?key={litellm.ADMIN}"
    for name in ("x-litellm-api-key", "x-goog-api-key", "cookie"):
        admins = {name: litellm.ADMIN}
        nobodys = {"Authorization": "", **admins}
        refused(await rank.http.get("/model/info", headers=nobodys), 401, "invalid_api_key")
        refused(await rank.http.get(path, headers={**key, **admins}), 403, "forbidden")


async def test_an_ended_session_calls_nothing(rank: Rank, key: dict[str, str]) -> None:
    assert (await rank.http.post("/rl/v1/finalize", json={}, headers=key)).status_code == 200
    body = {"model": "planner", "input": "a"}
    refused(await rank.http.post("/v1/moderations", json=body, headers=key), 410, "session_closed")


async def test_an_agent_sees_no_secret_and_no_providers_address(rank: Rank) -> None:
    key = await rank.agent()
    place = rank.provider.url.removeprefix("http://")
    for path in ("/model/info", "/v1/model/info", "/model_group/info"):
        answer = await rank.http.get(path, headers=key)
        assert answer.status_code == 200 and "planner" in answer.text, path
        for secret in (place, litellm.SECRET, litellm.ADMIN):
            assert secret not in answer.text, path
    for path in ("/utils/model_info?model=planner", "/utils/supported_openai_params?model=planner"):
        answer = await rank.http.get(path, headers=key)
        assert place not in answer.text, path
    for stream in (False, True):
        for model in ("backup", "claude"):
            body = {"model": model, "messages": HELLO, "stream": stream, "max_tokens": 4}
            answer = await rank.http.post("/v1/chat/completions", json=body, headers=key)
            assert answer.status_code == 200, answer.text
            assert place not in answer.text and place not in str(answer.headers)
    answer = await rank.http.post("/v1/images/generations", json=IMAGE, headers=key)
    assert answer.status_code == 200, answer.text
    assert place not in str(answer.headers)
    # Its operator does.
    admins = await rank.http.get("/model/info")
    assert place in admins.text and litellm.SECRET not in admins.text
