"""Start the whole service on this machine and train: ``any_agent_grpo.py --config my.yaml``.

Clusters launch this script; ``any-agent serve`` is the same for people.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):
    # Run as a file: make the packages beside it importable, here and in the children.
    import os

    _home = str(Path(__file__).resolve().parent.parent)
    sys.path[0] = _home
    os.environ["PYTHONPATH"] = os.pathsep.join(
        p for p in (_home, os.environ.get("PYTHONPATH", "")) if p
    )

from any_agent.cli import run_service
from any_agent.runtime.command_line import (
    CommandParser,
    add_service_arguments,
    guarded,
    overrides_of,
    parse,
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = CommandParser(description="Serve and train one run with GRPO.")
    add_service_arguments(parser)
    parser.add_argument(
        "--exit-when-done",
        action="store_true",
        help="end after the last step instead of continuing to serve the trained model",
    )
    arguments = parse(parser, argv)
    return guarded(
        lambda: run_service(
            arguments.config, overrides_of(arguments), train=True, stay=not arguments.exit_when_done
        )
    )


if __name__ == "__main__":
    sys.exit(main())
