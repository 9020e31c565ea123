"""What agents ask for reaches the engine under its names, on both routes."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from tests.support.proxy import HELLO, Proxy
from tests.support.proxy_fixtures import Start
from tests.support.scripted_engine import ScriptedEngine

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 4},
    "/v1/completions": {"prompt": "hello", "max_tokens": 4},
}
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {}}}
ASKED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0}, {"temperature": 0}),
    ({"temperature": 2, "top_p": 0.5}, {"temperature": 2, "top_p": 0.5}),
    ({"top_k": 3, "min_p": 0.25}, {"top_k": 3, "min_p": 0.25}),
    ({"seed": -(2**63)}, {"sampling_seed": -(2**63)}),
    ({"stop": "zz"}, {"stop": ["zz"]}),
    ({"frequency_penalty": -2}, {"frequency_penalty": -2}),
    ({"presence_penalty": 2}, {"presence_penalty": 2}),
    ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
    ({"logit_bias": {"5": -100, "7": 1.5}}, {"logit_bias": {"5": -100, "7": 1.5}}),
    ({"guided_regex": "a+"}, {"regex": "a+"}),
    ({"guided_choice": ["a.", "b"]}, {"regex": r"(a\.|b)"}),
    ({"guided_json": SCHEMA}, {"json_schema": orjson.dumps(SCHEMA).decode()}),
]


@pytest.mark.parametrize("path", BODIES)
async def test_eval_sessions_are_sampled_as_the_agent_asks(
    proxy: Proxy, engine: ScriptedEngine, path: str
) -> None:
    session = await proxy.open(mode="eval")
    for asked, told in ASKED:
        response = await proxy.post(path, BODIES[path] | asked, session["api_key"])
        assert response.status_code == 200, (asked, response.text)
        assert "x-any-agent-overrides" not in response.headers
        sampling = engine.requests[-1]["sampling_params"]
        assert told.items() <= sampling.items(), asked


async def test_agents_that_ask_for_no_temperature_get_the_configured_one(
    start: Start, engine: ScriptedEngine
) -> None:
    for settings, evaluation in (
        ([], 0.7),
        (["eval.temperature=0.25"], 0.25),
        (["eval.temperature=0"], 0.0),
    ):
        proxy = await start("sampling.temperature=0.7", *settings, admit=9)
        for mode, expected in (("train", 0.7), ("eval", evaluation)):
            session = await proxy.open(mode=mode)
            for path, body in BODIES.items():
                assert (await proxy.post(path, body, session["api_key"])).status_code == 200
                assert engine.requests[-1]["sampling_params"]["temperature"] == expected


@pytest.mark.parametrize("path", BODIES)
async def test_train_sessions_are_told_which_parameters_were_overridden(
    proxy: Proxy, engine: ScriptedEngine, path: str
) -> None:
    session = await proxy.open()
    await proxy.post(path, BODIES[path], session["api_key"])
    plain = engine.requests[-1]["sampling_params"]
    for asked, told in ASKED:
        response = await proxy.post(path, BODIES[path] | asked, session["api_key"])
        assert response.status_code == 200, (asked, response.text)
        sampling = engine.requests[-1]["sampling_params"]
        overrides = orjson.loads(response.headers.get("x-any-agent-overrides", "{}"))
        if overrides:
            assert (sampling, overrides.keys()) == (plain, asked.keys())
        else:
            assert told.items() <= sampling.items(), asked
    recorded = await proxy.recorded(session["session_id"])
    assert [i.untrainable_reason for i in recorded] == [
        *[None] * 6,
        *["penalty"] * 3,
        "logit_bias",
        *["grammar"] * 3,
    ]
