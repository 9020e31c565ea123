"""The reference model is the one that training began with, whatever the policy becomes."""

from __future__ import annotations

import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from any_agent.demo.models.tiny import make_model, save_tiny_model
from any_agent.errors import ConfigError
from tests.support.errors import fails_with
from tests.support.trainer.adapters import CONFIG as ADAPTED
from tests.support.trainer.adapters import stirred
from tests.support.trainer.episodes import pair
from tests.support.trainer.loop import Lab, config_of
from tests.support.trainer.policies import random_rows
from tests.support.trainer.trees import shaped_model
from trainer.loss import LossConfig
from trainer.model import PolicyConfig, loaded
from trainer.parallel.trainer_group import load_frozen
from trainer.policy import Policy
from trainer.reference import frozen_logprobs, require_alike, require_same_tokens
from trainer.updates import ReferenceLogprobs, StepConfig
from trainer.weight_folders import save_pretrained
from trainer.world import leave

CONFIG = PolicyConfig(lr=1e-2, threads=1)


def logprobs(policy: Policy, compute: ReferenceLogprobs | None = None) -> list[Tensor]:
    """Those of the policy itself, or of what is given."""
    passes = policy.runner.plan(random_rows(0, dtype=torch.float32), 30)
    return (compute or policy.runner.logprobs)(passes)


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_the_reference_stays_while_the_policy_moves(tiny_model_dir: Path) -> None:
    policy = Policy.load(tiny_model_dir, CONFIG)
    reference = frozen_logprobs(str(tiny_model_dir), policy)
    before = logprobs(policy)
    assert equal(logprobs(policy, reference), before)
    policy.train(random_rows(1, dtype=torch.float32))
    assert equal(logprobs(policy, reference), before)
    assert not equal(logprobs(policy), before)


def test_the_reference_computes_in_the_precision_of_the_policy(tiny_model_dir: Path) -> None:
    try:
        policy = Policy.load(tiny_model_dir, PolicyConfig(threads=1, dtype=torch.bfloat16))
        reference = frozen_logprobs(str(tiny_model_dir), policy)
        assert equal(logprobs(policy, reference), logprobs(policy))
    finally:
        leave()


