"""The trainer, killed at boundaries of its steps.

Run it by ``-m tests.support.e2e.dying_trainer MARKS ... -- ...``.

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
from trainer.sync.bucketed import UpdateAttempt


def _made(loop: TrainingLoop) -> int:
    return loop.policy.steps


BOUNDARIES: dict[str, tuple[type, str, Callable[[Any], int]]] = {
    "lease": (TrainingLoop, "_wait", lambda loop: _made(loop) + 1),
    "step": (TrainingLoop, "_optimize", _made),
    # The engines have all of the weights, and do not know it.
    "send": (UpdateAttempt, "_send", lambda attempt: attempt._new.step),
    "publish": (TrainingLoop, "_publish", _made),
    "ack": (TrainingLoop, "_settle", _made),
    "checkpoint": (TrainingLoop, "_save", _made),
}
"""The method after which it dies, and the number of the step that its object is at by then."""


def arm(boundary: str, step: int, mark: Path) -> None:
    owner, name, step_of = BOUNDARIES[boundary]
    method: Callable[..., Any] = getattr(owner, name)

    def dying(self: Any, *args: Any) -> Any:
        result = method(self, *args)
        if step_of(self) == step and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, dying)


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
