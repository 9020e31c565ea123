"""Weights sent to engines bucket by bucket: pause, open, send, close, check, publish, resume."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from any_agent.errors import EngineUnavailable, TrainingError
from any_agent.rollout import RankClients
from trainer.sync.base import UNREACHABLE_TIMEOUT, EngineCall, NewWeights, Transport
from trainer.sync.update_attempt import AttemptSettings, UpdateAttempt
from trainer.sync.verify import WeightVerifier

log = logging.getLogger(__name__)

_RETRY_DELAY = 1.0
_TOGETHER = 2
"""Tries with all engines at once."""


class BucketSync:
    """A :class:`trainer.sync.base.WeightSync` over a transport.

    All engines that are there get each bucket at once; where one dies meanwhile, once more those
    that live. Where that fails, too, each is tried by itself, so that one which is ill keeps no
    other. An engine calls its weights no version until it is known to have all of them; until then
    it stays paused, unless it has the old ones whole, as the embedded engine has.
    """

    def __init__(
        self,
        call: EngineCall,
        transport: Transport,
        *,
        load_timeout: float,
        dtype: str,
        in_place: bool = False,
        cuda: bool = False,
    ) -> None:
        self._call = call
        self._settings = AttemptSettings(
            transport, WeightVerifier(), load_timeout, dtype, in_place, cuda
        )

    def prepare(self, new: NewWeights) -> None:
        """Nothing: the folder is written while the engines sample again."""

    def update(self, ranks: RankClients, new: NewWeights) -> None:
        self._bring(ranks, range(len(ranks)), new)

    def repair(self, ranks: RankClients, new: NewWeights) -> None:
        async def served() -> list[int]:
            infos = await ranks.all(lambda rank: ranks.clients[rank].run_info())
            return [info.version for info in infos]

        versions = self._call(served(), timeout=2 * UNREACHABLE_TIMEOUT)
        for rank, version in enumerate(versions):
            if version != new.version:
                log.warning("rank %d samples with version %d, not %d", rank, version, new.version)
        self._bring(ranks, [r for r, v in enumerate(versions) if v != new.version], new)

    def close(self) -> None:
        self._settings.transport.drop()

    def _bring(self, ranks: RankClients, wanted: Iterable[int], new: NewWeights) -> None:
        pending = list(wanted)
        refused: list[TrainingError] = []
        within = self._settings.load_timeout + UNREACHABLE_TIMEOUT
        deadline = time.monotonic() + within
        tries = 0
        while pending:
            together, why = tries < _TOGETHER, ""
            tries += 1
            for members in [pending] if together else [[rank] for rank in pending]:
                attempt = UpdateAttempt(self._call, self._settings, ranks, new, alone=not together)
                attempt.run(members)
                refused += attempt.refused.values()
                gone = attempt.done | attempt.refused.keys()
                pending = [rank for rank in pending if rank not in gone]
                why = attempt.why or why
            if not pending:
                break
            if time.monotonic() > deadline:
                raise EngineUnavailable(
                    f"ranks {', '.join(map(str, pending))} did not take version {new.version} "
                    f"within {within:g} s ({why}); are their engines running, "
                    "and is engine.load_timeout long enough?"
                )
            time.sleep(_RETRY_DELAY)
        if refused:
            raise refused[0]
