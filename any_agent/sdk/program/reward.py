"""`RewardSource`: the command, file or grader that gives a run's reward in `any-agent run`.

Every failure is an AgentFailed that names the source and its fault.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from any_agent.errors import AgentFailed, ConfigError
from any_agent.protocol.rl import SessionContent, as_reward
from any_agent.runtime.atomic_files import create_empty
from any_agent.sdk.program.process import Program, run_program

Reward: TypeAlias = float | dict[str, float]

_TAIL_BYTES = 65_536
"""Bytes at the end of a file in which its last line, a reward or an error message, is sought."""
_MAX_QUOTED = 120
_GRADER = (sys.executable, "-m", "any_agent.rewards.grader")


@dataclass(frozen=True, slots=True)
class RewardSource:
    """A source of rewards: a ``command`` (for a shell), a ``file``, a ``grader``, or none of them.

    ``limit``: seconds that the command or the grader may take. ``env`` is their environment: the
    user's, not the session's, because a judge model that they call is not the agent.
    """

    command: str | None = None
    file: str | None = None
    """The file's path, with `{run}` for the run's number."""
    grader: str | None = None
    limit: float = 60.0
    env: Mapping[str, str] | None = None

    def __str__(self) -> str:
        if self.command is not None:
            return "the reward command"
        if self.grader is not None:
            return f"the grader {self.grader}"
        return "the reward file"

    @property
    def judges(self) -> bool:
        """True if the program itself has no part in the reward."""
        return self.command is not None or self.grader is not None

    def file_of(self, index: int) -> Path | None:
        """Return the file for a run's reward; None if none is named."""
        return Path(self.file.replace("{run}", str(index))) if self.file is not None else None

    async def check(self, folder: Path) -> None:
        """Raise ConfigError for a missing grader, before anything was started."""
        if self.grader is None:
            return
        if "." not in self.grader:
            raise ConfigError(f"--grader {self.grader}: write it as module.function")
        stem = folder / "grader-check"
        mark = f"ANY_AGENT_GRADER={stem}"
        program = self._program([*_GRADER, "--check", self.grader], stem, mark, {})
        try:
            ended = await run_program(program, limit=self.limit)
        except AgentFailed as error:
            raise ConfigError(f"--grader {self.grader}: {error.message}") from None
        if not ended.success:
            why = last_line(program.stderr) or str(ended)
            raise ConfigError(f"--grader {self.grader} cannot be used: {why}")

    async def reward(
        self, rewarded: Program, variables: Mapping[str, str], content: SessionContent | None
    ) -> Reward:
        """Return the reward of the command or the grader for a program that has ended.

        ``variables`` are added to its environment; ``content`` is the session's, for a grader.
        """
        stem = rewarded.stdout.with_suffix(".reward")
        if self.command is not None:
            argv, stdin = ["/bin/sh", "-c", self.command], rewarded.stdout
        else:
            assert self.grader is not None and content is not None
            argv, stdin = [*_GRADER, self.grader], beside(stem, "json")
            create_empty(stdin)
            stdin.write_text(json.dumps(content.graded()), encoding="utf-8")
        program = self._program(argv, stem, rewarded.mark, variables, stdin)
        ended = await run_program(program, limit=self.limit)
        if not ended.success:
            why = last_line(program.stderr)
            raise _failed(f"{self} {ended}{f': {why}' if why else ''}")
        return reward_in(program.stdout, str(self))

    def _program(
        self,
        argv: list[str],
        stem: Path,
        mark: str,
        variables: Mapping[str, str],
        stdin: Path = Path(os.devnull),
    ) -> Program:
        name, _, value = mark.partition("=")
        env = {**(self.env if self.env is not None else os.environ), **variables, name: value}
        return Program(argv, env, mark, beside(stem, "out"), beside(stem, "err"), stdin)


class RewardFile:
    """A file that a run may write its reward into; its earlier content does not count."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._before = self._state()

    def read(self) -> Reward | None:
        """Return the reward, None if the run has not written it; AgentFailed for invalid
        content."""
        if self._state() == self._before:
            return None
        return reward_in(self.path, f"the reward file {self.path}")

    def _state(self) -> tuple[int, ...] | None:
        try:
            found = self.path.stat()
        except OSError:
            return None
        return (found.st_ino, found.st_size, found.st_mtime_ns)


def beside(stem: Path, ending: str) -> Path:
    """Return a path with this ending appended, as a session's id may have dots itself."""
    return stem.with_name(f"{stem.name}.{ending}")


def reward_in(path: Path, what: str) -> Reward:
    """Return the reward in a file's last line: a number, or a JSON object of numbers by name;
    AgentFailed for any other line."""
    line = last_line(path)
    if not line:
        raise _failed(f"{what} says nothing: its last line must be a number")
    try:
        return reward_of(line)
    except ValueError as error:
        raise _failed(f"{what} says {_short(line)}: {error}") from None


def last_line(path: Path) -> str:
    """Return the last non-blank line of a file; empty if there is none, or no such file."""
    try:
        if not path.is_file():  # opening a pipe would wait for its writer
            return ""
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return _short(lines[-1], 1000) if lines else ""


def reward_of(text: str) -> Reward:
    """Parse a reward: a number, or a JSON object of numbers by name; ValueError."""
    try:
        value = float(text)
    except ValueError:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            raise ValueError("that is no number") from None
    return as_reward(value)


def _failed(message: str) -> AgentFailed:
    return AgentFailed(message, code="invalid_reward")


def _short(text: str, most: int = _MAX_QUOTED) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
