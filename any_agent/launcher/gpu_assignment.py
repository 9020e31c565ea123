"""The assignment of a machine's GPUs to its parts, without torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from any_agent.config import Config
from any_agent.errors import ConfigError
from any_agent.launcher.engines import engine_kind, sees_gpu

SHARED_GPUS = "ANY_AGENT_SHARED_GPUS"
"""The variable that tells a trainer how many of the machine's engines use its first GPU: `none`,
`some` or `all`."""


def require_devices(config: Config, *, trains: bool) -> None:
    """Raise ConfigError for `cuda` without a GPU, before each part fails."""
    wanted = {"engine.device": config.engine.device if not config.engine.urls else "auto"}
    if trains:
        wanted["train.device"] = config.train.device
    for name, device in wanted.items():
        if device == "cuda" and not sees_gpu():
            raise ConfigError(f"{name}=cuda, but there is no GPU {_where()}; use cpu or auto")
    # With engine.urls the kind may be one that only a plugin knows.
    owns_gpus = not config.engine.urls and engine_kind(config).owns_gpus
    if owns_gpus and config.engine.gpus > 1 and not sees_gpu():
        raise ConfigError(f"engine.gpus={config.engine.gpus}, but there is no GPU {_where()}")


@dataclass(frozen=True, slots=True)
class GpuAssignment:
    """The GPUs of each part, as `CUDA_VISIBLE_DEVICES` names them; None: all that are visible."""

    engines: tuple[tuple[str, ...] | None, ...]
    """GPUs of each engine of this machine, in their order."""
    trainer: tuple[str, ...] | None
    sends: str | None = None
    """The GPU that sends new weights: the trainer's first one."""

    @property
    def sharing(self) -> Literal["none", "some", "all"]:
        """Return how many of the engines use the GPU that sends new weights."""
        use = [self.sends in hand for hand in self.engines if hand is not None]
        return "none" if not any(use) else "all" if all(use) else "some"


def assign_gpus(
    config: Config, visible: Sequence[str], *, engines: int, trains: bool
) -> GpuAssignment:
    """Give each of this machine's engines its GPUs, and the trainer those that are left.

    The engines get the last GPUs: a script that trains in its own process takes the first. If none
    is left, the trainer shares the engines' GPUs. Embedded engines share GPUs if there are too few;
    SGLang fills the memory of its GPUs, so too few raise ConfigError.
    """
    if not visible or config.engine.device == "cpu" or config.engine.urls:
        return GpuAssignment((None,) * engines, None)
    owns_gpus = engine_kind(config).owns_gpus
    each = config.engine.gpus if owns_gpus else 1
    needed = each * engines
    if needed > len(visible):
        if owns_gpus:
            raise ConfigError(
                f"{engines} engines with engine.gpus={each} need {needed} GPUs, and there are "
                f"{len(visible)} ({','.join(visible)}): lower server.ranks or engine.gpus"
            )
        hands: tuple[tuple[str, ...], ...]
        hands = tuple((visible[k % len(visible)],) for k in range(engines))
        return GpuAssignment(hands, None, visible[0])
    left, theirs = tuple(visible[: len(visible) - needed]), visible[len(visible) - needed :]
    hands = tuple(tuple(theirs[k * each : (k + 1) * each]) for k in range(engines))
    return GpuAssignment(hands, left if trains and left else None, visible[0])


def _where() -> str:
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and not sees_gpu():
        return f"to be seen (CUDA_VISIBLE_DEVICES={hidden!r})"
    return "on this machine"
