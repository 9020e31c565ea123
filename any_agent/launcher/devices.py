"""Whether this machine has what the settings ask for, seen without torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from any_agent.config import Config
from any_agent.errors import ConfigError

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
