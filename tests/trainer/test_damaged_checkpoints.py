"""Checkpoints whose content is damaged: training resumes from the newest whole one."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from any_agent.errors import ConfigError
from tests.support.errors import fails_with
from tests.support.trainer.loop import RUN, Lab, assert_same_outcome, config_of, episodes, outcome

Damage = Callable[[Path], None]


def overwrite(path: Path, begin: int, data: bytes) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(begin)
        file.write(data)
    assert path.stat().st_size == size


def spoiled(name: str, begin: int, data: Callable[[int], bytes]) -> Damage:
    """Overwrite a file from a place on, counted from its end if negative, by so many bytes."""

    def damage(checkpoint: Path) -> None:
        path = checkpoint / name
        size = path.stat().st_size
        overwrite(path, begin % size, data(size))

    return damage


def one_flipped_bit(checkpoint: Path) -> None:
    path = checkpoint / "trainer" / "optimizer.safetensors"
    at = path.stat().st_size - 100
    overwrite(path, at, bytes([path.read_bytes()[at] ^ 1]))


def without_checksums(checkpoint: Path) -> None:
    path = checkpoint / "manifest.json"
    data = json.loads(path.read_text())
    del data["crc32"]
    path.write_text(json.dumps(data))


def other_checksums(checkpoint: Path) -> None:
    path = checkpoint / "manifest.json"
    data = json.loads(path.read_text())
    data["crc32"] = dict.fromkeys(data["crc32"], "00000000")
    path.write_text(json.dumps(data))


def noise(size: int) -> bytes:
    return random.Random(7).randbytes(size)


DAMAGES: dict[str, Damage] = {
    "a random header": spoiled("model.safetensors", 0, lambda _: noise(512)),
    "garbage for the state": spoiled("trainer/state.json", 0, noise),
    "a zeroed optimizer": spoiled("trainer/optimizer.safetensors", 0, bytes),
    "garbage for the generators": spoiled("trainer/state.json", 1000, lambda _: noise(64)),
    "garbage for the manifest": spoiled("manifest.json", 0, noise),
    "zeroed tensors": spoiled("model.safetensors", -8192, lambda _: bytes(8192)),
    "one flipped bit": one_flipped_bit,
    "another tokenizer": spoiled("tokenizer.json", 1000, lambda _: b"#"),
    "other checksums": other_checksums,
    "no checksums": without_checksums,
}


@pytest.fixture
def killed(settings: list[str]) -> Lab:
    """A trainer that was killed in step 5, with checkpoints of steps 2 and 4."""
    lab = Lab(config_of(settings, *RUN), episodes()).die("step", 5)
    names = sorted(path.name for path in lab.trainer.dir.checkpoints.glob("step-*"))
    assert names == ["step-00000002", "step-00000004"]
    return lab


def resumed(killed: Lab) -> Lab:
    again = killed.again()
    assert again.trainer.train()
    return again


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.service
def test_training_resumes_from_the_newest_undamaged_checkpoint(
    killed: Lab, uninterrupted: dict[str, Any], damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    root = killed.trainer.dir.checkpoints
    DAMAGES[damage](root / "step-00000004")
    again = resumed(killed)
    assert_same_outcome(uninterrupted, outcome(again))
    # Steps 3 to 5 were made again from their manifests, and acknowledged once each.
    assert [ids[0] for ids in again.executor.replayed] == ["p2-good", "p3-good", "p4-good"]
    assert (root / "damaged-step-00000004").is_dir()
    text = caplog.text
    assert "step-00000004 is damaged" in text and "set aside as damaged-step-00000004" in text
    assert f"falling back to {root / 'step-00000002'}" in text


def test_training_does_not_begin_anew_where_every_checkpoint_is_damaged(
    settings: list[str], killed: Lab, uninterrupted: dict[str, Any], tmp_path: Path
) -> None:
    root = killed.trainer.dir.checkpoints
    shutil.copytree(root / "step-00000004", tmp_path / "copy")
    DAMAGES["zeroed tensors"](root / "step-00000002")
    DAMAGES["garbage for the state"](root / "step-00000004")
    for _ in range(2):  # nor at the next start, when both are set aside
        again = Lab(config_of(settings, *RUN), [], before=killed)
        with fails_with(ConfigError, "damaged-step-00000002, damaged-step-00000004", "--trial"):
            again.trainer.train()
        assert again.service.published == []
    shutil.copytree(tmp_path / "copy", root / "step-00000004")
    assert_same_outcome(uninterrupted, outcome(resumed(killed)))


def test_a_damaged_publication_is_published_anew(settings: list[str]) -> None:
    """At the resume the ranks serve the trainer's own version 4, whose folder is damaged since."""
    lab = Lab(config_of(settings, *RUN), episodes()).die("ack", 4)
    folder = lab.trainer.dir.weights / "v00000004"
    DAMAGES["a random header"](folder)
    again = resumed(lab)
    assert (folder.parent / "damaged-v00000004").is_dir()
    assert again.service.published == [(5, 4), (6, 5)]
