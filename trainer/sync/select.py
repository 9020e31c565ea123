"""Which way new weights go, by the settings and by where trainer and engines are."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal, TypeAlias
from urllib.parse import urlsplit

from any_agent.config import LOOPBACK, Config
from any_agent.errors import ConfigError
from trainer.sync.base import EngineCall, WeightSync
from trainer.sync.bucketed import BucketSync
from trainer.sync.disk import DiskSync
from trainer.sync.group_transport import GroupTransport
from trainer.sync.tensor_transport import TensorTransport

Way: TypeAlias = Literal["disk", "distributed", "tensor"]

SHARED_GPUS = "ANY_AGENT_SHARED_GPUS"
"""Set by whoever starts engines beside the trainer: which of them use its GPU, `none`, `some`,
`all`."""


_NOT_WHERE = {"some": ("tensor", "distributed"), "all": ("distributed",)}
"""One process of NCCL's each GPU; a GPU's memory for processes that see it."""


def make_sync(
    config: Config, call: EngineCall, *, cuda: bool, engines: Sequence[str]
) -> WeightSync:
    """``cuda``: the policy is on a GPU. ``engines`` are their URLs, as far as they are known."""
    engine = config.engine
    in_place = engine.update_mode == "in_place"
    way = way_of(config, cuda=cuda, engines=engines)
    if way == "disk":
        return DiskSync(call, load_timeout=engine.load_timeout, in_place=in_place)
    transport = (
        GroupTransport(timeout=engine.load_timeout) if way == "distributed" else TensorTransport()
    )
    return BucketSync(
        call,
        transport,
        load_timeout=engine.load_timeout,
        dtype=config.model.dtype,
        in_place=in_place,
        cuda=cuda,
    )


def way_of(config: Config, *, cuda: bool, engines: Sequence[str]) -> Way:
    """Raises ConfigError for a way that cannot be gone with GPUs as they are shared."""
    wanted = config.engine.weight_sync
    local = all(urlsplit(url).hostname in LOOPBACK for url in engines)
    sharing = os.environ.get(SHARED_GPUS, "none")
    if wanted == "tensor" and cuda and not local:
        raise ConfigError(
            "engine.weight_sync=tensor, but engines are on other machines than the trainer, whose "
            "GPUs' memory they cannot read; use distributed"
        )
    if cuda and wanted in _NOT_WHERE.get(sharing, ()):
        raise ConfigError(
            f"engine.weight_sync={wanted}, but {sharing} of the engines use the trainer's GPU: "
            "tensors need that all do, a process group that none does; auto finds the way"
        )
    if wanted != "auto":
        return wanted
    if not cuda or config.engine.device == "cpu" or sharing == "some":
        return "disk"
    if sharing == "all":
        return "tensor" if local else "disk"
    return "distributed"
