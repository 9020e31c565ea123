"""The program that `any-agent regrade` starts: recorded sessions, graded by another function."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

import numpy as np

from any_agent.cli.regrade import add_regrade_arguments
from any_agent.errors import AnyAgentError, ConfigError
from any_agent.record import InteractionTree, lacks_texts, propagate_rewards, session_score
from any_agent.record.trajectory_file import write_trajectory
from any_agent.runtime.atomic_files import owner_only, write_atomic
from any_agent.runtime.command_line import (
    CommandParser,
    guarded,
    overrides_of,
    parse,
    printable,
    require_installed,
)
from proxy_ext.archive.records import ArchiveRecord
from proxy_ext.export.choice import group_of, reward_of
from proxy_ext.export.output import plain_file
from proxy_ext.export.reader import RunSessions, credited
from proxy_ext.export.regraded_sessions import RegradedSessions
from proxy_ext.sessions.grading import Grader, GraderFailed, Grades, graded
from proxy_ext.sessions.rewards import Parts, combined

_AHEAD = 4  # sessions that wait for each worker
_MOST_CHANGED = 5
_GOES_ON = ("open", "awaiting_reward")


@dataclass(frozen=True, slots=True)
class Regraded:
    """One session's reward before and after."""

    session_id: str
    group: str
    old: float | None
    new: float | None

    @property
    def change(self) -> float:
        return 0.0 if self.old is None or self.new is None else self.new - self.old


class Regrading:
    """One pass over a run's sessions, whose results are kept as lines of a file."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.sessions = RunSessions.of(arguments)
        workers = arguments.workers or os.cpu_count() or 1
        name = arguments.grader.replace(":", ".")
        self._grader = Grader(name, timeout=arguments.timeout, workers=workers)
        self._ahead = workers * _AHEAD
        path = plain_file(arguments.out)
        if path is None or arguments.out == "-":
            raise ConfigError("--out must name a file, in which an interrupted run can go on")
        self.path = path
        self.results: list[Regraded] = []
        self.earlier = self.problems = 0
        """Sessions that an earlier run has graded; sessions without a new reward, and damage."""

    async def run(self) -> None:
        """Grade what is not graded yet; ConfigError for a grader or a file that cannot be used."""
        try:
            try:
                await self._grader.check()
            except GraderFailed as error:
                raise ConfigError(f"{self._grader.name} cannot be used: {error}") from None
            done = self._earlier()
            with self._opened() as out:
                async with aclosing(self._graded(done)) as lines:
                    async for line in lines:
                        _write(out, line)
                        self._take(line)
        finally:
            await self._grader.close()

    def _opened(self) -> IO[bytes]:
        """Open the file behind its last line; a new one begins with what it is."""
        out = open(self.path, "ab", opener=owner_only)  # noqa: SIM115 - its caller closes it
        if not out.tell():
            _write(out, {"regraded_by": self._grader.name, "run": str(self.sessions.dir.path)})
        return out

    def _earlier(self) -> set[str]:
        """Read the file of an interrupted run; return the sessions that it has graded."""
        if not self.path.exists():
            return set()
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        lines = whole.splitlines()
        try:
            head = json.loads(lines[0]) if lines else {}
            same = head.get("regraded_by") == self._grader.name
            same = same and head.get("run") == str(self.sessions.dir.path)
            found = [json.loads(line) for line in lines[1:]] if same else []
        except (ValueError, AttributeError):
            same = False
        if content and not same:
            raise ConfigError(
                f"{self.path} is not a file that {self._grader.name} has written for this trial: "
                "name another one with --out"
            )
        # One that goes on has other calls later.
        kept = [line for line in found if line["problem"] is None and line["state"] not in _GOES_ON]
        if len(whole) < len(content) or len(kept) < len(found):
            # A line that was cut off, and sessions that are graded again.
            write_atomic(self.path, b"".join(map(_line, (head, *kept))))
        for line in kept:
            self._take(line)
        self.earlier = len(kept)
        return {line["session_id"] for line in kept}

    async def _graded(self, done: set[str]) -> AsyncGenerator[dict[str, Any]]:
        """Yield each session's line, as its grade comes; few are in memory at once."""
        running: set[asyncio.Task[dict[str, Any]]] = set()
        try:
            for found, record in self.sessions.read(self._report):
                if found.session_id in done:
                    continue
                running.add(asyncio.create_task(self._grade(record)))
                if len(running) >= self._ahead:
                    ended, running = await asyncio.wait(
                        running, return_when=asyncio.FIRST_COMPLETED
                    )
                    for task in ended:
                        yield task.result()
            for each in asyncio.as_completed(running):
                yield await each
        finally:
            for task in running:
                task.cancel()

    async def _grade(self, record: ArchiveRecord) -> dict[str, Any]:
        session = record.session
        line = {name: session[name] for name in ("task_id", "group_id", "state")}
        line = {"session_id": session["id"], **line, "old": None, "new": None}
        grades, problem = Grades(), None
        try:
            calls = credited(record, self.sessions.settings.train.discount)
            line["old"] = reward_of(session, calls)
            if any(map(lacks_texts, calls.tree)):
                raise GraderFailed("its texts were not stored (sessions.store_content)")
            async with self._grader.free:
                grades = await self._grader.grade(graded(session, calls.tree, record.rewards))
            line["new"] = self._reward_of(grades, calls.tree)
        except (GraderFailed, ValueError, AnyAgentError) as error:
            problem = str(error)
        rewards = _named(grades.final) | {id: _named(own) for id, own in grades.calls.items()}
        return {**line, "rewards": rewards, "problem": problem}

    def _reward_of(self, grades: Grades, tree: InteractionTree) -> float:
        """Return the new final reward, else the score by the calls' new rewards, which the tree
        gets."""
        settings = self.sessions.settings
        weights = settings.sessions.reward_weights
        for parts in (grades.final, *grades.calls.values()):
            for name in parts if weights else ():
                if name is not None and name not in weights:
                    raise GraderFailed(f"sessions.reward_weights has no weight of {name!r}")
        if grades.final:
            return combined(grades.final, weights)
        if not grades.calls:
            raise GraderFailed("it gave no reward")
        for call in tree:
            own = grades.calls.get(call.id)
            call.reward = combined(own, weights) if own is not None else None
        score = session_score(tree, propagate_rewards(tree, discount=settings.train.discount))
        if score is None:
            raise GraderFailed("it rewards calls, of which training counts none")
        return score

    def _take(self, line: Mapping[str, Any]) -> None:
        if line["problem"] is not None:
            self._report(f"session {line['session_id']}: {line['problem']}")
            return
        group = group_of(line, line["session_id"])
        self.results.append(Regraded(line["session_id"], group, line["old"], line["new"]))

    def _report(self, problem: str) -> None:
        self.problems += 1
        print(f"warning: {printable(problem)}", file=sys.stderr)


