"""What the engine refuses or fails at, as agents and operators see it."""

from __future__ import annotations

import logging

import pytest

from tests.support.proxy import HELLO, Proxy
from tests.support.scripted_engine import ScriptedEngine


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_grammar_that_the_engine_refuses(proxy: Proxy, path: str, stream: bool) -> None:
    """Under the agent's name, in one sentence, and not to be tried again."""
    session = await proxy.open()
    given = {"messages": HELLO} if "chat" in path else {"prompt": "hello"}
    for name, asked in {
        "guided_regex": {"guided_regex": "(a"},
        "structured_outputs": {"structured_outputs": {"regex": "(a"}},
    }.items():
        body = given | asked | {"stream": stream}
        response = await proxy.post(path, body, session["api_key"])
        assert response.status_code == 400
        assert response.headers["x-should-retry"] == "false"
        error = response.json()["error"]
        assert (error["param"], error["code"]) == (name, "invalid_request")
        start = f"{name}: the engine refused the request: Invalid grammar request"
        assert error["message"].startswith(start)
        assert "{" not in error["message"]


async def test_other_refusals_keep_their_words(proxy: Proxy, engine: ScriptedEngine) -> None:
    engine.fail("status", status=400)
    session = await proxy.open()
    body = {"messages": HELLO, "guided_regex": "a"}
    response = await proxy.post("/v1/chat/completions", body, session["api_key"])
    error = response.json()["error"]
    assert "scripted" in error["message"]
    assert error["param"] is None


async def test_failures_are_logged_once(
    proxy: Proxy, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    session = await proxy.open()
    engine.fail("status", status=507)
    body = {"messages": [{"role": "user", "content": "a secret"}], "n": 2}
    response = await proxy.post("/v1/chat/completions", body, session["api_key"])
    assert response.status_code == 503
    said = [r for r in caplog.records if r.name == "proxy_ext.calls.call"]
    (line,) = (r.getMessage() for r in said if r.levelno == logging.WARNING)
    assert "503 engine_unavailable" in line and "507: scripted" in line
    assert "secret" not in line
