"""Whether this machine has what the settings ask for, and who gets which GPU; without torch."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from any_agent.config import Config
from any_agent.errors import ConfigError

SHARED_GPUS = "ANY_AGENT_SHARED_GPUS"
"""A trainer's variable: which of the machine's engines use its first GPU, `none`, `some`, `all`."""
_SIGNS = ("nvidiactl", "nvidia0", "dxg", "kfd", "nvhost-gpu", "nvgpu")
"""In `/dev`: NVIDIA's driver, that of Windows' Linux, AMD's, and those of small boards."""


def require_devices(config: Config, *, trains: bool) -> None:
    """ConfigError for `cuda` where no GPU is to be seen: the parts would find out one by one."""
    wanted = {"engine.device": config.engine.device if not config.engine.urls else "auto"}
    if trains:
        wanted["train.device"] = config.train.device
    for name, device in wanted.items():
        if device == "cuda" and not sees_gpu():
            raise ConfigError(f"{name}=cuda, but there is no GPU {_where()}; use cpu or auto")
    starts_sglang = config.engine.kind == "sglang" and not config.engine.urls
    if starts_sglang and config.engine.gpus > 1 and not sees_gpu():
        raise ConfigError(f"engine.gpus={config.engine.gpus}, but there is no GPU {_where()}")


@dataclass(frozen=True, slots=True)
class GpuAssignment:
    """Who uses which GPUs, as `CUDA_VISIBLE_DEVICES` names them. None: all that are visible."""

    engines: tuple[tuple[str, ...] | None, ...]
    """Of each engine of this machine, in their order."""
    trainer: tuple[str, ...] | None
    sends: str | None = None
    """The GPU that new weights come from: the trainer's first one."""

    @property
    def sharing(self) -> Literal["none", "some", "all"]:
        """Which engines use the GPU that new weights come from."""
        use = [self.sends in hand for hand in self.engines if hand is not None]
        return "none" if not any(use) else "all" if all(use) else "some"


def assign_gpus(
    config: Config, visible: Sequence[str], *, engines: int, trains: bool
) -> GpuAssignment:
    """Give each of this machine's engines its GPUs, and the trainer those that are left.

    The engines' are the last ones: a script that trains in its own process takes the first. Where
    none is left the trainer shares the engines'. More embedded engines than GPUs share them, too;
    SGLang fills the memory of its own: ConfigError where there are too few.
    """
    if not visible or config.engine.device == "cpu" or config.engine.urls:
        return GpuAssignment((None,) * engines, None)
    sglang = config.engine.kind == "sglang"
    each = config.engine.gpus if sglang else 1
    needed = each * engines
    if needed > len(visible):
        if sglang:
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


def visible_gpus(dev: Path = Path("/dev")) -> tuple[str, ...]:
    """The GPUs that processes of ours would see; () for none, or none that can be counted."""
    told = os.environ.get("CUDA_VISIBLE_DEVICES")
    if told is not None:
        names = [name.strip() for name in told.split(",") if name.strip()]
        return () if "-1" in names else tuple(names)
    found = [path for path in dev.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    # CUDA counts what it sees from 0, whatever the driver calls it: in a container, 2 and 3, say.
    return tuple(str(k) for k in range(len(found)))


def sees_gpu(dev: Path = Path("/dev")) -> bool:
    """False where there is none for certain."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return False
    return not sys.platform.startswith("linux") or any((dev / name).exists() for name in _SIGNS)


def _where() -> str:
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and not sees_gpu():
        return f"to be seen (CUDA_VISIBLE_DEVICES={hidden!r})"
    return "on this machine"
