"""The models that the demo can train, each with its task and its settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from any_agent.demo.models import smollm2
from any_agent.demo.task import DISCOUNT, ECHO, SUMS, Task


@dataclass(frozen=True, slots=True)
class Setup:
    """A model, and how the demo trains it."""

    name: str
    phase: str
    """The title of the demo's first phase, which makes the model."""
    module: str
    """The module of `any_agent.demo` that makes it, given a folder and ``options``."""
    options: Callable[[int], tuple[str, ...]]
    """The module's further arguments, by the seed."""
    task: Task
    agents: int
    """Agents that run at once."""
    ranks: int
    patience: float
    """Seconds that an agent waits: for a slot of a session, and for its answers. Also the seconds
    after which the service expires a session that no agent knows, and its group continues without
    it: if a part of the service dies, the response to an opening may be lost."""
    settings: Mapping[str, object]
    require: Callable[[], object] = field(default=lambda: None)
    """Raises AnyAgentError if something is missing on this machine."""


TINY = Setup(
    name="tiny",
    phase="making a tiny model",
    module="model",
    options=lambda seed: ("--seed", str(seed)),
    task=ECHO,
    agents=4,
    ranks=2,
    patience=120.0,
    settings={
        "model.enable_thinking": "false",
        "sampling.max_new_tokens": 4,
        "rollout.max_concurrent": 192,
        "train.discount": DISCOUNT,
        "train.lr": 1.5e-3,
        "train.betas": "[0.9, 0.95]",
    },
)

SMOLLM2 = Setup(
    name="smollm2",
    phase=f"unpacking {smollm2.NAME}",
    module="models.smollm2",
    options=lambda seed: (),
    task=SUMS,
    # The engine computes the tokens of many calls at once in hardly more time than one.
    agents=32,
    ranks=1,
    # A step takes most of a minute on two cores, several where they are shared.
    patience=1200.0,
    settings={
        "sampling.max_new_tokens": 24,
        "sessions.max_wait": 1200,
        "rollout.max_concurrent": 96,
        "train.lr": 1e-5,
        "train.micro_batch_tokens": 1024,
        "train.keep_checkpoints": 1,
    },
    require=smollm2.find_gguf,
)

SETUPS = {setup.name: setup for setup in (TINY, SMOLLM2)}
