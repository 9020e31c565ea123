"""kill -9 under load: ``python tests/e2e/chaos.py [--kills N] [--agents N] [--seed N]``.

The demo's tiny model behind a real service of two ranks trains on what concurrent agents do, while
each kind of process (proxy, engine, router, trainer) is killed N times at random moments. Then the
agents' ledgers are held against what the run's folder keeps. Prints a table and a verdict; exit
code 1 unless no acknowledged session, answer, reward or finalize is lost, no session was trained on
twice, the counters balance, the reward rose, what was recorded is exact, and no key is in a log.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import secrets
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    # Run as a file: the tests' packages are beside the library's.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from any_agent.client.rl_client import RLClient
from any_agent.config import Config
from any_agent.demo.run import demo_config
from any_agent.errors import AnyAgentError
from any_agent.keys import rank_of_session
from any_agent.launcher import Node, NodeOptions
from any_agent.launcher.trial import trial_dir
from any_agent.rundir.layout import RunDir
from any_agent.runtime.command_line import say
from any_agent.types import SessionState
from tests.support import results
from tests.support.e2e import audit, history
from tests.support.e2e.crowd import Crowd
from tests.support.e2e.killing import KINDS, Kill, Killer, schedule, seconds_of
from tests.support.e2e.ledger import Ledger
from tests.support.results import Result
from tests.support.taught_models import copy_model

RANKS = 2
GAIN = 0.2
"""By which the accuracy on held-out prompts must rise."""
TOLERANCE = 1e-4
_CHECKED = 200
"""Interactions whose log-probabilities are computed anew."""
_ENDLESS = 1_000_000
_STEPS = 25
"""As many as the demo makes."""
_STALLED = 240.0
_SETTLE = 3
"""Steps after the last kill."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One run."""

    kills: int
    """Of each kind."""
    agents: int
    seed: int
    steps: int
    """At least so many."""
    limit: float
    """The most seconds that agents are at work."""


@dataclass(slots=True)
class Outcome:
    """What happened, and every promise that was not kept."""

    ledger: Ledger = field(default_factory=Ledger)
    kills: list[Kill] = field(default_factory=list)
    figures: dict[str, str] = field(default_factory=dict)
    problems: dict[str, list[str]] = field(default_factory=dict)
    """By promise; empty lists for those that were kept."""

    @property
    def good(self) -> bool:
        return not any(self.problems.values())


def chaos_config(root: Path, seed: int, admin_key: str) -> Config:
    """The demo's settings, with room for long answers, and nothing thrown away."""
    plain = demo_config(root, seed=seed, steps=_ENDLESS, ranks=RANKS).model_dump()
    plain["experiment"] = "chaos"
    plain["server"]["admin_key"] = admin_key
    plain["sampling"]["max_new_tokens"] = 64
    # Sessions whose open was acknowledged to nobody must not hold their groups for long.
    plain["sessions"] |= {"ttl": 120.0, "group_timeout": 90.0}
    plain["train"] |= {"checkpoint_every": 3, "keep_checkpoints": 100_000, "keep_weights": 100_000}
    return Config.model_validate(plain)


def run_chaos(root: Path, plan: Plan, say: Callable[[str], None]) -> Outcome:
    """Copy the model, serve, train, kill, and audit; files are kept under ``root``."""
    admin_key = secrets.token_hex(24)
    config = chaos_config(root, plan.seed, admin_key)
    copy_model(Path(config.model.path), seed=plan.seed)
    chaos = Chaos(config, plan, admin_key, say)
    chaos.go()
    return chaos.outcome


