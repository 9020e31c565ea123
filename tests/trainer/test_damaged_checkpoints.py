"""Checkpoints whose content is damaged: training resumes from the newest whole one."""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from any_agent.errors import ConfigError
from tests.support.errors import fails_with
from tests.support.trainer.loop import Lab, config_of, outcome
from tests.trainer.test_resume import RUN, assert_same, die_at, episodes, left_for

Damage = Callable[[Path], None]


def overwrite(path: Path, begin: int, data: bytes) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(begin)
        file.write(data)
    assert path.stat().st_size == size


def noise(size: int) -> bytes:
    return random.Random(7).randbytes(size)


def random_header(checkpoint: Path) -> None:
    overwrite(checkpoint / "model.safetensors", 0, noise(512))


def garbage_state(checkpoint: Path) -> None:
    path = checkpoint / "trainer" / "state.json"
    overwrite(path, 0, noise(path.stat().st_size))


def zeroed_optimizer(checkpoint: Path) -> None:
    path = checkpoint / "trainer" / "optimizer.safetensors"
    overwrite(path, 0, bytes(path.stat().st_size))


def zeroed_tensors(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    overwrite(path, path.stat().st_size - 8192, bytes(8192))


def one_flipped_bit(checkpoint: Path) -> None:
    path = checkpoint / "trainer" / "optimizer.safetensors"
    at = path.stat().st_size - 100
    overwrite(path, at, bytes([path.read_bytes()[at] ^ 1]))


def garbage_generators(checkpoint: Path) -> None:
    path = checkpoint / "trainer" / "rng.safetensors"
    overwrite(path, 0, noise(path.stat().st_size))


def another_tokenizer(checkpoint: Path) -> None:
    path = checkpoint / "tokenizer.json"
    overwrite(path, path.stat().st_size // 2, b"#")


def garbage_manifest(checkpoint: Path) -> None:
    path = checkpoint / "manifest.json"
    overwrite(path, 0, noise(path.stat().st_size))


def other_checksums(checkpoint: Path) -> None:
    path = checkpoint / "manifest.json"
    data = json.loads(path.read_text())
    data["crc32"] = dict.fromkeys(data["crc32"], "00000000")
    path.write_text(json.dumps(data))


DAMAGES = (
    *(random_header, garbage_state, zeroed_optimizer, zeroed_tensors, one_flipped_bit),
    *(garbage_generators, another_tokenizer, garbage_manifest, other_checksums),
)
STRUCTURAL = (random_header, garbage_state, zeroed_optimizer, garbage_generators, garbage_manifest)
"""The damages that are found without checksums."""


@pytest.fixture
def settings(tiny_model_dir: Path, tmp_path: Path) -> list[str]:
    return [f"root={tmp_path}", f"model.path={tiny_model_dir}", "train.lr=1e-3", "train.seed=1"]


@pytest.fixture(scope="module")
def uninterrupted(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("whole")
    base = [f"root={root}", f"model.path={tiny_model_dir}", "train.lr=1e-3", "train.seed=1"]
    lab = Lab(config_of(base, *RUN), episodes())
    assert lab.trainer.train()
    return outcome(lab)


@pytest.fixture
def killed(settings: list[str]) -> Lab:
    """A trainer that was killed in step 5, with checkpoints of steps 2 and 4."""
    lab = Lab(config_of(settings, *RUN), episodes())
    die_at(lab, "step", 5)
    names = sorted(path.name for path in lab.trainer.dir.checkpoints.glob("step-*"))
    assert names == ["step-00000002", "step-00000004"]
    return lab


def without_checksums(checkpoint: Path) -> None:
    """Make it one of an earlier version."""
    path = checkpoint / "manifest.json"
    data = json.loads(path.read_text())
    del data["crc32"]
    path.write_text(json.dumps(data))


def resumed(settings: list[str], killed: Lab) -> Lab:
    again = Lab(config_of(settings, *RUN), left_for(killed), before=killed)
    assert again.trainer.train()
    return again


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.service
def test_the_newest_whole_one_is_used(
    settings: list[str],
    killed: Lab,
    uninterrupted: dict[str, Any],
    damage: Damage,
    caplog: pytest.LogCaptureFixture,
) -> None:
    root = killed.trainer.dir.checkpoints
    damage(root / "step-00000004")
    again = resumed(settings, killed)
    assert_same(uninterrupted, outcome(again))
    # Steps 3 to 5 were made again from their manifests, and acknowledged once each.
    assert [ids[0] for ids in again.executor.replayed] == ["p2-good", "p3-good", "p4-good"]
    assert (root / "damaged-step-00000004").is_dir()
    text = caplog.text
    assert "step-00000004 is damaged" in text and "set aside as damaged-step-00000004" in text
    assert f"falling back to {root / 'step-00000002'}" in text


@pytest.mark.parametrize("damage", STRUCTURAL)
def test_without_checksums_the_form_is_checked(
    settings: list[str], killed: Lab, uninterrupted: dict[str, Any], damage: Damage
) -> None:
    root = killed.trainer.dir.checkpoints
    for step in (2, 4):
        without_checksums(root / f"step-0000000{step}")
    damage(root / "step-00000004")
    assert_same(uninterrupted, outcome(resumed(settings, killed)))
    assert (root / "damaged-step-00000004").is_dir()


def test_one_without_checksums_is_loaded_and_said_so(
    settings: list[str],
    killed: Lab,
    uninterrupted: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    without_checksums(killed.trainer.dir.checkpoints / "step-00000004")
    with caplog.at_level(logging.INFO):
        again = resumed(settings, killed)
    assert_same(uninterrupted, outcome(again))
    assert "step-00000004 has no checksums, as an earlier version wrote it" in caplog.text
    assert [ids[0] for ids in again.executor.replayed] == ["p4-good"]


def test_without_a_whole_one_training_does_not_begin_anew(
    settings: list[str], killed: Lab, uninterrupted: dict[str, Any], tmp_path: Path
) -> None:
    root = killed.trainer.dir.checkpoints
    shutil.copytree(root / "step-00000004", tmp_path / "copy")
    zeroed_tensors(root / "step-00000002")
    garbage_state(root / "step-00000004")
    for _ in range(2):  # nor at the next start, when both are set aside
        again = Lab(config_of(settings, *RUN), [], before=killed)
        with fails_with(ConfigError, "damaged-step-00000002, damaged-step-00000004", "--trial"):
            again.trainer.train()
        assert again.service.published == []
    shutil.copytree(tmp_path / "copy", root / "step-00000004")
    assert_same(uninterrupted, outcome(resumed(settings, killed)))


def test_a_damaged_publication_is_published_anew(settings: list[str]) -> None:
    """At the resume the ranks serve the trainer's own version 4, whose folder is damaged since."""
    lab = Lab(config_of(settings, *RUN), episodes())
    die_at(lab, "ack", 4)
    folder = lab.trainer.dir.weights / "v00000004"
    random_header(folder)
    again = resumed(settings, lab)
    assert (folder.parent / "damaged-v00000004").is_dir()
    assert again.service.published == [(5, 4), (6, 5)]
