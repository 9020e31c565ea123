"""The trained model's answers and the reward curve, from the run's files.

``python -m any_agent.demo.look_back ARGUMENTS`` takes and prints JSON. It is a process of its own
because it imports matplotlib and torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from any_agent.demo.setups import SETUPS
from any_agent.demo.state import Step, by_number
from any_agent.demo.task import messages, shuffled
from any_agent.inference import load_engine
from any_agent.runtime.log_tail import LogTail

_NOTE = "Groups whose sessions all score the same teach nothing, and count in no step's mean."
_ANSWERS = 3


def draw(steps: Sequence[Step], *, before: float, after: float, title: str) -> Figure:
    """Draw each step's mean reward, and the accuracy on held-out prompts before and after.

    Raises ValueError where there is no step.
    """
    if not steps:
        raise ValueError("there is no step to draw")
    numbers = [step["step"] for step in steps]
    rewards = [step["reward"] for step in steps]
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(numbers, rewards, marker="o", markersize=4, label="mean reward of a step's sessions")
    axes.plot(
        [0, numbers[-1]],
        [before, after],
        linestyle="none",
        marker="D",
        markersize=8,
        color="tab:orange",
        label="held-out prompts: share of first answers right, before and after",
    )
    for x, y in ((0, before), (numbers[-1], after)):
        axes.annotate(f"{y:.1%}", (x, y), xytext=(0, -18), textcoords="offset points", ha="center")
    axes.set_ylim(min(0.0, *rewards) - 0.02, max(1.0, *rewards) + 0.05)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.set_xlabel(f"optimizer step\n{_NOTE}")
    axes.set_ylabel("mean reward")
    share = axes.secondary_yaxis("right")
    share.yaxis.set_major_formatter(PercentFormatter(1.0))
    share.set_ylabel("share right")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    return figure


def look_back(
    experiment: str,
    trial: str,
    *,
    user: str,
    root: str,
    seed: int,
    model: str,
    tokens: int,
    metrics: str,
    curve: str,
    before: float,
    after: float,
    title: str,
) -> dict[str, Any]:
    """Draw the curve to a file; return the checkpoint's path and its answers to some prompts."""
    steps = by_number(LogTail(Path(metrics), from_start=True).new_records())
    draw(steps, before=before, after=after, title=title).savefig(curve)
    task = SETUPS[model].task
    prompts = shuffled(task.items(held_out=True), seed)[:_ANSWERS]
    with load_engine(experiment, trial, user=user, root=root) as engine:
        answers = [
            (item.prompt, engine.chat(messages(item, task.system), max_new_tokens=tokens))
            for item in prompts
        ]
        checkpoint = str(engine.path)
    told = [(prompt, answer["content"]) for prompt, answer in answers]
    return {"checkpoint": checkpoint, "answers": told}


if __name__ == "__main__":
    print(json.dumps(look_back(**json.loads(sys.argv[1]))))
