"""``python -m any_agent.launcher.local SCRIPT``: replace this process by a training script.

The script is the trainer's own, any_agent_grpo.py, or one with a GRPOTrainer.
"""

from __future__ import annotations

import filecmp
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from any_agent.errors import ConfigError
from any_agent.runtime.command_line import guarded, share_module_path

SERVICE_SCRIPT = "any_agent_grpo.py"  # the trainer's own script, which serves and trains
_USAGE = """usage: python -m any_agent.launcher.local SCRIPT [argument ...]

Run a training script on this machine, with these arguments: any_agent_grpo.py serves a model and
trains it on the sessions of agents that run elsewhere; other scripts are found from the working
directory. On the nodes of a Slurm job: python -m any_agent.launcher.slurm."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] in (["-h"], ["--help"]):
        print(_USAGE)
        return 0
    return guarded(lambda: _run(arguments))


def find_script(name: str) -> Path:
    """Return the file of this name from here; else the trainer's own, by name or in `trainer/`.

    Raises ConfigError where there is none.
    """
    path = Path(name)
    if path.is_file():
        return path
    if name in (SERVICE_SCRIPT, f"trainer/{SERVICE_SCRIPT}"):
        return service_script()
    raise ConfigError(
        f"there is no script {name} in {Path.cwd()}: give its path, or {SERVICE_SCRIPT}, which "
        "serves a model and trains it on the sessions of agents that run elsewhere"
    )


def service_script() -> Path:
    """Return the trainer's own script; ConfigError if it is not installed beside this package."""
    spec = find_spec("trainer")
    places = [] if spec is None else spec.submodule_search_locations or []
    scripts = (Path(place) / SERVICE_SCRIPT for place in places)
    found = next((path for path in scripts if path.is_file()), None)
    if found is None:
        raise ConfigError(
            f"the trainer's own {SERVICE_SCRIPT} is not installed here: "
            "pip install 'any-agent-rl[train]'"
        )
    return found


def is_service(script: Path) -> bool:
    """Return whether it is the trainer's own script, or a copy of it."""
    return filecmp.cmp(script, service_script(), shallow=False)


def _run(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0].startswith("-"):
        raise ConfigError(
            f"name a script, e.g. any_agent.launcher.local {SERVICE_SCRIPT} --config my.yaml"
        )
    script = find_script(arguments[0])
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, str(script), *arguments[1:]])


if __name__ == "__main__":
    share_module_path()
    sys.exit(main())
