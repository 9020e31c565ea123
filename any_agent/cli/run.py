"""``any-agent run``: run an unchanged program of any language as a session."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from any_agent.errors import ConfigError
from any_agent.runtime.atomic_files import write_atomic
from any_agent.runtime.command_line import count, option, printable, seconds

if TYPE_CHECKING:
    from any_agent.sdk.find_service import ServiceAddress
    from any_agent.sdk.program.reward import RewardSource
    from any_agent.sdk.program.run import ProgramGroup, ProgramRun

ALL_FINALIZED, SOME_FAILED, WRONG_INPUT, NO_SERVICE = 0, 1, 2, 3
_COLUMNS = ("RUN", "SESSION", "STATE", "REWARD", "CALLS", "EXIT", "SECONDS", "NOTE")
_count = count(4096)
_DESCRIPTION = (
    "Run a program as a session: its OpenAI or Anthropic client finds the service in its "
    "environment, its reward is recorded, and the session is finalized, or aborted if the program "
    "failed. Each program's output goes to a file (with --n 1 it is shown, too)."
)
_REWARDS = (
    "the source of rewards: the program's own key may set them (agent), may not (judge), or may "
    "until the judge does (both); default: judge with --reward-cmd and --grader, else agent"
)
_EPILOG = (
    "The key that opens sessions (a tenant's) is read from ANY_AGENT_API_KEY or OPENAI_API_KEY, "
    "or from --api-key-file. A reward is a number, or a JSON object of numbers by name. Without a "
    "reward option the program writes its reward into the file $ANY_AGENT_REWARD_FILE, or posts it "
    "itself. Exit codes: 0 all sessions are finalized, 1 some are not, 2 wrong input, 3 no service "
    "(unreachable, another service, key refused, training ended), 130 interrupted, 143 terminated."
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "run",
        help="run a program of any language as a session, or --n of them as a group",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        usage="%(prog)s [options] -- COMMAND [ARGUMENT ...]",
    )
    add = partial(option, parser)
    add("--n N", "run the program N times, as one group (default 1)", type=_count, default=1)
    add(
        "--url URL",
        "the service, or file:///... for a file that holds its URL (default: ANY_AGENT_URL, else "
        "OPENAI_BASE_URL)",
    )
    add("--api-key-file FILE", "a file that holds the key that opens sessions")
    add("--task ID", "the task's name, for reports; with --n 1 also the name of its group")
    mode_help = "the mode of the sessions (default: train)"
    parser.add_argument("--mode", choices=("train", "eval"), default="train", help=mode_help)
    add("--metadata JSON", "an object to store with the session; graders see it")
    rewards = parser.add_mutually_exclusive_group()
    option(
        rewards,
        "--reward-cmd CMD",
        "a shell command, run after the program, that prints the reward as its last line; it "
        "reads the program's standard output as its input",
    )
    option(
        rewards,
        "--reward-file FILE",
        "a file that the program writes the reward into; {run} stands for the run's number",
    )
    option(
        rewards,
        "--grader MODULE.FUNCTION",
        "a Python function that takes the session and returns the reward, as sessions.grader",
    )
    parser.add_argument("--rewards", choices=("agent", "judge", "both"), help=_REWARDS)
    add(
        "--reward-on-failure REWARD",
        "the reward of a run that fails or takes too long (default: its session is aborted)",
    )
    limit = partial(option, parser, type=seconds)
    limit("--timeout SECONDS", "time limit of a run (default 3600)", default=3600.0)
    limit("--reward-timeout SECONDS", "time limit of its reward (default 60)", default=60.0)
    limit("--wait SECONDS", "time to wait for a free slot (default 300)", default=300.0)
    add("--concurrency N", "concurrent runs (default: all, at most 32)", type=_count)
    add("--logs DIR", "keep the runs' output here (default: only that of failures)")
    add("--json FILE", "write the results of the runs to this file")
    parser.add_argument(
        "program",
        nargs=argparse.REMAINDER,
        metavar="COMMAND",
        help="the program and its arguments, after --",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from any_agent.runtime.signals import run_until_signal

    with ExitStack() as clean_up:
        folder = _output_folder(arguments.logs, clean_up)
        runs = _group(arguments, folder)
        signalled = run_until_signal(runs.run())
        code = exit_code(runs) if signalled is None else 128 + signalled
        if signalled is None:
            runs.show_rest()
        if code:
            clean_up.pop_all()
        _report(runs, kept=folder if code and arguments.logs is None else None)
        if arguments.json is not None:
            _write(arguments.json, as_json(runs, code))
    return code


def _group(arguments: argparse.Namespace, folder: Path) -> ProgramGroup:
    from any_agent.runtime.signals import hide_from_others
    from any_agent.sdk.find_service import service_of_options
    from any_agent.sdk.program.run import ProgramGroup

    # Before the key is read: programs and reward commands run under the same user.
    hide_from_others()
    service = service_of_options(arguments.url, arguments.api_key_file)
    program = arguments.program[arguments.program[:1] == ["--"] :]
    if not program:
        raise ConfigError("name the program after --, as in: any-agent run -- python my_agent.py")
    n = arguments.n
    concurrency = arguments.concurrency or min(n, 32)
    if arguments.reward_file and min(n, concurrency) > 1 and "{run}" not in arguments.reward_file:
        raise ConfigError(
            f"--reward-file {arguments.reward_file} would be written by {min(n, concurrency)} runs "
            "at once: put {run} into its name, which stands for the run's number (the program "
            "finds the number in ANY_AGENT_RUN_INDEX, and the path in ANY_AGENT_REWARD_FILE)"
        )
    return ProgramGroup(
        command=program,
        service=service,
        folder=folder,
        n=n,
        concurrency=concurrency,
        task_id=arguments.task,
        mode=arguments.mode,
        metadata=_metadata(arguments.metadata),
        rewards=arguments.rewards,
        limit=arguments.timeout,
        wait=arguments.wait,
        source=_source(arguments, service),
        failure_reward=_failure_reward(arguments.reward_on_failure),
        environ=dict(os.environ),
        echo=n == 1,
        ended=_report_failure if n > 1 else lambda _: None,
    )


def _source(arguments: argparse.Namespace, service: ServiceAddress) -> RewardSource:
    from any_agent.sdk.program.reward import RewardSource
    from any_agent.sdk.program.run import without_ours

    return RewardSource(
        command=arguments.reward_cmd,
        file=arguments.reward_file,
        grader=arguments.grader,
        limit=arguments.reward_timeout,
        env=without_ours(os.environ, service.api_key),
    )


def _metadata(text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text) if text is not None else {}
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--metadata is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError("--metadata must be a JSON object, like '{\"answer\": 5}'")
    return value


def _failure_reward(text: str | None) -> float | dict[str, float] | None:
    from any_agent.sdk.program.reward import reward_of

    try:
        return reward_of(text) if text is not None else None
    except ValueError as error:
        raise ConfigError(f"--reward-on-failure {text}: {error}") from None


# -- output ----------------------------------------------------------------------------------


def _output_folder(given: str | None, clean_up: ExitStack) -> Path:
    """Return the given folder for output, or a new one that ``clean_up`` removes."""
    path = Path(given or ".")
    try:
        if given is not None:
            path.mkdir(parents=True, exist_ok=True)
        else:
            path = Path(tempfile.mkdtemp(prefix="any-agent-run-"))
            clean_up.callback(shutil.rmtree, path, ignore_errors=True)
    except OSError as error:
        raise ConfigError(f"--logs {path} cannot be created: {error.strerror}") from None
    return path


def _report_failure(run: ProgramRun) -> None:
    """Report a failed run among several as soon as it has failed."""
    if run.state == "failed":
        print(f"run {run.run} failed: {printable(run.error or '')}", file=sys.stderr, flush=True)


def _report(runs: ProgramGroup, *, kept: Path | None) -> None:
    """Print the results to standard error: standard output is the program's.

    ``kept``: the new folder of the output, if it stays.
    """
    if any(run.session_id is not None or run.error is not None for run in runs.results):
        print(table(runs.results), file=sys.stderr)
        if kept is not None and any(run.stdout for run in runs.results):
            print(f"their output is in {kept}", file=sys.stderr)
    if runs.stopped is not None:
        print(f"error: {runs.stopped.message}", file=sys.stderr)


def exit_code(runs: ProgramGroup) -> int:
    """Return the exit code of runs that were not interrupted; see docs/how-to/run.md."""
    from any_agent.sdk.program.run import UNUSABLE

    if runs.stopped is not None:
        return NO_SERVICE if isinstance(runs.stopped, UNUSABLE) else WRONG_INPUT
    finalized = all(run.state == "finalized" for run in runs.results)
    return ALL_FINALIZED if finalized else SOME_FAILED


def table(results: Sequence[ProgramRun]) -> str:
    """Return a line for each run, and a summary."""
    rows = [_COLUMNS, *map(_row, results)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join([*lines, summary(results)])


def summary(results: Sequence[ProgramRun]) -> str:
    """Return how many runs are finalized, and their mean reward."""
    finalized = [run for run in results if run.state == "finalized"]
    mean = mean_reward(results)
    text = f"{len(finalized)} of {len(results)} finalized"
    return text if mean is None else f"{text}, mean reward {mean:.4g}"


def mean_reward(results: Sequence[ProgramRun]) -> float | None:
    """Return the mean over the finalized runs with a final reward; None without any."""
    rewards = [run.reward for run in results if run.reward is not None]
    return math.fsum(rewards) / len(rewards) if rewards else None


def as_json(runs: ProgramGroup, code: int) -> str:
    """Return all results as JSON."""
    results = runs.results
    report: dict[str, Any] = {
        "exit_code": code,
        "url": runs.service.url,
        "mode": runs.mode,
        "task_id": runs.task_id,
        "group_id": runs.group_id,
        "finalized": sum(run.state == "finalized" for run in results),
        "mean_reward": mean_reward(results),
        "stopped": runs.stopped.message if runs.stopped is not None else None,
        "runs": [asdict(run) for run in results],
    }
    return json.dumps(report, indent=2) + "\n"


def _row(run: ProgramRun) -> tuple[str, ...]:
    return (
        str(run.run),
        run.session_id or "-",
        run.state,
        _number(run.reward),
        "-" if run.calls is None else str(run.calls),
        "-" if run.exit_code is None else str(run.exit_code),
        "-" if run.seconds is None else f"{run.seconds:.1f}",
        printable(run.error or ""),
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _write(name: str, text: str) -> None:
    try:
        write_atomic(Path(name), text)
    except OSError as error:
        raise ConfigError(f"--json {name} cannot be written: {error.strerror}") from None
