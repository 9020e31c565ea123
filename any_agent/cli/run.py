"""``any-agent run``: a program of any language as a session, untouched."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from any_agent.runtime.command_line import count, seconds

if TYPE_CHECKING:
    from any_agent.sdk.program.group import ProgramGroup
    from any_agent.sdk.program.reward import RewardSource
    from any_agent.sdk.program.run import ProgramRun, RunOptions

_count = count(4096)
_DESCRIPTION = (
    "Run a program as a session: its OpenAI or Anthropic client finds the service in its "
    "environment, its reward is taken, and the session is finalized, or thrown away if it failed. "
    "What it prints goes to a file each (with --n 1 it is shown, too)."
)
_EPILOG = (
    "The key that opens sessions (a tenant's) is taken from ANY_AGENT_API_KEY or OPENAI_API_KEY, "
    "or from --api-key-file. A reward is a number, or a JSON object of numbers by name. Without an "
    "option it is what the program writes into the file $ANY_AGENT_REWARD_FILE, or posts itself. "
    "Exit codes: 0 all finalized, 1 some not, 2 wrong input, 3 no service (away, another one, the "
    "key refused, its training ended), 130 interrupted, 143 terminated."
)


def add_run_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The parser of ``run``."""
    parser = commands.add_parser(
        "run",
        help="run a program of any language as a session, or --n of them as a group",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        usage="%(prog)s [options] -- COMMAND [ARGUMENT ...]",
    )
    add = parser.add_argument
    add("--n", type=_count, default=1, metavar="N", help="run it N times, as one group (default 1)")
    add(
        "--url",
        help="the service, or file:///... for a file that holds its URL (default: ANY_AGENT_URL, "
        "else OPENAI_BASE_URL)",
    )
    add("--api-key-file", metavar="FILE", help="holds the key that opens sessions")
    add("--task", metavar="ID", help="the task's name, for reports; with --n 1 also its group's")
    add("--mode", choices=("train", "eval"), default="train", help="default: train")
    add("--metadata", metavar="JSON", help="an object to keep with the session; graders see it")
    rewards = parser.add_mutually_exclusive_group()
    rewards.add_argument(
        "--reward-cmd",
        metavar="CMD",
        help="a shell command, run after the program, that prints the reward as its last line; it "
        "reads the program's standard output as its input",
    )
    rewards.add_argument(
        "--reward-file",
        metavar="FILE",
        help="a file that the program writes the reward into; {run} stands for the run's number",
    )
    rewards.add_argument(
        "--grader",
        metavar="MODULE.FUNCTION",
        help="a Python function that takes the session and returns the reward, as sessions.grader",
    )
    add(
        "--reward-on-failure",
        metavar="REWARD",
        help="of a run that ends with another exit code than 0 or takes too long (default: its "
        "session is thrown away)",
    )
    limit: dict[str, Any] = {"type": seconds, "metavar": "SECONDS"}
    add("--timeout", default=3600.0, help="that a run may take (default 3600)", **limit)
    add("--reward-timeout", default=60.0, help="that its reward may take (default 60)", **limit)
    add("--wait", default=300.0, help="to wait for a free slot (default 300)", **limit)
    add("--concurrency", type=_count, metavar="N", help="runs at once (default: all, at most 32)")
    add("--logs", metavar="DIR", help="keep what runs print there (default: only of failures)")
    add("--json", metavar="FILE", help="write what became of the runs there")
    add("program", nargs=argparse.REMAINDER, metavar="COMMAND", help="the program, behind --")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from any_agent.runtime.signals import run_until_signal
    from any_agent.sdk.program.group import ProgramGroup
    from any_agent.sdk.program.report import as_json, exit_code

    with _Folder(arguments.logs) as folder:
        options = _options(arguments, folder.path)
        runs = ProgramGroup(options, ended=_tell if options.n > 1 else lambda _: None)
        signalled = run_until_signal(runs.run())
        code = exit_code(runs) if signalled is None else 128 + signalled
        if signalled is None:
            runs.show_rest()
        folder.wanted = code != 0
        _report(runs, folder)
        if arguments.json is not None:
            _write(arguments.json, as_json(runs, code))
    return code


