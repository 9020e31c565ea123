"""The frozen models beside the policy: the reference that a KL term, of the loss or in the reward,
compares it with, and the teacher from which the loss distils."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig

from any_agent.chat import load_hf_tokenizer
from any_agent.errors import ConfigError
from trainer.lora import switched_off
from trainer.model import loaded
from trainer.packing import Pass
from trainer.pass_runner import PassRunner, Teacher
from trainer.policy import Policy
from trainer.rows import Row, count_trained
from trainer.updates import ReferenceLogprobs
from trainer.weight_folders import tokenizer_of
from trainer.world import UnshardedModel, added

SETTINGS = {"reference": "train.reference_model", "teacher": "train.teacher"}
"""The frozen models, by the names of the policy's attributes, and the settings that name them."""


def require_alike(setting: str, path: str, policy: Policy) -> None:
    """Raise ConfigError for a model that cannot compute the policy's rows."""
    ours = policy.model.config.get_text_config()
    try:
        theirs = AutoConfig.from_pretrained(path).get_text_config()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{setting}={path} cannot be read: {error}") from error
    needed = (
        ("vocab_size", "token ids", "an equal vocab_size, padding included"),
        ("max_position_embeddings", "positions", "at least the policy's context"),
    )
    for name, what, advice in needed:
        mine, other = getattr(ours, name, None), getattr(theirs, name, None)
        if other != mine if name == "vocab_size" else (other or 0) < (mine or 0):
            raise ConfigError(
                f"{setting}={path} has {other} {what} ({name}), the policy {mine}: name a model "
                f"with {advice}, or leave it out"
            )


def require_same_tokens(setting: str, path: str, own: str) -> None:
    """Raise ConfigError for a model whose token ids mean other texts than those of ``own``: its
    log-probabilities would be those of other answers.

    A folder without a tokenizer, and one that is the same, are not compared.
    """
    if not path or path == own:
        return
    try:
        theirs = load_hf_tokenizer(path).get_vocab()
    except ConfigError:
        return
    ours = load_hf_tokenizer(str(tokenizer_of(own))).get_vocab()
    if theirs != ours:
        every = theirs.keys() | ours.keys()
        token = min(token for token in every if theirs.get(token) != ours.get(token))
        raise ConfigError(
            f"{setting}={path} has another tokenizer than the policy: {token!r} is its token "
            f"{theirs.get(token)}, and the policy's {ours.get(token)}; name a model with the "
            "policy's tokenizer"
        )


def frozen_logprobs(path: str, policy: Policy, *, base: bool = False) -> ReferenceLogprobs:
    """Return a frozen model's log-probabilities.

    The ``base`` of the policy's adapter is not loaded again: it is the policy without the adapter.
    Any other is loaded; raises as :func:`_frozen`.
    """
    if base:
        return partial(_without_adapter, policy)
    _, runner = _frozen("reference", path, policy)
    return runner.logprobs


def frozen_teacher(path: str, policy: Policy) -> Teacher:
    """Load the teacher; raises as :func:`_frozen`."""
    return Teacher.of(*_frozen("teacher", path, policy), policy.device)


def _frozen(role: str, path: str, policy: Policy) -> tuple[UnshardedModel, PassRunner]:
    """Load a model beside the policy, divided as that is.

    All processes of the policy's world must call it together. Raises ConfigError for a model that
    cannot be loaded, StartupError for one that lacks weights.
    """
    ours = policy.runner
    config = replace(
        policy.config,
        packing="tree" if ours.packing == "tree" else "rows",
        compile=ours.fused,
        gradient_checkpointing=False,
        lora=None,
    )
    try:
        whole = loaded(path, config, policy.world, frozen=True)
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"{SETTINGS[role]}={path} cannot be loaded: {error}") from error
    runner = PassRunner(whole, policy.device, config, policy.world, ours.pass_tokens)
    # It computes the policy's passes.
    ours.compute_like(runner)
    return whole, runner


def _without_adapter(policy: Policy, passes: Sequence[Pass]) -> list[Tensor]:
    with switched_off(policy.model):
        return policy.runner.logprobs(passes)


def reference_logprobs(
    policy: Policy, rows: Sequence[Row], token_budget: int | None = None
) -> list[Tensor]:
    """Return the reference model's log-probabilities of each row's trained tokens, float64.

    Each row states its temperature. The processes that the policy leads take their parts.
    """
    counts = [count_trained([row]) for row in rows]
    starts = [end - n for end, n in zip(accumulate(counts), counts, strict=True)]
    placed = [row | {"starts": torch.tensor(k)} for row, k in zip(rows, starts, strict=True)]
    budget = policy.runner.budget(token_budget)
    command = {"do": "compare", "tokens": sum(counts), "budget": budget, "shapes": ()}
    if policy.leader is None:
        found = compare(policy, command, placed)
    else:
        size = policy.leader.world.size
        by_rank, command["shapes"] = policy.runner.shares(placed, size, budget)
        with policy.leader.run(command, by_rank):
            found = compare(policy, command, by_rank[0])
    policy.clock.lap("forward")
    return list(torch.split(found, counts))


def compare(policy: Policy, command: Mapping[str, Any], rows: Sequence[Row]) -> Tensor:
    """Return the reference's log-probabilities of the rows of all processes, each at its `starts`.

    ``rows`` are this process's. All processes must call it together.
    """
    assert policy.reference is not None, "it is loaded"
    out = torch.zeros(command["tokens"], dtype=torch.float64)
    how = command["budget"], command["shapes"]
    found = policy.runner.of_rows(policy.reference, rows, *how)
    for row, values in zip(rows, found, strict=True):
        start = int(row["starts"])
        out[start : start + len(values)] = values
    return out if policy.world is None else added(out, policy.world)
