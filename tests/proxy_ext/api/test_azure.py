"""The real Azure client against the proxy: its header, its paths, and the model in them."""

from __future__ import annotations

from typing import Any

import httpx
import openai

from any_agent.completions.apis import plain_path
from tests.support.errors import fails_with
from tests.support.proxy import HELLO, Proxy
from tests.support.proxy_fixtures import Start

BODY: dict[str, Any] = {"messages": HELLO, "max_tokens": 2}
ADMIN = "server.admin_key=operator-secret-4711"


def azure(session: dict[str, Any], **options: Any) -> openai.AsyncAzureOpenAI:
    if "azure_ad_token" not in options:
        options["api_key"] = session["api_key"]
    return openai.AsyncAzureOpenAI(api_version="2024-10-21", max_retries=0, **options)


async def test_azures_client_needs_no_change(start: Start) -> None:
    proxy = await start(ADMIN, admit=10)
    session = await proxy.open()
    key, url = session["api_key"], proxy.url
    forms: list[dict[str, Any]] = [
        {"azure_endpoint": url},
        {"azure_endpoint": url, "azure_ad_token": key},
        {"azure_endpoint": url, "azure_deployment": "mine"},
        {"azure_endpoint": f"{url}/{key}"},
        {"base_url": f"{url}/v1"},
        {"base_url": url},
        {"base_url": f"{url}/openai/deployments/mine"},
    ]
    for form in forms:
        async with azure(session, **form) as client:
            answer = await client.chat.completions.create(model="other", **BODY)
        assert answer.model == ("mine" if "mine" in str(form) else "other"), form
    assert len(await proxy.recorded(session["session_id"])) == len(forms)


async def test_other_calls_and_streams_of_azures_client_are_served(proxy: Proxy) -> None:
    session = await proxy.open()
    async with azure(session, azure_endpoint=proxy.url) as client:
        chunks = await client.chat.completions.create(model="m", stream=True, **BODY)
        reasons = [c.choices[0].finish_reason async for c in chunks if c.choices]
        assert reasons[-1] == "length"
        text = await client.completions.create(model="m", prompt="1 + 1 =", max_tokens=2)
        assert text.choices[0].finish_reason == "length"
        response = await client.responses.create(model="m", input="Hi", max_output_tokens=16)
        assert (await client.responses.retrieve(response.id)).id == response.id
        assert [model.id async for model in client.models.list()] == ["policy"]
        with fails_with(openai.NotFoundError, code="model_not_found", param="model"):
            await client.embeddings.create(model="m", input="x")


async def test_the_path_names_the_model(start: Start) -> None:
    proxy = await start("model.unknown_model=reject", admit=10)
    headers = {"api-key": (await proxy.open())["api_key"]}
    for model, status in (("policy", 200), ("gpt-5", 404)):
        path = f"/openai/deployments/{model}/chat/completions?api-version=2024-10-21"
        for named in ({}, {"model": "policy"}):
            answer = await proxy.http.post(path, json=BODY | named, headers=headers)
            assert answer.status_code == status, answer.text


async def test_api_key_is_a_key_like_the_others(start: Start) -> None:
    proxy = await start(ADMIN, admit=10)
    first, second = [(await proxy.open())["api_key"] for _ in range(2)]
    chat, azures = "/v1/chat/completions", "/openai/v1/chat/completions"
    async with httpx.AsyncClient(base_url=proxy.url) as http:
        for path, headers, status in (
            (chat, {"api-key": first}, 200),
            (azures, {"api-key": first}, 200),
            (chat, {"api-key": "sk-v1.0.x"}, 401),
            (azures, {"api-key": "sk-v1.0.x"}, 401),
            (chat, {"api-key": first, "authorization": f"Bearer {first}"}, 200),
            (chat, {"api-key": first, "authorization": f"Bearer {second}"}, 400),
        ):
            answer = await http.post(path, json=BODY | {"model": "m"}, headers=headers)
            assert answer.status_code == status, (path, headers)
        assert answer.json()["error"]["code"] == "session_mismatch"
        listed = await http.get("/rl/v1/sessions", headers={"api-key": "operator-secret-4711"})
        assert len(listed.json()) == 2


def test_paths_of_azure_lead_to_our_routes() -> None:
    for path, plain, model in (
        ("/openai/deployments/a/b/chat/completions", "/v1/chat/completions", "a/b"),
        ("/v1/deployments/a/completions", "/v1/completions", "a"),
        ("/deployments/a/embeddings", "/v1/embeddings", "a"),
        ("/openai/responses/resp_1/input_items", "/v1/responses/resp_1/input_items", None),
        ("/openai/v1/models", "/v1/models", None),
    ):
        assert plain_path(path) == (plain, model)
    for path in (
        "/v1/chat/completions",
        "/openai/deployments//embeddings",
        "/openai/deployments/m/images/generations",
        "/openai/files",
        "/openai/rl/v1/lease",
        "/openai/v1",
    ):
        assert plain_path(path) == (path, None)
    # LiteLLM keeps what it passes on to OpenAI.
    for path in ("/openai/v1/responses", "/openai/chat/completions"):
        assert plain_path(path, litellm=True) == (path, None)
    assert plain_path("/openai/deployments/a/embeddings", litellm=True) == ("/v1/embeddings", "a")
