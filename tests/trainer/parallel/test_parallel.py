"""Several processes compute what one computes; what they keep, any number of them goes on from."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from any_agent.demo.models.tiny import save_tiny_model
from tests.support.trainer.adapters import adapted_policy, gradients_of_adapter, row_logprobs
from tests.support.trainer.policies import (
    assert_same,
    other_model,
    random_rows,
    small_policy,
    teach,
    trainer_gradients,
)
from tests.support.trainer.updates import SEQUENCE_LEVEL
from tests.support.trainer.world import together
from tests.support.trainer.world_cases import (
    CONFIG,
    LORA_CONFIG,
    adapters_of,
    buckets_left_early,
    commanded,
    compared,
    distilled,
    distilled_steps,
    divided_case,
    gone_on,
    gradients_of,
    led,
    run,
    saved_again,
    silent,
    split,
    trained,
    under,
    updated,
    waiting,
    weights_of,
)
from tests.support.trainer.world_cases import killed as one_killed
from trainer.checkpoint import load_checkpoint, save_checkpoint
from trainer.loss import LossConfig
from trainer.model import PolicyConfig
from trainer.parallel.trainer_group import load_frozen
from trainer.policy import Policy
from trainer.sharded_optimizer import moments
from trainer.updates import StepConfig

pytestmark = pytest.mark.service

CASES = 16
SAVING: list[dict[str, Any]] = [
    {"gradient_checkpointing": True},
    {"offload": True},
    {"gradient_checkpointing": True, "offload": True},
]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_loss_and_gradient_are_those_of_one_process_for_any_split(size: int) -> None:
    """Three divide no dimension evenly. Some cases leave processes without rows."""
    assert min(len(split(case)[0]) for case in range(CASES)) == 1
    found = together(size, gradients_of, CASES)
    policy = small_policy()
    for case in range(CASES):
        rows, _ = split(case)
        loss, gradients = trainer_gradients(policy, rows)
        assert [result[case][0] for result in found] == pytest.approx([loss] * size, abs=1e-9)
        assert_same(found[0][case][1], gradients, atol=1e-9)


@pytest.mark.parametrize(("size", "kind"), [(1, "reverse"), (2, "forward"), (3, "reverse")])
def test_a_divided_teacher_teaches_what_it_teaches_one_process(size: int, kind: Any) -> None:
    config = LossConfig(teacher_coef=0.7, teacher_kind=kind)
    found = together(size, distilled, 8, config)
    policy = small_policy()
    teach(policy, other_model())
    for case in range(8):
        loss, gradients = trainer_gradients(policy, split(case)[0], config)
        assert [result[case][0] for result in found] == pytest.approx([loss] * size, abs=1e-9)
        assert_same(found[0][case][1], gradients, atol=1e-9)


@pytest.mark.parametrize("config", [CONFIG, LORA_CONFIG])
def test_commanded_steps_beside_a_teacher_and_a_reference_are_those_of_one_process(
    tiny_model_dir: Path, tmp_path: Path, config: PolicyConfig
) -> None:
    model = str(tiny_model_dir)
    teacher = str(save_tiny_model(tmp_path, seed=3, hidden_size=96, layers=3))
    loss = LossConfig(teacher_coef=0.7, kl_coef=0.1)
    found = together(2, led, config, distilled_steps, model, teacher, loss)[0]
    alone = Policy.load(model, config)
    load_frozen(alone, "reference", model)
    load_frozen(alone, "teacher", teacher)
    for seed in range(2):
        alone.train(random_rows(seed, dtype=torch.float32), 60, loss, StepConfig(2))
    assert_same(found, weights_of(alone), atol=1e-5)


@pytest.mark.parametrize(
    ("size", "config", "cases"),
    [
        # With every input that a loss can have.
        *((size, SEQUENCE_LEVEL, 6) for size in (1, 2, 4)),
        # Losses that need the tokens of all processes.
        (2, LossConfig("vespo", off_policy_threshold=0.3, kl_coef=0.1), 3),
        (2, LossConfig("sapo", top_entropy=0.4, kl_coef=0.1), 3),
        (2, LossConfig("reinforce", second_moment=1.0, rejection_k3=4.0, kl_coef=0.1), 3),
    ],
    ids=lambda c: getattr(c, "name", str(c)),
)
def test_several_updates_are_those_of_one_process_for_any_split(
    size: int, config: LossConfig, cases: int
) -> None:
    found = together(size, updated, cases, config)
    for case in range(cases):
        policy, frozen = small_policy(lr=1e-3), small_policy()
        policy.reference = frozen.runner.logprobs
        rows, parts, _ = divided_case(case)
        stats = policy.train(rows, None, config, StepConfig(2), parts).stats
        for result in found:
            told = result[case][0]
            assert told.loss == pytest.approx(stats.loss, abs=1e-8)
            assert (told.tokens, told.is_masked) == (stats.tokens, stats.is_masked)
        assert_same(found[0][case][1], weights_of(policy), atol=1e-7)


def test_a_reference_that_several_processes_compute_is_that_of_one(tiny_model_dir: Path) -> None:
    """Each takes a part of the rows, and the leader gets them all in their order."""
    found = together(3, led, CONFIG, compared, str(tiny_model_dir), range(3))[0]
    start = Policy.load(tiny_model_dir, CONFIG)
    for seed in range(3):
        expected = start.runner.row_logprobs(random_rows(seed, dtype=torch.float32))
        assert len(found[seed]) == len(expected)
        for got, one in zip(found[seed], expected, strict=True):
            torch.testing.assert_close(got, one.double(), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("config", "broken"), [(CONFIG, 0), (CONFIG, 1), (LORA_CONFIG, 0)])
def test_a_step_of_several_updates_is_undone_in_every_process(
    tiny_model_dir: Path, config: PolicyConfig, broken: int
) -> None:
    model = str(tiny_model_dir)
    expected, _ = together(2, led, config, commanded, model, None)[0]
    found, said = together(2, led, config, commanded, model, broken)[0]
    assert "advantage at micro-batch" in said
    assert_same(found, expected, atol=0)
    alone = Policy.load(model, config)
    load_frozen(alone, "reference", model)
    for seed in (0, 2):
        rows, parts = random_rows(seed, dtype=torch.float32), [[0, 2, 4], [1, 3, 5]]
        alone.train(rows, 60, SEQUENCE_LEVEL, StepConfig(2, lr=2e-3), parts)
    assert_same(found, weights_of(alone), atol=1e-5)


def test_saving_memory_changes_neither_gradients_nor_steps() -> None:
    plain, *others = together(2, under, torch.float64, [{}, *SAVING])[0]
    for (loss, gradients), weights in others:
        assert loss == pytest.approx(plain[0][0], abs=1e-12)
        assert_same(gradients, plain[0][1], atol=1e-12)
        assert_same(weights, plain[1], atol=1e-9)


def test_two_processes_with_an_adapter_compute_what_one_computes() -> None:
    results = together(2, adapters_of, [{}, SAVING[-1]], 6)
    policy, base = adapted_policy(), small_policy()
    bare = torch.cat([row_logprobs(base, [row])[0] for row in split(0)[0]])
    for number in range(2):
        found, without, weights = results[0][number]
        for case in range(6):
            rows, budget = split(case)
            loss, expected = gradients_of_adapter(policy, rows, budget)
            assert [result[number][0][case][0] for result in results] == (
                pytest.approx([loss] * 2, abs=1e-9)
            )
            assert_same(found[case][1], expected, atol=1e-9)
        torch.testing.assert_close(without, bare, atol=1e-12, rtol=0)
        assert_same(weights, weights_of(policy), atol=0)


def test_passes_in_bfloat16_are_those_in_float32_but_for_its_digits() -> None:
    """8 bits of them: a relative error of 2**-8 in each number, and few of them add up."""
    configs = [{}, {"dtype": torch.bfloat16}]
    exact, rough = together(2, under, torch.float32, configs)[0]
    assert rough[0][0] == pytest.approx(exact[0][0], rel=0.02)
    error, size = (
        torch.cat([t.flatten() for t in part])
        for part in (
            [rough[0][1][name] - t for name, t in exact[0][1].items()],
            exact[0][1].values(),
        )
    )
    assert 0 < float(error.norm()) < 0.05 * float(size.norm())
    assert {t.dtype for t in [*rough[0][1].values(), *rough[1].values()]} == {torch.float32}


@pytest.mark.parametrize("config", [CONFIG, LORA_CONFIG], ids=["all weights", "adapter"])
def test_a_checkpoint_of_two_processes_is_resumed_by_one_two_or_four(
    tiny_model_dir: Path, tmp_path: Path, config: PolicyConfig
) -> None:
    def in_processes(size: int, case: Any, *arguments: Any) -> dict[str, Tensor]:
        found: dict[str, Tensor] = together(size, led, config, case, *arguments)[0]
        return found

    model = str(tiny_model_dir)
    expected = in_processes(2, trained, model, range(2), str(tmp_path / "two"))
    checkpoint = tmp_path / "two" / "step-00000002"
    one, state = load_checkpoint(checkpoint, config)
    assert state == {"seen": 2} and one.steps == 2
    assert_same(weights_of(one), expected, atol=0)
    assert next(iter(moments(one).values())).any(), "comparing zeros proves nothing"

    again = in_processes(4, saved_again, str(checkpoint), str(tmp_path / "four"))
    assert_same(again, expected, atol=0)
    by_way_of_four, _ = load_checkpoint(tmp_path / "four" / "step-00000002", config)
    assert_same(weights_of(by_way_of_four), expected, atol=0)
    assert_same(moments(by_way_of_four), moments(one), atol=0)

    # A step from there, by two as if they had not stopped, and by one, but for rounding.
    unbroken = in_processes(2, trained, model, range(3), str(tmp_path / "unbroken"))
    assert_same(in_processes(2, gone_on, str(checkpoint), range(2, 3)), unbroken, atol=0)
    one.train(random_rows(2, dtype=torch.float32), 60)
    assert_same(weights_of(one), unbroken, atol=1e-5)


def test_a_checkpoint_of_one_process_is_resumed_by_three(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    """Shares of different sizes."""
    policy = Policy.load(tiny_model_dir, CONFIG)
    policy.train(random_rows(0, dtype=torch.float32), 60)
    checkpoint = save_checkpoint(tmp_path / "one", policy, tiny_model_dir, {})
    found = together(3, led, CONFIG, saved_again, str(checkpoint), str(tmp_path / "three"))[0]
    assert_same(found, weights_of(policy), atol=0)
    back, _ = load_checkpoint(tmp_path / "three" / "step-00000001", CONFIG)
    assert_same(moments(back), moments(policy), atol=0)


def test_buckets_may_be_left_and_hold_the_weights_of_all(tiny_model_dir: Path) -> None:
    found, some = together(2, led, CONFIG, buckets_left_early, str(tiny_model_dir))[0]
    policy = Policy.load(tiny_model_dir, CONFIG)
    assert len(some) == 2 and all(some)
    policy.train(random_rows(0, dtype=torch.float32), 60)
    expected = weights_of(policy)
    assert_same(found, expected, atol=1e-5)


def test_a_process_that_is_gone_is_named_in_the_error_of_the_others() -> None:
    ((said, told),) = together(2, one_killed, dying=(1,))
    assert "is gone" in said
    assert "is gone" in told


def test_a_process_that_hangs_is_reported_by_every_process() -> None:
    for said in together(3, silent, stopped=(1,)):
        assert "is gone" in said


def test_a_full_disk_of_either_process_is_waited_out(tiny_model_dir: Path, tmp_path: Path) -> None:
    checkpoints, loss = together(2, waiting, str(tiny_model_dir), str(tmp_path))[0]
    assert checkpoints == [1]
    assert math.isfinite(loss)
    load_checkpoint(tmp_path / "step-00000001", CONFIG)


def test_a_run_that_is_killed_or_stopped_goes_on_as_if_nothing_had_been(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    base = [f"model.path={tiny_model_dir}", "train.lr=1e-3", "train.seed=1", "train.steps=4"]
    base += ["train.checkpoint_every=2", "rollout.eta=9", "train.micro_batch_tokens=16"]
    (whole, _) = together(2, run, [*base, f"root={tmp_path / 'whole'}"], 0)
    settings = [*base, f"root={tmp_path / 'killed'}"]
    assert together(2, run, settings, 0, 3, dying=(0, 1)) == []
    (killed, _) = together(2, run, settings, 3)

    settings = [*base, f"root={tmp_path / 'stopped'}"]
    (stopped, _) = together(2, run, settings, 0, None, 3)
    assert stopped["name"] == "step-00000003", "it kept one of the step under way"
    (resumed, _) = together(2, run, settings, 3)
    for again in (killed, resumed):
        assert again["steps"] == whole["steps"] == [1, 2, 3, 4]
        assert again["state"] == whole["state"]
        assert_same(again["tensors"], whole["tensors"], atol=0)
