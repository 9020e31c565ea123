"""All runs of a plan: which is next, what becomes of failed ones, and when it is over."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from any_agent.client.backoff import jittered
from any_agent.errors import AgentFailed, AnyAgentError, Conflict, RunFinished
from any_agent.sdk.agent_callable import AgentCallable
from any_agent.sdk.attempts import AttemptOutcome, AttemptRunner
from any_agent.sdk.progress import RunProgress
from any_agent.sdk.results import RunResult
from any_agent.sdk.results_log import ResultsLog
from any_agent.sdk.run_plan import ItemSource, RunId, RunPlan

log = logging.getLogger(__name__)

_MAX_LOST = 3
"""Sessions of one run that may end by themselves, one after the other."""
_MAX_GROUPS = 5
"""Groups that an item may need, each for those whom the one before left behind."""
_MAX_PAUSE = 30.0
_NOT_OURS_ANY_MORE = {"idempotency_mismatch", "key_retired"}
"""A runner before this one opened the same with other settings, or under a secret that is gone: it
never came to know of that session, which expires."""
_ENDS_TIMEOUT = 20.0
"""Seconds for what runs when the runner stops: open sessions are aborted in it."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    concurrency: int
    retries: int
    on_failure: Literal["skip", "stop"]
    max_failures: int


