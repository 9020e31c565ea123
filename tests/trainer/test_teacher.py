"""A teacher's whole distributions are learned at the tokens that the policy sampled."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from any_agent.config import TrainConfig
from any_agent.demo.models.tiny import make_model, save_tiny_model
from any_agent.errors import ConfigError
from tests.support.errors import fails_with
from tests.support.trainer.adapters import adapted_policy
from tests.support.trainer.episodes import pair, session
from tests.support.trainer.loop import (
    Lab,
    assert_same_outcome,
    config_of,
    episodes,
    outcome,
    same,
)
from tests.support.trainer.policies import (
    VOCAB,
    assert_same,
    dense_loss,
    dense_table,
    gradients,
    other_model,
    random_rows,
    small_policy,
    teach,
    trainer_gradients,
)
from tests.support.trainer.trees import shaped_model, shaped_policy, tree_rows
from trainer.batch import training_batch
from trainer.loss import LossConfig
from trainer.model import PolicyConfig
from trainer.parallel.trainer_group import load_frozen
from trainer.policy import Policy
from trainer.rows import Row, count_trained
from trainer.updates import StepConfig
from trainer.world import leave

KINDS = ("reverse", "forward")


def dense_divergences(policy: Any, teacher: Any, row: Row, kind: str) -> Tensor:
    """The divergence at each trained token, as the formula says it, on full logits of one row."""
    ours, theirs = dense_table(policy, row), dense_table(teacher, row).detach()
    if kind == "forward":
        ours, theirs = theirs, ours
    return torch.stack(
        [
            torch.stack([p.exp() * (p - q) for p, q in zip(one, other, strict=True)]).sum()
            for one, other in zip(ours, theirs, strict=True)
        ]
    )


def dense(policy: Policy, teacher: Any, rows: Sequence[Row], config: LossConfig) -> dict[str, Any]:
    """The loss and the gradients of the reward's part and of the distillation's."""
    policy.model.zero_grad(set_to_none=True)
    found = [
        dense_divergences(policy.model, teacher, row, config.teacher_kind)
        * row.get("token_weights", torch.tensor(1.0))
        for row in rows
    ]
    more = config.teacher_coef * torch.cat(found).sum() / count_trained(rows)
    loss = dense_loss(policy.model, rows, config) + more
    loss.backward()
    out = gradients(policy)
    policy.model.zero_grad(set_to_none=True)
    return {"loss": float(loss.detach()), "gradients": out}


def distillation_law(kind: str = "reverse", packing: str = "tree", budget: int = 60) -> None:
    policy = small_policy(head_chunk=7, packing=packing)
    teacher = teach(policy, other_model())
    rows = random_rows(0)
    config = LossConfig(teacher_coef=0.7, teacher_kind=kind)  # type: ignore[arg-type]
    expected = dense(policy, teacher, rows, config)
    loss, got = trainer_gradients(policy, rows, config, token_budget=budget)
    assert loss == pytest.approx(expected["loss"], abs=1e-10)
    assert_same(got, expected["gradients"], atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("packing", "budget"), [("tree", 60), ("tree", 9), ("rows", 60)])
def test_loss_and_gradient_equal_the_divergence_over_the_whole_vocabulary(
    kind: str, packing: str, budget: int
) -> None:
    """At each row's own temperature, which both distributions have."""
    distillation_law(kind, packing, budget)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", [9, 40, 10_000])
