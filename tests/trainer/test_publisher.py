"""The last weights go to ranks that join, and training waits for none of them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from any_agent.config import Config
from any_agent.errors import AnyAgentError, EngineUnavailable, StaleOwner
from any_agent.rundir.fleet import Fleet
from any_agent.rundir.layout import RunDir
from any_agent.rundir.registry import RegistryEntry
from any_agent.runtime.disk_space import DiskSpace
from tests.support.fixed_ranks import FixedRanks
from trainer.publisher import Publisher
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


def test_a_joining_rank_that_does_not_take_weights_ends_no_training(lab: Lab) -> None:
    lab.sync.failure = EngineUnavailable("away")
    lab.publisher.bring_joining()
    lab.sync.failure = StaleOwner("another trainer has taken over")
    with pytest.raises(StaleOwner):
        lab.publisher.bring_joining()
