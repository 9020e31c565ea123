"""Weights of a mapped file give the same logits, bit for bit, as those that were sent."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from any_agent.engine.embedded.model_loader import LoadedModel, load_model
from any_agent.engine.embedded.weight_loading import apply_weights, read_weights
from trainer.policy import Policy


@pytest.fixture(scope="module", params=["8", "40"])
def elsewhere(
    request: pytest.FixtureRequest, tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The model with a file whose tensors begin so many bytes after a multiple of 64."""
    folder = Path(shutil.copytree(tiny_model_dir, tmp_path_factory.mktemp("model") / "copy"))
    file = folder / "model.safetensors"
    weights = load_file(tiny_model_dir / file.name)
    for more in range(64):
        save_file(weights, file, metadata={"format": "pt", "x": "x" * more})
        if (8 + int.from_bytes(file.read_bytes()[:8], "little")) % 64 == int(request.param):
            return folder
    raise AssertionError("no header is so long")


def places(model: torch.nn.Module) -> set[int]:
    return {parameter.data_ptr() % 64 for parameter in model.parameters()}


@torch.inference_mode()
def logits(loaded: LoadedModel) -> torch.Tensor:
    found: torch.Tensor = loaded.model(torch.arange(3, 40)[None]).logits
    return found


def test_an_updated_engine_computes_exactly_as_one_that_began_so(
    elsewhere: Path, tiny_model_dir: Path
) -> None:
    begun, updated = load_model(str(elsewhere)), load_model(str(tiny_model_dir))
    for value in updated.model.parameters():
        value.data = torch.zeros_like(value)
    apply_weights(updated.model, read_weights(updated.model, elsewhere))
    assert places(begun.model) == places(updated.model) == {0}
    assert torch.equal(logits(begun), logits(updated))
    tied = begun.model.config.tie_word_embeddings
    head, embedding = begun.model.get_output_embeddings(), begun.model.get_input_embeddings()
    assert (head.weight is embedding.weight) == tied


def test_a_policy_computes_as_one_that_went_on(elsewhere: Path) -> None:
    assert places(Policy.load(elsewhere).model) == {0}
