"""A part that tells others of itself by the registry in a folder, every hundredth of a second."""

from __future__ import annotations

from pathlib import Path

import pytest

from any_agent.rundir import registry
from any_agent.rundir.registry import Registry, RegistryEntry


class Part:
    """Describes itself, with the number of the description as its version."""

    def __init__(self) -> None:
        self.told = 0

    def __call__(self) -> RegistryEntry:
        self.told += 1
        return RegistryEntry(name="rank-3", boot_id="b", url="http://x", pid=1, version=self.told)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "HEARTBEAT", 0.01)


def entry(folder: Path) -> RegistryEntry | None:
    registry = Registry(folder)
    registry.refresh()
    return registry.get("rank-3")


def version(folder: Path) -> int:
    found = entry(folder)
    return found.version if found else 0
