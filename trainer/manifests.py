"""What each optimizer step took: written, durably, before the step changes anything.

A trainer that resumes from a checkpoint makes the steps that came after it again, from these.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from any_agent.errors import TrainingError
from any_agent.rundir.layout import write_json
from any_agent.types import SampledSession
from trainer.sampled_rows import read_sessions, write_sessions

FORMAT = 1
_NAME = re.compile(r"step-(\d{8,})\.json")


@dataclass(frozen=True, slots=True)
class Manifest:
    """One step: its sessions in their order, and all that decides on what they are worth."""

    step: int
    """The optimizer steps made once this one is."""
    groups: list[list[str]]
    """Every session of the batch by its group, also those with nothing to train on."""
    trained: list[str]
    rejected: dict[str, str]
    """Session and reason."""
    tokens: list[int]
    """Trained tokens of each row."""
    versions: dict[int, int]
    """The optimizer steps behind each weight version that sampled a token."""
    eta: int
    discount: float
    normalize_std: bool
    positions: list[int] = field(default_factory=list)
    """Items of the dataset that are done with by this step: those of its groups, and those that
    were left out since the step before, because nothing came of them."""
    max_row_tokens: int | None = None

    @property
    def sessions(self) -> list[str]:
        return [id for group in self.groups for id in group]

    def require_same(
        self, trained: Sequence[str], rejected: Mapping[str, str], tokens: Sequence[int]
    ) -> None:
        """TrainingError where these are not what the step trained on."""
        if (trained, rejected, tokens) == (self.trained, self.rejected, self.tokens):
            return
        differ = set(trained) ^ set(self.trained)
        differ |= {id for id, _ in rejected.items() ^ self.rejected.items()}
        how = f"of {', '.join(sorted(differ)[:8])}" if differ else "in their order or tokens"
        raise TrainingError(
            f"step {self.step} cannot be made again as it was: its {len(self.sessions)} sessions "
            f"are others now, {how}; it trained on {sum(self.tokens)} tokens, now there are "
            f"{sum(tokens)}"
        )


class ManifestStore:
    """The manifests of a run, one file per step, and beside it what its sampled sessions hold."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, manifest: Manifest, sampled: Sequence[SampledSession] = ()) -> None:
        """On disk when it returns. Those of later steps, of a history given up, are removed."""
        if sampled:
            # First: what a manifest names can be had.
            write_sessions(self._rows(manifest.step), sampled)
        write_json(self.path(manifest.step), {"format": FORMAT, **asdict(manifest)})
        for step in self.steps():
            if step > manifest.step:
                self.remove(step)

    def read(self, step: int) -> Manifest:
        """Raises TrainingError for a file that is none of this version's."""
        path = self.path(step)
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data.pop("format") != FORMAT:
                raise ValueError("it was written by another version of any-agent")
            data["versions"] = {int(version): of for version, of in data["versions"].items()}
            return Manifest(**data)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise TrainingError(f"{path} cannot be read: {error}") from error

    def sampled(self, step: int) -> Mapping[str, SampledSession]:
        """Those of a step's sessions that no rank's journal holds, by id; raises as `read`."""
        return read_sessions(self._rows(step))

    def after(self, step: int) -> list[int]:
        """The later steps that were taken; TrainingError where one in between is missing."""
        later = [taken for taken in self.steps() if taken > step]
        if later != list(range(step + 1, step + 1 + len(later))):
            raise TrainingError(
                f"the newest usable checkpoint is of step {step}, but of the steps after it only "
                f"{_listed(later)} left manifests in {self._folder}; remove these files to go on "
                "from that checkpoint without them"
            )
        return later

    def steps(self) -> list[int]:
        names = (_NAME.fullmatch(path.name) for path in self._folder.iterdir())
        return sorted(int(match[1]) for match in names if match)

    def remove(self, step: int) -> None:
        self.path(step).unlink(missing_ok=True)
        self._rows(step).unlink(missing_ok=True)

    def set_aside(self, steps: Sequence[int]) -> None:
        """These cannot be made again: keep what they took for whoever wants to know, under other
        names. ``steps`` are the last ones, in their order."""
        for step in reversed(steps):  # the last one first: stopped anywhere it leaves no gap
            for path in (self._rows(step), self.path(step)):
                if path.exists():
                    path.replace(path.with_name(path.name.replace("step-", "lost-", 1)))

    def prune(self, oldest: int) -> None:
        """Remove those that no resume needs: from ``oldest``, the oldest checkpoint's step, on
        they are kept."""
        for step in self.steps():
            if step <= oldest:
                self.remove(step)

    def path(self, step: int) -> Path:
        """Where a step's manifest lies."""
        return self._folder / f"step-{step:08d}.json"

    def _rows(self, step: int) -> Path:
        return self.path(step).with_suffix(".safetensors")


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, steps[:8])) + (", ..." if len(steps) > 8 else "")
