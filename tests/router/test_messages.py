"""The router's own errors on the paths of Anthropic's API: in its shape, which its SDK reads."""

from __future__ import annotations

from typing import Any

from tests.router.conftest import StartLab
from tests.support.messages import refused
from tests.support.router import Lab, die

PATHS = ("/v1/messages", "/messages", "/v1/messages/count_tokens")
BODY: dict[str, Any] = {"model": "m", "max_tokens": 5, "messages": []}


async def test_a_lost_reply_is_an_error_in_the_form_of_messages(lab: Lab) -> None:
    lab.ranks[0].handler = die
    key = lab.key(0)
    for path in (*PATHS, f"/{key}/v1/messages"):
        for headers, again in (({}, "false"), ({"x-stainless-retry-count": "0"}, "true")):
            response = await lab.post(path, BODY, key, **headers)
            refused(response, 502, "api_error", "reply_lost")
            assert response.headers["x-should-retry"] == again
    # The other APIs' errors are theirs.
    response = await lab.post("/v1/chat/completions", BODY, key)
    assert "type" not in response.json()


async def test_a_request_that_is_too_large_is_an_error_in_the_form_of_messages(
    start_lab: StartLab,
) -> None:
    lab = await start_lab("server.max_body_bytes=100000")
    for path in PATHS:
        response = await lab.post(path, b"x" * 200_000, lab.key(0))
        refused(response, 413, "request_too_large", "payload_too_large")
    more = [f"x-more-{k}: {'y' * 20_000}" for k in range(2)]
    wire = await lab.raw("POST /v1/messages", *more)
    assert " 413 " in await wire.head()
    data = await wire.take(30)
    assert data.startswith(b'{"type":"error"'), data
