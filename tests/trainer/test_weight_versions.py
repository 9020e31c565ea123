"""Versions are reserved on disk, never used twice, and forgotten in time."""

from __future__ import annotations

from pathlib import Path

import pytest

import trainer.publisher
from any_agent.errors import ConfigError
from any_agent.rundir.layout import read_json
from tests.support.errors import fails_with
from trainer.publisher import WeightVersions


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.json"


def test_a_weight_version_is_on_disk_before_it_is_used(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = WeightVersions(path)
    assert versions.reserve(step=4) == 1
    assert read_json(path)["highest_version"] == 1

    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(trainer.publisher, "write_json", full)
    with fails_with(OSError, "no space"):
        versions.reserve(step=5)
    assert read_json(path)["highest_version"] == 1


def test_a_version_is_not_used_again_after_a_crash(path: Path) -> None:
    """Whether or not anybody had seen it."""
    assert [WeightVersions(path).reserve(step) for step in (1, 1, 2)] == [1, 2, 3]
    assert WeightVersions(path).steps_of({0, 1, 2, 3}) == {0: 0, 1: 1, 2: 1, 3: 2}
    assert WeightVersions(path).steps_of({7})[7] < -1_000_000, "unknown ones are long ago"


def test_versions_go_on_above_what_an_engine_serves(path: Path) -> None:
    versions = WeightVersions(path)
    versions.at_least(7)
    assert versions.reserve(step=1) == 8
    versions.at_least(3)
    assert versions.reserve(step=2) == 9
    assert WeightVersions(path).reserve(step=3) == 10


def test_the_oldest_versions_are_forgotten(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer.publisher, "MAX_REMEMBERED", 3)
    versions = WeightVersions(path)
    for step in range(1, 11):
        versions.reserve(step)
    for kept in (versions, WeightVersions(path)):
        steps = kept.steps_of({7, 8, 9, 10})
        assert [steps[v] for v in (8, 9, 10)] == [8, 9, 10]
        assert steps[7] < 0
    assert len(read_json(path)["versions"]) == 3


@pytest.mark.parametrize("content", ["", "noise", "[]", '{"highest_version": "x"}'])
def test_a_damaged_state_names_its_remedy(path: Path, content: str) -> None:
    path.write_text(content)
    with fails_with(ConfigError, path):
        WeightVersions(path)
    assert path.read_text() == content, "no version is taken again"