class Chaos:
    """One service under load and under fire."""

    def __init__(
        self, config: Config, plan: Plan, admin_key: str, say: Callable[[str], None]
    ) -> None:
        self.config = config
        self.plan = plan
        self.outcome = Outcome()
        self._admin_key = admin_key
        self._say = say
        self._rng = random.Random(plan.seed)
        self._node: Node
        self._redone: list[history.Manifest] = []
        self._counters: list[audit.Counters] | None = None

    def go(self) -> None:
        """Serve, let agents and faults loose, and audit: also what came to no end."""
        try:
            with Node(self.config, NodeOptions(say=self._say)) as node:
                asyncio.run(self.drive(node))
        except (AnyAgentError, AssertionError, TimeoutError) as error:
            # What was promised until then is held against it all the same.
            self._check("the run came to no end", [f"{type(error).__name__}: {error}"])
        self._say("audit     reading the journals")
        self.audit(trial_dir(self.config))

    async def drive(self, node: Node) -> None:
        """Agents at work while parts are killed; raises what ended the service, or TimeoutError."""
        self._node = node
        with first_error():
            async with (
                RLClient(node.url, admin_key=self._admin_key) as service,
                asyncio.timeout(self.plan.limit),
                asyncio.TaskGroup() as tasks,
            ):
                watching = tasks.create_task(self._watch())
                await self._act(node, service)
                watching.cancel()

    async def _watch(self) -> None:
        """Have dead parts started again; in this thread, with which their lives are bound up."""
        while True:
            self._node.check()
            await asyncio.sleep(0.05)

    async def _act(self, node: Node, service: RLClient) -> None:
        ledger = self.outcome.ledger
        crowd = self._crowd(node.url, service)
        before = await crowd.evaluate()
        self._say(f"before    first answer right: {before:.3f}")
        began = time.monotonic()
        work = asyncio.create_task(crowd.work())
        try:
            await self._until_step(2, work)
            await self._strike(node, work)
            await self._until_step(max(self.plan.steps, self._step() + _SETTLE), work)
            crowd.leave()
            await work
        finally:
            work.cancel()
        spent = time.monotonic() - began
        after = await crowd.evaluate()
        self._say(f"after     first answer right: {after:.3f}")
        self._counters = await audit.read_counters(node.dir, RANKS, self._admin_key)
        finalized = sum(told.finalized for told in ledger.sessions)
        self.outcome.figures |= {
            "load": f"{len(ledger.sessions)} sessions, {finalized} finalized, in {spent:.0f} s",
            "steps": f"{self._step()}",
            "accuracy": f"{before:.3f} -> {after:.3f}",
        }
        self._judge_learning(before, after)

    def _crowd(self, url: str, service: RLClient) -> Crowd:
        plan = self.plan
        return Crowd(url, service, self.outcome.ledger, agents=plan.agents, seed=plan.seed)

    def _judge_learning(self, before: float, after: float) -> None:
        rose = after >= before + GAIN
        self._check("reward rises", [] if rose else [f"{before:.3f} -> {after:.3f}"])

    async def _strike(self, node: Node, work: asyncio.Task[None]) -> None:
        plan = schedule(self.plan.kills, RANKS, self._rng)
        killer = Killer(node, plan, self._rng, killed=self._remember, after=self._tell)
        self.outcome.kills = killer.kills
        await beside(work, killer.run())
        killed = Counter(kill.part for kill in killer.kills)
        restarts = {name: part.restarts for name, part in node.parts.items() if part.restarts}
        self._check("restarts of others", [] if restarts == killed else [f"{restarts}, {killed}"])

    def _remember(self, part: str) -> None:
        """The steps that a trainer killed now has to make again."""
        if part == "trainer":
            self._redone += history.unsaved(self._node.dir)

    def _tell(self, kill: Kill) -> None:
        number, total = len(self.outcome.kills), len(KINDS) * self.plan.kills
        self._say(
            f"kill      {number}/{total} {kill.part}: ready again after {kill.seconds:.1f} s, "
            f"step {self._step()}"
        )

    def _step(self) -> int:
        return history.last_step(self._node.dir)

    async def _until_step(self, step: int, work: asyncio.Task[None]) -> None:
        now, since = self._step(), time.monotonic()
        while now < step:
            if work.done():
                await work
                raise AssertionError(f"the agents left before step {step}")
            if time.monotonic() - since > _STALLED:
                raise TimeoutError(f"no step after step {now} in {_STALLED:g} s")
            await asyncio.sleep(0.2)
            if self._step() != now:
                now, since = self._step(), time.monotonic()

    def audit(self, run: RunDir) -> None:
        """Hold the ledger against the folder; the service has ended."""
        ledger, figures = self.outcome.ledger, self.outcome.figures
        records = self._read_records(run)
        lost = audit.lost(ledger, records)
        self._check("acknowledged sessions lost", lost.sessions)
        self._check("acknowledged answers lost", lost.answers)
        self._check("acknowledged rewards lost", lost.rewards)
        self._check("acknowledged finalizes lost", lost.finalizes)
        self._check("answers that break the protocol", ledger.broken)
        self._audit_history(run, records)
        if self._counters is not None:
            self._check("counters out of balance", audit.unbalanced(self._counters, records, RANKS))
        self._audit_exactness(records)
        self._audit_training(run, records)
        self._check("keys in logs", audit.leaks(run, [self._admin_key]))
        known = {told.session_id for told in ledger.sessions}
        figures["opened unheard"] = f"{len(records.keys() - known)} sessions"
        figures["trained unseen"] = f"{len(audit.unseen(ledger, records))} answers"
        self._check("tracebacks in logs", audit.complaints(run))

    def _read_records(self, run: RunDir) -> dict[str, audit.Record]:
        return audit.read_records(run, RANKS)

    def _audit_history(self, run: RunDir, records: dict[str, audit.Record]) -> None:
        survived = history.read_history(run)
        states = {session_id: record.row.state for session_id, record in records.items()}
        steps = {session_id: record.row.step for session_id, record in records.items()}
        without, unsaid = history.effects_against_states(survived, states, steps)
        self._check("trained twice", history.trained_twice(survived))
        self._check("contradictions in the history", history.contradictions(survived))
        self._check("called trained, without effect", without)
        self._check("trained, and not called so", [f"{s} is {states.get(s)}" for s in unsaid])
        trained = sum(state == SessionState.TRAINED for state in states.values())
        self.outcome.figures["history"] = (
            f"{history.last_step(run)} steps, {trained} sessions trained on"
        )
        self._audit_repeats(survived)

    def _audit_repeats(self, survived: history.History) -> None:
        changed = history.given_up(self._redone, survived)
        self._check("steps not made again as they were", [f"step {step}" for step in changed])
        self.outcome.figures["history"] += f", {len(self._redone)} steps made again"

    def _audit_exactness(self, records: dict[str, audit.Record]) -> None:
        spanning = self._spanning()
        checks = audit.sample_checks(self.config, records, spanning, _CHECKED, self._rng)
        worst = audit.worst_error(checks)
        count = sum(check.interaction.id in spanning for check in checks)
        self.outcome.figures["exactness"] = (
            f"worst error {worst:.1e} of {len(checks)} interactions, "
            f"{count} of which outlived an engine"
        )
        self._check("inexact", [] if worst < TOLERANCE else [f"{worst:.1e}"])

    def _audit_training(self, run: RunDir, records: dict[str, audit.Record]) -> None:
        # Not before: torch's threads would be in the agents' way.
        from tests.support.e2e.retrain import retrain

        compared, others = retrain(self.config, run, records)
        self.outcome.figures["trained anew"] = f"{compared} checkpoints compared bit for bit"
        self._check("weights of another history", others)

    def _spanning(self) -> set[str]:
        """Completions that were under way when their rank's engine was killed."""
        out = set()
        for kill in self.outcome.kills:
            for told, completion_id, answer in self.outcome.ledger.answers():
                mine = kill.part == f"engine-{rank_of_session(told.session_id)}"
                if mine and answer.began < kill.at < answer.ended:
                    out.add(completion_id)
        return out

    def _check(self, promise: str, problems: list[str]) -> None:
        self.outcome.problems[promise] = problems