class RunScheduler:
    """Runs a plan from wherever its log stands."""

    def __init__(
        self,
        plan: RunPlan,
        items: ItemSource,
        agent: AgentCallable,
        attempts: AttemptRunner,
        run_log: ResultsLog,
        policy: RetryPolicy,
        show: Callable[[RunProgress], object],
    ) -> None:
        self._plan = plan
        self._items = items
        self._agent = agent
        self._attempts = attempts
        self._log = run_log
        self._policy = policy
        self._show = show
        self.results = {
            place: result
            for place, result in run_log.known.results.items()
            if place.epoch < plan.epochs
        }
        self.stopped: RunFinished | None = None
        """Why nothing more is begun."""
        self._progress = RunProgress(len(plan))
        for result in self.results.values():
            self._count(result)
        self._next = iter(plan)
        self._again: deque[RunId] = deque()
        self._busy = 0
        self._changed = asyncio.Condition()
        self._groups = dict(run_log.known.regrouped)
        self._left_behind: defaultdict[tuple[int, int], list[RunId]] = defaultdict(list)
        self._undecided: Counter[tuple[int, int]] = Counter()
        """Runs of an item that are neither done nor left behind."""
        self._tried: Counter[RunId] = Counter()
        """Attempts that were opened at a place: each has a number of its own."""
        self._in_a_row = 0

    async def run(self) -> None:
        """Until everything is done, or nothing more can be.

        Cancelled, or when something is raised: what runs is ended, and open sessions are aborted.
        Raises AgentFailed as the policy says, and what the service refuses to all alike.
        """
        left = self._progress.total - self._progress.done
        workers = [
            asyncio.create_task(self._work()) for _ in range(min(self._policy.concurrency, left))
        ]
        self._show(self._progress)
        if not workers:
            return
        try:
            # No `gather`: it would cancel them, too, and a second time is too much for those that
            # are aborting their sessions.
            ended, _ = await asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.wait(workers, timeout=_ENDS_TIMEOUT)
        for worker in ended:
            worker.result()

    # -- what is next --------------------------------------------------------------------------

    async def _work(self) -> None:
        while (place := await self._take()) is not None:
            self._progress.running += 1
            try:
                await self._one(place)
            finally:
                self._progress.running -= 1
                self._busy -= 1
                if not self._busy or self._again:
                    async with self._changed:
                        self._changed.notify_all()

    async def _take(self) -> RunId | None:
        """The next place; None when there will be none any more."""
        while self.stopped is None:
            place = self._again.popleft() if self._again else self._fresh()
            if place is not None:
                self._busy += 1
                return place
            if not self._busy:
                return None
            # Those that run may leave some behind, for a group of their own.
            async with self._changed:
                if self._busy and not self._again:
                    await self._changed.wait()
        return None

    def _fresh(self) -> RunId | None:
        for place in self._next:
            if place.member == 0:
                # Before the first of them runs: which of its runs there is something to do for.
                members = (RunId(place.epoch, place.item, m) for m in range(self._size))
                todo = sum(member not in self.results for member in members)
                self._undecided[place.epoch, place.item] = todo
            if place not in self.results:
                return place
        return None

    @property
    def _size(self) -> int:
        return self._plan.header.group_size

    # -- one run -------------------------------------------------------------------------------

    async def _one(self, place: RunId) -> None:
        try:
            result = await self._result(place)
        except RunFinished as error:
            self._stop(error)
            return
        except Conflict as error:
            if error.code != "group_closed":
                raise
            await self._leave_behind(place, error.message)
            return
        if result is not None:
            await self._done(result)
        await self._decided(place)

    async def _result(self, place: RunId) -> RunResult | None:
        """Attempts until one is good, or the last one has failed; None: the run stops before."""
        begun = self._log.known.begun.pop(place, None)
        if begun is not None:
            self._tried[place] = begun.attempt + 1
            if begun.session_id is not None:
                result = await self._attempts.look(place, begun.session_id, begun.attempt)
                if result is not None:
                    return result
        failures = lost = 0
        while True:
            try:
                outcome = await self._attempt(place, last=failures >= self._policy.retries)
            except AnyAgentError as error:
                if error.code not in _NOT_OURS_ANY_MORE:
                    raise
                self._tried[place] += 1
                continue
            if not outcome.again:
                return outcome.result
            if outcome.lost:
                lost += 1
                if lost > _MAX_LOST:
                    return outcome.result
                continue
            failures += 1
            log.info("run %s failed, and is tried again: %s", place, outcome.result.error)
            await asyncio.sleep(jittered(min(2.0 ** (failures - 1), _MAX_PAUSE)))

    async def _attempt(self, place: RunId, *, last: bool) -> AttemptOutcome:
        generation, size = self._groups.get(place, (0, self._size))
        outcome = await self._attempts.make(
            place,
            self._items[place.item],
            attempt=self._tried[place],
            task=self._items.task(place.item),
            group=(self._plan.group(place, generation), size),
            last=last,
        )
        self._tried[place] += 1
        return outcome

    async def _done(self, result: RunResult) -> None:
        # Whatever comes in between: it is done, and the service knows that, too.
        self.results[RunId(*result.place)] = result
        await self._log.ended(result)
        self._count(result)
        self._show(self._progress)
        if result.ok:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        what = f"item {result.item} (epoch {result.epoch}, run {result.member})"
        log.warning("%s failed: %s", what, result.error)
        if self._policy.on_failure == "stop":
            raise AgentFailed(f"{what} failed: {result.error}", code=result.code)
        if self._in_a_row >= self._policy.max_failures:
            raise AgentFailed(
                f"{self._in_a_row} runs failed one after the other (max_failures), the last one "
                f"was {what}: {result.error}",
                code=result.code,
            )
        if self._agent.hanging > self._policy.concurrency:
            raise AgentFailed(
                f"{self._agent.hanging} runs of {self._agent.name} go on in their threads though "
                f"they took more than timeout= allows: make it end by itself"
            )

    def _count(self, result: RunResult) -> None:
        self._progress.done += 1
        self._progress.failed += not result.ok
        if result.reward is not None:
            self._progress.rewarded += 1
            self._progress.rewards += result.reward

    def _stop(self, why: RunFinished) -> None:
        if self.stopped is None:
            log.info("nothing more is begun: %s", why.message)
        self.stopped = why

    # -- groups that went on without somebody --------------------------------------------------

    async def _leave_behind(self, place: RunId, why: str) -> None:
        """Its group has closed without it: with the others of its item that are left behind so, it
        makes another one, once it is known who they are."""
        generation, _ = self._groups.get(place, (0, 0))
        if generation + 1 >= _MAX_GROUPS:
            result = RunResult(
                item=place.item,
                epoch=place.epoch,
                member=place.member,
                state="failed",
                group_id=self._plan.group(place, generation),
                error=why,
                code="group_closed",
            )
            await self._done(result)
        else:
            self._left_behind[place.epoch, place.item].append(place)
        await self._decided(place)

    async def _decided(self, place: RunId) -> None:
        item = place.epoch, place.item
        self._undecided[item] -= 1
        if self._undecided[item] > 0:
            return
        del self._undecided[item]
        left = self._left_behind.pop(item, None)
        if not left:
            return
        generation = 1 + max(self._groups.get(one, (0, 0))[0] for one in left)
        log.info("%d runs of item %d make a group of their own", len(left), place.item)
        await self._log.regrouped(left, generation)
        for one in left:
            self._groups[one] = generation, len(left)
        self._undecided[item] = len(left)
        self._again.extend(left)
