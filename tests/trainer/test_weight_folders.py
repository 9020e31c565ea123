from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import any_agent.runtime.atomic_files
from any_agent.errors import Conflict, StartupError
from any_agent.rundir.layout import published_versions
from tests.support.errors import fails_with
from trainer.model import PolicyConfig
from trainer.policy import Policy
from trainer.weight_folders import holds_weights, prune, publish_to_disk


@pytest.fixture(scope="module")
def policy(tiny_model_dir: Path) -> Policy:
    return Policy.load(tiny_model_dir, PolicyConfig(threads=1))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_published_version_holds_the_policys_weights_and_tokenizer(
    policy: Policy, tiny_model_dir: Path, tmp_path: Path, dtype: torch.dtype | None
) -> None:
    path = publish_to_disk(policy, tiny_model_dir, tmp_path, 7, dtype=dtype)
    assert path == tmp_path / "v00000007" and published_versions(tmp_path) == [7]
    kind = dtype or torch.float32
    assert json.loads((path / "config.json").read_text())["dtype"] == str(kind)[6:]
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    for a, b in zip(policy.model.parameters(), loaded.parameters(), strict=True):
        assert (a.dtype, b.dtype) == (torch.float32, kind) and torch.equal(a.to(kind), b)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (path / name).read_bytes() == (tiny_model_dir / name).read_bytes()
    assert AutoTokenizer.from_pretrained(path).get_vocab()


def test_versions_are_never_reused(policy: Policy, tiny_model_dir: Path, tmp_path: Path) -> None:
    publish_to_disk(policy, tiny_model_dir, tmp_path, 3)
    before = sorted(p.stat().st_mtime_ns for p in (tmp_path / "v00000003").iterdir())
    for version in (3, 2):
        with pytest.raises(Conflict):
            publish_to_disk(policy, tiny_model_dir, tmp_path, version)
    assert sorted(p.stat().st_mtime_ns for p in (tmp_path / "v00000003").iterdir()) == before


def test_a_failure_half_way_leaves_nothing(policy: Policy, tmp_path: Path) -> None:
    with fails_with(StartupError, "tokenizer"):
        publish_to_disk(policy, tmp_path / "nowhere", tmp_path / "out", 0)
    assert list((tmp_path / "out").iterdir()) == []


def test_what_a_killed_writer_left_is_neither_seen_nor_kept(
    policy: Policy, tiny_model_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / ".partial-v00000004").mkdir()
    (tmp_path / ".partial-v00000004" / "model.safetensors").write_bytes(b"half")
    assert published_versions(tmp_path) == []
    publish_to_disk(policy, tiny_model_dir, tmp_path, 5)
    assert [p.name for p in tmp_path.iterdir()] == ["v00000005"]


def test_everything_is_on_disk_before_the_name_appears(
    policy: Policy, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    original = any_agent.runtime.atomic_files.fsync

    def spy(path: Path) -> None:
        if path.parent != tmp_path and path != tmp_path:
            assert not (tmp_path / "v00000000").exists()
        synced.append(path)
        original(path)

    monkeypatch.setattr(any_agent.runtime.atomic_files, "fsync", spy)
    target = publish_to_disk(policy, tiny_model_dir, tmp_path, 0)
    names = {p.name for p in target.iterdir()}
    assert names <= {p.name for p in synced}
    assert synced[-1] == tmp_path, "the parent comes last: it holds the new name"


def test_pruning_keeps_the_newest_published_versions(tmp_path: Path) -> None:
    for version in (1, 2, 10, 100_000_000):
        (tmp_path / f"v{version:08d}").mkdir()
    (tmp_path / "notes").mkdir()
    assert prune(tmp_path, 2) == [1, 2]
    assert published_versions(tmp_path) == [10, 100_000_000]
    assert prune(tmp_path, 5) == []
    assert (tmp_path / "notes").exists()
    with pytest.raises(ValueError):
        prune(tmp_path, 0)


def test_a_folder_holds_the_policys_weights_or_does_not(
    policy: Policy, tiny_model_dir: Path, tmp_path: Path
) -> None:
    folder = publish_to_disk(policy, tiny_model_dir, tmp_path, 1)
    assert holds_weights(folder, policy)
    assert not holds_weights(folder, policy, dtype=torch.bfloat16)
    half = publish_to_disk(policy, tiny_model_dir, tmp_path, 2, dtype=torch.bfloat16)
    assert holds_weights(half, policy, dtype=torch.bfloat16)
    assert not holds_weights(tmp_path / "nothing", policy)
    first = next(policy.model.parameters()).view(-1)
    with torch.no_grad():
        value = first[0].clone()
        first[0] = torch.nextafter(value, torch.tensor(9.0))
        assert not holds_weights(folder, policy)
        first[0] = value
    assert holds_weights(folder, policy)
