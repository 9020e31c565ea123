"""The process group by which a trainer sends weights to engines, in the form that SGLang joins.

Rank 0 is the trainer; each engine process has another rank. `torch.distributed` does not register
the group: neither side needs a default group, and a dropped group leaves nothing behind.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from any_agent.runtime.environment import environment_with

Backend: TypeAlias = Literal["gloo", "nccl"]

JOIN_TIMEOUT = timedelta(seconds=60)  # the time in which all members must join


class Rendezvous:
    """A store in the trainer's process, on one address only, at which a group's members meet.

    Keep it as long as the group. Raises OSError for an address that is not this machine's.
    """

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        self._listener = socket.socket(family)
        self._listener.bind((host, 0))
        self._listener.listen()
        self.host = host
        self.port = int(self._listener.getsockname()[1])
        self.store: Store = TCPStore(
            host,
            self.port,
            is_master=True,
            timeout=JOIN_TIMEOUT,
            wait_for_workers=False,
            # Without this it would listen on every address of the machine.
            master_listen_fd=self._listener.detach(),
        )


class WeightGroup:
    """One member. All methods block, and raise RuntimeError if others are gone or too late."""

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        size: int,
        name: str,
        backend: Backend = "gloo",
        timeout: float,
    ) -> None:
        """``timeout`` bounds each operation. With gloo this waits until all members have joined."""
        self.size, self.backend = size, backend
        self._timeout = timedelta(seconds=timeout)
        limit = min(self._timeout, JOIN_TIMEOUT)
        # The prefixes that `init_process_group` adds to the store: SGLang's side has them, too.
        device = "cpu" if backend == "gloo" else "cuda"
        inner = PrefixStore(f"{device}/", PrefixStore(f"{name}/", PrefixStore(name, store)))
        self._group: Any
        if backend == "gloo":
            self._group = torch.distributed.ProcessGroupGloo(inner, rank, size, timeout=limit)
        else:
            self._group = _nccl(inner, rank, size, self._timeout)

    @classmethod
    def join(
        cls,
        host: str,
        port: int,
        *,
        rank: int,
        size: int,
        name: str,
        backend: Backend = "gloo",
        timeout: float,
    ) -> WeightGroup:
        """Join the trainer's group, as an engine, at the trainer's address."""
        store = TCPStore(
            host,
            port,
            is_master=False,
            timeout=min(timedelta(seconds=timeout), JOIN_TIMEOUT),
            wait_for_workers=False,
        )
        return cls(store, rank=rank, size=size, name=name, backend=backend, timeout=timeout)

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Copy rank 0's values into all members' tensors, one by one, in the same order on all."""
        group = self._group
        if group is None:
            raise RuntimeError("this member has left the group")
        for work in [group.broadcast(tensor, 0, self._timeout) for tensor in tensors]:
            work.wait()
        if tensors and tensors[0].is_cuda:
            # NCCL's wait covers one stream; the next reader or free may use another one.
            torch.cuda.synchronize(tensors[0].device)

    def close(self) -> None:
        """Leave the group; operations that wait for this member, anywhere, fail at once."""
        group, self._group = self._group, None
        if group is not None:
            with suppress(RuntimeError):
                group.abort()


def _nccl(store: Store, rank: int, size: int, limit: timedelta) -> Any:
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = limit
    # A dead member must fail the operation; by default it ends this whole process.
    settings = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    with environment_with(settings):
        return ProcessGroupNCCL(store, rank, size, options)
