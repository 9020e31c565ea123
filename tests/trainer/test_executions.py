"""One task, one start: by rows, by the tree of prefixes, and depth-first a policy learns alike."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from any_agent.config import TrainConfig
from any_agent.types import Trajectory, id_array, logprob_array
from tests.support.trainer.episodes import interaction
from tests.support.trainer.policies import VOCAB, small_policy
from trainer.batch import training_batch
from trainer.from_config import loss_config
from trainer.policy import Policy
from trainer.updates import StepConfig

pytestmark = pytest.mark.service

STEPS, GROUPS, SIZE, TURNS, OUTPUT = 8, 2, 6, 2, 4
EXECUTIONS = {"rows": ("rows", 10_000), "tree": ("tree", 10_000), "depth-first": ("tree", 24)}
CONFIG = TrainConfig(preset="gspo", eps_low=0.2, eps_high=0.3, minibatches=2, epochs_per_batch=2)  # type: ignore[call-arg]


def answers(policy: Policy, asked: Tensor, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sampled tokens of every session, and their log-probabilities, [sessions, OUTPUT]."""
    ids, found = asked, []
    with torch.no_grad():
        for _ in range(OUTPUT):
            table = policy.model(input_ids=ids, use_cache=False).logits[:, -1].log_softmax(-1)
            token = torch.multinomial(table.exp(), 1, generator=g)
            found.append(table.gather(1, token))
            ids = torch.cat([ids, token], 1)
    return ids[:, -OUTPUT:], torch.cat(found, 1)


def talks(policy: Policy, group: int, g: torch.Generator) -> list[Trajectory]:
    """Sessions of several turns; the reward is the share of sampled ids in the upper half."""
    sessions = [Trajectory(f"{group}-{k}", f"{group}", [], final_reward=0.0) for k in range(SIZE)]
    context, shares = torch.zeros(SIZE, 0, dtype=torch.int64), torch.zeros(SIZE)
    for turn in range(TURNS):
        question = torch.tensor([3 + group, 5 + turn, 7]).expand(SIZE, 3)
        context = torch.cat([context, question], 1)
        tokens, logprobs = answers(policy, context, g)
        context = torch.cat([context, tokens], 1)
        shares += (tokens >= VOCAB // 2).float().mean(1) / TURNS
        for one, ids, values in zip(sessions, tokens, logprobs, strict=True):
            parent = one.interactions[-1].id if turn else None
            made = interaction(f"{one.session_id}-{turn}", parent, session=one.session_id)
            made = replace(
                made,
                prompt_delta_ids=id_array(question[0].tolist()),
                output_ids=id_array(ids.tolist()),
                output_logprobs=logprob_array(values.numpy()),
                output_versions=id_array([0] * OUTPUT),
            )
            one.interactions.append(made)
    return [replace(one, final_reward=float(r)) for one, r in zip(sessions, shares, strict=True)]


@cache
def run(execution: str) -> tuple[list[float], list[int], dict[str, Tensor]]:
    """Each step's mean reward and the tokens that it computed, and the last weights."""
    packing, budget = EXECUTIONS[execution]
    policy = small_policy(lr=1e-2, packing=packing)
    g = torch.Generator().manual_seed(0)
    rewards, computed = [], []
    for _ in range(STEPS):
        groups = [talks(policy, group, g) for group in range(GROUPS)]
        batch = training_batch(groups, CONFIG, step=0, eta=0, step_of_version={0: 0})
        rewards.append(sum(batch.scores) / len(batch.scores))
        settings = StepConfig(CONFIG.epochs_per_batch)
        done = policy.train(batch.rows, budget, loss_config(CONFIG), settings, batch.minibatches)
        computed.append(done.stats.tokens_computed)
    return rewards, computed, policy.model.state_dict()


def test_the_policy_learns() -> None:
    rewards, _, _ = run("tree")
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.2, rewards


@pytest.mark.parametrize("execution", ["rows", "depth-first"])
@pytest.mark.service
def test_the_curve_is_that_of_the_tree_within_rounding(execution: str) -> None:
    """The same tokens are sampled to the end, so that the curves are the same."""
    expected, _, weights = run("tree")
    rewards, _, found = run(execution)
    assert rewards == pytest.approx(expected, abs=1e-9)
    for name, tensor in weights.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-8, rtol=0)


def test_they_compute_different_tokens() -> None:
    counts = {execution: run(execution)[1][0] for execution in EXECUTIONS}
    assert counts["tree"] == counts["depth-first"] < counts["rows"]
