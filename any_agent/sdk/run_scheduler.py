"""`RunScheduler`: the order of a plan's runs, retries of failed ones, and groups that closed
early."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from any_agent.client.backoff import jittered
from any_agent.client.retry_transport import SharedClient
from any_agent.client.rl_client import RLClient
from any_agent.errors import AgentFailed, AnyAgentError, ConfigError, Conflict, RunFinished
from any_agent.protocol.rl import Rewards
from any_agent.runtime.command_line import one_line_errors
from any_agent.sdk.agent_callable import AgentCallable
from any_agent.sdk.attempts import (
    Attempt,
    AttemptOutcome,
    AttemptRunner,
    MissingReward,
    recover_result,
)
from any_agent.sdk.find_service import find_service
from any_agent.sdk.open_session import AgentSession
from any_agent.sdk.results import ResultsLog, RunProgress, RunResult
from any_agent.sdk.run_plan import RunId, RunPlan, task_of

log = logging.getLogger(__name__)

_MAX_LOST = 3  # sessions in a row of one run that may end by themselves
_MAX_GROUPS = 5
"""Groups that an item may need, each for the runs without which the one before closed."""
_MAX_PAUSE = 30.0
_UNREACHABLE_SESSION = {"idempotency_mismatch", "key_retired"}
"""Errors of an open that an earlier runner sent with other settings, or under a secret that is no
longer valid: that session cannot be used, and expires."""
_STOP_TIMEOUT = 20.0
"""Seconds that the running attempts have for aborting their sessions when the runner stops."""


@dataclass(kw_only=True, eq=False, repr=False)
class RunnerSettings:
    """The settings of an :class:`~any_agent.sdk.AgentRunner`, which describes them."""

    concurrency: int = 32
    group_size: int = 8
    epochs: int = 1
    results: str | Path | None = None
    on_failure: Literal["skip", "stop"] = "skip"
    retries: int = 2
    max_failures: int = 32
    timeout: float = 600.0
    missing_reward: MissingReward = "fail"
    mode: Literal["train", "eval"] = "train"
    version: int | Literal["current"] | None = None
    ttl: float | None = None
    rewards: Rewards | None = None
    wait: float = 3600.0
    retry_for: float | None = None
    url: str | None = None
    api_key: str | None = None
    progress: bool | Callable[[RunProgress], object] | None = None
    agent_name: str = ""

    def __post_init__(self) -> None:
        one_line_errors(place=True)
        for name in ("concurrency", "group_size", "epochs", "max_failures"):
            value = getattr(self, name)
            require_setting(value >= 1, f"{name} is {value}: it must be at least 1")
        retries, timeout, missing = self.retries, self.timeout, self.missing_reward
        require_setting(retries >= 0, f"retries is {retries}: it must be at least 0")
        require_setting(timeout > 0, f"timeout is {timeout}: it must be above 0, in seconds")
        failure, mode = self.on_failure, self.mode
        require_setting(failure in ("skip", "stop"), f"on_failure is {failure!r}: skip or stop")
        require_setting(mode in ("train", "eval"), f"mode is {mode!r}: train or eval")
        require_setting(
            missing in ("fail", "await") or isinstance(missing, int | float),
            f"missing_reward is {missing!r}: 'fail', 'await', or a number",
        )
        self.service = find_service(self.url, self.api_key)


def require_setting(valid: bool, message: str) -> None:
    if not valid:
        raise ConfigError(message)


@dataclass(eq=False, repr=False)
class RunScheduler:
    """Makes the runs of a plan that have no result in its log yet."""

    plan: RunPlan
    items: Sequence[Any]
    agent: AgentCallable
    settings: RunnerSettings
    client: RLClient
    log: ResultsLog
    show: Callable[[RunProgress], object]
    http: SharedClient | None

    def __post_init__(self) -> None:
        settings = self.settings
        self._attempts = AttemptRunner(
            self.agent, settings.timeout, settings.missing_reward, self.log, self.http
        )
        known = self.log.results.items()
        self.results = {run: result for run, result in known if run.epoch < self.plan.epochs}
        self.stopped: RunFinished | None = None
        """The reason why no further run begins."""
        self._progress = RunProgress(len(self.plan))
        for result in self.results.values():
            self._count(result)
        self._planned = iter(self.plan)
        self._requeued: deque[RunId] = deque()
        self._groups = dict(self.log.groups)
        self._left_out: defaultdict[tuple[int, int], list[RunId]] = defaultdict(list)
        self._tried: Counter[RunId] = Counter()
        """The number of each run's next attempt."""
        self._failures_in_a_row = 0

    async def run(self) -> None:
        """Make all runs; return when they are done, or when training takes no more.

        When this is cancelled, or raises, running attempts are cancelled and open sessions aborted.
        Raises AgentFailed by ``on_failure`` and ``max_failures``, and the service's errors that
        concern all runs.
        """
        limit = self.settings.concurrency
        running: set[asyncio.Task[None]] = set()
        ended: asyncio.Queue[asyncio.Task[None]] = asyncio.Queue()
        self.show(self._progress)
        try:
            while True:
                # A run that ends may have queued others again, whose group closed without them.
                while len(running) < limit and (run := self._next_run()) is not None:
                    task = asyncio.create_task(self._make_run(run))
                    task.add_done_callback(ended.put_nowait)
                    running.add(task)
                if not running:
                    return
                task = await ended.get()
                running.discard(task)
                task.result()
        finally:
            for task in running:
                task.cancel()
            if running:
                await asyncio.wait(running, timeout=_STOP_TIMEOUT)

    def _next_run(self) -> RunId | None:
        """Return the next run; None if none can begin now."""
        if self.stopped is not None:
            return None
        if self._requeued:
            return self._requeued.popleft()
        return next((run for run in self._planned if run not in self.results), None)

    @property
    def _size(self) -> int:
        return self.plan.header.group_size

    async def _make_run(self, run: RunId) -> None:
        self._progress.running += 1
        try:
            result = await self._result(run)
        except RunFinished as error:
            if self.stopped is None:
                log.info("no further run begins: %s", error.message)
            self.stopped = error
        except Conflict as error:
            if error.code != "group_closed":
                raise
            await self._leave_out(run, error.message)
        else:
            await self._record(result)
            await self._regroup(run)
        finally:
            self._progress.running -= 1

    async def _result(self, run: RunId) -> RunResult:
        """Make attempts until one succeeds, or the last one has failed."""
        started = self.log.started.pop(run, None)
        if started is not None:
            self._tried[run] = started.attempt + 1
            if started.session_id is not None:
                result = await recover_result(self.client, run, started.session_id, started.attempt)
                if result is not None:
                    return result
        failures = lost = 0
        while True:
            try:
                outcome = await self._attempt(run, last=failures >= self.settings.retries)
            except AnyAgentError as error:
                if error.code not in _UNREACHABLE_SESSION:
                    raise
                self._tried[run] += 1
                continue
            if not outcome.retry:
                return outcome.result
            if outcome.lost:
                lost += 1
                if lost > _MAX_LOST:
                    return outcome.result
                continue
            failures += 1
            log.info("%s failed and is tried again: %s", _name_of(run), outcome.result.error)
            await asyncio.sleep(jittered(min(2.0 ** (failures - 1), _MAX_PAUSE)))

    async def _attempt(self, run: RunId, *, last: bool) -> AttemptOutcome:
        settings, plan, number = self.settings, self.plan, self._tried[run]
        generation, size = self._groups.get(run, (0, self._size))
        item, train = self.items[run.item], settings.mode == "train"
        session = AgentSession(
            task_of(item) or plan.group(run),
            group_id=plan.group(run, generation) if train else None,
            group_size=size if train else None,
            mode=settings.mode,
            metadata={"run": plan.header.run, **run._asdict(), "attempt": number},
            version=settings.version,
            ttl=settings.ttl,
            rewards=settings.rewards,
            url=settings.service.named,
            api_key=settings.service.api_key,
            wait=settings.wait,
            retry_for=settings.retry_for,
            idempotency_key=plan.key(run, number, "open"),
        )
        # The same address, which also knows the source of the key.
        session.service = settings.service
        end_key = plan.key(run, number, "end")
        attempt = Attempt(run, item, session, number, end_key, last)
        outcome = await self._attempts.run_attempt(attempt)
        self._tried[run] += 1
        return outcome

    async def _record(self, result: RunResult) -> None:
        # Before anything else may fail: the run is done, and the service knows it. No await stands
        # between the two lines, as a later line of the log may rely on this result.
        self.results[result.place] = result
        await self.log.ended(result)
        self._count(result)
        self.show(self._progress)
        if result.ok:
            self._failures_in_a_row = 0
            return
        self._failures_in_a_row += 1
        name = _name_of(result.place)
        log.warning("%s failed: %s", name, result.error)
        if self.settings.on_failure == "stop":
            raise AgentFailed(f"{name} failed: {result.error}", code=result.code)
        if self._failures_in_a_row >= self.settings.max_failures:
            raise AgentFailed(
                f"{self._failures_in_a_row} runs in a row failed (max_failures), the last one was "
                f"{name}: {result.error}",
                code=result.code,
            )
        if self.agent.hanging > self.settings.concurrency:
            raise AgentFailed(
                f"{self.agent.hanging} runs of {self.agent.name} still run in their threads "
                "after timeout=: make the agent end by itself"
            )

    def _count(self, result: RunResult) -> None:
        self._progress.done += 1
        self._progress.failed += not result.ok
        if result.reward is not None:
            self._progress.rewarded += 1
            self._progress.rewards += result.reward

    async def _leave_out(self, run: RunId, reason: str) -> None:
        """Put a run whose group has closed without it into another group, with the other such runs
        of its item, once all of them are known."""
        generation, _ = self._groups.get(run, (0, 0))
        if generation + 1 >= _MAX_GROUPS:
            result = RunResult(
                **run._asdict(),
                state="failed",
                group_id=self.plan.group(run, generation),
                error=reason,
                code="group_closed",
            )
            await self._record(result)
        else:
            self._left_out[run.epoch, run.item].append(run)
        await self._regroup(run)

    async def _regroup(self, run: RunId) -> None:
        """Queue an item's runs that were left out of their group, as a group of their own, once
        all of its other runs have a result."""
        item = run.epoch, run.item
        runs = self._left_out.get(item, [])
        members = (RunId(*item, member) for member in range(self._size))
        if not runs or any(one not in self.results and one not in runs for one in members):
            return
        del self._left_out[item]
        generation = 1 + max(self._groups.get(one, (0, 0))[0] for one in runs)
        log.info("%d runs of item %d make a group of their own", len(runs), run.item)
        # Behind the lines of the other runs' results, some of which may not be on the disk yet.
        await self.log.regrouped(runs, generation)
        for one in runs:
            self._groups[one] = generation, len(runs)
        self._requeued.extend(runs)


def _name_of(run: RunId) -> str:
    return f"item {run.item} (epoch {run.epoch}, run {run.member})"
