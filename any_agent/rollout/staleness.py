"""How many train sessions may be admitted so that no token grows too old."""

from __future__ import annotations

from any_agent.config import RolloutConfig
from any_agent.protocol import Capacity


def free_slots(now: Capacity, config: RolloutConfig) -> int:
    """Sessions that may be opened on top of those there are.

    ``min(max_concurrent - running, (eta + 1) * batch_size - (running + buffered))``: what is
    admitted now is trained on at most eta steps after its weights. Slots that open groups have
    reserved count as running.
    """
    running = now.running + now.reserved
    ahead = (config.eta + 1) * config.batch_size
    free = min(config.max_concurrent - running, ahead - (running + now.buffered))
    if running == 0 and now.buffered < config.batch_size:
        # Groups that closed with fewer members can leave less room than the next group needs,
        # and then neither a batch nor a group would ever be complete.
        free = max(free, min(now.waiting, config.batch_size))
    return max(0, free)
