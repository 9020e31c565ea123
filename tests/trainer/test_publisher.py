"""Versions are reserved on disk and never used twice; the last weights go to ranks that join."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import trainer.publisher
from any_agent.config import Config
from any_agent.engine import HALF_LOADED
from any_agent.errors import AnyAgentError, ConfigError, EngineUnavailable, StaleOwner
from any_agent.rundir.fleet import Fleet
from any_agent.rundir.layout import RunDir, read_json
from any_agent.rundir.registry import RegistryEntry
from any_agent.runtime.disk_space import DiskSpace
from tests.support.errors import fails_with
from tests.support.fixed_ranks import FixedRanks
from trainer.publisher import Publisher, WeightVersions
from trainer.sync import NewWeights


class Ranks(FixedRanks):
    version = 6

    def entry(self, rank: int) -> RegistryEntry:
        return RegistryEntry(name=f"rank-{rank}", boot_id="b", url="u", pid=1, version=self.version)


class Sync:
    """Remembers which ranks got which version."""

    def __init__(self) -> None:
        self.given: list[tuple[int, list[int] | None]] = []
        self.failure: AnyAgentError | None = None

    def prepare(self, new: NewWeights) -> None: ...

    def update(self, ranks: Ranks, new: NewWeights, wanted: list[int] | None = None) -> None:
        self.given.append((new.version, wanted))
        if self.failure is not None:
            raise self.failure


class Lab:
    def __init__(self, folder: Path) -> None:
        self.ranks = Ranks(object())
        executor: Any = SimpleNamespace(ranks=self.ranks, call=asyncio.run)
        self.publisher = Publisher(Config(), RunDir(folder), executor, DiskSpace())
        self.sync = Sync()
        last = NewWeights(7, 3, folder, lambda: None, lambda: iter(()))
        self.publisher.last, self.publisher.sync = last, self.sync  # type: ignore[assignment]


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    lab = Lab(tmp_path)
    lab.ranks.change(Fleet.of(1).with_state(4, "joining"), rank_4=object())
    return lab


def test_a_rank_that_joins_with_an_older_version_gets_the_last(lab: Lab) -> None:
    lab.publisher.bring_joining()
    assert lab.sync.given == [(7, [4])]
    lab.ranks.version = 7
    lab.publisher.bring_joining()
    lab.ranks.version = 6
    lab.ranks.change(Fleet.of(1).with_state(4, "serving"))
    lab.publisher.bring_joining()
    assert lab.sync.given == [(7, [4])], "one that serves gets it with the others"


def test_a_rank_whose_engine_lost_its_weights_gets_them_again(lab: Lab) -> None:
    class Rank:
        def __init__(self, version: int) -> None:
            self.version = version

        async def run_info(self) -> Any:
            return SimpleNamespace(version=self.version)

    lab.ranks.clients[0], rank = Rank(7), Rank(HALF_LOADED)
    lab.ranks.change(Fleet.of(1).with_state(4, "serving"), rank_4=rank)
    lab.ranks.version = HALF_LOADED  # in the registry, whose entries may be old
    lab.publisher.bring_joining()
    assert lab.sync.given == [(7, [4])]
    rank.version = 7
    lab.publisher.bring_joining()
    assert lab.sync.given == [(7, [4])]


def test_a_joining_rank_that_does_not_take_weights_ends_no_training(lab: Lab) -> None:
    lab.sync.failure = EngineUnavailable("away")
    lab.publisher.bring_joining()
    lab.sync.failure = StaleOwner("another trainer has taken over")
    with pytest.raises(StaleOwner):
        lab.publisher.bring_joining()


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
