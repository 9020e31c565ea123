"""The model to train: its settings, and how it is loaded and prepared."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from any_agent.engine.weight_serialization import align
from any_agent.errors import ConfigError, StartupError
from trainer.lora import Lora, add_adapter
from trainer.world import UnshardedModel, World, alone, in_turn, shard


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """The settings of a policy's memory, computation and optimizer.

    ``head_chunk`` is the number of trained tokens whose logits [head_chunk, vocab] exist at a
    time, forward and backward; None: what suits the device and the vocabulary. ``threads`` None
    leaves torch's choice; one is best for tiny models.
    """

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    head_chunk: int | None = None
    packing: Literal["tree", "rows"] = "tree"
    """Compute a prefix that rows share once, or each row by itself."""
    gradient_checkpointing: bool = False
    dtype: torch.dtype | None = None
    """The type that passes compute in; None: the weights' own type."""
    compile: bool = False
    """Let torch.compile fuse the kernels of the layers, and of what follows the output head."""
    offload: bool = False
    """Keep weights, gradients and optimizer in the machine's memory between their uses."""
    device: str = "cpu"
    threads: int | None = None
    lora: Lora | None = None
    """Train an adapter of this kind, and leave the model's own weights as they are."""

    def __post_init__(self) -> None:
        if (self.head_chunk or 1) < 1 or self.grad_clip <= 0:
            raise ConfigError("head_chunk and grad_clip must be positive")


def loaded(
    source: str | Path,
    config: PolicyConfig,
    world: World | None,
    *,
    frozen: bool = False,
) -> UnshardedModel:
    """Load a model from a local folder or a hub name, safetensors only, and prepare it.

    Its weights are float32; ``frozen`` ones get no gradient and have the type that passes compute
    in. Raises StartupError for missing weights, which transformers would draw at random.
    """
    from transformers import AutoModelForCausalLM

    with in_turn(world):
        model, report = AutoModelForCausalLM.from_pretrained(
            str(source),
            dtype=(frozen and config.dtype) or torch.float32,
            use_safetensors=True,
            attn_implementation="sdpa",
            output_loading_info=True,
            # Refused below, by their names.
            ignore_mismatched_sizes=True,
        )
        misshapen = {name for name, *_ in report["mismatched_keys"]}
        wrong = sorted({*report["missing_keys"], *misshapen})
        if wrong:
            listed = ", ".join(wrong)
            raise StartupError(f"{source}: weights are missing or misshapen: {listed}")
        if frozen:
            model.requires_grad_(False)
        return prepared(model, config, world)


def context_of(model: Any) -> int | None:
    """Return the most tokens of a row, by a model's configuration; None: it does not say.

    A configuration may have the tokens before its positions are scaled, and the factor.
    """
    config = model.config.get_text_config()
    most: int | None = getattr(config, "max_position_embeddings", None)
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in [ropes, *(one for one in ropes.values() if isinstance(one, dict))]:
        if most is not None and rope.get("rope_type") != "dynamic":
            original = rope.get("original_max_position_embeddings") or 0
            most = max(most, int(original * (rope.get("factor") or 1)))
    return most


def world_for(config: PolicyConfig, world: World | None) -> World | None:
    """Return the world to divide weights in: this process alone if the configuration needs one."""
    if world is None and (config.dtype is not None or config.offload):
        return alone(config.device)
    return world


def prepared(model: Any, config: PolicyConfig, world: World | None) -> UnshardedModel:
    """Prepare a model for training: with the adapter to train, if any, no dropout, on its device,
    divided among the processes."""
    if config.lora is not None:
        add_adapter(model, config.lora)
    whole = UnshardedModel(model)
    model.eval()
    if world is None:
        model.to(config.device)
        align(model)
    _switch_dropout_off(model)
    if config.gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
        # transformers checkpoints in training mode only; dropout is already off.
        model.train()
    if world is not None:
        shard(whole, world, dtype=config.dtype, offload=config.offload)
    return whole


def _switch_dropout_off(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        # Rates that a module passes to functions.
        for name, value in list(vars(module).items()):
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