def test_the_reference_after_a_restart_is_the_model_of_the_beginning(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    base = [f"root={tmp_path}", f"model.path={tiny_model_dir}", "train.lr=1e-2", "train.kl_coef=1"]
    first = Lab(config_of(base, "train.steps=2", "rollout.eta=9"), [pair("a"), pair("b")])
    assert first.trainer.train()
    again = Lab(config_of(base, "train.steps=3"), [], before=first)
    again.trainer.load()
    policy = again.trainer.policy
    assert policy.steps == 2 and policy.reference is not None
    start = Policy.load(tiny_model_dir, CONFIG)
    assert equal(logprobs(policy, policy.reference), logprobs(start))
    assert not equal(logprobs(policy), logprobs(start))


def test_another_model_is_refused_by_name_at_the_start(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    policy = Policy.load(tiny_model_dir, CONFIG)
    own = policy.model.config
    other = make_model(own.vocab_size + 3, 0, hidden_size=32, context=own.max_position_embeddings)
    other.save_pretrained(tmp_path / "vocabulary")
    make_model(own.vocab_size, 0, hidden_size=32, context=16).save_pretrained(tmp_path / "short")
    with fails_with(ConfigError, f"{own.vocab_size + 3} token ids", f"policy {own.vocab_size}"):
        require_alike("train.reference_model", str(tmp_path / "vocabulary"), policy)
    with fails_with(ConfigError, "16 positions"):
        require_alike("train.reference_model", str(tmp_path / "short"), policy)
    with fails_with(ConfigError, "train.reference_model=", tmp_path / "nothing"):
        require_alike("train.reference_model", str(tmp_path / "nothing"), policy)
    swapped = shutil.copytree(tiny_model_dir, tmp_path / "swapped")
    file = swapped / "tokenizer.json"
    file.write_text(file.read_text().replace('"0": ', '"x0": ').replace('"1": ', '"0": '))
    with fails_with(ConfigError, "another tokenizer", "'0'"):
        require_same_tokens("train.reference_model", str(swapped), str(tiny_model_dir))
    settings = [f"root={tmp_path}", f"model.path={tiny_model_dir}", "train.kl_coef=0.1"]
    settings.append(f"train.reference_model={tmp_path / 'vocabulary'}")
    with fails_with(ConfigError, "train.reference_model="):
        Lab(config_of(settings), []).trainer.train()


def test_the_base_of_an_adapter_is_the_policy_without_it(tiny_model_dir: Path) -> None:
    policy = stirred(Policy.load(tiny_model_dir, ADAPTED))
    load_frozen(policy, "reference", str(tiny_model_dir))
    assert policy.reference is not None and not hasattr(policy.reference, "__self__")
    start = Policy.load(tiny_model_dir, CONFIG)
    before = logprobs(start)
    assert equal(logprobs(policy, policy.reference), before)
    now = logprobs(policy)
    assert not equal(now, before)
    rows = random_rows(1, dtype=torch.float32)
    policy.train(rows, None, LossConfig(kl_coef=1.0), StepConfig(2))
    assert equal(logprobs(policy, policy.reference), before)
    assert not equal(logprobs(policy), now)


def test_an_adapters_reference_may_be_another_model(tiny_model_dir: Path, tmp_path: Path) -> None:
    other = Policy.load(tiny_model_dir, CONFIG)
    other.train(random_rows(1, dtype=torch.float32))
    save_pretrained(other, tiny_model_dir, tmp_path)
    policy = stirred(Policy.load(tiny_model_dir, ADAPTED))
    load_frozen(policy, "reference", str(tmp_path))
    assert policy.reference is not None
    assert equal(logprobs(policy, policy.reference), logprobs(other))


def test_a_reference_that_cannot_share_prefixes_makes_the_policy_share_none(tmp_path: Path) -> None:
    model = shaped_model("mistral", torch.float32)
    shaped_model("mistral", torch.float32, sliding_window=8).save_pretrained(tmp_path)
    policy = Policy(model, CONFIG)
    assert policy.runner.packing == "tree"
    policy.reference = frozen_logprobs(str(tmp_path), policy)
    assert policy.runner.packing == "rows"
    policy.reference(policy.runner.plan(random_rows(0, dtype=torch.float32)))


@pytest.fixture
def with_reference(tiny_model_dir: Path, tmp_path: Path) -> list[str]:
    """The settings of a run with a reference model of its own, in the folder `reference`."""
    save_tiny_model(tmp_path / "reference", seed=3)
    return [
        *(f"root={tmp_path / 'runs'}", f"model.path={tiny_model_dir}", "train.lr=1e-2"),
        *("train.kl_coef=1", f"train.reference_model={tmp_path / 'reference'}", "rollout.eta=9"),
    ]


def killed_after(step: int, settings: list[str], *more: str) -> Lab:
    lab = Lab(config_of(settings, "train.steps=3", *more), [pair(name) for name in "abc"])
    return lab.die("published", step)


@pytest.mark.parametrize("every", [9, 1, 2], ids=["replay", "checkpoint", "both"])
def test_other_weights_in_place_of_the_reference_are_refused(
    with_reference: list[str], tmp_path: Path, every: int
) -> None:
    more = f"train.checkpoint_every={every}"
    first = killed_after(3, with_reference, more)
    kept = shutil.copytree(tmp_path / "reference", tmp_path / "kept")
    save_tiny_model(tmp_path / "reference", seed=4)
    again = Lab(config_of(with_reference, "train.steps=3", more), [], before=first)
    with fails_with(ConfigError, "train.reference_model=", "model.safetensors"):
        again.trainer.train()
    # The same files in another place are the same model.
    shutil.rmtree(tmp_path / "reference")
    shutil.copytree(kept, tmp_path / "reference")
    assert Lab(config_of(with_reference, "train.steps=3", more), [], before=first).trainer.train()


def test_a_newly_chosen_reference_is_used_for_later_steps_only(
    with_reference: list[str], tmp_path: Path
) -> None:
    """A step is repeated with its own; what was chosen since is in its place afterwards."""
    first = killed_after(1, with_reference, "train.checkpoint_every=9")
    chosen = save_tiny_model(tmp_path / "chosen", seed=4)
    base = [each for each in with_reference if not each.startswith("train.reference_model")]
    for more in (("train.kl_coef=0",), (f"train.reference_model={chosen}",)):
        again = Lab(config_of(base, "train.steps=3", *more), [], before=first)
        again.trainer.load()
        again.trainer.catch_up()
        policy = again.trainer.policy
        assert policy.steps == 1
        if more == ("train.kl_coef=0",):
            assert policy.reference is None
            continue
        start = Policy.load(chosen, CONFIG)
        assert policy.reference is not None
        assert equal(logprobs(policy, policy.reference), logprobs(start))


def test_an_earlier_reference_is_freed_before_another_is_loaded(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Policy.load(tiny_model_dir, CONFIG)
    load_frozen(policy, "reference", str(tiny_model_dir))
    earlier = weakref.ref(policy.reference.__self__)  # type: ignore[union-attr]
    there: list[object] = []

    def loading(*args: Any, **kwargs: Any) -> Any:
        there.append(earlier())
        return loaded(*args, **kwargs)

    monkeypatch.setattr("trainer.reference.loaded", loading)
    load_frozen(policy, "reference", str(save_tiny_model(tmp_path, seed=1)))
    assert there == [None]


def test_a_reference_that_cannot_be_loaded_names_its_setting(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    policy = Policy.load(tiny_model_dir, CONFIG)
    path = save_tiny_model(tmp_path / "reference", seed=1) / "model.safetensors"
    for damage in (lambda: path.write_bytes(path.read_bytes()[:99]), path.unlink):
        damage()
        with fails_with(ConfigError, "train.reference_model="):
            load_frozen(policy, "reference", str(path.parent))
