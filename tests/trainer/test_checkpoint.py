from __future__ import annotations

import json
import logging
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import trainer.checkpoint
from any_agent.errors import NotFound, StartupError
from any_agent.rundir.checksums import write_manifest
from tests.support.errors import fails_with
from tests.support.trainer.adapters import train
from tests.support.trainer.loop import Killed
from trainer.checkpoint import (
    complete_checkpoints,
    latest_checkpoint,
    load_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)
from trainer.model import PolicyConfig
from trainer.policy import Policy

CONFIG = PolicyConfig(lr=1e-3, threads=1)


def load(root: Path, step: int) -> Policy:
    return load_checkpoint(root / f"step-{step:08d}", CONFIG)[0]


def next_step(root: Path) -> Policy:
    """The policy of the newest checkpoint, a step later."""
    policy = load(root, 3)
    train(policy, range(3, 4))
    return policy


def draws() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(np.random.rand())


@pytest.fixture(scope="module")
def saved(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with the checkpoints of steps 1, 2 and 3."""
    root = tmp_path_factory.mktemp("run")
    policy = Policy.load(tiny_model_dir, CONFIG)
    for step in range(3):
        train(policy, range(step, step + 1))
        save_checkpoint(root, policy, tiny_model_dir, {"version": step + 1})
    return root


@pytest.fixture
def root(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


def test_going_on_equals_never_having_stopped_bit_for_bit(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    policy = Policy.load(tiny_model_dir, CONFIG)
    train(policy, range(3))
    policy.optimizer.param_groups[0]["lr"] = 5e-4
    consumed = {"consumed": ["s-1", "s-2"], "versions": {"3": 2}}
    path = save_checkpoint(tmp_path, policy, tiny_model_dir, consumed)
    expected_draws = draws()
    train(policy, range(3, 5))

    torch.manual_seed(99)
    random.seed(99)
    np.random.seed(99)
    again, state = load_checkpoint(path, CONFIG)
    assert state == consumed and again.steps == 3
    assert draws() == expected_draws
    assert again.optimizer.param_groups[0]["lr"] == 5e-4
    train(again, range(3, 5))
    assert again.steps == policy.steps == 5
    for (name, a), b in zip(policy.model.named_parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b), name
        for key, moment in policy.optimizer.state[a].items():
            assert torch.equal(moment, again.optimizer.state[b][key]), (name, key)


def test_a_checkpoint_before_the_first_step_is_resumed_exactly(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    policy = Policy.load(tiny_model_dir, CONFIG)
    path = save_checkpoint(tmp_path, policy, tiny_model_dir, {})
    assert path.name == "step-00000000"
    again = load(tmp_path, 0)
    for one in (policy, again):
        train(one, range(1))
    assert all(map(torch.equal, policy.model.parameters(), again.model.parameters()))


def test_transformers_loads_a_checkpoint(root: Path) -> None:
    path = root / "step-00000003"
    model = AutoModelForCausalLM.from_pretrained(path)
    assert all(map(torch.equal, model.parameters(), load(root, 3).model.parameters()))
    assert AutoTokenizer.from_pretrained(path).encode("digit")
    assert [p.name for p in path.glob("*.safetensors")] == ["model.safetensors"]
    kinds = {p.suffix for p in path.rglob("*") if p.is_file()}
    assert kinds <= {".safetensors", ".json", ".jinja"}, "nothing is pickled"


def test_the_latest_is_found_whatever_the_pointer_says(root: Path, tmp_path: Path) -> None:
    assert list(complete_checkpoints(root)) == [1, 2, 3]
    for pointer in ("step-00000003", "", "garbage\n", None):
        if pointer is None:
            (root / "latest").unlink()
        else:
            (root / "latest").write_text(pointer)
        assert latest_checkpoint(root) == root / "step-00000003"
    assert latest_checkpoint(tmp_path / "nowhere") is None
    assert complete_checkpoints(tmp_path / "nowhere") == {}


@pytest.mark.parametrize("how", ["truncated", "gone"])
def test_a_broken_checkpoint_is_passed_over(
    root: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    names = ("model.safetensors", "config.json", "manifest.json")
    for file in (*names, "trainer/optimizer.safetensors", "trainer/state.json"):
        path = root / "step-00000003" / file
        whole = path.read_bytes()
        if how == "gone":
            path.unlink()
        else:
            path.write_bytes(whole[:-10])
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert latest_checkpoint(root) == root / "step-00000002", file
        assert "step-00000003" in caplog.text and "falling back" in caplog.text
        with fails_with(NotFound, "step-00000003"):
            load(root, 3)
        (aside,) = root.glob("*step-00000003")
        (aside / file).write_bytes(whole)
        aside.rename(root / "step-00000003")


def test_a_killed_writer_leaves_the_old_state(
    root: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(folder: Path) -> None:
        raise Killed

    policy = next_step(root)
    monkeypatch.setattr(trainer.checkpoint, "write_manifest", die)
    with pytest.raises(Killed):
        save_checkpoint(root, policy, tiny_model_dir, {})
    assert latest_checkpoint(root) == root / "step-00000003"
    assert sorted(p.name for p in root.glob("step-*")) == [f"step-0000000{k}" for k in (1, 2, 3)]


def test_a_partial_folder_is_never_picked_up_and_goes_with_the_next_save(
    root: Path, tiny_model_dir: Path
) -> None:
    shutil.copytree(root / "step-00000003", root / ".partial-step-00000004")
    assert latest_checkpoint(root) == root / "step-00000003"
    save_checkpoint(root, next_step(root), tiny_model_dir, {})
    assert latest_checkpoint(root) == root / "step-00000004"
    assert not list(root.glob(".partial-*"))


def test_a_history_that_was_given_up_is_not_resumed(root: Path, tiny_model_dir: Path) -> None:
    """Resume from step 1, save step 2 anew: step 3 is of the other history."""
    policy = load(root, 1)
    train(policy, range(7, 8))
    save_checkpoint(root, policy, tiny_model_dir, {"version": 9})
    assert latest_checkpoint(root) == root / "step-00000002"
    assert load_checkpoint(root / "step-00000002", CONFIG)[1] == {"version": 9}
    (root / "step-00000002" / "config.json").unlink()
    assert latest_checkpoint(root) == root / "step-00000001"
    prune_checkpoints(root, 5)
    assert list(complete_checkpoints(root)) == [1]


def test_older_checkpoints_are_pruned(root: Path, tiny_model_dir: Path) -> None:
    policy = next_step(root)
    save_checkpoint(root, policy, tiny_model_dir, {}, keep=2)
    assert list(complete_checkpoints(root)) == [3, 4]
    with pytest.raises(ValueError):
        prune_checkpoints(root, 0)
    save_checkpoint(root, policy, tiny_model_dir, {})
    (root / "step-00000004" / "config.json").unlink()
    prune_checkpoints(root, 1)
    assert list(complete_checkpoints(root)) == [3], "a broken one does not count as kept"


def test_state_that_is_not_json_is_refused_before_anything_is_written(
    root: Path, tiny_model_dir: Path
) -> None:
    for wrong in ({"x": float("nan")}, {"x": object()}):
        with pytest.raises((ValueError, TypeError)):
            save_checkpoint(root, load(root, 3), tiny_model_dir, wrong)
    assert latest_checkpoint(root) == root / "step-00000003"


def test_a_checkpoint_of_another_format_is_refused(root: Path) -> None:
    path = root / "step-00000003" / "trainer" / "state.json"
    for number in (1, 2):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"format": number}))
        write_manifest(path.parents[1])
        with fails_with(StartupError, f"format {number}", "format 3"):
            load(root, 3)


def test_the_optimizer_of_another_model_is_refused(root: Path) -> None:
    file = root / "step-00000003" / "trainer" / "optimizer.safetensors"
    state = load_file(file)
    name = next(name for name, tensor in state.items() if tensor.ndim == 2)
    tensor = state.pop(name)
    for other in ({f"model.layers.99.{name}": tensor}, {name: tensor[:-1].contiguous()}):
        save_file(state | other, file)
        write_manifest(file.parents[1])
        with fails_with(StartupError, "optimizer", "model"):
            load(root, 3)
