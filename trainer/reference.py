"""The frozen model that the loss's KL term compares the policy with."""

from __future__ import annotations

from dataclasses import replace

from transformers import AutoConfig

from any_agent.errors import ConfigError
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


def frozen_logprobs(path: str, policy: Policy) -> ReferenceLogprobs:
    """Load a model beside the policy, divided as that is, and return its log-probabilities.

    All processes of the policy's world must call it together. Raises StartupError for a model that
    cannot be loaded.
    """
    config = replace(policy.config, gradient_checkpointing=False)
    whole = loaded(path, config, policy.world, frozen=True)
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
