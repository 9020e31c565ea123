"""Train a pretrained model, and draw the curve:

python examples/real_model/train.py --config examples/real_model/config.yaml
"""

from __future__ import annotations

import random
import sys
from itertools import combinations_with_replacement

from any_agent import GRPOConfig, load_expr_config
from any_agent.demo.look_back import draw
from any_agent.demo.state import by_number
from any_agent.runtime.log_tail import records_in
from trainer import GRPOTrainer


class SumsConfig(GRPOConfig):
    """The run's settings and one of our own."""

    largest: int = 20
    """The largest number that is added."""


def tasks(largest: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return sums to train on, and sums of other pairs of numbers to measure with."""
    pairs = list(combinations_with_replacement(range(2, largest + 1), 2))
    random.Random(0).shuffle(pairs)
    kept = max(1, len(pairs) // 6)

    def sums(some: list[tuple[int, int]]) -> list[dict[str, str]]:
        both = sorted({order for a, b in some for order in ((a, b), (b, a))})
        return [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in both]

    return sums(pairs[kept:]), sums(pairs[:kept])


def main() -> None:
    config, _ = load_expr_config(sys.argv[1:], SumsConfig)
    train, valid = tasks(config.largest)
    with GRPOTrainer(config, train_dataset=train, valid_dataset=valid) as trainer:
        trainer.train(workflow="agent.SumAgent", eval_workflow="agent.SumAgent")
    records = records_in(trainer.dir.metrics)
    evals = [record["eval"]["reward"] for record in records if "eval" in record]
    steps = by_number(record for record in records if "eval" not in record)
    curve = trainer.dir.path / "reward.png"
    draw(steps, before=evals[0], after=evals[-1], title="sums").savefig(curve)
    print(f"right on sums that training never sees: {evals[0]:.1%} before, {evals[-1]:.1%} after")
    print(f"curve     {curve}")


if __name__ == "__main__":
    main()
