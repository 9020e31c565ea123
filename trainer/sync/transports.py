"""Transports of buckets: a process group, and tensors in HTTP bodies or as handles of GPU memory.

The group has the trainer's first process and all engines. On a GPU that trainer and engine share
only handles travel in HTTP bodies (CUDA IPC), and the engine copies from the trainer's memory to
its own.
"""

from __future__ import annotations

import asyncio
import base64
import io
import ipaddress
import logging
import pickle
import socket
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from any_agent.engine.weight_process_group import Backend, Rendezvous, WeightGroup
from any_agent.engine.weight_serialization import cuda_reduction, pack
from any_agent.errors import AnyAgentError, EngineUnavailable, TrainingError
from any_agent.runtime.private_address import is_private
from trainer.sync.engine_client import EngineClient
from trainer.weight_buckets import Bucket

log = logging.getLogger(__name__)

_GROUP = "any-agent"  # A fixed name, so that a trainer can end an earlier trainer's group


class Transport:
    """Carries buckets to engines; its coroutines run on the event loop of the ranks' clients."""

    async def open(self, engines: Sequence[EngineClient]) -> None:
        """Prepare to send to these engines."""

    async def send(self, engines: Sequence[EngineClient], bucket: Bucket, name: str) -> None:
        """Send one bucket to all engines at once; if one fails, all have failed.

        ``name`` is the engines' name for their weights from then on.
        """
        raise NotImplementedError

    def drop(self) -> None:
        """Drop the connections, if there are any, after a failure."""


class GroupTransport(Transport):
    """One process group, for as long as the same engines live and none fails.

    It uses NCCL between GPUs, gloo otherwise and where NCCL fails before it has worked once.
    """

    def __init__(self, *, timeout: float, cuda: bool = False) -> None:
        """``cuda``: the tensors are on a GPU."""
        self._timeout = timeout
        self._cuda = cuda
        self._members: tuple[tuple[str, str], ...] = ()
        self._nccl: bool | None = None
        """True once NCCL has worked, False once it has failed before; None: unknown."""
        self._group: WeightGroup | None = None
        self._rendezvous: Rendezvous | None = None

    async def open(self, engines: Sequence[EngineClient]) -> None:
        members = tuple(engine.identity for engine in engines)
        if self._group is not None and self._members == members:
            return
        self.drop()
        # No engine may stay in a group whose other members are gone, such as an earlier trainer's.
        await asyncio.gather(*map(_leave, engines))
        direct = self._cuda and all(e.info.cuda for e in engines) and self._nccl is not False
        try:
            await self._build(engines, "nccl" if direct else "gloo")
        except AnyAgentError as error:
            self._judge_nccl(error)
            raise
        self._members = members

    def _judge_nccl(self, error: AnyAgentError) -> None:
        """Use gloo from the next try on if NCCL failed and has never worked."""
        if self._nccl is None and "nccl" in error.message.lower():
            self._nccl = False
            log.warning(
                "NCCL does not work between the trainer (torch %s) and the engines, so weights use "
                "gloo, which is slower; install the same torch in both environments (%s)",
                torch.__version__,
                error.message,
            )

    async def _build(self, engines: Sequence[EngineClient], backend: Backend) -> None:
        host = await asyncio.to_thread(address_towards, [engine.url for engine in engines])
        size = 1 + sum(engine.info.processes for engine in engines)
        try:
            meeting = Rendezvous(host)
        except (OSError, RuntimeError) as error:
            raise EngineUnavailable(
                f"the trainer cannot listen for the engines on {host}: {error}"
            ) from error
        joining = []
        offset = 1
        for engine in engines:
            body: dict[str, Any] = {"master_address": host, "master_port": meeting.port}
            body |= {"rank_offset": offset, "world_size": size}
            body |= {"group_name": _GROUP, "backend": backend}
            joining.append(engine.post("/init_weights_update_group", body))
            offset += engine.info.processes
        entering = asyncio.to_thread(
            WeightGroup,
            meeting.store,
            rank=0,
            size=size,
            name=_GROUP,
            backend=backend,
            timeout=self._timeout,
        )
        # A refusal is known at once; the members that wait give up by themselves.
        *_, group = await _all_or_none(*joining, _translate_errors(entering, "enter the group"))
        self._group, self._rendezvous = group, meeting
        log.info("weights go to %d engines over %s, from %s", len(engines), backend, host)

    async def send(self, engines: Sequence[EngineClient], bucket: Bucket, name: str) -> None:
        group = self._group
        assert group is not None
        names = [name for name, _ in bucket]
        tensors = [tensor if group.backend == "nccl" else tensor.cpu() for _, tensor in bucket]
        body: dict[str, Any] = {"names": names, "group_name": _GROUP, "flush_cache": False}
        body |= {"dtypes": [str(t.dtype).removeprefix("torch.") for t in tensors]}
        body |= {"shapes": [list(t.shape) for t in tensors], "weight_version": name}
        posts = [engine.post("/update_weights_from_distributed", body) for engine in engines]
        try:
            broadcast = asyncio.to_thread(group.broadcast, tensors)
            await _all_or_none(*posts, _translate_errors(broadcast, "send"))
        except BaseException as error:
            # This ends the broadcast, which would wait for an engine that has refused.
            self.drop()
            if group.backend == "nccl" and isinstance(error, AnyAgentError):
                self._judge_nccl(error)
            raise
        if group.backend == "nccl":
            self._nccl = True

    def drop(self) -> None:
        group, self._group = self._group, None
        self._rendezvous, self._members = None, ()
        if group is not None:
            group.close()


