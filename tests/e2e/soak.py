"""Hours under faults of every kind: ``python tests/e2e/soak.py [--hours N | --minutes N]``.

The demo's tiny model behind a real service of two ranks trains on what concurrent agents do. Of
every twenty intervals each kind of fault has one: kill -9, SIGTERM and SIGSTOP of each kind of
process, cut connections, slow requests, a full disk, a wall clock that jumps. Memory, descriptors,
threads, event loops' lag and the run's folder are sampled. At the end the agents' ledgers are held
against journals and archives, and the second half's slopes against their bounds. Prints a table and
a verdict; exit code 1 unless every promise was kept and everything is flat. It mounts a small disk,
which needs root.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

if __package__ in (None, ""):
    # Run as a file: the tests' packages are beside the library's.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from any_agent.client.rl_client import RLClient
from any_agent.config import Config
from any_agent.launcher import Node
from any_agent.rundir.layout import RunDir, published_versions, weights_folder
from tests.e2e.chaos import (
    RANKS,
    TOLERANCE,
    Chaos,
    Outcome,
    Plan,
    arguments_of,
    beside,
    chaos_config,
    judged,
    record_outcome,
    told,
)
from tests.support.e2e import audit, faults, history
from tests.support.e2e.crowd import Crowd
from tests.support.e2e.faults import KINDS, Faults, set_clock
from tests.support.e2e.killing import Kill
from tests.support.e2e.sampling import BOUNDS, Sampler
from tests.support.e2e.wire import Wire, wire_to
from tests.support.small_disk import Disk, small_disk
from tests.support.taught_models import copy_model

_DISK_MB, _DISK_MB_PER_HOUR = 512, 512
"""The disk's size. Of a session about 3 KB stay in the journal for a day, its row and the answers
that a retry may ask for, and 2 KB in an archive: 300 MB an hour here."""
_NOISE = 0.2
_CHECKED = 200
_INTERVAL = 10.0
"""Seconds at most from one fault to the next one."""
_SETTLE = 2


def soak_config(root: Path, disk: Path, seed: int, admin_key: str) -> Config:
    """The chaos run's settings, but nothing is kept that a long run does not need."""
    plain = chaos_config(root, seed, admin_key).model_dump()
    plain["experiment"] = "soak"
    plain["root"] = disk / "runs"
    # Whatever was acknowledged is looked for at the end.
    plain["sessions"] |= {"keep_hours": 1 / 60, "archive_bytes": 2**40}
    plain["train"] |= {"checkpoint_every": 5, "keep_checkpoints": 2, "keep_weights": 4}
    return Config.model_validate(plain)


