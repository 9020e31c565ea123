"""Errors in the adapter's path, each of which a law notices."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import trainer.lora
import trainer.tree_attention
from tests.trainer.test_adapter_files import (
    a_checkpoint_is_complete,
    going_on_equals_never_having_stopped,
)
from tests.trainer.test_lora import (
    a_folder_is_recognised_until_the_next_step,
    gradients_are_those_of_whole_weights,
    merged_weights_are_exact,
    only_the_adapter_is_trained,
    published_is_trained,
    without_the_adapter_it_is_the_base,
)
from trainer.lora import Lora, adapter_tensors, layers

original_merged = trainer.lora.merged
original_add_adapter = trainer.lora.add_adapter
original_attention = trainer.tree_attention.tree_attention


def doubled(model: Any, *arguments: Any) -> list[torch.Tensor]:
    for layer in layers(model).values():
        layer.scaling["default"] *= 2
    try:
        return original_merged(model, *arguments)
    finally:
        for layer in layers(model).values():
            layer.scaling["default"] /= 2


def forgotten(model: Any, stored: Any, names: Any, whole: Any) -> list[torch.Tensor]:
    every = {**stored, **adapter_tensors(model)}
    return [whole(every[name]) for name in names]


def stale(model: Any, stored: Any, names: Any, whole: Any) -> list[torch.Tensor]:
    """Merged once."""
    known = model.__dict__.setdefault("known", {})
    for name in names:
        if name not in known:
            known[name] = original_merged(model, stored, [name], whole)[0].clone()
    return [known[name] for name in names]


def thawed(model: Any, lora: Lora) -> None:
    original_add_adapter(model, lora)
    model.model.norm.weight.requires_grad_(True)


def without_alpha(model: Any, lora: Lora) -> None:
    original_add_adapter(model, lora)
    for layer in layers(model).values():
        layer.scaling["default"] = 1.0


def keys_decide(module: Any, query: Any, key: Any, value: Any, *rest: Any, **others: Any) -> Any:
    """Values that a later pass uses get a gradient only if keys do."""
    out = original_attention(module, query, key, value, *rest, **others)
    tree = others.get("tree")
    if tree is not None and module.layer_idx in tree.kept and not key.requires_grad:
        keys, (values, leaf) = tree.kept[module.layer_idx]
        tree.kept[module.layer_idx] = [keys, (values, leaf.detach())]
    return out


def nothing(*_: Any) -> None: ...


def values_of_some_layers(*_: Path) -> None:
    gradients_are_those_of_whole_weights(lora=Lora(3, 2, ("v_proj", "0.mlp.down_proj")))


Law = Callable[[Path, Path], object]
PLANTED: dict[str, tuple[str, Any, Law]] = {
    "the merge doubles the scale": ("trainer.policy.merged", doubled, merged_weights_are_exact),
    "engines get twice the adapter": ("trainer.policy.merged", doubled, published_is_trained),
    "engines get the base": ("trainer.policy.merged", forgotten, published_is_trained),
    "the merge is stale": (
        "trainer.policy.merged",
        stale,
        a_folder_is_recognised_until_the_next_step,
    ),
    "alpha is ignored": ("trainer.model.add_adapter", without_alpha, merged_weights_are_exact),
    "a base weight is trained": ("trainer.model.add_adapter", thawed, only_the_adapter_is_trained),
    "the adapter is not loaded": (
        "trainer.adapter_files.load_adapter",
        nothing,
        going_on_equals_never_having_stopped,
    ),
    "the adapter's prefix is missing": (
        "trainer.adapter_files._PREFIX",
        "",
        a_checkpoint_is_complete,
    ),
    "the checkpoint's model is the base": (
        "trainer.policy.merged",
        forgotten,
        a_checkpoint_is_complete,
    ),
    "the adapter stays on": (
        "trainer.reference.switched_off",
        nullcontext,
        without_the_adapter_it_is_the_base,
    ),
}


@pytest.mark.filterwarnings("ignore:Found missing adapter keys")
@pytest.mark.parametrize("error", PLANTED)
def test_a_planted_error_is_noticed(
    error: str, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, wrong, law = PLANTED[error]
    monkeypatch.setattr(place, wrong)
    with pytest.raises(AssertionError):
        law(tiny_model_dir, tmp_path)


@pytest.mark.service
def test_that_values_need_gradients_although_keys_do_not_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values_of_some_layers()
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, trainer.tree_attention.NAME, keys_decide)
    with pytest.raises(AssertionError):
        values_of_some_layers()
