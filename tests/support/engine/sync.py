"""Engines as a trainer's weight sync finds them, each behind a stand-in for its proxy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from any_agent.client.rl_client import RLClient
from any_agent.errors import EngineUnavailable
from any_agent.rundir.registry import RegistryEntry
from any_agent.runtime.event_loop import LoopThread
from tests.support.engine.sglang_contract import call
from tests.support.fixed_ranks import FixedRanks
from trainer.policy import Policy
from trainer.sync import NewWeights, WeightSync
from trainer.sync.bucketed import BucketSync
from trainer.sync.disk import DiskSync
from trainer.sync.transports import GroupTransport, TensorTransport
from trainer.weight_buckets import Bucket
from trainer.weight_folders import publish_to_disk

WAYS = ("disk", "distributed", "tensor")
_BUCKET = 100_000
"""Bytes; several buckets even of a tiny model."""


class Proxy(RLClient):
    """Pauses its engine and lets it go on; never tells of weights that the engine has not."""

    def __init__(self, url: str) -> None:
        self.engine_url = url
        self.events: list[str] = []
        self.mode = "abort"

    async def pause(self, *, ttl: float) -> None:
        self.events.append("pause")
        await self._post("/pause_generation", {"mode": self.mode})

    async def publish_version(self, *, version: int, path: str, step: int) -> None:
        assert (await self.run_info()).version == version
        self.events.append(f"v{version}")

    async def resume(self) -> None:
        self.events.append("resume")
        await self._post("/continue_generation", {})

    async def run_info(self) -> Any:
        try:
            _, info = await call(self.engine_url, "/model_info", method="GET")
        except OSError as error:
            raise EngineUnavailable("it is away") from error
        told = info["weight_version"]
        return SimpleNamespace(version=int(told) if told.isdecimal() else -1)

    async def _post(self, path: str, body: dict[str, Any]) -> None:
        try:
            status, answer = await call(self.engine_url, path, body)
        except OSError as error:
            raise EngineUnavailable("it is away") from error
        assert status == 200, answer


class Fleet(FixedRanks):
    """As many ranks as engines."""

    def __init__(self, *urls: str) -> None:
        self.proxies = [Proxy(url) for url in urls]
        super().__init__(*self.proxies)

    def entry(self, rank: int) -> RegistryEntry | None:
        url = self.proxies[rank].engine_url
        return RegistryEntry(name=f"rank-{rank}", boot_id="b", url="u", pid=1, engine_url=url)


@contextmanager
def syncing(
    way: str,
    *,
    dtype: str,
    load_timeout: float = 120.0,
    in_place: bool = False,
    on_the_way: Callable[[Bucket], Bucket] = lambda bucket: bucket,
) -> Iterator[WeightSync]:
    """A sync with an event loop of its own, as the trainer's executor has one.

    ``on_the_way`` may change what its transport carries.
    """
    thread = LoopThread("ranks")
    thread.start()
    sync: WeightSync
    if way == "disk":
        sync = DiskSync(thread.call, load_timeout=load_timeout, in_place=in_place)
    else:
        carrier = (
            GroupTransport(timeout=load_timeout) if way == "distributed" else TensorTransport()
        )
        carries: Any = carrier.send
        carrier.send = lambda engines, bucket, name: carries(  # type: ignore[method-assign]
            engines, on_the_way(bucket), name
        )
        sync = BucketSync(
            thread.call, carrier, load_timeout=load_timeout, dtype=dtype, in_place=in_place
        )
    try:
        yield sync
    finally:
        sync.close()
        thread.stop()


class Weights:
    """A checkpoint's weights as new versions, from a policy that holds them."""

    def __init__(self, model: Path, folder: Path, dtype: str) -> None:
        self._model, self._folder = model, folder
        self._dtype = None if dtype == "float32" else getattr(torch, dtype)
        self.policy = Policy.load(model)

    def version(self, number: int) -> NewWeights:
        folder = self._folder / f"v{number:08d}"

        def write() -> None:
            if not folder.is_dir():
                publish_to_disk(self.policy, self._model, self._folder, number, dtype=self._dtype)

        def buckets() -> Iterator[Bucket]:
            return self.policy.buckets(_BUCKET, self._dtype)

        return NewWeights(number, number, folder, write, buckets)


async def bring(sync: WeightSync, fleet: Fleet, new: NewWeights, *, how: str = "update") -> None:
    """As the trainer's thread does."""

    def work() -> None:
        sync.prepare(new)
        getattr(sync, how)(fleet, new)

    await asyncio.to_thread(work)


def breaking(new: NewWeights, change: Callable[[int, Bucket], Any]) -> NewWeights:
    """The same, ``change`` called with each bucket before it is given; what it returns is sent."""

    def buckets() -> Iterator[Bucket]:
        for k, bucket in enumerate(new.buckets()):
            changed = change(k, bucket)
            yield bucket if changed is None else changed

    return replace(new, buckets=buckets)
