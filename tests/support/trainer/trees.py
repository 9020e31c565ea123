"""Rows that share prefixes in every way that sessions can, and models to compute them."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from tests.support.trainer.policies import VOCAB, in_precision, row_of
from trainer.model import PolicyConfig
from trainer.policy import Policy
from trainer.rows import Row, with_training_signal


def tree_rows(seed: int, dtype: torch.dtype = torch.float64, count: int = 9) -> list[Row]:
    """Rows of two groups: branches, chains of turns, single tokens, a row that is another's prefix,
    duplicates with other advantages, choices that begin alike, and tokens that are masked."""
    chance = random.Random(seed)
    known: list[list[int]] = [
        [group, *(chance.randrange(VOCAB) for _ in range(chance.randint(1, 9)))] for group in (1, 2)
    ]
    rows = []
    for _ in range(count):
        before = chance.choice(known)
        kept = before[: chance.choice([len(before), len(before), chance.randint(1, len(before))])]
        # Few different tokens, so that siblings are often equal.
        fresh = [chance.randrange(3) for _ in range(chance.choice([0, 1, 3, 14]))]
        ids = [*kept, *fresh]
        if len(ids) < 2:
            ids.append(chance.randrange(VOCAB))
        known.append(ids)
        rows.append(_row(ids, chance, dtype))
    twin = chance.choice(rows)
    rows.append(_row(twin["input_ids"].tolist(), chance, dtype))
    rows.append(dict(rows[0]))
    chance.shuffle(rows)
    return rows


def episode_rows(turns: int) -> list[Row]:
    """The rows of one episode, each of which continues the one before it by four tokens."""
    chance = random.Random(turns)
    ids = [chance.randrange(VOCAB) for _ in range(4 * turns)]
    return [_row(ids[: 4 * turn], chance, torch.float64) for turn in range(1, turns + 1)]


def _row(ids: list[int], chance: random.Random, dtype: torch.dtype) -> Row:
    mask = [0, *(int(chance.random() < 0.6) for _ in ids[1:])]
    if not any(mask):
        mask[chance.randrange(1, len(ids))] = 1
    spread = torch.tensor([abs(chance.gauss(0, 1.5)) for _ in ids], dtype=dtype)
    row = row_of(ids, mask, logprobs=-3.9 - spread)
    temperature = chance.choice([1.0, 1.0, 0.7])
    return with_training_signal(row, advantage=chance.gauss(0, 1), temperature=temperature)


SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {"tie_word_embeddings": False},
    "llama, tied": {"model_type": "llama", "tie_word_embeddings": True},
    "gemma": {"num_key_value_heads": 1},
    "mistral": {"sliding_window": 256, "num_key_value_heads": 4},
}


def shaped_model(shape: str, dtype: torch.dtype = torch.float64, **settings: Any) -> Any:
    """A model of two layers whose weights are large enough that attention matters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    given = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    given |= SHAPES[shape] | settings
    kind = given.pop("model_type", shape)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = AutoConfig.for_model(kind, **given)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return in_precision(model, dtype)


def shaped_policy(shape: str, dtype: torch.dtype = torch.float64, **settings: Any) -> Policy:
    """The policy of such a model; ``settings`` are those of the policy."""
    return Policy(shaped_model(shape, dtype), PolicyConfig(**settings))


def relative(found: Tensor, expected: Tensor) -> float:
    """The norm of the difference in units of what is expected."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())
