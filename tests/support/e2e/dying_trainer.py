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
from trainer.manifests import ManifestStore
from trainer.step_maker import StepMaker
from trainer.sync.bucketed import UpdateAttempt


def _made(loop: TrainingLoop, *_: Any) -> int:
    return loop.policy.steps


BOUNDARIES: dict[str, tuple[type, str, Callable[..., int]]] = {
    "lease": (TrainingLoop, "_wait", lambda loop, *_: _made(loop) + 1),
    "manifest": (ManifestStore, "write", lambda _, taken, *__: taken.step),
    "step": (StepMaker, "optimize", lambda _, policy, *__: policy.steps),
    # The engines have all of the weights, and do not know it.
    "send": (UpdateAttempt, "_send", lambda attempt, *_: attempt._new.step),
    "publish": (TrainingLoop, "publish", _made),
    "ack": (TrainingLoop, "settle", _made),
    "checkpoint": (TrainingLoop, "save", _made),
}
"""The method at whose end it dies, or at whose beginning for a name like `before-ack`, and the
number of the step that its object is at by then."""


def arm(boundary: str, step: int, mark: Path) -> None:
    before = boundary.startswith("before-")
    owner, name, step_of = BOUNDARIES[boundary.removeprefix("before-")]
    method: Callable[..., Any] = getattr(owner, name)

    def die(self: Any, *args: Any) -> None:
        if step_of(self, *args) == step and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def dying(self: Any, *args: Any, **named: Any) -> Any:
        if before:
            die(self, *args)
        result = method(self, *args, **named)
        if not before:
            die(self, *args)
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
