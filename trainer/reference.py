"""The frozen model that the loss's KL term compares the policy with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig

from any_agent.errors import ConfigError
from trainer.packing import Pass
from trainer.pass_runner import PassRunner
from trainer.policy import Policy, loaded
from trainer.updates import ReferenceLogprobs


def require_alike(path: str, policy: Policy) -> None:
    """Raise ConfigError for a model that cannot compute the policy's rows."""
    ours = policy.model.config.get_text_config()
    try:
        theirs = AutoConfig.from_pretrained(path).get_text_config()
    except (OSError, ValueError) as error:
        raise ConfigError(f"train.reference_model={path} cannot be read: {error}") from error
    advice = "name a model with the policy's tokenizer and context, or leave it out"
    for name, what in (("vocab_size", "token ids"), ("max_position_embeddings", "positions")):
        mine, other = getattr(ours, name, None), getattr(theirs, name, None)
        if other != mine if name == "vocab_size" else (other or 0) < (mine or 0):
            raise ConfigError(
                f"train.reference_model={path} has {other} {what} ({name}), the policy {mine}: "
                + advice
            )


def is_base(path: str, policy: Policy) -> bool:
    """Return True if a path is that of the model that the policy's adapter is trained on."""
    return policy.base is not None and policy.base.is_at(path)


def frozen_logprobs(path: str, policy: Policy, *, base: bool = False) -> ReferenceLogprobs:
    """Load a model beside the policy, divided as that is, and return its log-probabilities.

    The ``base`` of the policy's adapter is not loaded again: it is the policy without the adapter.
    All processes of the policy's world must call it together. Raises ConfigError for a model that
    cannot be loaded, StartupError for one that lacks weights.
    """
    if base:
        return partial(_without_adapter, policy)
    config = replace(policy.config, gradient_checkpointing=False, lora=None)
    try:
        whole = loaded(path, config, policy.world, frozen=True)
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"train.reference_model={path} cannot be loaded: {error}") from error
    runner = PassRunner(
        whole,
        policy.device,
        divided=policy.world is not None,
        packing=policy.runner.packing,
        head_chunk=config.head_chunk,
        dtype=config.dtype,
    )
    # It computes the policy's passes, so these are of a kind that both can compute.
    policy.runner.packing = runner.packing
    return runner.logprobs


def _without_adapter(policy: Policy, passes: Sequence[Pass]) -> list[Tensor]:
    with policy.without_adapter():
        return policy.runner.logprobs(passes)