def _named(parts: Parts) -> dict[str, Any]:
    return {name or "reward": value for name, value in parts.items()}


def summary_of(results: Sequence[Regraded]) -> dict[str, Any]:
    """Return figures about both rewards; those of a comparison are None without a pair of them."""
    both = [one for one in results if one.old is not None]
    groups: defaultdict[str, list[Regraded]] = defaultdict(list)
    for one in both:
        groups[one.group].append(one)
    several = [group for group in groups.values() if len(group) > 1]
    changed = sorted((one for one in both if one.change), key=lambda one: -abs(one.change))
    flips, pairs = _flips(several)
    return {
        "sessions": len(results),
        "with_both": len(both),
        "old_mean": _mean([one.old for one in both]),
        "new_mean": _mean([one.new for one in both]),
        "rank_correlation": _spearman([one.old for one in both], [one.new for one in both]),
        "changed": len(changed),
        "groups": len(several),
        "pairs": pairs,
        "flipped_pairs": flips,
        "groups_alike_before": sum(len({one.old for one in group}) == 1 for group in several),
        "groups_alike_after": sum(len({one.new for one in group}) == 1 for group in several),
        "most_changed": [
            {"session_id": one.session_id, "old": one.old, "new": one.new}
            for one in changed[:_MOST_CHANGED]
        ],
    }


def _mean(values: Sequence[float | None]) -> float | None:
    return math.fsum(v for v in values if v is not None) / len(values) if values else None


def _spearman(old: Sequence[float | None], new: Sequence[float | None]) -> float | None:
    """Return the correlation of the ranks; None where one side has a single value."""
    if len(set(old)) < 2 or len(set(new)) < 2:
        return None
    return float(np.corrcoef(_ranks(old), _ranks(new))[0, 1])


