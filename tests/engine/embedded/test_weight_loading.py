"""Weight updates: exact versions per token, all or nothing, safetensors only."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from any_agent.engine.embedded.engine import EmbeddedEngine, EngineOptions
from any_agent.engine.embedded.model_loader import load_model
from any_agent.errors import Conflict, InvalidRequest
from any_agent.rundir.checksums import write_manifest
from tests.support.engine.embedded import (
    LIMIT,
    Gate,
    error_of,
    fresh_logprobs,
    prompt,
    request,
    worst,
    wrapped,
)


def kept_cache_logprobs(
    old: Any, new: Any, ids: list[int], output: list[int], seam: int
) -> torch.Tensor:
    """Old weights' keys and values up to the seam, new weights from there on; one row."""
    from transformers import DynamicCache

    cache = DynamicCache(config=old.config)
    found = []
    with torch.inference_mode():
        logits = old(input_ids=torch.tensor([ids]), past_key_values=cache).logits[0, -1]
        for n, token in enumerate(output):
            found.append(torch.log_softmax(logits, -1)[token])
            model = old if n + 1 < seam else new
            logits = model(input_ids=torch.tensor([[token]]), past_key_values=cache).logits[0, -1]
    return torch.stack(found)


@pytest.mark.service
async def test_in_place_update_has_exact_versions(
    tiny_model_dir: Path, other_model_dir: Path, own_engine: EmbeddedEngine
) -> None:
    generations = [
        own_engine.submit(request(f"r{i}", prompt(4 + 3 * i, i), max_new_tokens=400))
        for i in range(3)
    ]
    for generation in generations:
        await generation.progress()
    await own_engine.pause("in_place")
    seams = [len(g.request.output_ids) for g in generations]
    assert await own_engine.update_weights(str(other_model_dir), "7") == 3
    await own_engine.resume()
    old, new = load_model(str(tiny_model_dir)).model, load_model(str(other_model_dir)).model
    for generation, seam in zip(generations, seams, strict=True):
        assert (await asyncio.wait_for(generation.finished(), LIMIT)).type == "length"
        out = generation.request
        assert out.versions(0, len(out.output_ids)) == ["0"] * seam + ["7"] * (400 - seam)
        reference = kept_cache_logprobs(old, new, out.input_ids, out.output_ids, seam)
        assert worst(out.logprobs, reference) < 1e-4
        before = fresh_logprobs(old, out.input_ids, out.output_ids[:seam])
        assert worst(out.logprobs[:seam], before) < 1e-5
    late = own_engine.submit(request("late", prompt(9)), stream=False)
    await asyncio.wait_for(late.finished(), LIMIT)
    assert error_of(new, prompt(9), late.request.output_ids, late.request.logprobs) < 1e-5


async def test_an_update_waits_for_those_in_flight(
    tiny_model_dir: Path, other_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    async with wrapped(load_model(str(tiny_model_dir)), gate.around) as engine:
        running = engine.submit(request("a", prompt(4), max_new_tokens=5), stream=False)
        await asyncio.to_thread(gate.wait_for_step)
        posted = asyncio.Event()
        post = engine.loop.update

        def spy(*args: Any) -> Any:
            posted.set()
            return post(*args)

        monkeypatch.setattr(engine.loop, "update", spy)
        update = asyncio.create_task(engine.update_weights(str(other_model_dir), "1"))
        await asyncio.wait_for(posted.wait(), LIMIT)
        late = engine.submit(request("b", prompt(4), max_new_tokens=5), stream=False)
        assert not update.done()
        gate.let(20)
        assert await asyncio.wait_for(update, LIMIT) == 0
        await asyncio.wait_for(running.finished(), LIMIT)
        await asyncio.wait_for(late.finished(), LIMIT)
        assert running.request.versions(0, 5) == ["0"] * 5
        assert late.request.versions(0, 5) == ["1"] * 5


async def test_an_update_waits_for_running_calls_only_so_long(
    tiny_model_dir: Path, other_model_dir: Path
) -> None:
    options = EngineOptions(update_timeout=0.05)
    async with EmbeddedEngine.load(str(tiny_model_dir), options) as engine:
        running = engine.submit(request("a", prompt(4), max_new_tokens=2000))
        await running.progress()
        with pytest.raises(Conflict):
            await engine.update_weights(str(other_model_dir), "1")
        late = engine.submit(request("b", prompt(4)), stream=False)  # admission goes on
        await asyncio.wait_for(late.finished(), LIMIT)
        assert late.request.versions(0, 8) == ["0"] * 8
        await engine.update_weights(str(other_model_dir), "1", abort_all=True)
        assert (await running.finished()).type == "abort"
        assert engine.version == 1


def resaved(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


def rewritten(name: str, at: int, zeros: int) -> Callable[[Path], None]:
    """Overwritten with zeros behind the trainer's manifest."""

    def damage(folder: Path) -> None:
        write_manifest(folder)
        data = bytearray((folder / name).read_bytes())
        data[at : at + zeros] = bytes(zeros)
        (folder / name).write_bytes(data)

    return damage


def pickle_only(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")


def with_index(told: dict[str, Any]) -> Callable[[Path], None]:
    return lambda folder: (folder / "model.safetensors.index.json").write_text(json.dumps(told))


NORM = "model.norm.weight"
DAMAGES: dict[str, Callable[[Path], Any]] = {
    "one is missing": resaved(lambda weights: weights.pop(NORM)),
    "one too many": resaved(lambda weights: weights.update(stranger=torch.zeros(2))),
    "another shape": resaved(lambda weights: weights.update({NORM: weights[NORM][:-1].clone()})),
    "cut off": lambda folder: os.truncate(folder / "model.safetensors", 100_000),
    "garbage": lambda folder: (folder / "model.safetensors").write_bytes(b"not a checkpoint"),
    "a pickle": pickle_only,
    "a bad index": with_index({"weight_map": [1]}),
    "a missing shard": with_index({"weight_map": {NORM: "model-1.safetensors"}}),
    "gone": shutil.rmtree,
    "zeroed": rewritten("model.safetensors", 50_000, 4096),
    "its header zeroed": rewritten("model.safetensors", 0, 4096),
    "its manifest zeroed": rewritten("manifest.json", 0, 64),
}


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_bad_checkpoint_changes_nothing(
    damage: str, other_model_dir: Path, own_engine: EmbeddedEngine, tmp_path: Path
) -> None:
    bad = Path(shutil.copytree(other_model_dir, tmp_path / "v00000001"))
    DAMAGES[damage](bad)
    before = {k: v.clone() for k, v in own_engine.loaded.model.state_dict().items()}
    with pytest.raises(InvalidRequest):
        await own_engine.update_weights(str(bad), "1")
    for name, value in own_engine.loaded.model.state_dict().items():
        assert torch.equal(value, before[name])
    assert own_engine.version == 0
    generation = own_engine.submit(request("a", prompt(3)), stream=False)
    assert (await asyncio.wait_for(generation.finished(), LIMIT)).type == "length"


async def test_sharded_weights_are_loaded_whole(
    own_engine: EmbeddedEngine, other_model_dir: Path, tmp_path: Path
) -> None:
    other = load_model(str(other_model_dir)).model
    other.save_pretrained(tmp_path, max_shard_size="100KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    # A file of the same name that is no manifest of ours.
    (tmp_path / "manifest.json").write_text('{"name": "a model"}')
    await own_engine.update_weights(str(tmp_path), "3")
    assert own_engine.version == 3
    for name, value in own_engine.loaded.model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name])
