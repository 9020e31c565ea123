"""What the leading process tells the others, and what they answer: JSON and tensors by gloo.

::

    leader                                   followers
      tell(command) ── the same to all ──▶     receive()
      give(rank, rows) ── each its own ──▶     take()
      answers()     ◀── one of each ─────      answer()

Nothing is pickled. Every wait ends: when a process is gone its connections break, and what is
silent for `World.timeout` is lost, too: TrainingError. So while there is nothing to do, the leader
says so now and then.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from any_agent.errors import TrainingError
from trainer.world import World

log = logging.getLogger(__name__)

_BEAT = 10.0

Rows = Sequence[Mapping[str, Tensor]]


class CommandChannel:
    """The messages of one process. A group of its own: nothing gets between gradients."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=world.timeout))

    def tell(self, command: Mapping[str, Any]) -> None:
        """The leader to all others."""
        data = json.dumps(command).encode()
        with _reached():
            dist.broadcast(torch.tensor([len(data)]), 0, self._group)
            dist.broadcast(_bytes(data), 0, self._group)

    def receive(self) -> dict[str, Any]:
        with _reached():
            size = torch.zeros(1, dtype=torch.int64)
            dist.broadcast(size, 0, self._group)
            data = torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(data, 0, self._group)
        command: dict[str, Any] = json.loads(data.numpy().tobytes())
        return command

    def give(self, rank: int, rows: Rows) -> None:
        """The leader to one other; any number of tensors in each row."""
        tensors = {
            f"{k}/{key}": t.contiguous() for k, row in enumerate(rows) for key, t in row.items()
        }
        self._send(rank, save(tensors, metadata={"rows": str(len(rows))}))

    def take(self) -> list[dict[str, Tensor]]:
        tensors = load(self._from(0))
        out: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            number, key = name.split("/", 1)
            out.setdefault(int(number), {})[key] = tensor
        return [out[k] for k in sorted(out)]

    def answer(self, told: Mapping[str, Any]) -> None:
        """A follower to the leader."""
        self._send(0, json.dumps(told).encode())

    def answers(self) -> list[dict[str, Any]]:
        """Of all followers, by rank."""
        return [json.loads(self._from(rank)) for rank in range(1, self.world.size)]

    def _send(self, rank: int, data: bytes) -> None:
        with _reached():
            dist.send(torch.tensor([len(data)]), rank, self._group)
            dist.send(_bytes(data), rank, self._group)

    def _from(self, rank: int) -> bytes:
        with _reached():
            size = torch.zeros(1, dtype=torch.int64)
            dist.recv(size, rank, self._group)
            data = torch.empty(int(size), dtype=torch.uint8)
            dist.recv(data, rank, self._group)
        return data.numpy().tobytes()


class Leader:
    """The leader's end: one command at a time, and a sign of life in between."""

    def __init__(self, channel: CommandChannel, *, every: float = _BEAT) -> None:
        """``every``: seconds of silence after which the others are asked whether they are there."""
        self.channel = channel
        self._every = every
        self.lost: Callable[[BaseException], None] = lambda error: None
        """Called, in another thread, when the others cannot be reached any more."""
        self._astray = False
        """Not all of a command's answers are there."""
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="followers", daemon=True)
        self._thread.start()

    @contextmanager
    def doing(
        self, command: Mapping[str, Any], rows: Sequence[Rows] | None = None
    ) -> Iterator[list[str]]:
        """All do this together, the body being the leader's own part; ``rows`` are by rank.

        The list has, after the body, what followers came upon that is not finite. TrainingError
        where another process failed at it. After another exception than FloatingPointError nobody
        is waited for: the process has to end, and the others end with it.
        """
        found: list[str] = []
        with self._lock:
            self._astray = True
            self.channel.tell(command)
            for rank, part in enumerate(rows or ()):
                if rank:
                    self.channel.give(rank, part)
            try:
                yield found
            except FloatingPointError:
                self._settle(found)
                raise
            self._settle(found)

    def _settle(self, found: list[str]) -> None:
        answers = self.channel.answers()
        self._astray = False
        for rank, told in enumerate(answers, start=1):
            if told.get("error"):
                raise TrainingError(f"training process {rank}: {told['error']}")
            if told.get("not_finite"):
                found.append(told["not_finite"])

    def stop(self) -> None:
        """Let the others end, once. Where something failed in the middle of a command they do not
        listen any more: they end with this process."""
        self._over.set()
        self._thread.join(self.channel.world.timeout)
        with self._lock:
            if not self._astray:
                self._astray = True
                try:
                    self.channel.tell({"do": "stop"})
                except TrainingError as error:
                    log.warning("%s", error.message)

    def _beat(self) -> None:
        while not self._over.wait(self._every):
            try:
                with self.doing({"do": "nothing"}):
                    pass
            except Exception as error:
                if not self._over.is_set():
                    log.error("%s", error)
                    self.lost(error)
                return


@contextmanager
def _reached() -> Iterator[None]:
    """What gloo says where a connection breaks or a wait is over, in words."""
    try:
        yield
    except RuntimeError as error:
        raise TrainingError(f"a process that trains with this one is gone: {error}") from error


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
