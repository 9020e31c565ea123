"""`EpisodeRunner` runs one episode, and reads its result."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from any_agent.engine.pool import SEEDS
from any_agent.errors import AgentFailed, InvalidTrajectory
from any_agent.rollout.jobs import EpisodeJob
from any_agent.types import GenerationHyperparameters, SampledSession
from any_agent.workflow import context
from any_agent.workflow.grouped import own_copy
from any_agent.workflow.tensors import roles_of, rows_of, tensors_of

_NONE = (
    "the episode returned None, so there is nothing to train on: its workflow rejected it, or its "
    "agent made no model call that reached the service, and returned no reward"
)


@dataclass(frozen=True, slots=True)
class EpisodeOutcome:
    """A result to train on, or the reason why there is none."""

    result: Any = None
    reason: str | None = None
    """The reason, under its name in `rejected`."""
    error: BaseException | None = None
    """The error that explains the reason."""


@dataclass(slots=True, kw_only=True)
class EpisodeRunner:
    """Runs episodes; raises CancelledError if cancelled from outside, and no other error."""

    engine: Any
    version: Callable[[], int]
    newest: Callable[[], int | None] = lambda: None
    vocab_size: int | None = None
    sampling: GenerationHyperparameters | None
    eval_sampling: GenerationHyperparameters | None
    timeout: float | None
    discount: float
    seed: int | None = None
    """None: only calls with a seed of their own get one."""
    stopping: bool = False

    async def run(self, job: EpisodeJob, k: int) -> EpisodeOutcome:
        """Run the job's run number ``k``."""
        try:
            async with asyncio.timeout(self.timeout) as limit:
                result = await self._run(job, k)
            return self._read(result, job, k)
        except InvalidTrajectory as error:
            return EpisodeOutcome(reason="invalid", error=error)
        except TimeoutError as error:
            if not limit.expired():
                return EpisodeOutcome(reason="failed", error=error)
            late = TimeoutError(f"the episode took more than {self.timeout:g} s")
            return EpisodeOutcome(reason="timeout", error=late.with_traceback(error.__traceback__))
        except asyncio.CancelledError as error:
            if self.stopping or job.dropped:
                raise
            # The workflow has cancelled itself, which must end this run alone.
            name = type(job.workflow).__name__
            failed = AgentFailed(
                f"the episode was cancelled from within: {name}, or a library that it calls, "
                "cancelled its own task, or let the CancelledError of a cancelled task through"
            )
            return EpisodeOutcome(reason="failed", error=failed.with_traceback(error.__traceback__))
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            # An agent's exit() would end the whole event loop.
            return EpisodeOutcome(reason="failed", error=error)

    async def _run(self, job: EpisodeJob, k: int) -> Any:
        # The task is this run's own.
        SEEDS.set(seeds_of(self.seed, job.is_eval, job.position, k))
        sampling = (job.is_eval and self.eval_sampling) or self.sampling
        here = context.WorkflowContext(
            task_id=job.position,
            is_eval=job.is_eval,
            version=self.version(),
            temperature=sampling.temperature if sampling is not None else None,
            sampling=sampling,
        )
        with context.use(here):
            return await job.workflow.arun_episode(self.engine, own_copy(job.data))

    def _read(self, result: Any, job: EpisodeJob, k: int) -> EpisodeOutcome:
        if result is None:
            return EpisodeOutcome(
                reason="returned_none", error=AgentFailed(_NONE, code="returned_none")
            )
        if job.stream is None or not job.stream.sessions:
            return EpisodeOutcome(tensors_of(result, discount=self.discount))
        rows = rows_of(
            result,
            discount=self.discount,
            newest=self.newest(),
            vocab_size=self.vocab_size,
        )
        task = job.data.get("task_id")
        return EpisodeOutcome(
            SampledSession(
                session_id=f"{job.group_id}-{k}",
                group_id=job.group_id,
                rows=[row for row, _ in rows],
                temperatures=[temperature for _, temperature in rows],
                task_id=None if task is None else str(task),
                roles=roles_of(result),
            )
        )


def seeds_of(seed: int | None, *run: int) -> Callable[[int | None], int | None]:
    """Return a function that gives each call of a run its sampling seed.

    It depends on the run, the call's number and the call's own seed, else ``seed``; None without
    either. A call's own seed is not taken as it is: all runs of a group would be equal.
    """
    calls = itertools.count()

    def seed_of(own: int | None) -> int | None:
        first = seed if own is None else own
        if first is None:
            return None
        numbers = (first, *run, next(calls))
        digest = sha256(" ".join(map(str, map(int, numbers))).encode()).hexdigest()
        return int(digest[:8], 16) >> 1

    return seed_of
