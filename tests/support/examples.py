"""Examples as their READMEs say, on the embedded engine and a tiny model that can add.

What is run is the README's own command, word for word, from the repository's folder; settings after
it make it small.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.clients.environment import python_with
from tests.support.e2e.serving import Served, environment, serve
from tests.support.taught_models import taught_model

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
_LIMIT = 1000.0
"""Seconds, for a whole example: less than its test has."""


@dataclass(frozen=True, slots=True)
class Ran:
    """What an example's command has left."""

    said: str
    """All that it printed."""
    folder: Path
    """The run's."""
    steps: list[dict[str, Any]]
    """The lines of `metrics.jsonl` that are of a step."""
    evals: list[dict[str, Any]]
    """Those that are of an evaluation."""
    rows: list[dict[str, Any]]
    """What training was given: of each row `prompt`, `completion` and `reward`, beside others."""

    @property
    def rewards(self) -> list[float]:
        """Of each step, the mean."""
        return [step["reward"] for step in self.steps]


def command_of(example: str) -> list[str]:
    """The one line of its README that begins with `python examples/` or `bash examples/`."""
    readme = EXAMPLES / example / "README.md"
    found = re.findall(r"^((?:python|bash) examples/.*)$", readme.read_text(), re.M)
    assert len(found) == 1, f"{readme} has {len(found)} commands"
    return shlex.split(str(found[0]))


def tiny_settings(example: str) -> list[str]:
    """What its README puts after the command to try it on the tiny model."""
    text = (EXAMPLES / example / "README.md").read_text()
    (found,) = re.findall(r"with\s`(model\.path=/tmp/tiny .*?)`\s*after", text, re.S)
    return shlex.split(str(found))


def small(folder: Path, *more: str, model: Path | None = None) -> list[str]:
    """Settings of a training of two steps, each of two groups of four, on one rank here."""
    return [
        f"model.path={model or taught_model('sums')}",
        f"root={folder}/runs",
        "server.ranks=1",
        "server.port=0",
        "rollout.dump_to_file=true",
        "sessions.group_size=4",
        "rollout.batch_size=8",
        "rollout.max_concurrent=8",
        "train.steps=2",
        "train.lr=1e-3",
        *more,
    ]


def run_example(
    example: str,
    settings: Sequence[str],
    folder: Path,
    *,
    environment_of: str | None = None,
    **variables: str,
) -> Ran:
    """Run a training's command to its end, with settings after it; fails with all that it said.

    ``environment_of`` names the environment of tests/clients that its `requirements.txt` is
    installed in, beside what is installed here. ``variables``: of the command's own environment.
    """
    python = sys.executable
    if environment_of is not None:
        python = str(python_with(environment_of))
    program, *words = command_of(example)
    said = _run([{"python": python}.get(program, program), *words, *settings], **variables)
    (metrics,) = (folder / "runs").rglob("metrics.jsonl")
    lines = _lines(metrics)
    return Ran(
        said,
        metrics.parent,
        steps=[line for line in lines if "eval" not in line],
        evals=[line["eval"] for line in lines if "eval" in line],
        rows=[row for file in sorted(metrics.parent.glob("rollout/*/*")) for row in _lines(file)],
    )


def read(row: dict[str, Any]) -> str:
    """What an agent got to read of a row's completion: no thoughts, and no mark of its end."""
    said = re.sub(r"<think>.*?(</think>|$)", "", row["completion"], flags=re.S)
    return said.removesuffix("<|im_end|>")


def number(said: str) -> str | None:
    """What most agents take for an answer: the last whole number."""
    found = re.findall(r"-?\d+", said)
    return str(found[-1]) if found else None


def asked(row: dict[str, Any]) -> tuple[int, int]:
    """The two numbers of its question; what the model says later on may look like one."""
    found = re.search(r"What is (\d) \+ (\d)\?", row["prompt"])
    assert found is not None, row
    return int(found[1]), int(found[2])


@contextmanager
def service(folder: Path, *settings: str) -> Iterator[Served]:
    """`any-agent serve`, which trains on what an agent outside does, on the taught model."""
    given = [*small(folder), "model.enable_thinking=false", *settings]
    with serve(*given, cwd=folder) as served:
        yield served


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _run(command: Sequence[str | Path], **variables: str) -> str:
    # What is installed beside this interpreter is found, too: any-agent itself.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    done = subprocess.run(
        list(map(str, command)),
        cwd=ROOT,
        env=environment(PATH=path, **variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_LIMIT,
    )
    said = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, f"{shlex.join(map(str, command))}:\n{said}"
    return said
