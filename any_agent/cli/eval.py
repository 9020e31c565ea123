"""``any-agent eval``: measure a model's score with an agent on a dataset."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Coroutine
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from any_agent.errors import (
    ConfigError,
    Forbidden,
    ServiceUnavailable,
    Unauthenticated,
    WrongService,
)
from any_agent.runtime.atomic_files import write_atomic
from any_agent.runtime.command_line import count, number, option, seconds

if TYPE_CHECKING:
    from any_agent.sdk.evaluation import Evaluation
    from any_agent.sdk.find_service import ServiceAddress

_DESCRIPTION = (
    "Run an agent on every item of a dataset and report its score: the mean reward, pass@k, and "
    "their confidence intervals. The agent is the same as in training: a class with async def "
    "run(data, **extra_kwargs), or a function of an item. Each run is a session of the mode eval, "
    "which is never trained on."
)
_EPILOG = (
    "The key of a service at --url (a tenant's or an operator's) is read from ANY_AGENT_API_KEY "
    "or OPENAI_API_KEY, or from --api-key-file. Exit codes: 0 all runs have a score, 1 some runs "
    "or the evaluation failed, 2 wrong input, 3 no service (unreachable, another service, key "
    "refused), 130 interrupted, 143 terminated."
)
_count = count(100_000)
_Version = int | Literal["current", "any"]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "eval",
        help="run an agent on a dataset: mean reward, pass@k and their confidence intervals",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    add = partial(option, parser)
    add("--agent NAME", "the agent, a class or a function, like my_module.MyAgent", required=True)
    add("--data FILE", "the dataset: JSONL, or Parquet with the extra [data]", required=True)
    where = parser.add_mutually_exclusive_group()
    option(
        where,
        "--model RUN",
        "the model: experiment/trial, experiment/trial@VERSION, or a folder; the command serves it "
        "during the evaluation",
    )
    option(
        where,
        "--url URL",
        "a running service, or file:///... for a file that holds its URL (default: ANY_AGENT_URL, "
        "else OPENAI_BASE_URL)",
    )
    add(
        "--version N",
        "with --url: the weight version that every token must have; 'any' allows versions to "
        "change while the service trains (default: the version that it serves)",
        type=_version,
    )
    add("-n,--n N", "runs of each item (default 1)", type=_count, default=1)
    add("--k K,K", "the values of k for pass@k (default: 1, 2, 4, ... up to --n)", type=_counts)
    add("--pass-at REWARD", "the least reward that passes (default 1)", type=number, default=1.0)
    add(
        "--reward-on-failure REWARD",
        "the score of a run that fails (default: left out)",
        type=number,
    )
    parser.add_argument(
        "--rewards",
        choices=("agent", "judge", "both"),
        default="judge",
        help="the source of scores: what the agent returns (judge, the default), rewards that it "
        "posts under its session's key (agent), or both",
    )
    add("--limit N", "take the first N items only", type=_count)
    add("--concurrency N", "concurrent runs (default 32)", type=_count, default=32)
    add("--timeout SECONDS", "time limit of a run (default 600)", type=seconds, default=600.0)
    retries = count(100_000, least=0)
    add("--retries N", "further attempts at a run that fails (default 0)", type=retries, default=0)
    add(
        "--agent-arg NAME=VALUE",
        "an argument for the constructor of the agent's class (repeatable)",
        action="append",
        default=[],
    )
    add("--out FILE", "write a JSON line for each run; the same command resumes from this file")
    add("--json FILE", "write the figures to this file; -: print them instead of the table")
    add("--api-key-file FILE", "a file that holds the key of the service at --url")
    add("--keep DIR", "with --model: keep the records and logs in this folder")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="with --model: settings of the service, e.g. root=..., server.ranks=1",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from any_agent.runtime.signals import exit_by_signal, handle_signals

    try:
        # Whatever has been started by then is ended at SIGTERM, too.
        with handle_signals(exit_by_signal, signal.SIGTERM):
            return _evaluate(arguments)
    except (Unauthenticated, Forbidden, ServiceUnavailable, WrongService) as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 3


def _evaluate(arguments: argparse.Namespace) -> int:
    from any_agent.sdk.evaluation import evaluate
    from any_agent.sdk.run_plan import items_of

    if arguments.model is None:
        if arguments.overrides or arguments.keep:
            raise ConfigError(
                f"{' '.join(arguments.overrides) or '--keep'}: settings are for the service that "
                "is started for --model; a service at --url has its own"
            )
    elif arguments.version is not None or arguments.api_key_file is not None:
        raise ConfigError(
            "--version and --api-key-file are for a service at --url: name a model's version with "
            "--model, as in --model my-exp/trial-1@20"
        )
    # Every error in the options is found before a model is loaded.
    agent, data = _agent(arguments), items_of(arguments.data)
    items = [data[k] for k in range(min(len(data), arguments.limit or len(data)))]
    _require_writable(arguments.json)
    ks = arguments.k or None
    if ks and max(ks) > arguments.n:
        raise ConfigError(
            f"--k {max(ks)} needs at least {max(ks)} runs of each item: -n is {arguments.n}"
        )
    evaluation = partial(
        evaluate,
        agent=agent,
        # Results of another agent are not resumed.
        agent_name=" ".join([arguments.agent, *sorted(arguments.agent_arg)]),
        items=items,
        runs=arguments.n,
        concurrency=arguments.concurrency,
        timeout=arguments.timeout,
        retries=arguments.retries,
        threshold=arguments.pass_at,
        failed_score=arguments.reward_on_failure,
        rewards=arguments.rewards,
        results=arguments.out,
        version=arguments.version if arguments.version is not None else "current",
    )
    with ExitStack() as stack:
        if arguments.model is None:
            from any_agent.sdk.find_service import service_of_options

            service = service_of_options(arguments.url, arguments.api_key_file)
            done = _until_signal(evaluation(service))
        else:
            service, watch = _serve(arguments, stack)
            done = _until_signal(evaluation(service, check=watch))
    _report(arguments, done, ks or done.default_ks(), len(items))
    return 1 if done.failed and done.failed_score is None else 0


def _agent(arguments: argparse.Namespace) -> Any:
    from any_agent.runtime.import_string import import_string
    from any_agent.sdk.agent_callable import AgentCallable, callable_of

    # Python searches the folder of the command's own file, not the current folder.
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    found = import_string(arguments.agent, "agent")
    if hasattr(found, "arun_episode"):
        raise ConfigError(
            f"{arguments.agent} is a RolloutWorkflow, which samples from a trainer's engines and "
            "not over HTTP: evaluate it during training (eval.every, eval.at_start)"
        )
    agent = callable_of(found, _keywords(arguments.agent_arg))
    AgentCallable(agent)  # Raises if it does not accept its arguments.
    return agent


def _keywords(texts: list[str]) -> dict[str, Any]:
    import yaml

    out = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError(f"--agent-arg {text}: write NAME=VALUE, as in --agent-arg turns=3")
        try:
            out[name] = yaml.safe_load(value)
        except yaml.YAMLError:
            out[name] = value
    return out


def _serve(arguments: argparse.Namespace, stack: ExitStack) -> tuple[ServiceAddress, Any]:
    """Start the model's service; return its address and the check to call while it runs."""
    import tempfile

    from any_agent.launcher.checkpoint_service import find_kept, served
    from any_agent.sdk.find_service import ServiceAddress

    kept = find_kept(arguments.model, arguments.overrides)
    # The full name has a version, also where the option had none.
    arguments.model = kept.name
    folder = arguments.keep
    if folder is None:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="any-agent-eval-"))
    node, key = stack.enter_context(served(kept, Path(folder).absolute(), _say))
    return ServiceAddress(node.local_url, key), node.check


