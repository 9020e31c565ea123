"""Scripts that a launcher is told to start: which file is meant."""

from __future__ import annotations

import filecmp
from importlib.util import find_spec
from pathlib import Path

from any_agent.errors import ConfigError

SERVICE = "any_agent_grpo.py"
"""The trainer's own script, which serves and trains."""


def found_script(name: str) -> Path:
    """The file of this name from here; else the trainer's own, by its name alone or in `trainer/`.

    Raises ConfigError where there is none.
    """
    path = Path(name)
    if path.is_file():
        return path
    if name in (SERVICE, f"trainer/{SERVICE}"):
        return service_script()
    raise ConfigError(
        f"there is no script {name} in {Path.cwd()}: give its path, or {SERVICE}, which serves a "
        "model and trains it on what agents outside do"
    )


def service_script() -> Path:
    """The trainer's own; ConfigError if it is not installed beside this package."""
    spec = find_spec("trainer")
    places = [] if spec is None else spec.submodule_search_locations or []
    found = next((path for path in (Path(p) / SERVICE for p in places) if path.is_file()), None)
    if found is None:
        raise ConfigError(
            f"the trainer's own {SERVICE} is not installed here: pip install 'any-agent-rl[train]'"
        )
    return found


def is_service(script: Path) -> bool:
    """Say if it is the trainer's own, or a copy of it."""
    return filecmp.cmp(script, service_script(), shallow=False)
