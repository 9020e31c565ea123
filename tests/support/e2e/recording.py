"""A trainer that records each batch: ``-m tests.support.e2e.recording OUT proxy|dataset -- ...``.

``proxy``: what follows ``--`` are the arguments of the training process, as the launcher gives
them. ``dataset``: it is what a researcher's script is given, and the script trains
:class:`tests.support.e2e.counting_agent.CountingAgent`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from any_agent import GRPOConfig, load_expr_config
from tests.support.e2e.counting_agent import AGENT, items
from trainer import GRPOTrainer
from trainer import __main__ as process
from trainer.batch import TrainingBatch
from trainer.policy import Policy
from trainer.step_maker import StepMaker


def record(folder: Path) -> None:
    """From now on: ``step-N.safetensors``, tensors named `<row>.<field>`."""
    optimize = StepMaker.optimize

    def writing(self: StepMaker, policy: Policy, batch: TrainingBatch, taken: Any) -> Any:
        tensors = {
            f"{number:04d}.{name}": tensor.contiguous()
            for number, row in enumerate(batch.rows)
            for name, tensor in row.items()
        }
        save_file(tensors, folder / f"step-{taken.step}.safetensors")
        return optimize(self, policy, batch, taken)

    StepMaker.optimize = writing  # type: ignore[method-assign]


def train_on_dataset(arguments: list[str]) -> int:
    config, _ = load_expr_config(arguments, GRPOConfig)
    with GRPOTrainer(config, train_dataset=items()) as trainer:
        return 0 if trainer.train(workflow=AGENT) else 1


def main() -> int:
    at = sys.argv.index("--")
    folder, fed = sys.argv[1:at]
    record(Path(folder))
    arguments = sys.argv[at + 1 :]
    if fed == "dataset":
        return train_on_dataset(arguments)
    sys.argv[1:] = arguments
    return process.main()


if __name__ == "__main__":
    sys.exit(main())
