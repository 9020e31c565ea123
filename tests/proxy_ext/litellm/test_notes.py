"""The place at which LiteLLM puts a stream together, which no hook of its own reaches in time."""

from __future__ import annotations

import litellm
import pytest

from proxy_ext import litellm_proxy
from tests.support.fake_provider import Provider
from tests.support.proxy import HELLO

pytestmark = pytest.mark.service


@pytest.mark.parametrize("reported", [True, False])
async def test_a_stream_is_noted_before_its_end(
    monkeypatch: pytest.MonkeyPatch, reported: bool
) -> None:
    monkeypatch.setattr(litellm, "stream_chunk_builder", litellm.stream_chunk_builder)
    monkeypatch.setattr(litellm, "callbacks", list(litellm.callbacks))
    litellm_proxy.note_answers()
    provider = Provider()
    provider.said_usage = reported
    async with provider.serve() as url:
        with litellm_proxy.facts_of("call-1") as facts:
            stream = await litellm.acompletion(
                model="openai/gpt-x",
                messages=HELLO,
                api_base=f"{url}/v1",
                api_key="none",
                stream=True,
                stream_options={"include_usage": True},
                litellm_call_id="call-1",
            )
            async for _ in stream:
                pass
    assert facts.streamed, (
        "LiteLLM has put the stream together without litellm.stream_chunk_builder, or after its "
        "end: litellm_proxy.note_answers needs another place"
    )
    assert facts.model == "gpt-x-0613"
    usage = None if facts.usage is None else facts.usage["total_tokens"]
    assert usage == (10 if reported else None)
