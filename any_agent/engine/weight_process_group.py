"""The process group by which a trainer sends weights to engines, as SGLang joins it.

Rank 0 is the trainer, every engine process one more. It is no group of `torch.distributed`'s own
list: neither side needs a default group, and one that is given up leaves nothing behind.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

Backend: TypeAlias = Literal["gloo", "nccl"]

_JOINING = timedelta(seconds=60)
"""For all members to be there."""


class Rendezvous:
    """Where the members of one group meet: a store in the trainer's process, on one address only.

    It has to live as long as the group. Raises OSError for an address that is not this machine's.
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
            timeout=_JOINING,
            wait_for_workers=False,
            # By itself it would listen on every address of the machine.
            master_listen_fd=self._listener.detach(),
        )


class WeightGroup:
    """One member. All methods block, and raise RuntimeError where others are gone or too late."""

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
        """``timeout`` is of each operation. With gloo it returns once all members are there."""
        self.size, self.backend = size, backend
        self._timeout = timedelta(seconds=timeout)
        limit = min(self._timeout, _JOINING)
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
        """As an engine: meet the trainer at its address."""
        store = TCPStore(
            host,
            port,
            is_master=False,
            timeout=min(timedelta(seconds=timeout), _JOINING),
            wait_for_workers=False,
        )
        return cls(store, rank=rank, size=size, name=name, backend=backend, timeout=timeout)

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Rank 0's values into everybody's tensors, one by one, in the same order on all."""
        group = self._group
        if group is None:
            raise RuntimeError("this member has left the group")
        for work in [group.broadcast(tensor, 0, self._timeout) for tensor in tensors]:
            work.wait()
        if tensors and tensors[0].is_cuda:
            # NCCL's wait is the stream's; who reads or frees them next may use another one.
            torch.cuda.synchronize(tensors[0].device)

    def close(self) -> None:
        """Leave. Whoever waits for this member, here or elsewhere, fails at once."""
        group, self._group = self._group, None
        if group is not None:
            with suppress(RuntimeError):
                group.abort()


def _nccl(store: Store, rank: int, size: int, limit: timedelta) -> Any:
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = limit
    # A member that dies must fail the operation; by default it ends this whole process.
    with _environment(TORCH_NCCL_BLOCKING_WAIT="1", TORCH_NCCL_ASYNC_ERROR_HANDLING="0"):
        return ProcessGroupNCCL(store, rank, size, options)


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
