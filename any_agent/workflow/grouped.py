"""`GroupedRolloutWorkflow`: several runs of a workflow on one item, the basis of a baseline."""

from __future__ import annotations

import asyncio
import copy
import logging
from typing import Any, cast

from any_agent.engine import RolloutEngine
from any_agent.errors import InvalidTrajectory
from any_agent.workflow.base import EpisodeResult, RolloutWorkflow, TensorDict
from any_agent.workflow.tensors import concat_padded_tensors, kind_of, tensors_of

log = logging.getLogger(__name__)


class GroupedRolloutWorkflow(RolloutWorkflow):
    """Runs ``workflow`` ``group_size`` times for each item concurrently, and merges the results.

    Rejected and failed runs are left out; they neither end nor shorten the others.
    """

    def __init__(self, workflow: RolloutWorkflow, group_size: int) -> None:
        if not isinstance(group_size, int) or group_size < 1:
            raise ValueError(f"group_size is {group_size!r}: it must be a whole number from 1 on")
        self.workflow = workflow
        self.group_size = group_size

    async def arun_members(
        self, engine: RolloutEngine, data: dict[str, Any]
    ) -> list[EpisodeResult | BaseException | None]:
        """Return each run's own result, None, or its error, when all have ended.

        Each run has its own copy of the item. Cancelling this cancels all runs, and waits for
        them.
        """
        runs = [
            asyncio.create_task(self._run(engine, own_copy(data))) for _ in range(self.group_size)
        ]
        try:
            await asyncio.wait(runs)
        finally:
            for run in runs:
                run.cancel()
            await asyncio.gather(*runs, return_exceptions=True)
        return list(await asyncio.gather(*runs, return_exceptions=True))

    async def _run(self, engine: RolloutEngine, data: dict[str, Any]) -> EpisodeResult | None:
        try:
            return await self.workflow.arun_episode(engine, data)
        except SystemExit as error:
            # Raised from a task it would end the event loop, and all other episodes with it.
            raise RuntimeError(f"the workflow tried to exit the process: {error!r}") from error

    async def arun_episode(
        self, engine: RolloutEngine, data: dict[str, Any]
    ) -> EpisodeResult | None:
        """Return the merged results of the runs; None if all were rejected.

        Tensors are concatenated, [sum of the batches, longest]; dictionaries of interactions and
        lists of trajectories are joined. Raises the first run's error if no run has a result.
        """
        members = await self.arun_members(engine, data)
        failures = [m for m in members if isinstance(m, BaseException)]
        results = [m for m in members if m is not None and not isinstance(m, BaseException)]
        if not results:
            if failures:
                raise failures[0]
            return None
        for failure in failures:
            log.warning("a run of a group failed and is left out of it: %r", failure)
        return merged(results)


def own_copy(data: dict[str, Any]) -> dict[str, Any]:
    """Return a run's own copy of an item, as runs may change it, and the next epoch reads it
    again."""
    try:
        return copy.deepcopy(data)
    except Exception:
        # Values that cannot be copied are shared.
        return dict(data)


def merged(results: list[EpisodeResult]) -> EpisodeResult:
    """Return several results as one; InvalidTrajectory for interactions with equal ids."""
    kinds = {kind_of(result) for result in results}
    if kinds == {"trajectories"}:
        return [t for result in results for t in cast(list[Any], result)]
    if kinds == {"interactions"}:
        out: dict[str, Any] = {}
        for result in results:
            interactions = cast(dict[str, Any], result)
            if twice := out.keys() & interactions.keys():
                raise InvalidTrajectory(
                    f"two runs of one group returned interactions of the same id, {min(twice)!r}: "
                    "ids must be unique, so make one client for each episode"
                )
            out |= interactions
        return out
    tensors: list[TensorDict] = [tensors_of(result) for result in results]
    return concat_padded_tensors(tensors)
