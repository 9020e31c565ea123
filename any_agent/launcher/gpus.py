"""The GPUs of this machine, found without torch."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

_SIGNS = ("nvidiactl", "nvidia0", "dxg", "kfd", "nvhost-gpu", "nvgpu")
"""Devices in `/dev` of NVIDIA's driver, of WSL, of AMD's driver, and of small boards."""


def visible_gpus(dev: Path = Path("/dev")) -> tuple[str, ...]:
    """Return the GPUs that child processes see; () for none, or none that can be counted."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        names = [name.strip() for name in hidden.split(",") if name.strip()]
        return () if "-1" in names else tuple(names)
    found = [path for path in dev.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    # CUDA counts from 0, also in a container whose devices have the numbers 2 and 3.
    return tuple(str(k) for k in range(len(found)))


def sees_gpu(dev: Path = Path("/dev")) -> bool:
    """Return False where there is no GPU for certain."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return False
    return not sys.platform.startswith("linux") or any((dev / name).exists() for name in _SIGNS)
