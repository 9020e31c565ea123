"""Draw learning curves with and without a teacher: ``teacher.py docs/explanation/teacher.png``.

A model of two layers learns sums in one turn, first far enough to be a teacher. Then, for each
seed, a new model learns them from rewards, from rewards and the teacher, and from the teacher
alone. The teacher is the reference model of the loss's KL term (k2), so that each sampled token is
pulled towards what the teacher would have sampled there.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from any_agent.config import TrainConfig
from benchmarks.learning.beside_trl import EVERY, SETTINGS, TASK, WAITING, ours, say
from benchmarks.learning.curves import picture, summary
from benchmarks.learning.runs import prepare, train
from trainer.advantage import GroupAdvantages, SessionRewards, group_advantages

TEACHERS_STEPS = 30
TEACHER: dict[str, Any] = {
    "train__kl_coef": 0.3,
    "train__kl_estimator": "k2",
    # A group whose sessions score alike learns from the teacher, too.
    "train__dynamic_sampling": "keep",
}
ALONE: dict[str, Any] = {"train__advantage_estimator": "benchmarks.learning.teacher.no_advantages"}


def no_advantages(
    groups: Sequence[Sequence[SessionRewards]], config: TrainConfig
) -> list[GroupAdvantages]:
    """Learn nothing from rewards: every advantage is 0."""
    return group_advantages(
        [[SessionRewards([0.0] * len(s.rewards), s.counted) for s in g] for g in groups]
    )


def taught(folder: Path) -> Path:
    """Train a model of seed 100 until it is a teacher; return its checkpoint."""
    prepare(folder, TASK, 100)
    figures = train(
        folder,
        TASK,
        100,
        **SETTINGS | WAITING | {"train__steps": TEACHERS_STEPS, "train__lr": 2e-3},
    )
    say(100, "the teacher", [figures.before, figures.after])
    (found,) = (folder / "runs").glob(f"*/*/*/checkpoints/step-{TEACHERS_STEPS:08}")
    kept = folder / "teacher"
    shutil.copytree(found, kept)
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw curves with and without a teacher.")
    parser.add_argument("png", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    curves: dict[str, list[list[float]]] = {
        "rewards": [],
        "rewards and a teacher": [],
        "a teacher alone": [],
    }
    with tempfile.TemporaryDirectory(prefix="any-agent-teacher-") as root:
        teacher = TEACHER | {"train__reference_model": taught(Path(root, "teacher"))}
        for seed in range(arguments.seeds):
            folder = Path(root, f"{seed}")
            prepare(folder, TASK, seed)
            for (name, runs), more in zip(
                curves.items(), ({}, teacher, teacher | ALONE), strict=True
            ):
                given = SETTINGS | WAITING | more | {"eval__every": EVERY}
                runs.append(ours(folder, TASK, seed, **given).evals)
                say(seed, name, runs[-1])
    for name, runs in curves.items():
        print(summary(name, runs, last=3))
    picture(
        curves,
        every=EVERY,
        first=0,
        title="Sums in one turn, with and without a teacher",
        reward="mean reward on held-out items",
    ).savefig(arguments.png)


if __name__ == "__main__":
    main()
