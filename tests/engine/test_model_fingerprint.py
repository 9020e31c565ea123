"""An engine with another model is found out, and no id that its model lacks reaches it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from any_agent.engine.model_fingerprint import ModelFingerprint, shape_of
from any_agent.errors import ConfigError, EngineUnavailable, InvalidRequest
from tests.support.engine.sglang import all_of, client_of, request, update
from tests.support.errors import fails_with
from tests.support.scripted_engine import ScriptedEngine
from tests.support.waiting import until

SHAPE = ModelFingerprint(100, "qwen3", ("Qwen3ForCausalLM",))


def test_the_shape_of_a_model_is_read_from_its_config(tmp_path: Path, tiny_model_dir: Path) -> None:
    tiny = shape_of(str(tiny_model_dir))
    assert (tiny.model_type, tiny.architectures) == ("qwen3", ("Qwen3ForCausalLM",))
    assert tiny.vocab_size is not None and tiny.vocab_size > 100
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "vl", "text_config": {"vocab_size": 7}}))
    assert shape_of(str(tmp_path)) == ModelFingerprint(7, "vl", None)
    config.write_text("[")
    with fails_with(ConfigError, tmp_path):
        shape_of(str(tmp_path))
    assert shape_of("nobody/has-this-model") == ModelFingerprint()


def test_another_model_is_refused_by_what_differs() -> None:
    for told, seen in (
        ({"vocab_size": 101}, "vocab_size"),
        ({"model_type": "llama"}, "model_type"),
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
    ):
        with fails_with(ConfigError, "http://10.0.0.1:3", seen):
            SHAPE.require_same(told, "http://10.0.0.1:3")
    SHAPE.require_same({"vocab_size": 100, "architectures": ["Qwen3ForCausalLM"]}, "")
    SHAPE.require_same({}, "an engine that tells nothing")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("input_ids", {"ids": [5, 100]}),
        ("input_ids", {"ids": [-1]}),
        ("stop_token_ids", {"stop_token_ids": (3, 1000)}),
        ("logit_bias", {"logit_bias": ((100, 1.0),)}),
    ],
    ids=str,
)
async def test_ids_that_the_model_lacks_are_refused_before_they_reach_the_engine(
    scripted: ScriptedEngine, stream: bool, name: str, change: dict[str, object]
) -> None:
    async with client_of(scripted, shape=SHAPE) as client:
        with fails_with(InvalidRequest, "100", param=name):
            await all_of(client, request("bad", **change), stream=stream)  # type: ignore[arg-type]
        assert not scripted.requests
        good = request("good", ids=[0, 99])
        assert (await all_of(client, good, stream=stream))[-1].stop_reason


@pytest.mark.parametrize("size", [99, 100, 101])
async def test_an_engine_with_more_or_fewer_ids_than_the_model_is_refused(size: int) -> None:
    """SGLang does not tell it."""
    scripted = ScriptedEngine(incremental=True)
    scripted.vocabulary = size
    async with scripted.serve(), client_of(scripted, shape=ModelFingerprint(100)) as client:
        if size == 100:
            await client.require_model()
            return
        with fails_with(ConfigError, "fewer" if size < 100 else "more"):
            await client.require_model()


async def test_an_engine_that_comes_back_as_another_model_gets_no_calls(
    scripted: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    scripted.vocabulary = 100
    async with client_of(scripted, shape=SHAPE, update_wait=1) as client:
        await client.require_model()
        scripted.vocabulary = 50
        await scripted.die()
        with pytest.raises(EngineUnavailable):
            await all_of(client, request("r"), stream=True)
        assert client.away
        await scripted.revive()
        with fails_with(EngineUnavailable, "restart"):
            await all_of(client, request("s"), stream=True)
        (said,) = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
        assert scripted.url in said
        scripted.vocabulary = 100
        await until(lambda: not client.away)
        assert (await all_of(client, request("t"), stream=True))[-1].stop_reason


@pytest.mark.parametrize("status", [429, 503])
async def test_a_full_engine_is_neither_gone_nor_another_model(
    scripted: ScriptedEngine, stream: bool, status: int
) -> None:
    async with client_of(scripted, shape=SHAPE) as client:
        for _ in range(2):  # the call, and the question how many ids it knows
            scripted.fail("status", status=status)
        with fails_with(EngineUnavailable, f"answered {status}"):
            await all_of(client, request("r"), stream=stream)
        assert not client.away
        assert len(scripted.requests) == 2


async def test_an_engine_with_half_loaded_weights_gets_no_calls(scripted: ScriptedEngine) -> None:
    """While they come bucket by bucket, SGLang says `loading-7`."""
    async with client_of(scripted, update_wait=1) as client:
        scripted.weight_version = "loading-7"
        with pytest.raises(EngineUnavailable):
            await all_of(client, request("r"), stream=False)
        await client.info()
        assert client.version == -1
        scripted.weight_version = "7"
        await until(lambda: not client.away)
        assert client.version == 7
        assert (await all_of(client, request("s"), stream=False))[-1].versions[-1] == 7


async def test_a_cache_kept_over_an_update_is_apart_for_each_version(
    scripted: ScriptedEngine, stream: bool
) -> None:
    async with client_of(scripted, update_mode="in_place") as client:
        for version in (0, 1):
            await update(client, scripted, version)
            await all_of(client, replace(request(f"r{version}"), cache_salt="mine"), stream=stream)
    assert [body["cache_salt"] for body in scripted.requests] == ["mine@0", "mine@1"]
    async with client_of(scripted) as client:
        await all_of(client, request("flushed"), stream=stream)
    assert "cache_salt" not in scripted.requests[-1]
