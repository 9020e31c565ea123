"""A run's adapter, alone, for engines that are live adapters of a shared engine."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from pathlib import Path

import torch

from any_agent.engine import split_adapter
from any_agent.engine.embedded.adapter_files import read_adapter
from any_agent.engine.embedded.adapters import adapter_matrices, named_matrices
from any_agent.engine.weight_serialization import checksums, dtype_of
from any_agent.errors import ConfigError, EngineUnavailable, TrainingError
from any_agent.rundir.checksums import damage
from trainer.adapter_files import FOLDER
from trainer.lora import BaseWeights
from trainer.sync.base import NewWeights
from trainer.sync.disk import DiskSync
from trainer.sync.engine_client import EngineClient

log = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class AdapterSync(DiskSync):
    """A disk sync that verifies an engine's base before the first adapter, and each adapter.

    Other adapters of the same engine go on meanwhile. Raises ConfigError, too: for an engine with
    another base, or one that does not take an adapter as this run's.
    """

    base: BaseWeights
    """The weights that the adapter is trained on."""
    _taken: set[tuple[str, str]] = field(default_factory=set)
    """The engine processes that have taken an adapter."""

    async def _load(self, engine: EngineClient, new: NewWeights) -> None:
        await engine.fetch_info()
        dtype = dtype_of(engine.info.dtype)
        first = engine.identity not in self._taken
        if first:
            await self._require_base(engine, dtype)
        body = {"model_path": str(new.folder), "weight_version": new.loading}
        try:
            await engine.post("/update_weights_from_disk", body)
        except TrainingError as error:
            if first and await asyncio.to_thread(damage, new.folder) is None:
                raise ConfigError(error.message) from error
            raise
        expected = await asyncio.to_thread(_checksums, new.folder / FOLDER, dtype)
        if (await engine.checksums())[:1] != [expected]:
            raise EngineUnavailable(
                f"the engine at {engine.url} has other values than the adapter's in {new.folder}"
            )
        await engine.rename(str(new.version))
        self._taken.add(engine.identity)

    async def _require_base(self, engine: EngineClient, dtype: torch.dtype) -> None:
        """Raise ConfigError unless the engine's own weights are those below the adapter."""
        shared = engine.at(split_adapter(engine.url)[0])
        theirs = (await shared.checksums() or [{}])[0]
        mine = await asyncio.to_thread(self.base.checksums, dtype)
        both = mine.keys() & theirs.keys()
        if not both:
            log.warning(
                "the engine at %s has other names than %s for its weights, so that only the "
                "architecture was compared",
                shared.url,
                self.base.path,
            )
        if wrong := sorted(name for name in both if theirs[name] != mine[name]):
            raise ConfigError(
                f"the engine at {shared.url} has another model than {self.base.path}, on which "
                f"the adapter is trained: {len(wrong)} weights differ, e.g. {wrong[0]}; start the "
                "engine with --model-path of the run's model, or set model.path"
            )


def _checksums(folder: Path, dtype: torch.dtype) -> dict[str, str]:
    files = read_adapter("published", folder, str(folder))
    return checksums(named_matrices(adapter_matrices(str(folder), files, dtype)))
