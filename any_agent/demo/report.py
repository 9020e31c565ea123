"""What the demo came to: figures before and after, where things lie, what to type next."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from any_agent.config import Config
from any_agent.demo.driver import Measures

PORT = 8000
"""Where the lines to type next serve the model."""


@dataclass(frozen=True, slots=True)
class Report:
    """The end of the demo."""

    before: Measures
    after: Measures
    rewards: Sequence[float]
    """Mean of each step's sessions."""
    curve: Path
    checkpoint: str
    answers: Sequence[tuple[str, str]]
    """Held-out prompts, and what the checkpoint says to them."""
    seconds: float
    peak_mib: int
    next: Sequence[tuple[str, Sequence[str]]]
    """What one may do now, and the lines to type for it."""
    failed: int = 0
    """Sessions of the demo's agents."""
    error: str = ""
    """The last one's."""
    restarts: Mapping[str, int] = field(default_factory=dict)
    """Parts of the service that died on the way and were started again, how often."""

    title = "on prompts that training never sees"
    """Of the table."""

    def rows(self) -> list[tuple[str, str, str]]:
        """A label, before, after."""
        a, b = self.before, self.after
        return [
            ("first answer right", f"{a.accuracy:.1%}", f"{b.accuracy:.1%}"),
            ("mean reward (at most 1)", f"{a.reward:.3f}", f"{b.reward:.3f}"),
            ("turns per session (at most 2)", f"{a.turns:.2f}", f"{b.turns:.2f}"),
            ("tokens per answer", f"{a.tokens:.2f}", f"{b.tokens:.2f}"),
        ]

    def facts(self) -> list[tuple[str, str]]:
        """Labels and what there is to say."""
        out = [("curve", str(self.curve)), ("kept", self.checkpoint)]
        label = "asked"
        for prompt, answer in self.answers:
            out.append((label, f"{prompt}  ->  {answer}"))
            label = ""
        out.append(("took", f"{self.seconds:.1f} s, peak memory {self.peak_mib} MiB in all"))
        if self.restarts:
            counts = [f"{name} {times(count)}" for name, count in self.restarts.items()]
            out.append(("restarted", ", ".join(counts)))
        if self.failed:
            out.append(("failed", f"{self.failed} of the agents' sessions, at last: {self.error}"))
        return out


def times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def next_lines(config: Config, command: str) -> list[tuple[str, list[str]]]:
    """Commands that work as they are, in a shell, from the folder that the demo was started in."""
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
            "Connect your own agent to it, as it is, in a session of its own:",
            [
                f"export OPENAI_BASE_URL={url}/v1",
                "export OPENAI_API_KEY=$(curl -s \\",
                f"  '{url}/rl/v1/start_session?mode=eval' |",
                r"""  sed 's/.*"api_key":"\([^"]*\)".*/\1/')""",
            ],
        ),
        (
            "Train a model on the work of your agents, as README.md tells:",
            [f"{command} serve --model Qwen/Qwen3-0.6B"],
        ),
    ]


def command() -> str:
    """How this program is called from here."""
    if shutil.which("any-agent"):
        return "any-agent"
    beside = Path(sys.executable).with_name("any-agent")
    here = Path.cwd()
    return shlex.quote(str(beside.relative_to(here) if beside.is_relative_to(here) else beside))
