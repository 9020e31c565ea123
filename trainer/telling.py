"""Telling the ranks how far the run is."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Literal, TypeAlias

from any_agent.errors import AnyAgentError
from any_agent.rollout import RolloutExecutor
from trainer.publisher import PATIENCE

log = logging.getLogger(__name__)

RunWord: TypeAlias = Literal["training", "finished"]
_WITHIN = 5.0
"""Seconds that a rank may take to hear of a checkpoint."""


def tell(executor: RolloutExecutor, state: RunWord, *, step: int, checkpoint: Path | None) -> None:
    """Every rank must hear it, or this raises: one that does not know that training goes on, or
    that it has ended, sends agents away, or keeps them."""
    ranks, path = executor.ranks, str(checkpoint) if checkpoint else None
    executor.call(
        ranks.all(lambda rank: ranks.clients[rank].set_run(state, step=step, checkpoint=path)),
        timeout=2 * PATIENCE,
    )


def tell_if_there(executor: RolloutExecutor, *, step: int, checkpoint: Path | None) -> None:
    """A new checkpoint, which is only shown: a rank that is away holds nobody up, and hears of
    the next one."""
    ranks, path = executor.ranks, str(checkpoint) if checkpoint else None

    async def say(rank: int) -> None:
        try:
            async with asyncio.timeout(_WITHIN):
                await ranks.clients[rank].set_run("training", step=step, checkpoint=path)
        except (AnyAgentError, TimeoutError) as error:
            log.warning("rank %d was not told of step %d: %r", rank, step, error)

    executor.call(ranks.all(say))
