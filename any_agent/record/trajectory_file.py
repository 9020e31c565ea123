"""Files of trajectories, which one program of the service leaves for another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO

from any_agent.errors import ConfigError
from any_agent.record.codec import pack_trajectories, unpack_trajectories
from any_agent.types import Trajectory

_LENGTH = 8  # bytes of the length before each trajectory


def write_trajectory(file: IO[bytes], trajectory: Trajectory) -> None:
    """Append a trajectory."""
    data = pack_trajectories([trajectory])
    file.write(len(data).to_bytes(_LENGTH, "little") + data)


def read_trajectories(file: IO[bytes]) -> Iterator[Trajectory]:
    """Iterate over the trajectories of a file; ConfigError for a damaged one."""
    while head := file.read(_LENGTH):
        data = file.read(int.from_bytes(head, "little"))
        try:
            yield from unpack_trajectories(data)
        except ValueError as error:
            raise ConfigError(f"{file.name} is damaged ({error}): write it again") from None
