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
    greedy_evals: bool = False
    """Answer each held-out prompt once, by the likeliest tokens; by default it is sampled twice."""
    require: Callable[[], object] = field(default=lambda: None)
    """Raises AnyAgentError if something is missing on this machine."""

    @property
    def evals(self) -> int:
        """The number of eval sessions for every held-out prompt."""
        return 1 if self.greedy_evals else 2


TINY = Setup(
    name="tiny",
    phase="making a tiny model, which takes half a minute",
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
    agents=64,
    ranks=1,
    # A step takes some 20 seconds on two cores, more where they are shared.
    patience=1200.0,
    settings={
        # "13 + 8 = 21" has ten.
        "sampling.max_new_tokens": 12,
        "sessions.max_wait": 1200,
        "rollout.max_concurrent": 96,
        # Sampling until eight groups differ would take most of the time: first few answers are
        # right, and later few are wrong.
        "train.dynamic_sampling": "keep",
        "train.lr": 2.5e-5,
        # At a constant rate the last steps undo some of what was learned.
        "train.lr_schedule": "cosine",
        "train.threads": 2,
        "train.keep_checkpoints": 1,
    },
    greedy_evals=True,
    require=smollm2.find_gguf,
)

SETUPS = {setup.name: setup for setup in (TINY, SMOLLM2)}
