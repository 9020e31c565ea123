"""LoRA adapters that come, change and go while the engine serves: one for each of several runs.

Under ``/adapters/NAME`` a run has what looks like an engine of its own: its version, its pauses,
its updates and its calls. The model's weights and the batch are everyone's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from any_agent.engine.embedded.adapter_files import read_adapter, require_name
from any_agent.engine.embedded.adapters import Adapters, Matrices, named_matrices
from any_agent.engine.embedded.engine import EmbeddedEngine, Generation
from any_agent.engine.embedded.sampler import LogitsProcessor
from any_agent.engine.embedded.variant import Variant
from any_agent.engine.weight_serialization import checksums
from any_agent.errors import ConfigError, Conflict, EngineUnavailable, InvalidRequest, NotFound
from any_agent.rundir.checksums import MANIFEST, damage
from any_agent.types import ModelRequest

FOLDER = "adapter"
"""The adapter's folder in a checkpoint, and in a published version."""
UNLOADED = "unloaded"
"""The version of an adapter that has no weights yet; nothing is sampled with it."""


class LiveAdapter(EmbeddedEngine):
    """An engine's interface, for the requests of one live adapter alone.

    Before its first weights, and after its removal, it takes no request.
    """

    def __init__(self, home: LiveAdapters, name: str) -> None:
        # All but these is the engine's own.
        vars(self).update(vars(home.engine))
        self.variant = Variant(UNLOADED, name)
        self._generations = {}
        self._all, self._name = home, name
        self._removed = False
        self._updates = asyncio.Lock()

    @property
    def adapters(self) -> Mapping[str, str]:
        return {}

    @property
    def counts(self) -> tuple[int, int]:
        return self.loop.load_of(self.variant)

    def submit(
        self,
        request: ModelRequest,
        *,
        stream: bool = True,
        processor: LogitsProcessor | None = None,
    ) -> Generation:
        self._require_weights()
        return super().submit(request, stream=stream, processor=processor)

    async def rename(self, version: str) -> None:
        self._require_weights()
        await super().rename(version)

    async def checksums(self) -> dict[str, str]:
        """Return the checksums of its matrices, by the names of
        :func:`~any_agent.engine.embedded.adapters.named_matrices`."""
        own = await asyncio.wrap_future(self.loop.call(lambda: self._beside.matrices(self._name)))
        return await asyncio.to_thread(checksums, named_matrices(own))

    async def update_weights(
        self, path: str, version: str | None = None, *, abort_all: bool = False
    ) -> int:
        """Use the adapter in a folder, or in the folder `adapter` of a checkpoint.

        The first one takes a place in the engine. Raises Conflict if all are taken, InvalidRequest
        or ConfigError for an adapter that cannot be served here: the one before stays. Otherwise
        as :meth:`EmbeddedEngine.update_weights`.
        """
        if version is None:
            raise InvalidRequest("an adapter's weights need a weight_version")
        self._all.admit(self._name, self)
        try:
            async with self._updates:
                matrices = await asyncio.to_thread(self._read, Path(path))
                if self._removed:
                    raise Conflict(f"the adapter {self._name} was removed meanwhile: send it again")
                kept = await self._apply(
                    lambda: self._beside.put(self._name, matrices), version, abort_all=abort_all
                )
        except BaseException:
            if self.variant.version == UNLOADED:
                await self.remove()
            raise
        self.model_path = path
        return kept

    async def remove(self) -> None:
        """End its requests, and give back its place and its memory."""
        if not self._removed:
            self._removed = True
            self._all.forget(self._name)
            release = partial(self._beside.drop, self._name)
            await asyncio.wrap_future(self.loop.remove(self.variant, release))

    def _require_weights(self) -> None:
        if self._removed or self.variant.version == UNLOADED:
            raise EngineUnavailable(
                f"the adapter {self._name} has no weights in this engine: its run's trainer "
                "publishes them"
            )

    @property
    def _beside(self) -> Adapters:
        assert self.beside is not None
        return self.beside

    def _read(self, path: Path) -> Matrices:
        if (path / MANIFEST).exists() and (problem := damage(path)) is not None:
            raise InvalidRequest(f"the adapter in {path} is damaged: {problem}")
        inner, what = path / FOLDER, f"the adapter {self._name}"
        files = read_adapter(self._name, inner if inner.is_dir() else path, what)
        most = self.options.max_adapter_rank
        if files.config.rank > most:
            raise InvalidRequest(
                f"{what} has the rank {files.config.rank}, and this engine takes {most} at most: "
                "train with a lower train.lora.rank, or start the engine with a higher "
                "--max-adapter-rank"
            )
        return self._beside.fit(what, files)


class LiveAdapters:
    """The live adapters of one engine, by name; its event loop calls them."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self.engine = engine
        self._room = engine.options.live_adapters
        self._there: dict[str, LiveAdapter] = {}

    def describe(self) -> dict[str, Any]:
        """Return the places, and the weight versions of the adapters that have one."""
        versions = {name: each.variant.version for name, each in self._there.items()}
        return {"places": self._room, "versions": versions}

    def find(self, name: str) -> LiveAdapter:
        """Return an adapter, whether it has weights yet or not.

        NotFound if the engine takes none, InvalidRequest for a name that none can have.
        """
        if not self._room:
            raise NotFound("this engine takes no adapters: start it with --live-adapters NUMBER")
        try:
            require_name(name)
        except ConfigError as error:
            raise InvalidRequest(error.message) from None
        return self._there.get(name) or LiveAdapter(self, name)

    def admit(self, name: str, adapter: LiveAdapter) -> None:
        """Give an adapter a place, if it has none; Conflict if all are taken."""
        if name not in self._there and len(self._there) >= self._room:
            raise Conflict(
                f"the engine's places for adapters, {self._room}, are taken "
                f"({', '.join(sorted(self._there))}): send DELETE /adapters/NAME for one that is "
                "no longer needed, or start the engine with more --live-adapters"
            )
        self._there.setdefault(name, adapter)

    def forget(self, name: str) -> None:
        """Free an adapter's place."""
        self._there.pop(name, None)

    async def remove(self, name: str) -> None:
        """Remove an adapter; NotFound if it has no place."""
        adapter = self.find(name)
        if name not in self._there:
            raise NotFound(f"this engine has no adapter {name}")
        await adapter.remove()
