"""LiteLLM's documented examples at stock LiteLLM and at a rank of ours, request by request."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy_ext.web.exchange import HOLD_SECONDS
from tests.support import litellm
from tests.support.fake_provider import Fault, Provider
from tests.support.proxy import HELLO
from tests.support.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.service

_DIFFERENT = re.compile(
    rb'"(?:created|created_at|id|item_id|response_id|response_cost|request_id|litellm_call_id)"'
    rb':\s*(?:"[^"]*"|[0-9.e-]+)'
)
"""Times, and ids that LiteLLM makes anew for each answer."""
_HEADERS = ("x-litellm-model-name", "x-litellm-response-cost", "x-litellm-attempted-fallbacks")


def chat(model: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"model": model, "messages": HELLO, **fields}


CLAUDE: dict[str, Any] = {"model": "claude", "messages": HELLO, "max_tokens": 8}
RESPONSE: dict[str, Any] = {"model": "planner", "input": "Hello."}
REQUESTS: list[tuple[str, tuple[str, dict[str, Any]], Fault | None]] = [
    ("simple", chat("planner"), None),
    ("simple, streamed", chat("planner", stream=True), None),
    ("usage", chat("planner", stream=True, stream_options={"include_usage": True}), None),
    ("fallback", chat("planner"), "500"),
    ("fallback, streamed", chat("planner", stream=True), "500"),
    ("no fallback", chat("backup"), "500"),
    ("alias", chat("thinker"), None),
    ("balanced", chat("balanced", temperature=0.3), None),
    ("wildcard", chat("any/gpt-4o", max_tokens=8), None),
    ("dropped parameter", chat("claude", max_tokens=8, logit_bias={"1": 1}), None),
    ("refused", chat("backup", temperature=9), "400"),
    ("busy", chat("backup"), "429"),
    ("no message", ("/v1/chat/completions", {"model": "backup"}), None),
    ("text", ("/v1/completions", {"model": "planner", "prompt": "Hello."}), None),
    ("anthropic", ("/v1/messages", CLAUDE), None),
    ("anthropic, streamed", ("/v1/messages", {**CLAUDE, "stream": True}), None),
    ("responses", ("/v1/responses", RESPONSE), None),
    ("responses, streamed", ("/v1/responses", {**RESPONSE, "stream": True}), None),
    ("vectors", ("/v1/embeddings", {"model": "vectors", "input": ["a", "b"]}), None),
]


def same(response: httpx.Response) -> tuple[int, bytes, dict[str, str | None] | None]:
    """Return the parts that must be alike in both answers.

    No headers of a slow stream: a rank's leave before its first event then.
    """
    body = _DIFFERENT.sub(b"", response.content).replace(b" ", b"")
    streamed = response.headers["content-type"].startswith("text/event-stream")
    slow = streamed and response.elapsed.total_seconds() >= HOLD_SECONDS
    headers = None if slow else {name: response.headers.get(name) for name in _HEADERS}
    return response.status_code, body, headers


def alike(ours: Any, stock: Any) -> bool:
    (*answer, headers), (*expected, said) = ours, stock
    return answer == expected and (headers == said or None in (headers, said))


async def answers(
    http: httpx.AsyncClient, provider: Provider, headers: dict[str, str]
) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, (path, body), fault in REQUESTS:
        if fault is not None:
            provider.fail(fault)
        out[name] = same(await http.post(path, json=body, headers=headers))
    out["models"] = {each["id"] for each in (await http.get("/v1/models")).json()["data"]}
    info = (await http.get("/v1/model/info")).json()["data"]
    out["info"] = sorted(each["model_name"] for each in info)
    return out


async def test_every_example_is_answered_as_stock_litellm_does(
    tmp_path: Path,
    tiny_model_dir: Path,
    engine: ScriptedEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, asked = {}, {}
    monkeypatch.setenv(litellm.VARIABLE, litellm.SECRET)
    for who in ("stock", "ours"):
        provider = Provider()
        async with provider.serve() as url:
            data = litellm.examples(url)
            path = litellm.write_litellm(tmp_path / who, data)
            monkeypatch.setenv("TEST_CALLBACK_LOG", str(tmp_path / who / "told.jsonl"))
            rank = litellm.rank(path, tiny_model_dir, engine.url)
            async with litellm.stock(path) if who == "stock" else rank as http:
                headers = await litellm.session(http) if who == "ours" else {}
                found[who] = await answers(http, provider, headers)
            asked[who] = [(where, body) for where, body, _ in provider.requests]
    ours, stock = found["ours"], found["stock"]
    assert ours.pop("models") == stock.pop("models") | {"policy"}
    assert ours.pop("info") == sorted([*stock.pop("info"), "policy"])
    different = [name for name in stock if not alike(ours[name], stock[name])]
    assert not different, json.dumps(
        {name: [str(stock[name]), str(ours[name])] for name in different}, indent=1
    )
    # The provider was asked for the same, as often.
    assert asked["ours"] == asked["stock"]
    told = {
        who: [json.loads(line) for line in (tmp_path / who / "told.jsonl").read_text().splitlines()]
        for who in found
    }
    kept = ("model", "tokens", "cost", "messages")
    assert [[line[k] for k in kept] for line in told["ours"]] == [
        [line[k] for k in kept] for line in told["stock"]
    ]
    assert len(told["stock"]) >= 14
