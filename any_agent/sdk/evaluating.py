"""Running an evaluation: an agent on all items, against one service, to its figures."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from any_agent.sdk.evaluation import Evaluation
from any_agent.sdk.find_service import ServiceAddress, borrow_client, return_client
from any_agent.sdk.open_session import run_info
from any_agent.sdk.runner import AgentRunner

_POLL_INTERVAL = 0.1
_ANSWERS_TIMEOUT = 10.0
"""Seconds."""


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """What is run, and how."""

    agent: Callable[..., Any]
    agent_name: str
    """With its arguments: the results of another one are not gone on with."""
    items: Sequence[Any]
    runs: int
    concurrency: int
    timeout: float
    retries: int
    threshold: float
    failed_score: float | None
    out: str | None
    version: int | Literal["current", "any"]
    """The weight version that all tokens must be of: one, that which is served when it begins, or
    whichever."""


@dataclass(frozen=True, slots=True)
class EvaluatedRun:
    """What came of it, and whose model it was."""

    model: str
    """`experiment/trial`, as the service says."""
    evaluation: Evaluation


async def evaluate(
    options: EvalOptions, service: ServiceAddress, watch: Callable[[], object] | None = None
) -> EvaluatedRun:
    """All runs of all items; ``watch`` is called ten times a second meanwhile, and ends it by what
    it raises.

    Raises what :meth:`AgentRunner.arun` raises, and VersionGone where the service has gone on to
    other weights than those that it is pinned to.
    """
    work = asyncio.ensure_future(_evaluate(options, service))
    if watch is None:
        return await work
    watching = asyncio.ensure_future(_watch(watch))
    try:
        await asyncio.wait([work, watching], return_when=asyncio.FIRST_COMPLETED)
        if watching.done():
            watching.result()
        return await work
    finally:
        for task in (work, watching):
            task.cancel()
        for task in (work, watching):
            with suppress(asyncio.CancelledError, Exception):
                await task


async def _watch(look: Callable[[], object]) -> None:
    while True:
        await asyncio.sleep(_POLL_INTERVAL)
        look()


async def _evaluate(options: EvalOptions, service: ServiceAddress) -> EvaluatedRun:
    within = service.patience if service.file is not None else _ANSWERS_TIMEOUT
    client = borrow_client(service, retry_for=within)
    try:
        run = await run_info(client, service)
    finally:
        await return_client(service, retry_for=within)
    version = {"current": run.version, "any": None}.get(str(options.version), options.version)
    assert version is None or isinstance(version, int)
    runner = AgentRunner(
        url=service.named,
        api_key=service.api_key,
        mode="eval",
        version=version,
        concurrency=options.concurrency,
        group_size=options.runs,
        results=options.out,
        agent_name=options.agent_name,
        retries=options.retries,
        timeout=options.timeout,
        # Where failures have a score, an agent that always fails is judged like any other.
        max_failures=32 if options.failed_score is None else sys.maxsize,
    )
    results = await runner.arun(options.agent, options.items)
    evaluation = Evaluation.of(
        results,
        runs=options.runs,
        threshold=options.threshold,
        failed_score=options.failed_score,
    )
    return EvaluatedRun(f"{run.experiment}/{run.trial}", evaluation)
