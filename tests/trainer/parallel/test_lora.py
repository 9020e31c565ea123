"""An adapter that several processes train is that of one; one or several go on with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.trainer.adapters import adapted_policy, gradients_of_adapter, row_logprobs
from tests.support.trainer.policies import assert_same, random_rows, small_policy
from tests.support.trainer.updates import SEQUENCE_LEVEL
from tests.support.trainer.world import together
from tests.support.trainer.world_cases import (
    LORA_CONFIG,
    adapters_of,
    commanded,
    gone_on,
    led_lora,
    split,
    trained,
    weights_of,
)
from trainer.checkpoint import load_checkpoint
from trainer.parallel.trainer_group import load_reference
from trainer.policy import Policy
from trainer.sharded_optimizer import moments
from trainer.updates import StepConfig

pytestmark = pytest.mark.service
CONFIGS = [{}, {"gradient_checkpointing": True, "offload": True}]
CASES = 6


def test_two_processes_with_an_adapter_compute_what_one_computes() -> None:
    results = together(2, adapters_of, CONFIGS, CASES)
    policy, base = adapted_policy(), small_policy()
    bare = torch.cat([row_logprobs(base, [row])[0] for row in split(0)[0]])
    for number, _ in enumerate(CONFIGS):
        found, without, weights = results[0][number]
        for case in range(CASES):
            rows, budget = split(case)
            loss, expected = gradients_of_adapter(policy, rows, budget)
            assert [result[number][0][case][0] for result in results] == (
                pytest.approx([loss] * 2, abs=1e-9)
            )
            assert_same(found[case][1], expected, atol=1e-9)
        torch.testing.assert_close(without, bare, atol=1e-12, rtol=0)
        assert_same(weights, weights_of(policy), atol=0)


def test_an_adapters_checkpoint_of_two_processes_is_resumed_by_one_or_two(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    model, root = str(tiny_model_dir), str(tmp_path / "two")
    expected = together(2, led_lora, trained, model, range(2), root, LORA_CONFIG)[0]
    checkpoint = tmp_path / "two" / "step-00000002"
    one, state = load_checkpoint(checkpoint, LORA_CONFIG)
    assert state == {"seen": 2} and one.steps == 2
    assert_same(weights_of(one), expected, atol=0)
    assert next(iter(moments(one).values())).any(), "comparing zeros proves nothing"

    unbroken = together(
        2, led_lora, trained, model, range(3), str(tmp_path / "unbroken"), LORA_CONFIG
    )[0]
    assert_same(
        together(2, led_lora, gone_on, str(checkpoint), range(2, 3), LORA_CONFIG)[0],
        unbroken,
        atol=0,
    )
    one.train(random_rows(2, dtype=torch.float32), 60)
    assert_same(weights_of(one), unbroken, atol=1e-5)


def test_several_updates_beside_the_base_are_those_of_one_process(tiny_model_dir: Path) -> None:
    model = str(tiny_model_dir)
    found, _ = together(2, led_lora, commanded, model, None, LORA_CONFIG)[0]
    undone, said = together(2, led_lora, commanded, model, 0, LORA_CONFIG)[0]
    assert "advantage at micro-batch" in said
    assert all(torch.equal(found[name], tensor) for name, tensor in undone.items())
    alone = Policy.load(model, LORA_CONFIG)
    load_reference(alone, model)
    for seed in (0, 2):
        rows, parts = random_rows(seed, dtype=torch.float32), [[0, 2, 4], [1, 3, 5]]
        alone.train(rows, 60, SEQUENCE_LEVEL, StepConfig(2, lr=2e-3), parts)
    assert_same(found, weights_of(alone), atol=1e-5)
