"""Chat calls over HTTP: a whole answer, limits, ways to name the session, the listed model."""

from __future__ import annotations

import orjson

from any_agent.chat import ChatFormat
from tests.proxy_ext.api.test_refusals import refusal
from tests.support.proxy import HELLO, Proxy
from tests.support.proxy_fixtures import Start
from tests.support.scripted_engine import ScriptedEngine


def say(engine: ScriptedEngine, chat: ChatFormat, text: str) -> list[int]:
    """Queue an answer that ends its turn; its ids."""
    ids = [*chat.tokenizer.encode(text), chat.stop_token_ids[0]]
    engine.say(ids)
    return ids


async def test_a_whole_chat_answer_has_its_text_usage_and_reason(
    proxy: Proxy, engine: ScriptedEngine, chat: ChatFormat
) -> None:
    session = await proxy.open()
    ids = say(engine, chat, "4 and 2")
    response = await proxy.call(session["api_key"], max_tokens=20)
    assert response.status_code == 200
    answer = response.json()
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "gpt-4o"
    assert answer["choices"][0]["message"]["content"] == "4 and 2"
    assert answer["choices"][0]["finish_reason"] == "stop"
    prompt = engine.requests[0]["input_ids"]
    assert answer["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(ids),
        "total_tokens": len(prompt) + len(ids),
    }
    assert response.headers["x-any-agent-session"] == session["session_id"]
    assert response.headers["x-any-agent-interaction"] == answer["id"]
    assert response.headers["x-any-agent-version"] == "0"
    assert "x-any-agent-overrides" not in response.headers
    (interaction,) = await proxy.recorded(session["session_id"])
    assert interaction.id == answer["id"]
    assert interaction.prompt_delta_ids.tolist() == prompt
    assert interaction.output_ids.tolist() == ids
    assert interaction.output_versions.tolist() == [0] * len(ids)
    assert interaction.output_logprobs.tolist() == [-0.5 - (i % 7) / 8 for i in ids]
    assert interaction.trainable


async def test_the_answer_says_that_fewer_tokens_were_allowed(start: Start) -> None:
    proxy = await start("sampling.max_new_tokens=20", admit=10)
    for mode, stream in (("train", False), ("eval", True)):
        session = await proxy.open(mode=mode)
        response = await proxy.call(session["api_key"], max_tokens=30, stream=stream)
        assert orjson.loads(response.headers["x-any-agent-overrides"]) == {"max_tokens": 20}
        response = await proxy.call(session["api_key"], max_tokens=20, stream=stream)
        assert "x-any-agent-overrides" not in response.headers
        recorded = await proxy.recorded(session["session_id"])
        asked = [interaction.request.get("overridden") or {} for interaction in recorded]
        assert asked == [{"max_tokens": 30}, {}]


async def test_every_way_to_name_the_session_reaches_it(proxy: Proxy) -> None:
    session = await proxy.open()
    key, id = session["api_key"], session["session_id"]
    ways: list[tuple[str, dict[str, str]]] = [
        ("", {"authorization": f"Bearer {key}"}),
        ("", {"authorization": f"bearer {key}"}),
        ("", {"x-api-key": key}),
        ("", {"x-any-agent-session": id}),
        (f"/{key}", {}),
    ]
    for prefix, headers in ways:
        for path in ("/v1/chat/completions", "/chat/completions"):
            response = await proxy.post(prefix + path, {"messages": HELLO}, **headers)
            assert response.status_code == 200, (prefix, headers, response.text)
            assert response.headers["x-any-agent-session"] == id


async def test_the_policy_is_the_one_model_that_is_listed(proxy: Proxy) -> None:
    for path in ("/v1/models", "/models"):
        (model,) = (await proxy.http.get(path)).json()["data"]
        assert (model["id"], model["context_length"]) == ("policy", 2048)
        assert (await proxy.http.get(f"{path}/policy")).json() == model
    # To Anthropic's clients in their form.
    headers = {"anthropic-version": "2023-06-01"}
    page = (await proxy.http.get("/v1/models", headers=headers)).json()
    (model,) = page["data"]
    assert (model["type"], model["id"], model["display_name"]) == ("model", "policy", "policy")
    assert model["created_at"] == "1970-01-01T00:00:00Z"
    assert (page["first_id"], page["last_id"], page["has_more"]) == ("policy", "policy", False)
    assert (await proxy.http.get("/v1/models/policy", headers=headers)).json() == model
    for told in (headers, {}):
        missing = await proxy.http.get("/v1/models/x", headers=told)
        refusal(missing, 404, "model_not_found", "'policy'")
