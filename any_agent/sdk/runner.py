"""`AgentRunner`: runs an agent on every item of a dataset, each run in a session of the service."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from any_agent.client.retry_transport import retrying_client
from any_agent.errors import ConfigError
from any_agent.protocol.training import RunInfo
from any_agent.sdk.agent_callable import AgentCallable, AgentLike
from any_agent.sdk.find_service import shared_client
from any_agent.sdk.open_session import run_info
from any_agent.sdk.results import ResultsLog, RunProgress, RunResults
from any_agent.sdk.run_plan import PlanHeader, RunPlan, fingerprint, items_of, new_run
from any_agent.sdk.run_scheduler import RunnerSettings, RunScheduler, require_setting

_BAR_INTERVAL = 0.2  # seconds between two drawings of the bar
_BAR_WIDTH = 24


class AgentRunner(RunnerSettings):
    """Runs an agent on a dataset against a service that trains (or, with mode eval, serves).

    ``AgentRunner(concurrency=32, group_size=8).run(agent, dataset)``: each item is run
    ``group_size`` times, each time in its own session; all sessions of an item are one group, and
    so each other's baseline. ``docs/how-to/agent-runner.md`` describes the runner in full.

    ``concurrency``: runs at once. ``epochs``: passes over the dataset. ``results``: a JSONL file
    from which the same runner on the same dataset resumes after it was killed. ``retries``:
    further attempts at a run that fails, each in a new session that takes the failed one's place.
    ``on_failure``: a run that fails for good is skipped, or stops the runner. ``max_failures`` in
    a row stop it in any case. ``timeout``: seconds of one attempt. ``missing_reward``: the
    treatment of a run without a reward: `"fail"`, `"await"` (another caller sets it later), or the
    number that it gets. ``wait``: seconds to wait for a slot, as training admits no more sessions
    than it wants. ``retry_for``, ``ttl`` and ``version``: arguments of :class:`AgentSession`.
    ``progress``: a function that is called with a :class:`RunProgress` at each change; True shows a
    bar, None shows it on a terminal, False never. ``url`` and ``api_key``: by default the
    environment's (`find_service`). ``agent_name``: a file of results with another name is refused.

    Raises ConfigError, with the setting's name, for an invalid setting.
    """

    def run(
        self,
        agent: AgentLike,
        dataset: Any,
        *,
        group_size: int | None = None,
        agent_kwargs: Mapping[str, Any] | None = None,
    ) -> RunResults | Coroutine[Any, Any, RunResults]:
        """Return the results; inside a running event loop, the coroutine of :meth:`arun`.

        Ctrl-C ends the running attempts and aborts their sessions; finished runs stay in the file
        of results. A second Ctrl-C ends at once.
        """
        coroutine = self.arun(agent, dataset, group_size=group_size, agent_kwargs=agent_kwargs)
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            inside = False
        else:
            inside = True
        return coroutine if inside else asyncio.run(coroutine)

    async def arun(
        self,
        agent: AgentLike,
        dataset: Any,
        *,
        group_size: int | None = None,
        agent_kwargs: Mapping[str, Any] | None = None,
    ) -> RunResults:
        """Run the agent on every item, and return the result of each run.

        ``agent``: ``fn(item)``, ``fn(item, session)``, an object or a class with ``run(data,
        **extra_kwargs)`` (instantiated with ``agent_kwargs``), or the dotted name of one; blocking
        ones run in threads. It returns a reward (of its last completion), a dict of them by
        completion id, or None where it has set them itself; the return value of an agent that has
        finalized its session itself is ignored. ``dataset``: a list of items, the return value of
        `get_custom_dataset`, or a JSONL file. ``group_size`` replaces the runner's.

        Raises ConfigError for an invalid agent, dataset or file; AgentFailed when runs fail, as
        ``on_failure`` and ``max_failures`` say; RunFinished where no training goes on and no run
        is done (with some done, standard error and ``stopped`` of the results say it); and errors
        of the service that concern all runs: it is away, does not accept the key, or has no slot
        for too long.
        """
        called = AgentCallable(agent, agent_kwargs)
        items = items_of(dataset)
        size = self.group_size if group_size is None else group_size
        require_setting(size >= 1, f"group_size is {size}: it must be at least 1")
        results_log = ResultsLog(Path(self.results) if self.results is not None else None)
        results_log.open()
        show = progress_callback(self.progress)
        http = retrying_client() if called.wants_http_client and not called.blocks else None
        try:
            async with shared_client(self.service, retry_for=self.retry_for) as client:
                info = await run_info(client, self.service)
                plan = await self._planned(items, size, info, results_log)
                scheduler = RunScheduler(plan, items, called, self, client, results_log, show, http)
                try:
                    await scheduler.run()
                    if scheduler.stopped is not None and not scheduler.results:
                        raise scheduler.stopped
                except BaseException as error:
                    _end_bar(show)
                    self._report_progress(scheduler, plan, error)
                    raise
            stopped = None
            if scheduler.stopped is not None:
                stopped = scheduler.stopped.message
                _end_bar(show)
                self.announce(
                    f"stopped after {len(scheduler.results)} of {len(plan)} runs: {stopped}"
                )
            return RunResults(scheduler.results.values(), run=plan.header.run, stopped=stopped)
        finally:
            _end_bar(show)
            await results_log.close()
            if http is not None:
                await http.end()

    def announce(self, text: str) -> None:
        """Print why the run ends early to standard error; override it to show that elsewhere."""
        print(text, file=sys.stderr, flush=True)

    async def _planned(
        self, items: Sequence[Any], size: int, info: RunInfo, results_log: ResultsLog
    ) -> RunPlan:
        """Return the plan in the file, or a new one; ConfigError if the file is of another plan."""
        # Runs of two versions of a model do not go into one file.
        pinned = f"@{self.version}" if isinstance(self.version, int) else ""
        wanted = PlanHeader(
            run=results_log.header.run if results_log.header is not None else new_run(),
            data=fingerprint(items),
            items=len(items),
            group_size=size,
            mode=self.mode,
            service=f"{info.experiment}/{info.trial}{pinned}",
            agent=self.agent_name,
        )
        if results_log.header is None:
            await results_log.begin(wanted)
        elif results_log.header != wanted:
            difference = _difference(results_log.header, wanted)
            raise ConfigError(
                f"{results_log.path} has the results of another run: {difference}. "
                "Give this one a file of its own (results=), or remove that one"
            )
        return RunPlan(wanted, self.epochs)

    def _report_progress(self, runs: RunScheduler, plan: RunPlan, error: BaseException) -> None:
        """Print, or add to the error, how many runs are done and where their results are."""
        text = f"{len(runs.results)} of {len(plan)} runs are done"
        if self.results is not None:
            text += f"; {self.results} has them, and the same run goes on from it"
        if isinstance(error, asyncio.CancelledError):
            self.announce(f"stopped: {text}")
        else:
            error.add_note(text)


class ProgressBar:
    """A progress bar in one line of a terminal, which is drawn anew at each change."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._began = time.monotonic()
        self._next = 0.0
        self._drawn = 0

    def __call__(self, progress: RunProgress) -> None:
        now = time.monotonic()
        if now >= self._next or progress.done == progress.total:
            self._next = now + _BAR_INTERVAL
            self._draw(self._line(progress, now))

    def end(self) -> None:
        """Keep the line, and begin the next one."""
        if self._drawn:
            self._stream.write("\n")
            self._stream.flush()
            self._drawn = 0

    def _line(self, progress: RunProgress, now: float) -> str:
        share = progress.done / progress.total if progress.total else 1.0
        filled = int(share * _BAR_WIDTH)
        seconds = now - self._began
        rate = progress.done / seconds if seconds > 0 else 0.0
        parts = [
            f"{'#' * filled}{'.' * (_BAR_WIDTH - filled)} {progress.done}/{progress.total} runs",
            f"{progress.running} running",
            f"{rate:.1f}/s",
        ]
        if progress.failed:
            parts.append(f"{progress.failed} failed")
        if progress.mean is not None:
            parts.append(f"mean reward {progress.mean:.3f}")
        return " | ".join(parts)

    def _draw(self, line: str) -> None:
        self._stream.write("\r" + line.ljust(self._drawn))
        self._stream.flush()
        self._drawn = len(line)


def progress_callback(
    progress: bool | Callable[[RunProgress], object] | None,
) -> Callable[[RunProgress], object]:
    """Return the callback for changes: the caller's own; a bar for True, and, where there is a
    terminal, for None; one without effect for False."""
    if callable(progress):
        return progress
    if progress or (progress is None and sys.stderr.isatty()):
        return ProgressBar()
    return lambda _: None


def _end_bar(show: Callable[[RunProgress], object]) -> None:
    if isinstance(show, ProgressBar):
        show.end()


def _difference(found: PlanHeader, wanted: PlanHeader) -> str:
    """Describe the first difference between two plans."""
    templates = {
        "service": "sessions of {}, not of {}",
        "agent": "those of the agent {}, not of {}",
        "mode": "mode {}, not {}",
        "group_size": "group_size {}, not {}",
        "items": "{} items, not {}",
        "data": "another dataset",
    }
    for name, template in templates.items():
        values = getattr(found, name), getattr(wanted, name)
        if values[0] != values[1]:
            return template.format(*values)
    raise AssertionError("the same headers")