class Soak(Chaos):
    """One service under load, under every kind of fault, for a given time."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        admin_key: str,
        say: Callable[[str], None],
        *,
        seconds: float,
        disk: Disk,
        clock: Path,
        kept: Path,
    ) -> None:
        """``kept``: a folder for some versions' weights, by which calls are checked."""
        super().__init__(config, plan, admin_key, say)
        self.seconds = seconds
        self.sampler: Sampler | None = None
        self._disk = disk
        self._clock = clock
        self._kept = kept
        self._wire: Wire

    async def _act(self, node: Node, service: RLClient) -> None:
        async with (
            wire_to(node.url) as self._wire,
            RLClient(self._wire.url, admin_key=self._admin_key) as through,
        ):
            await super()._act(node, through)

    def _crowd(self, url: str, service: RLClient) -> Crowd:
        return Crowd(
            self._wire.url,
            service,
            self.outcome.ledger,
            agents=self.plan.agents,
            seed=self.plan.seed,
            noise=_NOISE,
        )

    def _judge_learning(self, before: float, after: float) -> None:
        """Leave it: part of the rewards is chance, and hours of that teach anything."""

    async def _strike(self, node: Node, work: asyncio.Task[None]) -> None:
        every = min(_INTERVAL, self.seconds / faults.INTERVALS)
        plan = faults.plan(round(self.seconds / every), self._rng)
        ledger = self.outcome.ledger
        self.sampler = Sampler(node, self._admin_key, sessions=lambda: len(ledger.sessions))
        bringing = Faults(
            node,
            self._wire,
            self._disk,
            self._clock,
            self._rng,
            killed=self._remember,
            after=self._tell,
        )
        self.outcome.kills = bringing.done
        await beside(
            work,
            bringing.run(plan, every=every),
            self.sampler.run(min(10.0, every / 2)),
            self._keep_weights(node.dir),
        )
        set_clock(self._clock, 0.0)

    async def _keep_weights(self, run: RunDir) -> None:
        while True:
            for version in published_versions(run.weights)[-1:]:
                with suppress(OSError):
                    copy_version(weights_folder(run.weights, version), self._kept)
            await asyncio.sleep(max(5.0, self.seconds / 200))

    def _remember(self, part: str) -> None:
        """Leave it: the manifests of the steps made again are gone by the end."""

    def _tell(self, kill: Kill) -> None:
        done = len(self.outcome.kills)
        self._say(
            f"fault     {done} {kill.kind} {kill.part}: {kill.seconds:.1f} s, step {self._step()}"
        )

    def audit(self, run: RunDir) -> None:
        missing = set(KINDS) - {fault.kind for fault in self.outcome.kills}
        self._check("kinds of faults left out", sorted(missing))
        super().audit(run)
        self._audit_flatness()
        if self.outcome.problems["tracebacks in logs"]:
            self._say(audit.last_traceback(run))

    def _read_records(self, run: RunDir) -> dict[str, audit.Record]:
        records = super()._read_records(run)
        self._check("archives against journals", audit.read_archives(run, RANKS, records))
        kept = sum(record.row.content == "archived" for record in records.values())
        self.outcome.figures["archived"] = f"{kept} of {len(records)} sessions"
        return records

    def _audit_repeats(self, survived: history.History) -> None:
        """Leave it: see `_remember`."""

    def _audit_exactness(self, records: dict[str, audit.Record]) -> None:
        versions = {0, *published_versions(self._kept)}
        known = {
            id: record
            for id, record in records.items()
            if all(versions.issuperset(i.output_versions) for i in record.interactions)
        }
        checks = audit.sample_checks(
            self.config, known, self._spanning(), _CHECKED, self._rng, self._kept
        )
        worst = audit.worst_error(checks)
        self.outcome.figures["exactness"] = (
            f"worst error {worst:.1e} of {len(checks)} interactions, {len(versions)} versions"
        )
        self._check("inexact", [] if checks and worst < TOLERANCE else [f"{worst:.1e}"])

    def _audit_training(self, run: RunDir, records: dict[str, audit.Record]) -> None:
        """Leave it: the checkpoints from which the steps would be made again are gone."""

    def _audit_flatness(self) -> None:
        if self.sampler is None or not self.sampler.disk:
            self._check("not flat", ["nothing was sampled"])
            return
        problems = [trend.problem for trend in self.sampler.trends()]
        problems += [problem for _, _, problem in self.sampler.disk_growth().values()]
        self._check("not flat", [problem for problem in problems if problem])


def copy_version(folder: Path, into: Path) -> None:
    """A copy of a version's folder, whole or not at all: it may be removed meanwhile."""
    target, part = into / folder.name, into / "part"
    if not target.exists():
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(folder, part)
        part.rename(target)


def table(soak: Soak) -> list[str]:
    """The faults, what agents noticed, what grew, and the promises."""
    outcome = soak.outcome
    lines = [f"{'fault':<14}{'times':>6}{'median s':>10}{'worst s':>9}"]
    for kind in KINDS:
        took = [fault.seconds for fault in outcome.kills if fault.kind == kind]
        median, worst = statistics.median(took or [0.0]), max(took, default=0.0)
        lines.append(f"{kind:<14}{len(took):>6}{median:>10.1f}{worst:>9.1f}")
    if soak.sampler is not None and soak.sampler.disk:
        lines += growth(soak.sampler)
    return lines + told(outcome)


