"""`AgentRunner`: an agent's code on every item of a dataset, each run a session of the service."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, Literal

from any_agent.client.retry_transport import retrying_client
from any_agent.errors import ConfigError
from any_agent.protocol.rl import RunInfo
from any_agent.sdk.agent_callable import AgentCallable, AgentLike
from any_agent.sdk.attempts import AttemptLimits, AttemptRunner, MissingReward
from any_agent.sdk.find_service import borrow_client, find_service, return_client
from any_agent.sdk.open_session import run_info
from any_agent.sdk.progress import ProgressBar, RunProgress, shown
from any_agent.sdk.results import RunResults
from any_agent.sdk.results_log import ResultsLog
from any_agent.sdk.run_plan import ItemSource, PlanHeader, RunPlan, new_run
from any_agent.sdk.run_scheduler import RetryPolicy, RunScheduler

log = logging.getLogger(__name__)


class AgentRunner:
    """Runs an agent on a dataset against a service that trains (or, with mode eval, serves).

    ``AgentRunner(concurrency=32, group_size=8).run(agent, dataset)``: each item is run
    ``group_size`` times, each time in a session of its own; all sessions of an item are one group,
    the baseline of each other. ``docs/how-to/agent-runner.md`` has all of it.

    ``concurrency``: runs at once. ``epochs``: passes over the dataset. ``results``: a JSONL file;
    the same runner on the same dataset goes on from it, wherever it was killed. ``retries``:
    further attempts at a run that fails, each in a new session that takes the failed one's place.
    ``on_failure``: whether a run that fails for good is skipped, or stops all. ``max_failures`` of
    them one after the other stop all in any case. ``timeout``: seconds that one attempt may take.
    ``missing_reward``: what becomes of a run that gave no reward: `"fail"`, `"await"` (somebody
    else gives it later), or a number that it is given. ``wait``: seconds to wait for a slot, of
    which training gives out no more than it wants. ``retry_for``: as that of
    :class:`AgentSession`. ``progress``: called with a :class:`RunProgress` at each change; True
    shows
    a bar, None does on a terminal, False never. ``ttl`` and ``version`` are those of the sessions.
    ``url`` and ``api_key`` are by default those of the environment (`find_service`).
    ``agent_name``: a file of results that was begun under another one is refused.
    """

    def __init__(
        self,
        *,
        concurrency: int = 32,
        group_size: int = 8,
        epochs: int = 1,
        results: str | Path | None = None,
        on_failure: Literal["skip", "stop"] = "skip",
        retries: int = 2,
        max_failures: int = 32,
        timeout: float = 600.0,
        missing_reward: MissingReward = "fail",
        mode: Literal["train", "eval"] = "train",
        version: int | Literal["current"] | None = None,
        ttl: float | None = None,
        wait: float = 3600.0,
        retry_for: float | None = None,
        url: str | None = None,
        api_key: str | None = None,
        progress: bool | Callable[[RunProgress], object] | None = None,
        agent_name: str = "",
    ) -> None:
        """ConfigError for a setting that is no good, naming it."""
        for name, value in {"concurrency": concurrency, "group_size": group_size}.items():
            _require(value >= 1, f"{name} is {value}: it must be at least 1")
        for name, value in {"epochs": epochs, "max_failures": max_failures}.items():
            _require(value >= 1, f"{name} is {value}: it must be at least 1")
        _require(retries >= 0, f"retries is {retries}: it must be at least 0")
        _require(timeout > 0, f"timeout is {timeout}: it must be above 0, in seconds")
        _require(on_failure in ("skip", "stop"), f"on_failure is {on_failure!r}: skip or stop")
        _require(mode in ("train", "eval"), f"mode is {mode!r}: train or eval")
        _require(
            missing_reward in ("fail", "await") or isinstance(missing_reward, int | float),
            f"missing_reward is {missing_reward!r}: 'fail', 'await', or a number",
        )
        self._service = find_service(url, api_key)
        self._group_size = group_size
        self._epochs = epochs
        self._path = Path(results) if results is not None else None
        self._policy = RetryPolicy(concurrency, retries, on_failure, max_failures)
        self._terms = AttemptLimits(
            service=self._service,
            mode=mode,
            timeout=timeout,
            missing_reward=missing_reward,
            wait=wait,
            retry_for=self._service.patience if retry_for is None else retry_for,
            ttl=ttl,
            version=version,
        )
        self._progress = progress
        self._agent_name = agent_name

    def run(
        self,
        agent: AgentLike,
        dataset: Any,
        *,
        group_size: int | None = None,
        agent_kwargs: Mapping[str, Any] | None = None,
    ) -> RunResults | Coroutine[Any, Any, RunResults]:
        """The results where no event loop runs; inside of one the coroutine of :meth:`arun`, which
        is to be awaited.

        Ctrl-C ends what runs and aborts its sessions; what is done is kept in the file of results.
        A second one ends at once.
        """
        running = self.arun(agent, dataset, group_size=group_size, agent_kwargs=agent_kwargs)
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(running)
        return running

    async def arun(
        self,
        agent: AgentLike,
        dataset: Any,
        *,
        group_size: int | None = None,
        agent_kwargs: Mapping[str, Any] | None = None,
    ) -> RunResults:
        """Run the agent on every item, and say what became of each run.

        ``agent``: ``fn(item)``, ``fn(item, session)``, an object or a class with ``run(data,
        **extra_kwargs)`` (made with ``agent_kwargs``), or the dotted name of one; what blocks is
        run in threads. It returns a reward (of its last completion), a dict of them by completion
        id, or None where it has set them itself; of one that has finalized its session itself,
        what it returns counts for nothing. ``dataset``: a list of items, what
        `get_custom_dataset` returns, or a JSONL file. ``group_size``: instead of the
        runner's.

        Raises ConfigError for an agent, a dataset or a file that is no good; AgentFailed when runs
        fail, as ``on_failure`` and ``max_failures`` say; RunFinished where no training goes on and
        no run is done (with some done, standard error and ``stopped`` of the results say it); and
        what the service refuses to all runs alike: it is away, does not take the key, or has no
        slot for too long.
        """
        called = AgentCallable(agent, agent_kwargs)
        items = ItemSource(dataset)
        size = self._group_size if group_size is None else group_size
        _require(size >= 1, f"group_size is {size}: it must be at least 1")
        run_log = ResultsLog(self._path)
        run_log.open()
        client = borrow_client(self._service, retry_for=self._terms.retry_for)
        show = shown(self._progress)
        http = retrying_client() if called.wants_http_client and not called.blocks else None
        try:
            info = await run_info(client, self._service)
            plan = await self._planned(items, size, info, run_log)
            attempts = AttemptRunner(called, self._terms, plan, run_log, client, http)
            running = RunScheduler(plan, items, called, attempts, run_log, self._policy, show)
            try:
                await running.run()
                if running.stopped is not None and not running.results:
                    raise running.stopped
            except BaseException as error:
                _end(show)
                self._say_what_is_kept(running, plan, error)
                raise
            stopped = None
            if running.stopped is not None:
                stopped = running.stopped.message
                _end(show)
                said = f"stopped after {len(running.results)} of {len(plan)} runs: {stopped}"
                self.announce(said)
            return RunResults(running.results.values(), run=plan.header.run, stopped=stopped)
        finally:
            _end(show)
            await run_log.end()
            if http is not None:
                await http.end()
            await return_client(self._service, retry_for=self._terms.retry_for)

    def announce(self, text: str) -> None:
        """Print why the run ends early to standard error; override it to show that elsewhere."""
        print(text, file=sys.stderr, flush=True)

    async def _planned(
        self, items: ItemSource, size: int, info: RunInfo, run_log: ResultsLog
    ) -> RunPlan:
        """The plan that the file has, or a new one. ConfigError for another run's file."""
        wanted = PlanHeader(
            run=run_log.header.run if run_log.header is not None else new_run(),
            data=items.fingerprint(),
            items=len(items),
            group_size=size,
            mode=self._terms.mode,
            service=f"{info.experiment}/{info.trial}{self._pinned}",
            agent=self._agent_name,
        )
        if run_log.header is None:
            await run_log.begin(wanted)
        elif run_log.header != wanted:
            other = _difference(run_log.header, wanted)
            raise ConfigError(
                f"{run_log.path} has the results of another run: {other}. "
                "Give this one a file of its own (results=), or remove that one"
            )
        return RunPlan(wanted, self._epochs)

    @property
    def _pinned(self) -> str:
        """Runs of two versions of a model are no one's results."""
        version = self._terms.version
        return f"@{version}" if isinstance(version, int) else ""

    def _say_what_is_kept(self, running: RunScheduler, plan: RunPlan, error: BaseException) -> None:
        kept = f"; {self._path} has them, and the same run goes on from it" if self._path else ""
        said = f"{len(running.results)} of {len(plan)} runs are done{kept}"
        if isinstance(error, asyncio.CancelledError):
            self.announce(f"stopped: {said}")
        else:
            error.add_note(said)


def _end(show: Callable[[RunProgress], object]) -> None:
    if isinstance(show, ProgressBar):
        show.end()


def _difference(there: PlanHeader, here: PlanHeader) -> str:
    words = {
        "data": "another dataset",
        "items": "{} items, not {}",
        "group_size": "group_size {}, not {}",
        "mode": "mode {}, not {}",
        "service": "sessions of {}, not of {}",
        "agent": "those of the agent {}, not of {}",
    }
    for name in ("service", "agent", "mode", "group_size", "items", "data"):
        values = getattr(there, name), getattr(here, name)
        if values[0] != values[1]:
            return words[name].format(*values)
    raise AssertionError("the same headers")


def _require(good: bool, message: str) -> None:
    if not good:
        raise ConfigError(message)
