"""The reasons why interactions are never trained on, as the few labels of a metric."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Final, Literal, TypeAlias, get_args

from any_agent.types import GenerationHyperparameters

UntrainableReason: TypeAlias = Literal[
    "grammar",
    "logit_bias",
    "penalty",
    "min_p",
    "truncated_sampling",
    "no_tokens",
    "version_gone",
    "undelivered",
    "frozen_model",
    "adapter",
    "guardrail",
    "guardrail_veto",
]
"""grammar, logit_bias, penalty, min_p, truncated_sampling: the tokens were drawn from another
distribution than the model's; under a grammar, every one of them was, or the engine does not tell
which. no_tokens: nothing was sampled. version_gone: a
weight update cut off a call of a session that is pinned to one version. undelivered: the answer
reached no client. frozen_model: another model than the policy answered. adapter: the
policy with an adapter of `engine.adapters` answered. guardrail: one that
`litellm.policy_guardrails` names refused the answer. guardrail_veto: one that
`litellm.policy_vetoes` names did, which keeps the whole session out of training."""

OF_ADAPTER: Final = "adapter"
GUARDRAIL_VETO: Final = "guardrail_veto"
REASONS: tuple[UntrainableReason, ...] = get_args(UntrainableReason)


def has_modified_distribution(gconfig: GenerationHyperparameters) -> UntrainableReason | None:
    """Return why tokens are not drawn from the plain, temperature-scaled distribution, if so."""
    if gconfig.logit_bias:
        return "logit_bias"
    penalties = (gconfig.frequency_penalty, gconfig.presence_penalty)
    if any(penalties) or gconfig.repetition_penalty != 1:
        return "penalty"
    if gconfig.min_p > 0:
        return "min_p"
    if gconfig.temperature == 0 or gconfig.top_p != 1 or gconfig.top_k > 0:
        return "truncated_sampling"
    return "grammar" if gconfig.grammar is not None else None


def untrainable_reason(
    gconfig: GenerationHyperparameters, output_ids: Sized, bound: Sequence[int] = ()
) -> UntrainableReason | None:
    """Return a sampled completion's reason, if it has one.

    ``bound`` says of each token whether a grammar decided it, as far as the engine tells; the
    others are the model's own. A forced call has no reason: its opening is prompt, and the rest is
    sampled given that.
    """
    if not len(output_ids):
        return "no_tokens"
    reason = has_modified_distribution(gconfig)
    if reason == "grammar" and len(bound) == len(output_ids) and not all(bound):
        return None
    return reason