def test_packed_trees_teach_what_plain_rows_teach(kind: str, budget: int) -> None:
    rows = tree_rows(3)
    config = LossConfig(teacher_coef=0.7, teacher_kind=kind)  # type: ignore[arg-type]
    found = []
    for packing, tokens in (("rows", 10_000), ("tree", budget)):
        policy = shaped_policy("qwen3", packing=packing)
        teach(policy, shaped_model("llama", num_hidden_layers=3))
        assert policy.runner.packing == packing
        found.append(trainer_gradients(policy, rows, config, token_budget=tokens))
    (loss, expected), (again, got) = found
    assert again == pytest.approx(loss, abs=1e-10)
    assert_same(got, expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_the_policy_itself_teaches_nothing(kind: str) -> None:
    policy = small_policy()
    teach(policy, small_policy().model)
    rows = [row | {"advantages": torch.tensor(0.0)} for row in random_rows(1)]
    config = LossConfig(teacher_coef=1.0, teacher_kind=kind)  # type: ignore[arg-type]
    loss, got = trainer_gradients(policy, rows, config)
    assert loss == pytest.approx(0, abs=1e-12)
    assert all(float(g.abs().max()) < 1e-12 for g in got.values())


@pytest.mark.parametrize("name", ["gspo", "sapo", "sft"])
def test_every_loss_gets_the_same_distillation(name: str) -> None:
    """Also one that is not of the field's form, and with weights of the tokens."""
    import trainer.sft  # noqa: F401

    rows = [row | {"token_weights": torch.tensor(0.5 + k)} for k, row in enumerate(random_rows(2))]
    policy = small_policy()
    teacher = teach(policy, other_model())
    both = LossConfig(name, is_level="token", teacher_coef=0.3)
    without = LossConfig(name, is_level="token")
    loss, got = trainer_gradients(policy, rows, both)
    plain, base = trainer_gradients(policy, rows, without)
    flat = [row | {"advantages": torch.tensor(0.0)} for row in rows]
    expected = dense(policy, teacher, flat, LossConfig(teacher_coef=0.3))
    assert loss - plain == pytest.approx(expected["loss"], abs=1e-10)
    difference = {key: got[key] - base[key] for key in got}
    assert_same(difference, expected["gradients"], atol=1e-9)


def test_steps_bring_the_policy_to_the_teacher_and_count_its_divergence() -> None:
    policy = small_policy(dtype=torch.float32, lr=1e-2)
    teacher = teach(policy, make_model(VOCAB, 5, hidden_size=16, layers=3, context=256))
    rows = [row | {"advantages": torch.tensor(0.0)} for row in random_rows(4, dtype=torch.float32)]
    config = LossConfig(teacher_coef=1.0)
    found = []
    for _ in range(60):
        with torch.no_grad():
            every = [dense_divergences(policy.model, teacher, row, "reverse") for row in rows]
        stats = policy.train(rows, None, config).stats
        means = stats.means()
        assert means["teacher_kl"] == pytest.approx(float(torch.cat(every).mean()), abs=1e-4)
        found.append(means["teacher_kl"])
    assert found[-1] < found[0] / 10


def test_several_updates_of_a_step_compare_with_the_policy_of_each() -> None:
    rows = [row | {"advantages": torch.tensor(0.0)} for row in random_rows(5)]
    config = LossConfig(teacher_coef=1.0)
    one, other = small_policy(lr=1e-3), small_policy(lr=1e-3)
    for policy in (one, other):
        teach(policy, other_model())
    one.train(rows, None, config, StepConfig(3))
    for _ in range(3):
        other.train(rows, None, config)
    for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=0)


def test_an_adapter_learns_from_a_teacher() -> None:
    policy = adapted_policy()
    teacher = teach(policy, other_model())
    rows = random_rows(6)
    config = LossConfig(teacher_coef=0.7, teacher_kind="forward")
    policy.model.zero_grad(set_to_none=True)
    expected = dense(policy, teacher, rows, config)
    loss, got = trainer_gradients(policy, rows, config)
    assert loss == pytest.approx(expected["loss"], abs=1e-10)
    assert_same(got, expected["gradients"], atol=1e-10)


def test_a_teacher_that_is_not_finite_is_named_with_the_token() -> None:
    policy = small_policy()
    teacher = teach(policy, other_model())
    assert policy.teacher is not None
    with torch.no_grad():
        teacher.get_output_embeddings().weight[3] = math.nan
    with fails_with(FloatingPointError, "divergence from the teacher", "row ", "position "):
        policy.train(random_rows(7), None, LossConfig(teacher_coef=1.0))


def test_a_step_without_the_teacher_that_its_loss_needs_is_an_error() -> None:
    with fails_with(ValueError, "teacher"):
        small_policy().train(random_rows(7), None, LossConfig(teacher_coef=1.0))


def test_no_logits_of_the_teacher_are_kept_for_the_backward_pass() -> None:
    """Of either model they exist for one chunk at a time."""
    policy = small_policy(head_chunk=5)
    teach(policy, other_model())
    passes = policy.runner.plan(random_rows(8))
    assert policy.teacher is not None
    kept: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        list(policy.runner.run(passes, taught=policy.teacher.of_passes(passes, "reverse")))
    assert kept and [shape for shape in kept if shape and shape[-1] == VOCAB] == []


