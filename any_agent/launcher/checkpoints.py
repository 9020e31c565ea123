"""The newest weights of a trial, found without torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from any_agent.config import Config
from any_agent.rundir import RunDir, read_json

_STEP = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True, slots=True)
class SavedWeights:
    """A checkpoint, and the version under which an engine serves it."""

    path: Path
    step: int
    version: int


def latest_weights(config: Config) -> SavedWeights | None:
    """The trial's latest checkpoint, or None where nothing was kept yet.

    ``latest`` names it; a checkpoint counts only with its manifest, which is written last.
    """
    run = RunDir.of(config.root, config.user, config.experiment, config.trial)
    try:
        name = (run.checkpoints / "latest").read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    match = _STEP.fullmatch(name)
    path = run.checkpoints / name
    if match is None or not (path / "manifest.json").is_file():
        return None
    saved = read_json(path / "trainer" / "state.json", {})
    # The version that just these weights were published as; later ones are other weights.
    return SavedWeights(path, int(match[1]), int(saved["state"]["version"]))
