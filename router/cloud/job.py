"""The service of one run, as the loop of all runs, the routes and the budgets see it."""

from __future__ import annotations

import asyncio
import time
from typing import Literal, TypeAlias

from any_agent.auth.access import signer_of
from any_agent.config.cloud import CloudConfig
from any_agent.errors import BudgetExhausted
from any_agent.keys import KeySigner
from any_agent.rundir.layout import RunDir
from any_agent.rundir.usage import UsageReader
from router.cloud.launching import Failure
from router.cloud.schedule import TAKE_PLACES, State
from router.cloud.store import Run

End: TypeAlias = Literal[
    "idle", "quiet", "turn", "stopped", "budget", "deleted", "draining", "failed"
]


class Job:
    """The service of one run. Times are monotonic seconds."""

    def __init__(self, run: Run, config: CloudConfig) -> None:
        self.run = run
        self.dir = RunDir.of(config.root, run.account, run.experiment, run.trial)
        self.state: State = "idle"
        self.wanted_at: float | None = None
        self.asked_at = time.monotonic()
        self.started_at = 0.0
        self.retry_at = 0.0
        self.calls = 0
        self.limits: set[asyncio.Timeout] = set()
        """The time limits of the requests that wait until it is ready."""
        self.usage = UsageReader(self.dir)
        self.removing = False
        """Its files are being removed."""
        self.halted: BudgetExhausted | None = None
        """Why it may not run: its account's budget is used up."""
        self.failures = 0
        """Failures since it was ready last."""
        self.failure = Failure("")
        """Its last failure."""
        self.position = 0
        """Its position in the queue, from 1; 0 while it is not in it."""
        self.place = 0
        """The place that it has, from 0."""
        self.origin = ""
        """The URL of its router."""
        self.ready = asyncio.Event()
        self.leaves = asyncio.Event()
        """It is to finish what is under way, and end."""
        self.end: End = "failed"
        """Why its service ends, if nothing goes wrong with it."""
        self.ended = asyncio.Event()
        """No process of it runs."""
        self.ended.set()
        self._signer: KeySigner | None = None

    @property
    def account(self) -> str:
        return self.run.account

    @property
    def ends(self) -> bool:
        return self.run.wish != "serve" or self.halted is not None

    @property
    def waiting(self) -> int:
        """Requests that wait until it is ready."""
        return len(self.limits)

    @property
    def takes_place(self) -> bool:
        return self.state in TAKE_PLACES

    def knows(self, key: str, prefix: str) -> bool:
        """Return whether a session's or a judge's key is one of this run."""
        if self._signer is None:
            if not self.dir.secret.exists():
                # It was never started, so it has no session.
                return False
            self._signer = signer_of(self.dir)
        return self._signer.verify(key, prefix) is not None

    def hurry(self) -> None:
        """Answer the requests that wait for it."""
        for limit in self.limits:
            limit.reschedule(asyncio.get_running_loop().time())


def state_of(job: Job, run: Run) -> str:
    """Return the state of a job, with what its owner wants, in the words that people see."""
    if run.wish == "delete":
        return "deleting"
    if run.wish == "stop" or job.halted is not None:
        return "stopping" if job.state != "idle" else "stopped"
    return "queued" if job.position else job.state


STATES = ("idle", "queued", "starting", "running", "stopping", "stopped", "failed", "deleting")
