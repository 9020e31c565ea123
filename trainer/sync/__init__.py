"""New weights for every rank's engine, without a lost call: pause, load, publish, resume.

They go by a folder (:mod:`.disk`; an adapter without its base: :mod:`.adapter`), or in buckets
(:mod:`.bucketed`), over a process group or as tensors in HTTP bodies (:mod:`.transports`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

from any_agent.auth.engine_key import key_of_engines
from any_agent.config import LOOPBACK, Config
from any_agent.errors import ConfigError
from any_agent.launcher.engines import SHARED_GPUS
from trainer.lora import BaseWeights
from trainer.sync.adapter import AdapterSync
from trainer.sync.base import EngineCall, NewWeights, WeightSync
from trainer.sync.bucketed import BucketSync
from trainer.sync.disk import DiskSync
from trainer.sync.transports import GroupTransport, TensorTransport, Transport

__all__ = ["EngineCall", "NewWeights", "WeightSync", "make_sync"]
Way: TypeAlias = Literal["disk", "distributed", "tensor"]

_IMPOSSIBLE = {"some": ("tensor", "distributed"), "all": ("distributed",)}
"""Ways that fail by the share of engines on the trainer's GPU: NCCL takes one process per GPU, and
only processes that see a GPU read its memory."""


def make_sync(
    config: Config,
    call: EngineCall,
    *,
    cuda: bool,
    engines: Sequence[str],
    base: BaseWeights | None = None,
) -> WeightSync:
    """Make the weight sync of a run.

    ``cuda``: the policy is on a GPU. ``engines``: the engines' URLs as far as they are known.
    ``base``: the weights below the adapter that engines get instead of all weights.
    """
    timeout = config.engine.load_timeout
    common: dict[str, Any] = {"load_timeout": timeout, "key": key_of_engines(config)}
    if base is not None:
        return AdapterSync(call, base=base, **common)
    common |= {"in_place": config.engine.update_mode == "in_place"}
    way = way_of(config, cuda=cuda, engines=engines)
    if way == "disk":
        return DiskSync(call, **common)
    transport: Transport = TensorTransport()
    if way == "distributed":
        transport = GroupTransport(timeout=timeout, cuda=cuda)
    return BucketSync(call, transport, dtype=config.model.dtype, **common)


def way_of(config: Config, *, cuda: bool, engines: Sequence[str]) -> Way:
    """Return the way that weights take; ConfigError if the places of the GPUs rule it out."""
    wanted = config.engine.weight_sync
    local = all(urlsplit(url).hostname in LOOPBACK for url in engines)
    sharing = os.environ.get(SHARED_GPUS, "none")
    if wanted == "tensor" and cuda and not local:
        raise ConfigError(
            "engine.weight_sync=tensor, but some engines run on other machines and cannot read "
            "the memory of the trainer's GPU; use distributed"
        )
    if cuda and wanted in _IMPOSSIBLE.get(sharing, ()):
        raise ConfigError(
            f"engine.weight_sync={wanted}, but {sharing} of the engines use the trainer's GPU: "
            "tensor needs all of them on it, distributed none; use auto"
        )
    if wanted != "auto":
        return wanted
    if not cuda or config.engine.device == "cpu" or sharing == "some":
        return "disk"
    if sharing == "all":
        return "tensor" if local else "disk"
    return "distributed"
