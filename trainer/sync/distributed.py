"""Weights by a process group of the trainer's first process and all engines."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import uuid
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from torch import Tensor

from any_agent.engine.weight_group import Backend, Rendezvous, WeightGroup
from any_agent.errors import AnyAgentError, EngineUnavailable, TrainingError
from any_agent.private_address import is_private
from trainer.sync.base import Bucket
from trainer.sync.engine import Engine

log = logging.getLogger(__name__)


class GroupTransport:
    """One group for as long as the same engines live; a member that fails is the end of it.

    NCCL between GPUs, gloo else.
    """

    def __init__(self, *, timeout: float) -> None:
        self._timeout = timeout
        self._members: tuple[str, ...] = ()
        self._joined: dict[str, str] = {}
        """The group that each engine was last told to join, by its URL."""
        self._name = ""
        self._group: WeightGroup | None = None
        self._rendezvous: Rendezvous | None = None

    async def open(self, engines: Sequence[Engine], *, cuda: bool) -> None:
        members = tuple(engine.url for engine in engines)
        if self._group is not None and self._members == members:
            return
        self.drop()
        # Those that stay must not keep a group whose other members are gone.
        left = [(engine, self._joined.pop(engine.url, None)) for engine in engines]
        await asyncio.gather(*(_leave(engine, group) for engine, group in left if group))
        await self._build(engines, "nccl" if cuda and _all_cuda(engines) else "gloo")
        self._members = members

    async def _build(self, engines: Sequence[Engine], backend: Backend) -> None:
        host = await asyncio.to_thread(address_towards, [engine.url for engine in engines])
        name = f"any-agent-{uuid.uuid4().hex[:12]}"
        size = 1 + sum(engine.about.processes for engine in engines)
        try:
            meeting = Rendezvous(host)
        except OSError as error:
            raise EngineUnavailable(
                f"engines cannot meet the trainer at {host}: {error}"
            ) from error
        joining = []
        offset = 1
        for engine in engines:
            body: dict[str, Any] = {"master_address": host, "master_port": meeting.port}
            body |= {"rank_offset": offset, "world_size": size}
            body |= {"group_name": name, "backend": backend}
            joining.append(engine.post("/init_weights_update_group", body))
            offset += engine.about.processes
            self._joined[engine.url] = name
        entering = asyncio.to_thread(
            WeightGroup,
            meeting.store,
            rank=0,
            size=size,
            name=name,
            backend=backend,
            timeout=self._timeout,
        )
        # An engine that refuses is known at once; whoever waits for it gives up by itself.
        *_, group = await _all_or_none(*joining, _within_errors(entering, "enter the group"))
        self._name, self._group, self._rendezvous = name, group, meeting
        log.info("weights go to %d engines by %s, from %s", len(engines), backend, host)

    async def send(self, engines: Sequence[Engine], bucket: Bucket, name: str) -> None:
        group = self._group
        assert group is not None
        names = [name for name, _ in bucket]
        tensors = [tensor if group.backend == "nccl" else tensor.cpu() for _, tensor in bucket]
        body: dict[str, Any] = {"names": names, "group_name": self._name, "flush_cache": False}
        body |= {"dtypes": [str(t.dtype).removeprefix("torch.") for t in tensors]}
        body |= {"shapes": [list(t.shape) for t in tensors], "weight_version": name}
        posts = [engine.post("/update_weights_from_distributed", body) for engine in engines]
        try:
            await _all_or_none(*posts, _within_errors(self._broadcast(group, tensors), "send"))
        except BaseException:
            # It ends the broadcast, which would wait for an engine that has refused.
            self.drop()
            raise

    async def _broadcast(self, group: WeightGroup, tensors: list[Tensor]) -> None:
        await asyncio.to_thread(group.broadcast, tensors)

    def drop(self) -> None:
        group, self._group = self._group, None
        self._rendezvous, self._members = None, ()
        if group is not None:
            group.close()


def address_towards(urls: Sequence[str]) -> str:
    """The private address of this machine by which all of these engines reach it.

    Raises TrainingError if there is none. No packet is sent.
    """
    found = "127.0.0.1"
    for url in urls:
        parts = urlsplit(url)
        try:
            ((family, _, _, _, there), *_) = socket.getaddrinfo(
                parts.hostname, parts.port, type=socket.SOCK_DGRAM
            )
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(there)
                mine = str(probe.getsockname()[0])
        except OSError as error:
            raise EngineUnavailable(f"there is no way to the engine at {url}: {error}") from error
        if not is_private(mine):
            raise TrainingError(
                f"weights would go to {url} from the public address {mine}: put trainer and "
                "engines on a private network, or set engine.weight_sync=disk"
            )
        if not ipaddress.ip_address(mine.partition("%")[0]).is_loopback:
            found = mine
    return found


def _all_cuda(engines: Sequence[Engine]) -> bool:
    return all(engine.about.cuda for engine in engines)


async def _leave(engine: Engine, group: str) -> None:
    try:
        await engine.post("/destroy_weights_update_group", {"group_name": group})
    except AnyAgentError as error:
        log.debug("%s did not leave %s: %s", engine.url, group, error.message)


async def _within_errors(work: Any, what: str) -> Any:
    """torch's errors as ours."""
    try:
        return await work
    except (RuntimeError, ValueError) as error:
        raise EngineUnavailable(f"the trainer could not {what}: {error}") from error


async def _all_or_none(*work: Any) -> list[Any]:
    """All results; or the first failure as soon as it is there, the others left alone."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