def _options(arguments: argparse.Namespace, folder: Path) -> RunOptions:
    import os

    from any_agent.errors import ConfigError
    from any_agent.sdk.find_service import service_of_options
    from any_agent.sdk.program.run import RunOptions

    program = arguments.program[arguments.program[:1] == ["--"] :]
    if not program:
        raise ConfigError("name the program behind --, as in: any-agent run -- python my_agent.py")
    n = arguments.n
    concurrency = arguments.concurrency or min(n, 32)
    if arguments.reward_file and min(n, concurrency) > 1 and "{run}" not in arguments.reward_file:
        raise ConfigError(
            f"--reward-file {arguments.reward_file} would be written by {min(n, concurrency)} runs "
            "at once: put {run} into its name, which stands for the run's number (the program "
            "finds it in ANY_AGENT_RUN_INDEX, and the whole path in ANY_AGENT_REWARD_FILE)"
        )
    return RunOptions(
        command=program,
        service=service_of_options(arguments.url, arguments.api_key_file),
        folder=folder,
        n=n,
        concurrency=concurrency,
        task_id=arguments.task,
        mode=arguments.mode,
        metadata=_metadata(arguments.metadata),
        limit=arguments.timeout,
        wait=arguments.wait,
        source=_source(arguments),
        failure_reward=_failure_reward(arguments.reward_on_failure),
        environ=dict(os.environ),
        echo=n == 1,
    )


def _source(arguments: argparse.Namespace) -> RewardSource:
    import os

    from any_agent.sdk.program.reward import RewardSource
    from any_agent.sdk.program.run import without_ours

    return RewardSource(
        command=arguments.reward_cmd,
        file=arguments.reward_file,
        grader=arguments.grader,
        limit=arguments.reward_timeout,
        env=without_ours(os.environ),
    )


def _metadata(text: str | None) -> dict[str, Any]:
    import json

    from any_agent.errors import ConfigError

    try:
        value = json.loads(text) if text is not None else {}
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--metadata is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError("--metadata must be a JSON object, like '{\"answer\": 5}'")
    return value


def _failure_reward(text: str | None) -> float | dict[str, float] | None:
    from any_agent.errors import ConfigError
    from any_agent.sdk.program.reward import reward_of

    try:
        return reward_of(text) if text is not None else None
    except ValueError as error:
        raise ConfigError(f"--reward-on-failure {text}: {error}") from None


# -- what is said ----------------------------------------------------------------------------------


def _tell(run: ProgramRun) -> None:
    """What becomes known early of a run among several: what went wrong."""
    from any_agent.sdk.program.report import plain

    if run.state == "failed":
        print(f"run {run.run} failed: {plain(run.error or '')}", file=sys.stderr, flush=True)


def _report(runs: ProgramGroup, folder: _Folder) -> None:
    """To standard error: standard output is the program's."""
    from any_agent.sdk.program.report import table

    if any(run.session_id is not None or run.error is not None for run in runs.results):
        print(table(runs.results), file=sys.stderr)
        if folder.made and folder.wanted and any(run.stdout for run in runs.results):
            print(f"what they printed is in {folder.path}", file=sys.stderr)
    if runs.stopped is not None:
        print(f"error: {runs.stopped.message}", file=sys.stderr)


def _write(name: str, text: str) -> None:
    from any_agent.errors import ConfigError
    from any_agent.runtime.atomic_files import write_atomic

    try:
        write_atomic(Path(name), text)
    except OSError as error:
        raise ConfigError(f"--json {name} cannot be written: {error.strerror}") from None


class _Folder:
    """Where the output goes: the given folder, or one that stays only if it is ``wanted``."""

    def __init__(self, given: str | None) -> None:
        self._given = given
        self.path = Path(given or ".")
        self.wanted = False

    @property
    def made(self) -> bool:
        """Whether it is a new one of ours."""
        return self._given is None

    def __enter__(self) -> Self:
        from any_agent.errors import ConfigError

        try:
            if self.made:
                self.path = Path(tempfile.mkdtemp(prefix="any-agent-run-"))
            else:
                self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--logs {self.path} cannot be made: {error.strerror}") from None
        return self

    def __exit__(self, *error: object) -> None:
        if self.made and not self.wanted:
            shutil.rmtree(self.path, ignore_errors=True)
