"""The size of a forward pass where none is set: as many tokens as memory has room for."""

from __future__ import annotations

from typing import Any

import torch

from trainer.model import PolicyConfig
from trainer.world import local_part

CPU_TOKENS = (256, 768)
"""The least and the most tokens of a pass on a CPU. Beyond, larger matrices are no faster, and
activations that outgrow the caches are paid for page by page."""
CPU_ACTIVATIONS = 1e9
"""The most bytes that a pass on a CPU keeps for its backward pass."""
GPU_TOKENS = (1024, 16_384)
GPU_SHARE = 0.7
"""The share of a GPU's free memory for activations. The rest is for the layers that are gathered at
the moment, the logits, kernels' workspaces and fragments."""
_TO_COME = 12
"""Bytes of gradient and moments for each trained parameter, in float32, that a step adds."""


def pass_tokens(model: Any, device: torch.device, config: PolicyConfig) -> int:
    """Return the tokens of a pass of this loaded model, whose optimizer has no state yet.

    On a CPU the result depends on the model alone.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    number = (config.dtype or trained[0].dtype).itemsize
    shape, checkpointing = model.config.get_text_config(), config.gradient_checkpointing
    kept = token_bytes(shape, number, checkpointing=checkpointing)
    if device.type == "cpu":
        return fitting(CPU_ACTIVATIONS / kept, *CPU_TOKENS)
    free, _ = torch.cuda.mem_get_info(device)
    state = 0 if config.offload else _TO_COME * sum(local_part(p).numel() for p in trained)
    return fitting(GPU_SHARE * (free - state) / kept, *GPU_TOKENS)


def fitting(tokens: float, least: int, most: int) -> int:
    """Return a number of tokens within the bounds, rounded down to a power of two or 1.5 times one.

    So a little more or less memory gives the same number.
    """
    steps = [k << shift for shift in range(most.bit_length()) for k in (2, 3)]
    return max((n for n in steps if least <= n <= min(tokens, most)), default=least)


def token_bytes(config: Any, number: int, *, checkpointing: bool) -> float:
    """Return the bytes that a pass keeps of each token, by a model's configuration.

    ``number`` is the bytes of a number. A mixture of experts keeps what a token's experts do.
    """
    hidden = config.hidden_size
    # A model without attention has no heads: its layers count as if there were one.
    heads = _widest(config, "num_attention_heads", 1)
    size = _widest(config, "head_dim", hidden // heads)
    heads += _widest(config, "num_key_value_heads", heads)
    intermediate = _widest(config, "intermediate_size", 4 * hidden)
    if experts := _widest(config, "num_experts_per_tok", 0):
        each = _widest(config, "moe_intermediate_size", intermediate)
        intermediate = max(intermediate, experts * each)
    layer = number * layer_numbers(hidden, heads * size, intermediate)
    return kept_bytes(config.num_hidden_layers, layer, number * hidden, checkpointing=checkpointing)


def _widest(config: Any, name: str, otherwise: int) -> int:
    """Return a size of a configuration, which may have one for each layer."""
    size = getattr(config, name, None) or otherwise
    return max(size) if isinstance(size, list | tuple) else size


def layer_numbers(hidden: int, attention: int, intermediate: int) -> int:
    """Return the numbers of a token that one layer keeps for its backward pass, at most.

    ``attention`` is the width of queries and keys together. Kept are the inputs and norms, queries,
    keys and values before and after their norms and rotation, and the gated feed-forward part.
    """
    return 8 * hidden + 5 * attention + 4 * intermediate


def kept_bytes(layers: int, layer: float, inputs: float, *, checkpointing: bool) -> float:
    """Return the bytes of a token in all layers, and of the gradients of one.

    ``layer`` is what a layer keeps, ``inputs`` the part of it that it keeps with checkpointing.
    """
    return layers * inputs + 1.5 * layer if checkpointing else (layers + 0.5) * layer
