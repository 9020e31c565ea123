"""What the engine refuses or fails at, as agents and operators see it."""

from __future__ import annotations

import pytest

from tests.proxy_ext.api.test_refusals import refusal
from tests.support.proxy import HELLO, Proxy
from tests.support.scripted_engine import ScriptedEngine


@pytest.mark.parametrize("stream", [False, True])
async def test_a_grammar_that_the_engine_refuses_is_named_as_the_agent_named_it(
    proxy: Proxy, stream: bool
) -> None:
    key = (await proxy.open())["api_key"]
    for name, asked in {
        "guided_regex": {"guided_regex": "(a"},
        "structured_outputs": {"structured_outputs": {"regex": "(a"}},
    }.items():
        response = await proxy.call(key, **asked, stream=stream)
        error = refusal(response, 400, "invalid_request", "Invalid grammar request")
        assert error["param"] == name and "{" not in error["message"]


async def test_other_refusals_of_the_engine_keep_their_words(
    proxy: Proxy, engine: ScriptedEngine
) -> None:
    engine.fail("status", status=400)
    session = await proxy.open()
    body = {"messages": HELLO, "guided_regex": "a"}
    response = await proxy.post("/v1/chat/completions", body, session["api_key"])
    assert refusal(response, 400, response.json()["error"]["code"], "scripted")["param"] is None
