"""Weight versions of one run: never reused, and how many optimizer steps each had behind it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from any_agent.rundir.layout import read_json, write_json

_REMEMBERED = 4096
_LONG_AGO = -(10**9)


class WeightVersions:
    """Kept in the run's `state.json`, so that a resumed run goes on above the highest."""

    def __init__(self, path: Path) -> None:
        saved = read_json(path, {})
        self._path = path
        self.highest = int(saved.get("highest_version", 0))
        self._steps: dict[int, int] = {
            int(version): step for version, step in saved.get("versions", {"0": 0}).items()
        }

    def at_least(self, version: int) -> None:
        """An engine serves this version, wherever it has it from: go on above it."""
        self.highest = max(self.highest, version)

    def reserve(self, step: int) -> int:
        """The next version; on disk before anybody can see it."""
        self.highest += 1
        self._steps[self.highest] = step
        for old in sorted(self._steps)[:-_REMEMBERED]:
            del self._steps[old]
        write_json(
            self._path, {"highest_version": self.highest, "step": step, "versions": self._steps}
        )
        return self.highest

    def steps_of(self, versions: set[int]) -> Mapping[int, int]:
        """The optimizer steps behind each; those not known (any more) count as long ago."""
        return {version: self._steps.get(version, _LONG_AGO) for version in versions}
