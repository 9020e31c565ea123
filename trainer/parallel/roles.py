"""Whether this process trains alone, leads others, or is led: decided by how it was started."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from any_agent.config import TrainConfig
from trainer.from_config import policy_config
from trainer.parallel.follower import Follower
from trainer.parallel.trainer_group import TrainerGroup
from trainer.world import World, follows, join, leave, require_processes, started_together


def joined(train: TrainConfig) -> World | None:
    """Meet the processes that torchrun started with this one; None where there are none.

    Raises ConfigError where they are not as many as configured, StartupError where they do not
    come.
    """
    require_processes(train.processes)
    if started_together() == 1:
        return None
    if follows():
        # The leader is told, ends the step under way, and tells this one.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    return join(policy_config(train).device)


def follow(world: World, train: TrainConfig) -> None:
    """All that a process other than the first does; it returns when the first one has ended."""
    Follower(world, policy_config(train), train).follow()
    leave()


@contextmanager
def leading(world: World | None) -> Iterator[TrainerGroup | None]:
    """The others, as this process leads them; at the end they are told to end."""
    if world is None:
        yield None
        return
    crew = TrainerGroup(world)
    try:
        yield crew
    finally:
        crew.stop()
        leave()
