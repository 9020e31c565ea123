"""Draw a demo's reward curve.

Run as ``python -m any_agent.demo.reward_curve METRICS PNG --before A --after B``.
Imports matplotlib, so it is a process of its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from any_agent.demo.state import Metrics, Step, by_number

_NOTE = "Groups of sessions that all score the same teach nothing; they are in no step's mean."


def picture(steps: Sequence[Step], *, before: float, after: float, title: str) -> Figure:
    """The mean reward of each step's sessions, and the accuracy on held-out prompts around them.

    Raises ValueError where there is no step.
    """
    if not steps:
        raise ValueError("there is no step to draw")
    numbers = [step.number for step in steps]
    rewards = [step.reward for step in steps]
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


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw a demo's reward curve.")
    parser.add_argument("metrics", type=Path)
    parser.add_argument("png", type=Path)
    parser.add_argument("--before", type=float, required=True)
    parser.add_argument("--after", type=float, required=True)
    parser.add_argument("--title", required=True)
    args = parser.parse_args()
    steps = by_number(Metrics(args.metrics).new())
    picture(steps, before=args.before, after=args.after, title=args.title).savefig(args.png)


if __name__ == "__main__":
    main()
