"""One demo: the model, the service, the agents, and the trained model's answers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import httpx
import psutil

from any_agent.config import Config
from any_agent.demo.driver import Driver
from any_agent.demo.report import Report, command, next_lines
from any_agent.demo.setups import TINY, Setup
from any_agent.demo.state import DemoState, PartState, Rate, SessionTotals, Tally
from any_agent.errors import AnyAgentError, StartupError
from any_agent.launcher import Node, NodeOptions
from any_agent.rundir.registry import rank_name
from any_agent.runtime.log_tail import LogTail
from any_agent.runtime.signals import handle_signals, interrupt

if TYPE_CHECKING:
    from any_agent.demo.display import Display


_MODULE_TIMEOUT = 300.0
FINISH_TIMEOUT = 120.0
_CHECK_INTERVAL = 0.2
_POLL_INTERVAL = 1.0


class Demo:
    """One demo. The main thread runs it; any thread may call :meth:`state`."""

    def __init__(
        self, config: Config, root: Path, *, permute: bool = False, setup: Setup = TINY
    ) -> None:
        self._config = config
        self._setup = setup
        self._permute = permute
        self._started = time.monotonic()
        self._node: Node | None = None
        self._names = part_names(config.server.ranks)
        self._display: Display
        self._metrics: LogTail
        self._before, self._training, self._after = Tally(), Tally(), Tally()
        self._asking: Tally | None = None
        """Tally of the running evaluation."""
        self._rate = Rate()
        self._state = DemoState(
            seed=config.train.seed,
            steps=config.train.steps,
            folder=str(root),
            phase=setup.phase,
            prompts=setup.evals * len(setup.task.items(held_out=True)),
        )

    def state(self) -> DemoState:
        """Return the state now."""
        # The dictionary is not iterated, because the main thread adds parts meanwhile.
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

    def run(self, display: Display) -> dict[str, Any]:
        """Run the demo and show its report; return its figures."""
        self._display = display
        config = self._config
        with peak_memory() as peak:
            setup = self._setup
            run_module(setup.module, config.model.path, *setup.options(config.train.seed))
            self._serve()
            self._set(phase="asking the checkpoint, drawing the curve")
            curve, found = self._look_back()
        tallies = self._before, self._training, self._after
        before, after = self._before.measures(), self._after.measures()
        assert self._node is not None
        report = Report(
            model=setup.name,
            seed=config.train.seed,
            steps=config.train.steps,
            ranks=config.server.ranks,
            permuted_rewards=self._permute,
            before=before.accuracy,
            after=after.accuracy,
            measures={"before": before, "after": after},
            eval_sessions=self._before.sessions + self._after.sessions,
            train_sessions=self._training.sessions,
            failed_sessions=sum(tally.failed for tally in tallies),
            errors=[error for tally in tallies for error in tally.errors],
            restarts={part.name: part.restarts for part in self.state().parts if part.restarts},
            seconds=round(time.monotonic() - self._started, 1),
            peak_memory_mib=round(peak()),
            run=str(self._node.dir.path),
            checkpoint=found["checkpoint"],
            curve=str(curve),
            answers=[(prompt, answer) for prompt, answer in found["answers"]],
        )
        display.end(report, self._state.rewards, next_lines(config, command()))
        return asdict(report)

    # -- the service ---------------------------------------------------------------------------

    def _serve(self) -> None:
        self._set(phase="starting the service")
        self._node = Node(self._config, NodeOptions(say=self._display.say))
        self._metrics = LogTail(self._node.dir.metrics, from_start=True)
        with self._node as node:
            try:
                self._set(url=node.url)
                asyncio.run(self._drive(node))
                await_trainer(node)
            except* AnyAgentError as group:
                raise first_error(group) from None
            finally:
                self._set(phase="ending the service")
        self._read_steps()

    async def _drive(self, node: Node) -> None:
        async with asyncio.TaskGroup() as tasks:
            watchers = [tasks.create_task(self._check(node)), tasks.create_task(self._poll(node))]
            seed = self._config.train.seed
            driver = Driver(node.url, seed=seed, permute=self._permute, setup=self._setup)
            await self._evaluate(driver, "before", self._before)
            self._set(phase="training")
            await driver.train(self._training)
            self._read_steps()
            await self._evaluate(driver, "after", self._after)
            for task in watchers:
                task.cancel()

    async def _evaluate(self, driver: Driver, when: str, tally: Tally) -> None:
        self._set(phase=f"asking held-out prompts, {when} training")
        self._asking = tally
        await driver.evaluate(tally)
        self._asking = None
        self._set(**{when: tally.measures()}, asked=0)

    async def _check(self, node: Node) -> None:
        """Keep the service running; raise when one of its parts cannot go on."""
        while True:
            # Checked in this thread, because children end with the thread that started them.
            node.check()
            await asyncio.sleep(_CHECK_INTERVAL)

    async def _poll(self, node: Node) -> None:
        """Refresh the state from the trainer's, the service's and the agents' counts."""
        sessions = SessionTotals()
        async with httpx.AsyncClient(base_url=node.url, timeout=5, trust_env=False) as service:
            while True:
                # While the router restarts, the last numbers stay.
                with suppress(httpx.HTTPError):
                    answer = await service.get("/metrics")
                    if answer.is_success:
                        self._state = replace(self._state, sessions=sessions.read(answer.text))
                self._read_steps()
                await asyncio.sleep(_POLL_INTERVAL)

    def _read_steps(self) -> None:
        self._state = self._state.plus(self._metrics.new_records())
        tokens = self._before.tokens + self._training.tokens + self._after.tokens
        self._set(
            tokens_per_second=self._rate.add(tokens),
            asked=self._asking.sessions if self._asking is not None else 0,
        )

    # -- the end -------------------------------------------------------------------------------

    def _look_back(self) -> tuple[Path, dict[str, Any]]:
        """Draw the curve and ask the checkpoint; return the curve's file and the answers."""
        config, state = self._config, self._state
        assert self._node is not None and state.before is not None and state.after is not None
        run = self._node.dir
        curve = run.path / "reward.png"
        title = f"any-agent demo, seed {state.seed}"
        if self._permute:
            title += ", each session rewarded as another one (control)"
        arguments = {
            "experiment": config.experiment,
            "trial": config.trial,
            "user": config.user,
            "root": str(config.root),
            "seed": state.seed,
            "model": self._setup.name,
            "tokens": config.sampling.max_new_tokens,
            "metrics": str(run.metrics),
            "curve": str(curve),
            "before": state.before.accuracy,
            "after": state.after.accuracy,
            "title": title,
        }
        found: dict[str, Any] = json.loads(run_module("look_back", json.dumps(arguments)))
        return curve, found

    def _set(self, **changes: Any) -> None:
        self._state = replace(self._state, **changes)
        self._display.update()


