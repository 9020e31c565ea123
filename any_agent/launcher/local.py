"""``python -m any_agent.launcher.local any_agent_grpo.py --config my.yaml``, on this machine.

Runs a training script in this process's place: the trainer's own, or one with a GRPOTrainer.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from any_agent.errors import ConfigError
from any_agent.launcher.script_path import SERVICE, found_script
from any_agent.runtime.command_line import guarded

_USAGE = """usage: python -m any_agent.launcher.local SCRIPT [argument ...]

Run a training script on this machine, with these arguments: any_agent_grpo.py serves a model and
trains it on what agents outside do; other scripts are found from here. On the nodes of a Slurm job:
python -m any_agent.launcher.slurm."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] in (["-h"], ["--help"]):
        print(_USAGE)
        return 0
    return guarded(lambda: _run(arguments))


def _run(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0].startswith("-"):
        raise ConfigError(f"which script? e.g. any_agent.launcher.local {SERVICE} --config my.yaml")
    script = found_script(arguments[0])
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, str(script), *arguments[1:]])


if __name__ == "__main__":
    # The script finds the packages that this process found, installed or not.
    os.environ.setdefault("PYTHONPATH", os.pathsep.join(p for p in sys.path if p))
    sys.exit(main())
