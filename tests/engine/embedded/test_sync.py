"""Weights come to the embedded engine by folder, by process group and in bodies; all or nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from any_agent.engine import weight_process_group
from any_agent.engine.embedded.engine import EmbeddedEngine, EngineOptions
from any_agent.engine.weight_serialization import pack
from tests.support.engine.embedded import Serve
from tests.support.engine.sglang_contract import call
from tests.support.engine.sync_contract import SyncContract
from tests.support.engine.updates_contract import UpdatesContract


@pytest.fixture
def models(tiny_model_dir: Path, other_model_dir: Path) -> list[Path]:
    return [tiny_model_dir, other_model_dir]


@pytest.fixture
async def engines(tiny_model_dir: Path, serve: Serve) -> AsyncIterator[list[str]]:
    options = EngineOptions(max_running_requests=4)
    async with AsyncExitStack() as stack:
        two = [
            await stack.enter_async_context(EmbeddedEngine.load(str(tiny_model_dir), options))
            for _ in range(2)
        ]
        yield [await serve(engine) for engine in two]


@pytest.fixture
async def url(engines: list[str]) -> str:
    return engines[0]


class TestSync(SyncContract):
    pass


class TestUpdates(UpdatesContract):
    pass


async def give(url: str, tensors: list[tuple[str, torch.Tensor]], version: str) -> tuple[int, Any]:
    """One whole update in one body; what its end is answered."""
    assert (await call(url, "/begin_weight_update", {}))[0] == 200
    how, text = pack(tensors)
    body = {"serialized_named_tensors": [text], "load_format": how, "weight_version": version}
    status, answer = await call(url, "/update_weights_from_tensor", body)
    assert status == 200, answer
    return await call(url, "/end_weight_update", {})


@pytest.mark.parametrize("wrong", ["missing", "strange", "misshapen"])
async def test_tensors_that_do_not_fit_change_no_weight(
    wrong: str, own_engine: EmbeddedEngine, serve: Serve
) -> None:
    url = await serve(own_engine)
    before = {k: v.clone() for k, v in own_engine.loaded.model.state_dict().items()}
    tensors = [(name, tensor + 1) for name, tensor in before.items()]
    name, tensor = tensors.pop()
    if wrong == "strange":
        tensors += [(name, tensor), ("stranger", tensor.clone())]
    elif wrong == "misshapen":
        tensors += [(name, tensor[..., :-1])]
    status, answer = await give(url, tensors, "5")
    assert (status, answer["success"]) == (400, False)
    for name, value in own_engine.loaded.model.state_dict().items():
        assert torch.equal(value, before[name])
    assert own_engine.variant.version == "0"
    # The session is over.
    assert (await give(url, list(before.items()), "6"))[0] == 200
    assert own_engine.variant.version == "6"


async def test_tied_weights_stay_tied(tiny_model_dir: Path, tmp_path: Path, serve: Serve) -> None:
    """They come once, as a checkpoint has them."""
    config = AutoConfig.from_pretrained(tiny_model_dir)
    config.tie_word_embeddings = True
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(tmp_path)
    async with EmbeddedEngine.load(str(tmp_path)) as engine:
        model = engine.loaded.model
        tensors = [(n, t + 1) for n, t in model.state_dict().items() if n != "lm_head.weight"]
        status, answer = await give(await serve(engine), tensors, "1")
        assert status == 200, answer
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
        for name, value in tensors:
            assert torch.equal(model.state_dict()[name], value)


@pytest.mark.parametrize(
    "body",
    [
        {"load_format": "pickle", "serialized_named_tensors": ["gASVAAAA"]},
        {"load_format": None, "serialized_named_tensors": ["gASVAAAA"]},
        {"load_format": "safetensors", "serialized_named_tensors": ["gASVAAAA"]},
        {"load_format": "safetensors", "serialized_named_tensors": ["no base64!"]},
        {"load_format": "cuda_ipc", "serialized_named_tensors": ["W1tdXQ=="]},
        {"load_format": "cuda_ipc", "serialized_named_tensors": ["W1siYSIsW11dXQ=="]},
        {"load_format": "safetensors", "serialized_named_tensors": []},
        {"load_format": "safetensors", "serialized_named_tensors": ["", ""]},
        {"load_format": "safetensors"},
    ],
    ids=str,
)
async def test_a_malformed_weight_update_is_refused_and_the_engine_lives(
    body: dict[str, Any], engine: EmbeddedEngine, serve: Serve
) -> None:
    url = await serve(engine)
    await call(url, "/begin_weight_update", {})
    status, answer = await call(url, "/update_weights_from_tensor", body)
    assert (status, answer["success"]) == (400, False)
    await call(url, "/end_weight_update", {})
    assert (await call(url, "/health", method="GET"))[0] == 200


async def test_joining_a_group_that_nobody_leads_blocks_nothing(
    engine: EmbeddedEngine, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Joining blocks nothing, and a bad wish is refused at once."""
    monkeypatch.setattr(weight_process_group, "JOIN_TIMEOUT", timedelta(seconds=1))
    url = await serve(engine)
    good = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
    good |= {"group_name": "g", "backend": "gloo"}
    for bad in ({"backend": "mpi"}, {"backend": "nccl"}, {"rank_offset": 2}, {"master_port": "x"}):
        assert (await call(url, "/init_weights_update_group", good | bad))[0] == 400
    joining = asyncio.create_task(call(url, "/init_weights_update_group", good))
    assert (await call(url, "/health", method="GET"))[0] == 200
    assert not joining.done()
    joining.cancel()
