"""What cannot be answered is refused clearly, and nothing of it is recorded."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.families import family
from tests.support.laws.service import Lab, lab_of

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}


@pytest.fixture
async def lab(tmp_path: Path) -> AsyncIterator[Lab]:
    settings = ("engine.update_wait=0.2",)
    async with lab_of(family("llama3"), tmp_path, *settings, true=False, context=512) as lab:
        yield lab


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("content", "code"),
    [
        ("word " * 600, "context_length_exceeded"),
        ("long " * 100_000, "context_length_exceeded"),
        ([{"type": "text", "text": "see"}, IMAGE], "invalid_request"),
        ([AUDIO], "invalid_request"),
    ],
)
async def test_content_that_cannot_be_rendered_is_refused_and_not_recorded(
    lab: Lab, content: Any, code: str, stream: bool
) -> None:
    session = await lab.proxy.open()
    messages = [{"role": "user", "content": content}]
    answer = await lab.proxy.call(session["api_key"], messages, stream=stream)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)
    assert answer.json()["error"]["param"].startswith("messages")
    assert not lab.engine.requests
    assert await lab.proxy.recorded(session["session_id"]) == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_without_an_engine_is_refused_with_503_and_not_recorded(
    lab: Lab, stream: bool
) -> None:
    session = await lab.proxy.open()
    await lab.engine.die()
    answer = await lab.proxy.call(session["api_key"], stream=stream)
    assert answer.status_code == 503
    assert int(answer.headers["Retry-After"]) >= 1
    assert await lab.proxy.recorded(session["session_id"]) == []