def _report(
    arguments: argparse.Namespace, evaluation: Evaluation, ks: list[int], items: int
) -> None:
    model = arguments.model or f"{evaluation.model}, {evaluation.describe_versions()}"
    figures = {
        "agent": arguments.agent,
        "model": arguments.model or evaluation.model,
        "data": arguments.data,
        **evaluation.figures(ks),
    }
    if arguments.json == "-":
        print(json.dumps(figures))
        return
    print(f"agent     {arguments.agent}")
    print(f"model     {model}")
    print(f"items     {items} of {arguments.data}, {evaluation.runs} runs each")
    if failures := evaluation.describe_failures():
        print(f"failed    {failures}")
    print()
    print("\n".join(evaluation.table(ks)), flush=True)
    if arguments.json is not None:
        try:
            write_atomic(Path(arguments.json), json.dumps(figures, indent=1) + "\n")
        except OSError as error:
            raise ConfigError(f"cannot write {arguments.json}: {error.strerror}") from None


def _require_writable(path: str | None) -> None:
    """Raise ConfigError before the runs instead of after them."""
    if path in (None, "-"):
        return
    folder = Path(path or "").absolute().parent
    if not (folder.is_dir() and os.access(folder, os.W_OK)) or Path(path or "").is_dir():
        raise ConfigError(f"--json {path} cannot be written")


def _say(line: str) -> None:
    """Print to standard error: standard output is for the results."""
    print(line, file=sys.stderr, flush=True)


def _until_signal(evaluation: Coroutine[Any, Any, Evaluation]) -> Evaluation:
    """Return the result; SystemExit after a signal, once open sessions are aborted."""
    import asyncio

    from any_agent.runtime.signals import run_until_signal

    found: list[Evaluation] = []

    async def evaluated() -> None:
        found.append(await evaluation)

    if threading.current_thread() is not threading.main_thread():
        # No signal arrives in this thread.
        asyncio.run(evaluated())
    elif (number := run_until_signal(evaluated())) is not None:
        raise SystemExit(128 + number)
    return found[0]


# -- argument types ---------------------------------------------------------------------------


def _counts(text: str) -> list[int]:
    return sorted({_count(part.strip()) for part in text.split(",")})


def _version(text: str) -> _Version:
    if text in ("any", "current"):
        return cast(_Version, text)
    return count(100_000, least=0)(text)