def run_module(module: str, *arguments: object, timeout: float = _MODULE_TIMEOUT) -> str:
    """Run ``python -m any_agent.demo.<module>``, so that its imports stay out of this process.

    Return what it prints. Raises StartupError with the end of its standard error if it fails.
    """
    child: subprocess.Popen[str] | None = None
    early: list[int] = []

    def later(number: int, _: FrameType | None) -> None:
        early.append(number)

    try:
        # An interrupt in the middle of its start would leave a child that nobody knows.
        with handle_signals(later, signal.SIGINT, signal.SIGTERM):
            child = subprocess.Popen(
                [sys.executable, "-m", f"any_agent.demo.{module}", *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"},
                # Ctrl-C at the terminal is for this process, which then kills the child.
                start_new_session=True,
            )
        if early:
            interrupt(early[0])
        printed, failure = child.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        raise StartupError(f"any_agent.demo.{module} took over {timeout:g} s") from None
    finally:
        if child is not None and child.poll() is None:
            child.kill()
            child.wait()
    if child.returncode != 0:
        raise StartupError(f"any_agent.demo.{module} failed:\n{failure[-2000:]}")
    return printed


def part_names(ranks: int) -> list[str]:
    """Return the names of the service's processes, in the order of starting."""
    engines = [f"engine-{rank}" for rank in range(ranks)]
    return [*engines, *map(rank_name, range(ranks)), "router", "trainer"]


def first_error(error: BaseException) -> BaseException:
    """Return the first error of nested groups of concurrent tasks."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def await_trainer(node: Node) -> None:
    """Wait until the trainer has written its last checkpoint and exited."""
    deadline = time.monotonic() + FINISH_TIMEOUT
    while not node.check():
        if time.monotonic() >= deadline:
            node.options.say(f"trainer   has not ended {FINISH_TIMEOUT:g} s after its last step")
            return
        time.sleep(0.05)


@contextmanager
def peak_memory(interval: float = 0.5) -> Iterator[Callable[[], float]]:
    """Sample the resident memory of the process tree; yield a function for the peak in MiB."""
    peak, end = 0.0, threading.Event()

    def sample() -> None:
        nonlocal peak
        while not end.wait(interval):
            peak = max(peak, _tree_mib())

    thread = threading.Thread(target=sample, name="memory", daemon=True)
    thread.start()
    try:
        yield lambda: peak
    finally:
        end.set()
        thread.join()


def _tree_mib() -> float:
    root = psutil.Process()
    total = 0
    for process in [root, *root.children(recursive=True)]:
        try:
            total += process.memory_info().rss
        except psutil.Error:
            continue
    return total / 2**20
