"""Workloads and random models for `benchmarks/trainer.py`: what a step trains on, made by code."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from trainer.rows import Row, with_training_signal


@dataclass(frozen=True, slots=True)
class Workload:
    """Sessions of one optimizer step, all alike: ``parents`` has the turn that each continues.

    A session begins with its group's ``system`` tokens. A turn adds ``added`` tokens to the turn
    before it, then ``output`` sampled ones, which are trained on.
    """

    about: str
    groups: int
    sessions: int
    system: int
    parents: tuple[int, ...]
    added: int
    output: int
    model: str = "27M"

    def smallest(self) -> Workload:
        """Return the same kind of step, small enough for a tiny model."""
        return replace(
            self,
            groups=min(self.groups, 2),
            sessions=min(self.sessions, 2),
            system=self.system and 12,
            parents=self.parents[: min(len(self.parents), 5)],
            added=self.added and 5,
            output=4,
            model="tiny head" if self.model == "head" else "tiny",
        )


def chain(turns: int) -> tuple[int, ...]:
    return tuple(range(-1, turns - 1))


WORKLOADS = {
    "W1": Workload("8 sessions x 8 turns, one system prompt", 1, 8, 512, chain(8), 64, 64),
    "W2": Workload("64 branching sessions in 8 groups", 8, 8, 96, (-1, 0, 1, 0, 3), 24, 32),
    "W3": Workload("64 single turns, nothing shared", 64, 1, 0, (-1,), 256, 128),
    **{
        f"W4/{turns}": Workload(f"an episode of {turns} turns", 1, 1, 0, chain(turns), 16, 16)
        for turns in (25, 50, 100, 200)
    },
    "W5": Workload(
        "64 short answers in 8 groups, 135 M parameters", 8, 8, 45, (-1,), 0, 24, "135M"
    ),
    "head": Workload("one row, a vocabulary of 150k", 1, 1, 0, (-1,), 2048, 2048, "head"),
}

QUICK = {
    "W1": replace(
        WORKLOADS["W1"], about="2 sessions x 8 turns, one system prompt", sessions=2, model="3M"
    ),
    "W2": replace(
        WORKLOADS["W2"], about="8 branching sessions in 2 groups", groups=2, sessions=4, model="3M"
    ),
    "W3": replace(WORKLOADS["W3"], about="4 single turns, nothing shared", groups=4, model="3M"),
    "W4/25": replace(WORKLOADS["W4/25"], model="3M"),
    "W5": replace(
        WORKLOADS["W5"],
        about="4 short answers in 2 groups, 35 M parameters",
        groups=2,
        sessions=2,
        model="35M",
    ),
    "head": replace(WORKLOADS["head"], added=1024, output=1024),
}
"""Fewer sessions of the same lengths, and smaller models: a CPU without instructions for bfloat16
takes some twenty times as long in it as in float32."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One model call of a session: all its tokens, the first ``prompt`` of them its prompt."""

    ids: list[int]
    logprobs: list[float]
    prompt: int
    parent: int


@dataclass(frozen=True, slots=True)
class TrainingRows:
    """The rows of one step in two forms with the same trained tokens, and the same loss."""

    rows: list[Row]
    """One row for each turn; its output is trained on."""
    paths: list[Row]
    """One row for each path from a session's start to a last turn; every output is trained once."""
    distinct: int
    """The tokens that differ in themselves or in what comes before them."""


def make_rows(workload: Workload, vocabulary: int) -> TrainingRows:
    """Draw the sessions; the same workload always gives the same rows."""
    rng = random.Random(workload.about)
    rows: list[Row] = []
    paths: list[Row] = []
    for _ in range(workload.groups):
        system = _draw(rng, vocabulary, workload.system)
        for _ in range(workload.sessions):
            turns = _session(rng, workload, vocabulary, system)
            advantage = rng.gauss(0, 1)
            rows += (_row(turns, [k], advantage) for k in range(len(turns)))
            paths += (_row(turns, part, advantage) for part in _paths(turns))
    return TrainingRows(rows, paths, _distinct(paths))


def _draw(rng: random.Random, vocabulary: int, count: int) -> list[int]:
    return [rng.randrange(1, vocabulary) for _ in range(count)]


def _session(
    rng: random.Random, workload: Workload, vocabulary: int, system: list[int]
) -> list[Turn]:
    """Return a session's turns; the behaviour is close to a random model's, which is uniform."""
    turns: list[Turn] = []
    for parent in workload.parents:
        before = turns[parent] if parent >= 0 else Turn(system, [0.0] * len(system), 0, -1)
        new = _draw(rng, vocabulary, workload.added + workload.output)
        sampled = [rng.gauss(-math.log(vocabulary), 0.3) for _ in range(workload.output)]
        logprobs = before.logprobs + [0.0] * workload.added + sampled
        prompt = len(before.ids) + workload.added
        turns.append(Turn(before.ids + new, logprobs, prompt, parent))
    return turns


def _paths(turns: Sequence[Turn]) -> Iterator[list[int]]:
    """Yield for each last turn, latest turn first, the turns to train on in its row."""
    parents = {turn.parent for turn in turns}
    done: set[int] = set()
    for last in range(len(turns)):
        if last in parents:
            continue
        path, k = [], last
        while k >= 0:
            path.append(k)
            k = turns[k].parent
        new = [k for k in path if k not in done]
        done.update(new)
        yield new


def _row(turns: Sequence[Turn], trained: list[int], advantage: float) -> Row:
    """Return the row of the first of these turns, with the outputs of all of them trained on."""
    last = turns[trained[0]]
    mask = torch.zeros(len(last.ids), dtype=torch.int32)
    for k in trained:
        mask[turns[k].prompt : len(turns[k].ids)] = 1
    row = {
        "input_ids": torch.tensor(last.ids, dtype=torch.int32),
        "loss_mask": mask,
        "logprobs": torch.tensor(last.logprobs) * mask,
        "versions": torch.where(mask.bool(), 0, -1).int(),
        "attention_mask": torch.ones(len(last.ids), dtype=torch.bool),
        "rewards": torch.tensor(advantage),
    }
    return with_training_signal(row, advantage=advantage, temperature=1.0)


def _distinct(rows: Sequence[Row]) -> int:
    known: dict[tuple[int, int], int] = {}
    for row in rows:
        node = 0
        for token in row["input_ids"].tolist():
            node = known.setdefault((node, token), len(known) + 1)
    return len(known)


def length(row: Row) -> int:
    return int(row["input_ids"].shape[0])


def make_model(name: str) -> Any:
    """Return a random float32 causal LM with torch's own attention: always the same one."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

    shared: dict[str, Any] = {
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
        "eos_token_id": None,
        "pad_token_id": None,
        "bos_token_id": None,
    }
    if name in ("135M", "35M"):
        # SmolLM2-135M's shape, and two of its layers.
        config: Any = LlamaConfig(
            vocab_size=49_152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30 if name == "135M" else 2,
            num_attention_heads=9,
            num_key_value_heads=3,
            **shared,
        )
    else:
        vocabulary, hidden, layers, heads = {
            "27M": (4096, 512, 8, 8),
            "3M": (4096, 256, 2, 4),
            "head": (151_936, 64, 1, 2),
            "tiny": (64, 32, 2, 2),
            "tiny head": (2048, 32, 1, 2),
        }[name]
        config = Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads // 2,
            head_dim=hidden // heads,
            **shared,
        )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