def test_passes_in_bfloat16_compute_the_teacher_in_it_too(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    """Its weights are divided then, as the policy's, and its head is whole all the same."""
    save_tiny_model(tmp_path / "teacher", seed=3, hidden_size=32)
    rows = [row | {"advantages": torch.tensor(0.0)} for row in random_rows(9, dtype=torch.float32)]
    config, found = LossConfig(teacher_coef=1.0), []
    try:
        for dtype in (None, torch.bfloat16):
            policy = Policy.load(tiny_model_dir, PolicyConfig(threads=1, dtype=dtype))
            load_frozen(policy, "teacher", str(tmp_path / "teacher"))
            assert policy.teacher is not None
            assert policy.teacher.weight.dtype == (dtype or torch.float32)
            stats = policy.train(rows, 60, config).stats
            found.append(stats.means()["teacher_kl"])
    finally:
        leave()
    assert found[0] != found[1] and found[1] == pytest.approx(found[0], rel=0.05)


@pytest.fixture
def taught(tiny_model_dir: Path, tmp_path: Path) -> list[str]:
    """The settings of a run with a teacher, wider and deeper than the policy, in a folder."""
    save_tiny_model(tmp_path / "teacher", seed=3, hidden_size=96, layers=3)
    return [
        *(f"root={tmp_path / 'runs'}", f"model.path={tiny_model_dir}", "train.lr=1e-3"),
        *("train.teacher_coef=1", f"train.teacher={tmp_path / 'teacher'}", "rollout.eta=9"),
        *("train.steps=5", "train.checkpoint_every=2"),
    ]


@pytest.mark.parametrize("more", [(), ("train.kl_coef=0.1", "train.teacher_kind=forward")])
@pytest.mark.service
def test_a_killed_trainer_with_a_teacher_ends_as_if_it_had_lived(
    taught: list[str], more: tuple[str, ...]
) -> None:
    whole = Lab(config_of([*taught, "trial=whole"], *more), episodes())
    assert whole.trainer.train()
    policy = whole.trainer.policy
    assert policy.teacher is not None and (policy.reference is not None) is bool(more)
    expected = outcome(whole)
    for boundary, when in (("manifest", 2), ("step", 1), ("published", 3), ("checkpoint", 2)):
        trial = f"trial={boundary}"
        again = Lab(config_of([*taught, trial], *more), episodes()).die(boundary, when).again()
        assert again.trainer.train()
        assert_same_outcome(expected, outcome(again))
    assert [line["teacher_kl"] > 0 for line in whole.metrics] == [True] * 5


def test_other_weights_in_place_of_the_teacher_are_refused(
    taught: list[str], tmp_path: Path
) -> None:
    first = Lab(config_of(taught), episodes()).die("published", 3)
    save_tiny_model(tmp_path / "teacher", seed=4, hidden_size=96, layers=3)
    with fails_with(ConfigError, "train.teacher=", "model.safetensors"):
        first.again().trainer.train()


def test_a_repeated_step_has_its_own_teacher(taught: list[str]) -> None:
    """What was chosen since is in its place afterwards."""
    first = Lab(config_of(taught), episodes()).die("step", 2)
    plain = [one for one in taught if not one.startswith("train.teacher")]
    again = Lab(config_of(plain, "train.lr=9"), [], before=first)
    again.trainer.load()
    again.trainer.catch_up()
    assert again.trainer.policy.steps == 2 and again.trainer.policy.teacher is None
    assert same(first.weights(), again.weights())


def test_without_the_rewards_weight_only_the_teacher_teaches(taught: list[str]) -> None:
    """Groups whose sessions score alike teach as well as others."""
    alone = ("train.reward_coef=0", "train.steps=2")
    found = []
    for name, scores in (("even", (1.0, 1.0)), ("odd", (0.0, 5.0))):
        groups = [
            [session(f"{k}-a", scores[0]), session(f"{k}-b", scores[1], output=(8, 4))]
            for k in range(2)
        ]
        lab = Lab(config_of([*taught, f"trial={name}"], *alone), groups)
        assert lab.trainer.train()
        zero_variance = lab.trainer.source.zero_variance
        assert [zero_variance.reject_reason(group) for group in groups] == [None, None]
        assert [line["reward"] for line in lab.metrics] == [sum(scores) / 2] * 2
        found.append(lab.weights())
    assert same(*found)
    start = Policy.load(config_of(taught).model.path, PolicyConfig(threads=1))
    assert not same(found[0], [p.detach() for p in start.model.parameters()])


def test_the_rewards_weight_scales_every_advantage() -> None:
    def advantages(share: float) -> list[float]:
        config = TrainConfig(teacher="x", teacher_coef=1.0, reward_coef=share)
        batch = training_batch([pair("p")], config, step=0, eta=0, step_of_version={0: 0})
        return [float(row["advantages"]) for row in batch.rows]

    assert advantages(0.25) == pytest.approx([a / 4 for a in advantages(1.0)], rel=1e-6)
    assert advantages(0.25)[0] > 0 > advantages(0.25)[1]


def test_another_model_is_refused_by_name_at_the_start(
    taught: list[str], tiny_model_dir: Path, tmp_path: Path
) -> None:
    own = Policy.load(tiny_model_dir, PolicyConfig(threads=1)).model.config
    other = make_model(own.vocab_size + 3, 0, hidden_size=32, context=own.max_position_embeddings)
    other.save_pretrained(shutil.copytree(tiny_model_dir, tmp_path / "vocabulary"))
    swapped = shutil.copytree(tiny_model_dir, tmp_path / "swapped")
    file = swapped / "tokenizer.json"
    file.write_text(file.read_text().replace('"0": ', '"x0": ').replace('"1": ', '"0": '))
    damaged = save_tiny_model(tmp_path / "damaged", seed=1)
    (damaged / "model.safetensors").write_bytes(b"x")
    for folder, why in (
        ("vocabulary", f"{own.vocab_size + 3} token ids"),
        ("vocabulary", "an equal vocab_size, padding included"),
        ("swapped", "another tokenizer"),
        ("nothing", "cannot be read"),
        ("damaged", "cannot be loaded"),
    ):
        settings = [*taught, f"train.teacher={tmp_path / folder}"]
        with fails_with(ConfigError, f"train.teacher={tmp_path / folder}", why):
            Lab(config_of(settings), []).trainer.train()