def _ranks(values: Sequence[float | None]) -> Any:
    """Return the rank of each value; equal ones have their mean rank."""
    _, where, counts = np.unique(
        np.array(values, np.float64), return_inverse=True, return_counts=True
    )
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[where]


def _flips(groups: Sequence[Sequence[Regraded]]) -> tuple[int, int]:
    """Return how many pairs of a group change their order, and how many pairs had one."""
    flips = pairs = 0
    for group in groups:
        old = np.array([one.old for one in group], np.float64)
        new = np.array([one.new for one in group], np.float64)
        before = np.sign(old[:, None] - old[None, :])
        after = np.sign(new[:, None] - new[None, :])
        pairs += int((before > 0).sum())
        flips += int(((before > 0) & (after < 0)).sum())
    return flips, pairs


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _write(out: IO[bytes], line: Mapping[str, Any]) -> None:
    out.write(_line(line))
    out.flush()


def _shown(figures: Mapping[str, Any], regrading: Regrading, path: str) -> str:
    def text(value: float | None) -> str:
        return "-" if value is None else f"{value:.4g}"

    lines = [
        f"{figures['sessions']} sessions graded ({regrading.earlier} of them by an earlier run), "
        f"{regrading.problems} problems; {path} has each",
        f"mean reward         {text(figures['old_mean'])} -> {text(figures['new_mean'])} "
        f"({figures['with_both']} sessions had one, {figures['changed']} changed)",
        f"rank correlation    {text(figures['rank_correlation'])}",
        f"pairs of a group    {figures['flipped_pairs']} of {figures['pairs']} change their order",
        f"groups that teach   {figures['groups'] - figures['groups_alike_before']} -> "
        f"{figures['groups'] - figures['groups_alike_after']} of {figures['groups']}",
    ]
    lines += [
        f"  {one['session_id']}  {text(one['old'])} -> {text(one['new'])}"
        for one in figures["most_changed"]
    ]
    return "\n".join(lines)


def _lines(path: Path) -> dict[str, dict[str, Any]]:
    """Return the lines of the sessions that have a new reward, by session."""
    with path.open("rb") as file:
        next(file)
        return {one["session_id"]: one for one in map(json.loads, file) if one["problem"] is None}


def train(regrading: Regrading, arguments: argparse.Namespace) -> NoReturn:
    """Become the program that trains on the regraded sessions."""
    sessions = RegradedSessions(regrading.sessions, _lines(regrading.path))
    descriptor, batch = tempfile.mkstemp(prefix="any-agent-regraded-", dir=regrading.path.parent)
    try:
        with open(descriptor, "wb") as file:
            for trajectory in sessions:
                write_trajectory(file, trajectory)
    except BaseException:
        os.unlink(batch)
        raise
    for reason, count in sorted(sessions.left_out.items()):
        print(f"left out  {count} sessions: {reason}")
    sys.stdout.flush()
    run = str(regrading.sessions.dir.path)
    command = [sys.executable, "-m", "trainer.regraded", batch, "--run", run]
    command += ["--out", arguments.train, "--problems", str(regrading.problems)]
    os.execv(sys.executable, [*command, *overrides_of(arguments)])


def main(argv: Sequence[str] | None = None) -> int:
    parser = CommandParser(prog="any-agent regrade")
    add_regrade_arguments(parser)
    arguments = parse(parser, argv)

    def run() -> int:
        if arguments.train is not None:
            require_installed("train")
            if os.path.lexists(arguments.train):
                raise ConfigError(f"--train {arguments.train} exists: name a new folder")
            if arguments.json:
                raise ConfigError("--json prints no training: leave it out with --train")
        regrading = Regrading(arguments)
        asyncio.run(regrading.run())
        figures = summary_of(regrading.results)
        if arguments.json:
            about = {"earlier": regrading.earlier, "problems": regrading.problems}
            print(json.dumps({**figures, **about}))
        else:
            print(_shown(figures, regrading, arguments.out))
        if arguments.train is not None:
            train(regrading, arguments)
        return 1 if regrading.problems else 0

    return guarded(run)


if __name__ == "__main__":
    sys.exit(main())
