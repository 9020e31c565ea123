"""Telling the ranks how far the run is."""

from __future__ import annotations

import asyncio
import logging
from typing import Literal, NamedTuple, TypeAlias

from any_agent.client.rl_client import RLClient
from any_agent.errors import AnyAgentError, StaleOwner
from any_agent.rollout import LeaseExecutor
from trainer.publisher import TIMEOUT

log = logging.getLogger(__name__)

RunWord: TypeAlias = Literal["training", "finished"]
_TIMEOUT = 5.0
"""Seconds that a rank may take to hear of a checkpoint."""


class RunStatus(NamedTuple):
    """How far the run is."""

    step: int
    checkpoint: str | None
    """The newest one."""
    oldest_step: int | None
    """Of the oldest checkpoint that training can go on from; None while it would begin anew."""


def announce(executor: LeaseExecutor, state: RunWord, news: RunStatus) -> None:
    """Every rank must hear it, or this raises: one that does not know that training goes on, or
    that it has ended, sends agents away, or keeps them."""
    ranks = executor.ranks
    executor.call(
        ranks.all(lambda rank: _send(ranks.clients[rank], state, news)), timeout=2 * TIMEOUT
    )


def announce_best_effort(executor: LeaseExecutor, news: RunStatus) -> None:
    """A new checkpoint, which decides on nothing that cannot wait: a rank that is away holds nobody
    up, and hears of the next one."""
    ranks = executor.ranks

    async def say(rank: int) -> None:
        try:
            async with asyncio.timeout(_TIMEOUT):
                await _send(ranks.clients[rank], "training", news)
        except StaleOwner:
            raise
        except (AnyAgentError, TimeoutError) as error:
            log.warning("rank %d was not told of step %d: %r", rank, news.step, error)

    executor.call(ranks.all(say))


async def _send(client: RLClient, state: RunWord, news: RunStatus) -> None:
    await client.set_run(
        state, step=news.step, checkpoint=news.checkpoint, oldest_step=news.oldest_step
    )
