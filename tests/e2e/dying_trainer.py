"""The trainer, killed at boundaries of its steps: ``-m tests.e2e.dying_trainer MARKS ... -- ...``.

``lease=1`` kills it, once, when it has the sessions of its first step; what follows ``--`` are the
trainer's own arguments. A file in the folder MARKS remembers each death.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer import __main__ as process
from trainer.loop import TrainingLoop

BOUNDARIES: dict[str, tuple[str, int]] = {
    "lease": ("_wait", 1),
    "step": ("_optimize", 0),
    "publish": ("_publish", 0),
    "ack": ("_settle", 0),
    "checkpoint": ("_save", 0),
}
"""The method after which it dies, and what makes the step's number of the steps made by then."""


def arm(boundary: str, step: int, mark: Path) -> None:
    name, offset = BOUNDARIES[boundary]
    method: Callable[..., Any] = getattr(TrainingLoop, name)

    def dying(self: TrainingLoop, *args: Any) -> Any:
        result = method(self, *args)
        if self.policy.steps + offset == step and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(TrainingLoop, name, dying)


def main() -> int:
    at = sys.argv.index("--")
    marks, *deaths = sys.argv[1:at]
    for death in deaths:
        boundary, _, step = death.partition("=")
        arm(boundary, int(step), Path(marks) / death)
    sys.argv[1:] = sys.argv[at + 1 :]
    return process.main()


if __name__ == "__main__":
    sys.exit(main())
