"""The trainer, killed at boundaries of its steps.

Run it by ``-m tests.support.e2e.dying_trainer MARKS ... -- ...``.

``lease=1`` kills it, once, when it has the sessions of its first step; what follows ``--`` are the
trainer's own arguments. A file in the folder MARKS remembers each death.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer import __main__ as process
from trainer.loop import TrainingLoop
from trainer.manifests import ManifestStore
from trainer.step_maker import StepMaker
from trainer.sync.base import Bucket, NewWeights
from trainer.sync.bucketed import UpdateAttempt


def _made(loop: TrainingLoop, *_: Any) -> int:
    return loop.policy.steps


BOUNDARIES: dict[str, tuple[type, str, Callable[..., int]]] = {
    "lease": (StepMaker, "manifest", lambda _, policy, *__: policy.steps + 1),
    "manifest": (ManifestStore, "write", lambda _, taken, *__: taken.step),
    "step": (StepMaker, "optimize", lambda _, policy, *__: policy.steps),
    "publish": (TrainingLoop, "publish", _made),
    "ack": (TrainingLoop, "settle", _made),
    "checkpoint": (TrainingLoop, "save", _made),
}
"""The method at whose end it dies, or at whose beginning for a name like `before-ack`, and the
number of the step that its object is at by then."""


def die_once(mark: Path) -> None:
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def arm(boundary: str, step: int, mark: Path) -> None:
    before = boundary.startswith("before-")
    owner, name, step_of = BOUNDARIES[boundary.removeprefix("before-")]
    method: Callable[..., Any] = getattr(owner, name)

    def dying(self: Any, *args: Any, **named: Any) -> Any:
        if before and step_of(self, *args) == step:
            die_once(mark)
        result = method(self, *args, **named)
        if not before and step_of(self, *args) == step:
            die_once(mark)
        return result

    setattr(owner, name, dying)


def arm_send(step: int, mark: Path) -> None:
    """Die when the engines have all of the weights, and do not know it."""
    begin = UpdateAttempt.__init__

    def begun(attempt: UpdateAttempt, sync: Any, ranks: Any, new: NewWeights, **named: Any) -> None:
        def buckets() -> Iterator[Bucket]:
            yield from new.buckets()
            if new.step == step:
                die_once(mark)

        begin(attempt, sync, ranks, replace(new, buckets=buckets), **named)

    UpdateAttempt.__init__ = begun  # type: ignore[assignment,method-assign]


def main() -> int:
    at = sys.argv.index("--")
    marks, *deaths = sys.argv[1:at]
    for death in deaths:
        boundary, _, step = death.partition("=")
        if boundary == "send":
            arm_send(int(step), Path(marks) / death)
        else:
            arm(boundary, int(step), Path(marks) / death)
    sys.argv[1:] = sys.argv[at + 1 :]
    return process.main()


if __name__ == "__main__":
    sys.exit(main())
