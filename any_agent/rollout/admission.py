"""How many train sessions may be admitted so that no token grows too old."""

from __future__ import annotations

from any_agent.config import RolloutConfig
from any_agent.protocol.rl import Capacity


def free_slots(now: Capacity, config: RolloutConfig) -> int:
    """Sessions that may be opened on top of those there are.

    ``min(max_concurrent - running, (eta + 1) * batch_size - (running + buffered))``: what is
    admitted now is trained on at most eta steps after its weights. Slots that open groups have
    reserved count as running.
    """
    return room(
        now.running + now.reserved,
        now.buffered,
        batch_size=config.batch_size,
        eta=config.eta,
        max_concurrent=config.max_concurrent,
    )


def room(running: int, buffered: int, *, batch_size: int, eta: int, max_concurrent: int) -> int:
    """The same of plain numbers, all in sessions."""
    ahead = (eta + 1) * batch_size
    return max(0, min(max_concurrent - running, ahead - (running + buffered)))


def stalled(now: Capacity, config: RolloutConfig) -> bool:
    """Whether no batch is complete, and nothing is under way that could complete one.

    Groups that closed with fewer members can leave less room than the next group needs: then the
    next one must be admitted all the same, or nothing would ever move again.
    """
    return now.running + now.reserved == 0 and now.buffered < config.batch_size