async def beside(work: asyncio.Task[None], *deeds: Coroutine[Any, Any, None]) -> None:
    """Run the deeds to the end of the first of them, while the agents are at work."""
    tasks = [asyncio.create_task(deed) for deed in deeds]
    try:
        await asyncio.wait([*tasks, work], return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            await work
            raise AssertionError("the agents left before the last fault")
        for task in tasks:
            if task.done():
                await task
    finally:
        for task in tasks:
            task.cancel()


@contextmanager
def first_error() -> Iterator[None]:
    """Raise the first of a group of errors by itself."""
    try:
        yield
    except BaseExceptionGroup as group:
        first: BaseException = group
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None


def table(outcome: Outcome) -> list[str]:
    """What was killed, how long it was away, and what agents noticed."""
    lines = [f"{'kind':<9}{'kills':>6}{'median s':>10}{'worst s':>9}{'calls failed':>14}"]
    for kind in KINDS:
        count, median, worst = seconds_of(outcome.kills, kind)
        failed = failures_after(outcome, kind)
        lines.append(f"{kind:<9}{count:>6}{median:>10.1f}{worst:>9.1f}{failed:>14}")
    return lines + told(outcome)


def told(outcome: Outcome) -> list[str]:
    """Print what agents noticed, the run's figures, and each promise's breaches."""
    ledger = outcome.ledger
    answers = [answer for _, _, answer in ledger.answers()]
    slowest = max((answer.seconds for answer in answers), default=0.0)
    lines = [f"calls     {len(answers)} answered, the slowest after {slowest:.1f} s"]
    for what in ("call", "open", "reward", "finalize"):
        failed = ledger.failed(what)
        shown = ", ".join(f"{n} {error}" for error, n in failed.most_common(6)) or "none"
        lines.append(f"failed    {what + 's:':<10} {shown}")
    lines += [f"{name:<16} {text}" for name, text in outcome.figures.items()]
    for promise, problems in outcome.problems.items():
        lines.append(f"{promise:<36} {len(problems)}")
        lines += [f"    {problem}" for problem in problems[:5]]
    return lines


def failures_after(outcome: Outcome, kind: str) -> int:
    """Calls that failed between a kill of this kind and the next kill."""
    ends = [kill.at for kill in outcome.kills[1:]] + [float("inf")]
    return sum(
        outcome.ledger.failed("call", kill.at, end).total()
        for kill, end in zip(outcome.kills, ends, strict=True)
        if kill.kind == kind
    )


def record_outcome(proof: str, form: str, outcome: Outcome, figures: list[str]) -> None:
    """Keep the result, with what was not kept first."""
    broken = [f"{name}: {len(found)}" for name, found in outcome.problems.items() if found]
    kept = len(outcome.problems) - len(broken)
    made = Result(proof, form, kept, len(broken), broken + [text for text in figures if text])
    results.record([made])


def arguments_of(parser: argparse.ArgumentParser, agents: int) -> argparse.Namespace:
    """Read what every such run is told, beside its own arguments."""
    parser.add_argument("--agents", type=int, default=agents, help="at work at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="keep the run's files in this empty folder")
    parser.add_argument("--record", action="store_true", help="keep the result for its document")
    return parser.parse_args()


def judged(
    run: Callable[[Path], Outcome], table: Callable[[Outcome], list[str]], keep: Path | None
) -> int:
    """Run in the folder to keep or one of its own, print table and verdict; the exit code."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="any-agent-", ignore_cleanup_errors=True) as folder:
        root = keep or Path(folder)
        root.mkdir(parents=True, exist_ok=True)
        outcome = run(root.absolute())
    print("\n".join(table(outcome)))
    kept = "every promise was kept" if outcome.good else "FAILED"
    print(f"verdict   {kept} ({time.monotonic() - began:.0f} s)")
    return 0 if outcome.good else 1


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill every kind of process under load.")
    parser.add_argument("--kills", type=int, default=10, help="of each kind (default 10)")
    arguments = arguments_of(parser, agents=16)
    limit = 600 + 4 * arguments.kills * 60
    plan = Plan(arguments.kills, arguments.agents, arguments.seed, _STEPS, limit)

    def run(root: Path) -> Outcome:
        outcome = run_chaos(root, plan, say=say)
        if arguments.record:
            away = ", ".join(f"{kind} {seconds_of(outcome.kills, kind)[2]:.1f} s" for kind in KINDS)
            figures = [outcome.figures.get("load", ""), f"away at most: {away}"]
            form = f"{arguments.kills} kills of each kind"
            record_outcome("tests/e2e/chaos.py", form, outcome, figures)
        return outcome

    return judged(run, table, arguments.keep)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
