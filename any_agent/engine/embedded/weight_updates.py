"""Weights that a trainer sends while the engine runs: by a process group, or in HTTP bodies.

As in SGLang a session is opened, buckets come, and it is closed. Here they are only gathered
meanwhile, and put in at the end, all or nothing: an engine whose trainer dies half-way still has
its old weights whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from any_agent.engine.embedded.engine import EmbeddedEngine
from any_agent.engine.embedded.weight_loading import fit_weights
from any_agent.engine.weight_process_group import WeightGroup
from any_agent.engine.weight_serialization import checksums, dtype_of, unpack
from any_agent.errors import Conflict, EngineUnavailable, InvalidRequest

_GROUP_TIMEOUT = 600.0
"""Seconds that a member of a group is waited for."""


class WeightUpdater:
    """The sessions and groups of one engine. Its methods belong to the engine's event loop."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine
        self._groups: dict[str, WeightGroup] = {}
        self._staged: dict[str, Tensor] | None = None
        self._version: str | None = None
        self._abort_all = False
        self._lock = asyncio.Lock()

    async def join(
        self, name: str, host: str, port: int, *, rank: int, size: int, backend: str
    ) -> None:
        """Returns once the group is whole. EngineUnavailable if it does not become so."""
        if name in self._groups:
            raise Conflict(f"the group {name!r} is there already")
        if backend not in ("gloo", "nccl"):
            raise InvalidRequest(f"backend must be gloo or nccl, not {backend!r}", param="backend")
        if not 0 < rank < size:
            raise InvalidRequest(f"rank_offset must be 1 to {size - 1}", param="rank_offset")
        if backend == "nccl" and self._engine.loaded.device.type != "cuda":
            raise InvalidRequest("this engine has no GPU: use gloo", param="backend")
        # There is one trainer: another group is of one that died, or has given it up.
        self.close()
        try:
            self._groups[name] = await asyncio.to_thread(
                WeightGroup.join,
                host,
                port,
                rank=rank,
                size=size,
                name=name,
                backend="nccl" if backend == "nccl" else "gloo",
                timeout=_GROUP_TIMEOUT,
            )
        except RuntimeError as error:
            raise EngineUnavailable(f"the group {name!r} was not joined: {error}") from error

    def leave(self, name: str) -> None:
        """Whatever waits in it fails at once."""
        self._group(name, remove=True).close()

    def close(self) -> None:
        """Leave all groups."""
        for name in list(self._groups):
            self.leave(name)

    def begin(self) -> None:
        """Open a session; Conflict while one is open."""
        if self._staged is not None:
            raise Conflict(
                "a weight-update session is already open; call end_weight_update() first"
            )
        self._staged, self._version, self._abort_all = {}, None, False

    async def receive(
        self, group: str, names: list[str], dtypes: list[str], shapes: list[list[int]]
    ) -> None:
        """The next bucket, of tensors as told, from rank 0 of a group."""
        session, member = self._open(), self._group(group)
        if not len(names) == len(dtypes) == len(shapes):
            raise InvalidRequest("names, dtypes and shapes must be as many as one another")
        device = self._engine.loaded.device if member.backend == "nccl" else torch.device("cpu")
        try:
            tensors = [
                torch.empty(shape, dtype=dtype_of(dtype), device=device)
                for shape, dtype in zip(shapes, dtypes, strict=True)
            ]
            async with self._lock:
                await asyncio.to_thread(member.broadcast, tensors)
        except (RuntimeError, TypeError) as error:
            self._groups.pop(group, None)
            member.close()
            raise EngineUnavailable(f"no weights came by {group!r}: {error}") from error
        self._stage(session, dict(zip(names, tensors, strict=True)))

    async def take(self, how: str, text: str) -> None:
        """The next bucket, from a body."""
        session = self._open()
        self._stage(session, await asyncio.to_thread(unpack, how, text))

    def name_version(self, version: str | None, *, abort_all: bool = False) -> None:
        """What the session's weights are called once they are in."""
        self._version = version if version is not None else self._version
        self._abort_all |= abort_all

    async def end(self) -> int:
        """Put in what came; returns how many requests were kept paused.

        Raises InvalidRequest, the old weights untouched, unless it is every weight of the model;
        the session is over either way.
        """
        staged, self._staged = self._open(), None
        model = self._engine.loaded.model
        weights = await asyncio.to_thread(fit_weights, model, staged)
        return await self._engine.apply_weights(weights, self._version, abort_all=self._abort_all)

    async def checksums(self) -> dict[str, str]:
        """Of every weight as it is served, by the model's names; tied ones under each of theirs."""
        state: Mapping[str, Tensor] = self._engine.loaded.model.state_dict()
        return await asyncio.to_thread(checksums, list(state.items()))

    def _stage(self, session: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
        if session is not self._staged:
            raise Conflict("the session of these weights was closed while they were on their way")
        session.update(tensors)

    def _open(self) -> dict[str, Tensor]:
        if self._staged is None:
            raise InvalidRequest(
                "weights come between begin_weight_update() and end_weight_update()"
            )
        return self._staged

    def _group(self, name: Any, *, remove: bool = False) -> WeightGroup:
        found = self._groups.pop(name, None) if remove else self._groups.get(name)
        if found is None:
            raise InvalidRequest(f"there is no group {name!r}; call init_weights_update_group")
        return found
