"""Weights that differ, published as a trainer publishes them."""

from __future__ import annotations

from pathlib import Path


def publish_other(model: Path, root: Path, version: int) -> Path:
    """``root/v...``: the model's weights with noise that its version seeds."""
    import torch

    from trainer.model import PolicyConfig
    from trainer.policy import Policy
    from trainer.weight_folders import publish_to_disk

    policy = Policy.load(model, PolicyConfig(threads=1))
    noise = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=noise))
    return publish_to_disk(policy, model, root, version)