def address_towards(urls: Sequence[str]) -> str:
    """Return the private address at which all of these engines reach this machine.

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
            raise EngineUnavailable(f"no route to the engine at {url}: {error}") from error
        if not is_private(mine):
            raise TrainingError(
                f"weights would go to {url} from the public address {mine}: put trainer and "
                "engines on a private network, or set engine.weight_sync=disk"
            )
        if not ipaddress.ip_address(mine.partition("%")[0]).is_loopback:
            found = mine
    return found


async def _leave(engine: EngineClient) -> None:
    try:
        await engine.post("/destroy_weights_update_group", {"group_name": _GROUP})
    except AnyAgentError as error:
        log.debug("the engine at %s did not leave a group: %s", engine.url, error.message)


async def _translate_errors(work: Any, what: str) -> Any:
    """Await this; raise torch's errors as EngineUnavailable."""
    try:
        return await work
    except (RuntimeError, ValueError) as error:
        raise EngineUnavailable(f"the trainer could not {what}: {error}") from error


async def _all_or_none(*work: Any) -> list[Any]:
    """Return all results, or raise the first failure at once and cancel the rest."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


class TensorTransport(Transport):
    """Sends each engine its own HTTP request, without a connection to prepare."""

    async def send(self, engines: Sequence[EngineClient], bucket: Bucket, name: str) -> None:
        async def post(engine: EngineClient) -> None:
            # The handles of one body are good for one reader, so each gets its own.
            body = await asyncio.to_thread(_body, engine, bucket)
            body |= {"flush_cache": False, "weight_version": name}
            await engine.post("/update_weights_from_tensor", body)

        results = await asyncio.gather(*map(post, engines), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result


def _body(engine: EngineClient, bucket: Bucket) -> dict[str, Any]:
    if engine.info.embedded:
        # Only an engine on a GPU can read another process's GPU.
        here = bucket if engine.info.cuda else [(name, tensor.cpu()) for name, tensor in bucket]
        how, text = pack(here)
        return {"load_format": how, "serialized_named_tensors": [text]}
    return {"serialized_named_tensors": [pickled(bucket) for _ in range(engine.info.processes)]}


def pickled(bucket: Bucket) -> str:
    """Encode a bucket for SGLang: base64 of a pickle of ``[(name, tensor), ...]``.

    Such text is only written here, never read; SGLang reads it by a list of allowed types. GPU
    tensors are handles of their memory, others have their values.
    """
    raw = io.BytesIO()
    _Pickler(raw, protocol=pickle.HIGHEST_PROTOCOL).dump(
        [(name, tensor.detach().contiguous()) for name, tensor in bucket]
    )
    return base64.b64encode(raw.getvalue()).decode()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_cuda:
            from torch.multiprocessing.reductions import rebuild_cuda_tensor

            # SGLang replaces this function by one that takes the device by its UUID.
            rebuild: Callable[..., Tensor] = rebuild_cuda_tensor
            return rebuild, tuple(cuda_reduction(value))
        return NotImplemented