def growth(sampler: Sampler) -> list[str]:
    lines = [f"{'second half':<12}{'figure':<13}{'first':>9}{'last':>9}{'per hour':>10}  unit"]
    for trend in sorted(sampler.trends(), key=lambda trend: (trend.kind, trend.name)):
        bound = BOUNDS[trend.kind]
        first, last, each = (
            value / bound.scale for value in (trend.first, trend.last, trend.per_hour)
        )
        said = bound.unit if trend.judged else f"{bound.unit} (a short life, not judged)"
        lines.append(
            f"{trend.name:<12}{trend.kind:<13}{first:>9.1f}{last:>9.1f}{each:>10.2f}  {said}"
        )
    for kind, (end, each, _) in sampler.disk_growth().items():
        lines.append(
            f"{kind:<12}{'disk':<13}{'':>9}{end / 2**20:>9.1f}  MB, {each:.0f} bytes a session"
        )
    return lines


def figures(soak: Soak) -> list[str]:
    """Return the figures of a run for the document: its load, and what grew most."""
    sampler = soak.sampler
    if sampler is None or not sampler.disk:
        return []
    most = []
    for kind, bound in BOUNDS.items():
        judged = (each for each in sampler.trends() if each.judged and each.kind == kind)
        grown = [each.per_hour for each in judged]
        most.append(f"{kind} {max(grown, default=0.0) / bound.scale:+.2g} {bound.unit}".rstrip())
    files = [
        f"{kind} {end / 2**20:.0f} MB, {each:.0f} bytes a session"
        for kind, (end, each, _) in sampler.disk_growth().items()
    ]
    load = f"{soak.outcome.figures.get('load', '')}, {len(soak.outcome.kills)} faults"
    return [load, f"an hour at most: {', '.join(most)}", f"at the end: {'; '.join(files)}"]


def run_soak(root: Path, *, seconds: float, agents: int, seed: int) -> Soak:
    """Copy the model, serve, train, bring the faults, and audit; files are kept under ``root``."""

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:7.0f}  {line}", flush=True)

    began = time.monotonic()
    kept, clock = root / "kept", root / "clock"
    kept.mkdir(parents=True)
    clock.write_bytes(bytes(8))
    os.environ["SOAK_CLOCK"] = str(clock)
    hook = Path(faults.__file__).parent / "clock"
    path = [str(hook), str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(entry for entry in path if entry)
    admin_key = secrets.token_hex(24)
    size = _DISK_MB + round(_DISK_MB_PER_HOUR * seconds / 3600)
    with small_disk(root / "disk", size << 20) as disk:
        config = soak_config(root, disk.folder, seed, admin_key)
        copy_model(Path(config.model.path), seed=seed)
        plan = Plan(kills=0, agents=agents, seed=seed, steps=0, limit=2 * seconds + 900)
        how = {"seconds": seconds, "disk": disk, "clock": clock, "kept": kept}
        soak = Soak(config, plan, admin_key, say, **how)
        soak.go()
    return soak


def main() -> int:
    parser = argparse.ArgumentParser(description="Hours under faults of every kind.")
    lasts = parser.add_mutually_exclusive_group()
    lasts.add_argument("--hours", type=float, default=2.0, help="of faults (default 2)")
    lasts.add_argument("--minutes", type=float, help="of faults, instead of hours")
    arguments = arguments_of(parser, agents=12)
    seconds = 60 * arguments.minutes if arguments.minutes else 3600 * arguments.hours
    soak: Soak

    def run(root: Path) -> Outcome:
        nonlocal soak
        soak = run_soak(root, seconds=seconds, agents=arguments.agents, seed=arguments.seed)
        if arguments.record:
            form = f"{seconds / 3600:.2g} h"
            record_outcome("tests/e2e/soak.py", form, soak.outcome, figures(soak))
        return soak.outcome

    return judged(run, lambda _: table(soak), arguments.keep)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
