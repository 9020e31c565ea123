"""How the trainer's processes are started."""

from __future__ import annotations

from pathlib import Path

from any_agent.config import Config
from any_agent.launcher.place import Place


def trainer_arguments(config: Config, settings: Path, place: Place) -> list[str]:
    """What follows `python -m`: a trainer of the run with these resolved settings."""
    return ["trainer", "--config", str(settings), "--host", place.host]
