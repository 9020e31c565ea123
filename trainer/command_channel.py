"""Commands of the leading process and replies of the others: JSON and tensors over gloo.

The leader sends each of the others a command with its rows, and receives a reply from each.

Nothing is pickled. Every wait ends with a TrainingError when a process is gone, because its
connections break, or when it is silent for `World.timeout`. So while there is nothing to do, the
leader sends a heartbeat command.
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

_HEARTBEAT_INTERVAL = 10.0

_MESSAGE = "message"

Rows = Sequence[Mapping[str, Tensor]]


class CommandChannel:
    """The messages of one process, in a process group of their own, apart from the gradients."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=world.timeout))

    def send(self, rank: int, message: Mapping[str, Any], rows: Rows = ()) -> None:
        """Send a message, and rows of any number of tensors each, to another process."""
        tensors = {
            f"{k}/{key}": t.contiguous() for k, row in enumerate(rows) for key, t in row.items()
        }
        tensors[_MESSAGE] = _bytes(json.dumps(message).encode())
        data = _bytes(save(tensors))
        with _translated_errors():
            dist.send(torch.tensor([len(data)]), rank, self._group)
            dist.send(data, rank, self._group)

    def receive(self, rank: int) -> tuple[dict[str, Any], list[dict[str, Tensor]]]:
        """Receive another process's next message, with its rows."""
        with _translated_errors():
            dist.recv(size := torch.zeros(1, dtype=torch.int64), rank, self._group)
            dist.recv(data := torch.empty(int(size), dtype=torch.uint8), rank, self._group)
        tensors = load(data.numpy().tobytes())
        message = json.loads(tensors.pop(_MESSAGE).numpy().tobytes())
        rows: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            number, key = name.split("/", 1)
            rows.setdefault(int(number), {})[key] = tensor
        return message, [rows[k] for k in sorted(rows)]


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class Leader:
    """Rank 0 as it commands the others: one command at a time, and heartbeats in between."""

    def __init__(self, world: World, *, heartbeat: float = _HEARTBEAT_INTERVAL) -> None:
        """``heartbeat``: seconds without a command after which the others get an empty one."""
        self.world = world
        self._channel = CommandChannel(world)
        self._interval = heartbeat
        self.lost: Callable[[BaseException], None] = lambda error: None
        """Called, in another thread, when another process can no longer be reached."""
        self._unsettled = False
        """Some replies to a command are missing."""
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._send_heartbeats, name="followers", daemon=True)
        self._thread.start()

    @contextmanager
    def run(self, command: Mapping[str, Any], rows: Sequence[Rows] | None = None) -> Iterator[None]:
        """Run a command on all processes, the body being the leader's part; ``rows`` are by rank.

        Raises TrainingError if another process failed. After a FloatingPointError or TrainingError
        in the body the others reply as ever, and wait for another command; a FloatingPointError has
        the place that another process found, if one did. After any other exception there is no wait
        for replies: this process has to end, and the others end with it.
        """
        with self._lock:
            self._unsettled = True
            self._send(command, rows)
            try:
                yield
            except FloatingPointError as error:
                if found := self._settle():
                    raise FloatingPointError(found[0]) from error
                raise
            except TrainingError:
                self._settle()
                raise
            self._settle()

    def _send(self, command: Mapping[str, Any], rows: Sequence[Rows] | None = None) -> None:
        for rank in range(1, self.world.size):
            self._channel.send(rank, command, rows[rank] if rows else ())

    def _settle(self) -> list[str]:
        """Return what the others found that is not finite."""
        replies = [self._channel.receive(rank)[0] for rank in range(1, self.world.size)]
        self._unsettled = False
        for rank, reply in enumerate(replies, start=1):
            if reply.get("error"):
                raise TrainingError(f"training process {rank} failed: {reply['error']}")
        return [reply["not_finite"] for reply in replies if reply.get("not_finite")]

    def stop(self) -> None:
        """Stop the others, once; after a failed command they do not listen, and end with this."""
        self._over.set()
        self._thread.join(self.world.timeout)
        with self._lock:
            if not self._unsettled:
                self._unsettled = True
                try:
                    self._send({"do": "stop"})
                except TrainingError as error:
                    log.warning("cannot stop the other training processes: %s", error.message)

    def _send_heartbeats(self) -> None:
        while not self._over.wait(self._interval):
            try:
                with self.run({"do": "nothing"}):
                    pass
            except Exception as error:
                if not self._over.is_set():
                    log.error("the heartbeat of the training processes failed: %s", error)
                    self.lost(error)
                return


@contextmanager
def _translated_errors() -> Iterator[None]:
    """Raise gloo's errors, a broken connection or a timeout, as TrainingError."""
    try:
        yield
    except RuntimeError as error:
        raise TrainingError(f"another training process is gone: {error}") from error
