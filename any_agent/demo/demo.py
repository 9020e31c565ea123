"""One demo from nothing to the report: the model, the service, the agents, a look back."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from any_agent.client.rl_client import RLClient
from any_agent.config import Config
from any_agent.demo.child_process import ChildProcess
from any_agent.demo.driver import EVALS, Driver, Tally, workers
from any_agent.demo.peak_memory import PeakMemory
from any_agent.demo.report import Report, command, next_lines
from any_agent.demo.state import DemoState, Metrics, PartState, Rate, SessionTotals
from any_agent.demo.task import items
from any_agent.errors import AnyAgentError
from any_agent.launcher import Node, NodeOptions
from any_agent.rundir.registry import rank_name

if TYPE_CHECKING:
    from any_agent.demo.display import LiveDisplay
    from any_agent.demo.plain_output import PlainOutput

_WORKERS = 4
_CHILD_TIMEOUT = 300.0
_FINISH_TIMEOUT = 30.0
_CHECK_INTERVAL = 0.2
_POLL_INTERVAL = 1.0


class Demo:
    """One demo. The main thread runs it; :meth:`look` may be called in any."""

    def __init__(self, config: Config, root: Path, *, permute: bool = False) -> None:
        self._config = config
        self._permute = permute
        self._started = time.monotonic()
        self._node: Node | None = None
        self._names = part_names(config.server.ranks)
        self._shown: LiveDisplay | PlainOutput
        self._metrics: Metrics
        self._before, self._training, self._after = Tally(), Tally(), Tally()
        self._asking: Tally | None = None
        """Of the evaluation under way."""
        self._rate = Rate()
        self._state = DemoState(
            seed=config.train.seed,
            ranks=config.server.ranks,
            steps=config.train.steps,
            folder=str(root),
            prompts=EVALS * len(items(held_out=True)),
        )

    def look(self) -> DemoState:
        """The state now."""
        # No iteration: the main thread adds parts meanwhile.
        known = self._node.parts if self._node is not None else {}
        parts = [(name, known.get(name)) for name in self._names]
        return replace(
            self._state,
            elapsed=time.monotonic() - self._started,
            parts=tuple(
                PartState(name, part.state, part.restarts) if part else PartState(name)
                for name, part in parts
            ),
        )

    def run(self, shown: LiveDisplay | PlainOutput) -> dict[str, Any]:
        """From nothing to the report; the figures."""
        self._shown = shown
        config = self._config
        with PeakMemory() as memory:
            with ChildProcess("model", config.model.path, "--seed", config.train.seed) as model:
                model.output(_CHILD_TIMEOUT)
            self._serve()
            self._set(phase="asking the checkpoint, drawing the curve")
            curve, said = self._look_back()
            peak = round(memory.peak_mib)
        report = Report(
            before=self._before.measures(),
            after=self._after.measures(),
            rewards=self._state.rewards,
            curve=curve,
            checkpoint=said["checkpoint"],
            answers=[(prompt, answer) for prompt, answer in said["answers"]],
            seconds=round(time.monotonic() - self._started, 1),
            peak_mib=peak,
            next=next_lines(config, command()),
            failed=self._tally("failed"),
            error=(self._errors() or [""])[-1],
            restarts={part.name: part.restarts for part in self.look().parts if part.restarts},
        )
        shown.end(report)
        return self._figures(report)

    # -- the service ---------------------------------------------------------------------------

    def _serve(self) -> None:
        self._set(phase="starting the service")
        self._node = Node(self._config, NodeOptions(say=self._shown.say))
        self._metrics = Metrics(self._node.dir.metrics)
        with self._node as node:
            try:
                self._set(url=node.url)
                asyncio.run(self._drive(node))
                _finish(node)
            except* AnyAgentError as group:
                raise _first(group) from None
            finally:
                self._set(phase="ending the service")
        self._read_steps()

    async def _drive(self, node: Node) -> None:
        client = RLClient(node.url, trust_env=False)
        async with client, workers(_WORKERS) as agents, asyncio.TaskGroup() as tasks:
            seen = [tasks.create_task(self._check(node)), tasks.create_task(self._poll(node))]
            driver = Driver(client, agents, seed=self._config.train.seed, permute=self._permute)
            await self._ask(driver, "before", self._before)
            self._set(phase="training")
            await driver.train(self._training)
            self._read_steps()
            await self._ask(driver, "after", self._after)
            for task in seen:
                task.cancel()

    async def _ask(self, driver: Driver, when: str, tally: Tally) -> None:
        self._set(phase=f"asking held-out prompts, {when} training")
        self._asking = tally
        await driver.evaluate(tally)
        self._asking = None
        self._set(**{when: tally.measures()}, asked=0)

    async def _check(self, node: Node) -> None:
        """Keep the service running; raises when a part of it cannot go on."""
        while True:
            # Not in another thread: children end with the thread that started them.
            node.check()
            await asyncio.sleep(_CHECK_INTERVAL)

    async def _poll(self, node: Node) -> None:
        """Follow what trainer, service and agents say of themselves."""
        sessions = SessionTotals()
        async with httpx.AsyncClient(base_url=node.url, timeout=5, trust_env=False) as service:
            while True:
                # While the router restarts, the last numbers stand.
                with suppress(httpx.HTTPError):
                    answer = await service.get("/metrics")
                    if answer.is_success:
                        self._state = replace(self._state, sessions=sessions.read(answer.text))
                self._read_steps()
                await asyncio.sleep(_POLL_INTERVAL)

    def _read_steps(self) -> None:
        self._state = self._state.plus(self._metrics.new())
        self._set(
            tokens_per_second=self._rate.add(self._tally("tokens")),
            asked=self._asking.sessions if self._asking is not None else 0,
        )

    # -- the end -------------------------------------------------------------------------------

    def _look_back(self) -> tuple[Path, dict[str, Any]]:
        """The curve's file, and what the checkpoint answers; both from what lies on disk."""
        config, state = self._config, self._state
        assert self._node is not None and state.before is not None and state.after is not None
        run = self._node.dir
        curve = run.path / "reward.png"
        names = [config.experiment, config.trial, "--user", config.user, "--root", config.root]
        marks = ["--before", state.before.accuracy, "--after", state.after.accuracy]
        title = f"any-agent demo, seed {state.seed}"
        if self._permute:
            title += ", each session rewarded as another one (control)"
        with (
            ChildProcess("sample", *names, "--seed", state.seed) as sample,
            ChildProcess("curve", run.metrics, curve, *marks, "--title", title) as drawing,
        ):
            drawing.output(_CHILD_TIMEOUT)
            said: dict[str, Any] = json.loads(sample.output(_CHILD_TIMEOUT))
        return curve, said

    def _figures(self, report: Report) -> dict[str, Any]:
        assert self._node is not None
        return {
            "seed": self._config.train.seed,
            "steps": self._config.train.steps,
            "ranks": self._config.server.ranks,
            "permuted_rewards": self._permute,
            "before": report.before.accuracy,
            "after": report.after.accuracy,
            "measures": {"before": asdict(report.before), "after": asdict(report.after)},
            "eval_sessions": self._before.sessions + self._after.sessions,
            "train_sessions": self._training.sessions,
            "failed_sessions": report.failed,
            "errors": self._errors(),
            "restarts": report.restarts,
            "seconds": report.seconds,
            "peak_memory_mib": report.peak_mib,
            "run": str(self._node.dir.path),
            "checkpoint": report.checkpoint,
            "curve": str(report.curve),
            "answers": report.answers,
        }

    def _tally(self, name: str) -> int:
        return sum(getattr(t, name) for t in (self._before, self._training, self._after))

    def _errors(self) -> list[str]:
        return [*self._before.errors, *self._training.errors, *self._after.errors]

    def _set(self, **changes: Any) -> None:
        self._state = replace(self._state, **changes)
        self._shown.changed()


def part_names(ranks: int) -> list[str]:
    """The service's processes, in the order of starting."""
    engines = [f"engine-{rank}" for rank in range(ranks)]
    return [*engines, *map(rank_name, range(ranks)), "router", "trainer"]


def _first(error: BaseException) -> BaseException:
    """What went wrong first, out of nested groups of concurrent tasks."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _finish(node: Node) -> None:
    """The trainer tells `finished`, with its checkpoint, before it exits; let it."""
    deadline = time.monotonic() + _FINISH_TIMEOUT
    while not node.check():
        if time.monotonic() >= deadline:
            node.options.say(f"trainer   has not ended {_FINISH_TIMEOUT:g} s after its last step")
            return
        time.sleep(0.05)
