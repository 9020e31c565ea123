"""The demo's report: figures before and after, the paths of its files, commands to type next."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from any_agent.config import Config
from any_agent.demo.state import Measures
from any_agent.runtime.command_line import printable

PORT = 8000  # the port on which the commands to type next serve the model


Commands: TypeAlias = Sequence[tuple[str, Sequence[str]]]
"""Next things to do, each with the lines to type."""


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of a demo, as `--json` writes them."""

    model: str
    seed: int
    steps: int
    ranks: int
    permuted_rewards: bool
    before: float
    """Share of sessions whose first answer was right before training."""
    after: float
    measures: Mapping[str, Measures]
    """Averages ``before`` and ``after`` training."""
    eval_sessions: int
    train_sessions: int
    failed_sessions: int
    errors: Sequence[str]
    """The last errors of each phase."""
    restarts: Mapping[str, int]
    """Number of restarts of the parts of the service that died."""
    seconds: float
    peak_memory_mib: int
    run: str
    checkpoint: str
    curve: str
    answers: Sequence[tuple[str, str]]
    """Held-out prompts and the checkpoint's answers."""

    def rows(self) -> list[tuple[str, str, str]]:
        """Return the table's rows: a label, the figure before, the figure after."""
        a, b = self.measures["before"], self.measures["after"]
        tries = [
            ("mean reward (at most 1)", f"{a.reward:.3f}", f"{b.reward:.3f}"),
            ("turns per session (at most 2)", f"{a.turns:.2f}", f"{b.turns:.2f}"),
        ]
        return [
            ("first answer right", f"{a.accuracy:.1%}", f"{b.accuracy:.1%}"),
            # In a task of one turn the reward is the share of right answers.
            *(tries if max(a.turns, b.turns) > 1 else ()),
            ("tokens per answer", f"{a.tokens:.2f}", f"{b.tokens:.2f}"),
        ]

    def facts(self) -> list[tuple[str, str]]:
        """Return labels and texts of the other results."""
        out = [("curve", self.curve), ("kept", self.checkpoint)]
        label = "asked"
        for prompt, answer in self.answers:
            # An answer may have lines, and whatever else a model writes.
            out.append((label, printable(f"{prompt}  ->  {' '.join(answer.split())}")))
            label = ""
        out.append(("took", f"{self.seconds:.1f} s, peak memory {self.peak_memory_mib} MiB in all"))
        if self.restarts:
            counts = [f"{name} {times(count)}" for name, count in self.restarts.items()]
            out.append(("restarted", ", ".join(counts)))
        if self.failed_sessions:
            last = f"{self.failed_sessions} of the agents' sessions, at last: {self.errors[-1]}"
            out.append(("failed", last))
        return out


def times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def next_lines(config: Config, command: str) -> Commands:
    """Return commands that work as they are, in a shell in the demo's working directory."""
    url = f"http://127.0.0.1:{PORT}"
    return [
        (
            "Serve what was learned:",
            [
                f"{command} serve --no-train --port {PORT} \\",
                f"  --experiment {config.experiment} --trial {config.trial} \\",
                f"  root={shlex.quote(str(config.root))}",
            ],
        ),
        (
            "Connect your own agent, unchanged, in a session of its own:",
            [
                f"export OPENAI_BASE_URL={url}/v1",
                "export OPENAI_API_KEY=$(curl -s \\",
                f"  '{url}/rl/v1/start_session?mode=eval' |",
                r"""  sed 's/.*"api_key":"\([^"]*\)".*/\1/')""",
            ],
        ),
        (
            "Train its first model on the work of your agents; README.md has others:",
            [
                f"{command} serve --port {PORT} --trial first sessions.group_size=4 \\",
                f"  rollout.batch_size=16 train.lr={config.train.lr:g} \\",
                f"  --model {shlex.quote(config.model.path)}",
            ],
        ),
    ]


def command() -> str:
    """Return the command that calls this program from the working directory."""
    if shutil.which("any-agent"):
        return "any-agent"
    beside = Path(sys.executable).with_name("any-agent")
    here = Path.cwd()
    return shlex.quote(str(beside.relative_to(here) if beside.is_relative_to(here) else beside))
