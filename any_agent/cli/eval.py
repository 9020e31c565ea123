"""``any-agent eval``: what a model scores with an agent on a dataset."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from any_agent.runtime.command_line import count, number, seconds

if TYPE_CHECKING:
    from any_agent.sdk.evaluating import EvalOptions, EvaluatedRun
    from any_agent.sdk.find_service import ServiceAddress

_DESCRIPTION = (
    "Run an agent on every item of a dataset and say what it scores: the mean reward, pass@k, and "
    "how sure that is. It is the agent of training: a class with async def run(data, "
    "**extra_kwargs), or a function of an item. Each run is a session of the mode eval: nothing is "
    "trained on."
)
_EPILOG = (
    "The key of a service at --url (a tenant's or an operator's) is taken from ANY_AGENT_API_KEY "
    "or OPENAI_API_KEY, or from --api-key-file. Exit codes: 0 all runs have a score, 1 some "
    "failed, or the evaluation did, 2 wrong input, 3 no service (away, another one, the key "
    "refused), 130 interrupted, 143 terminated."
)
_count = count(100_000)
_Version = int | Literal["current", "any"]


def add_eval_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The parser of ``eval``."""
    parser = commands.add_parser(
        "eval",
        help="run an agent on a dataset: mean reward, pass@k and their confidence intervals",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    add = parser.add_argument
    add("--agent", required=True, metavar="NAME", help="my_module.MyAgent: a class or a function")
    add("--data", required=True, metavar="FILE", help="the items: JSONL, or Parquet with [data]")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--model",
        metavar="RUN",
        help="experiment/trial, experiment/trial@VERSION, or a folder: it is served here while it "
        "is evaluated",
    )
    where.add_argument(
        "--url",
        help="a running service, or file:///... for a file that holds its URL (default: "
        "ANY_AGENT_URL, else OPENAI_BASE_URL)",
    )
    add(
        "--version",
        type=_version,
        metavar="N",
        help="with --url: the weight version that every "
        "token must be of; 'any' lets a service that trains go on (default: the one it serves)",
    )
    add("-n", "--n", type=_count, default=1, metavar="N", help="runs of each item (default 1)")
    add("--k", type=_counts, metavar="K,K", help="of pass@k (default: 1, 2, 4, ... up to --n)")
    add("--pass-at", type=number, default=1.0, metavar="REWARD", help="that passes (default 1)")
    add(
        "--reward-on-failure",
        type=number,
        metavar="REWARD",
        help="what a run counts as that fails (default: it is left out)",
    )
    add("--limit", type=_count, metavar="N", help="take the first N items only")
    add("--concurrency", type=_count, default=32, metavar="N", help="runs at once (default 32)")
    add("--timeout", type=seconds, default=600.0, metavar="SECONDS", help="of a run (default 600)")
    add(
        "--retries",
        type=_zero_or_more,
        default=0,
        metavar="N",
        help="further attempts at a run that fails (default 0)",
    )
    add(
        "--agent-arg",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an argument that the agent's class is made with; may be repeated",
    )
    add("--out", metavar="FILE", help="a line of JSON per run; the same command goes on from it")
    add("--json", metavar="FILE", help="write the figures there; -: print them, and no table")
    add("--api-key-file", metavar="FILE", help="holds the key of the service at --url")
    add("--keep", metavar="DIR", help="with --model: keep there what was recorded and logged")
    add(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="with --model: settings of the service, e.g. root=..., server.ranks=1",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from any_agent.errors import Forbidden, ServiceUnavailable, Unauthenticated, WrongService

    try:
        with _terminable():
            return _evaluate(arguments)
    except (Unauthenticated, Forbidden, ServiceUnavailable, WrongService) as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 3


def _evaluate(arguments: argparse.Namespace) -> int:
    from any_agent.errors import ConfigError
    from any_agent.sdk.evaluating import evaluate

    if arguments.model is None:
        if arguments.overrides or arguments.keep:
            raise ConfigError(
                f"{' '.join(arguments.overrides) or '--keep'}: settings are those of a service "
                "that is started for --model; one at --url has its own"
            )
    elif arguments.version is not None or arguments.api_key_file is not None:
        raise ConfigError(
            "--version and --api-key-file are for a service at --url: a model's version is named "
            "with it, as in --model my-exp/trial-1@20"
        )
    options = _options(arguments)
    _require_writable(arguments.json)
    ks = arguments.k or None
    if ks and max(ks) > options.runs:
        raise ConfigError(f"--k {max(ks)} needs as many runs of each item: -n is {options.runs}")
    with ExitStack() as stack:
        if arguments.model is None:
            from any_agent.sdk.find_service import service_of_options

            service = service_of_options(arguments.url, arguments.api_key_file)
            done = _until_signal(evaluate(options, service))
        else:
            service, watch = _serve(arguments, stack)
            done = _until_signal(evaluate(options, service, watch))
    _report(arguments, done, ks or done.evaluation.default_ks(), len(options.items))
    return 1 if done.evaluation.failed and options.failed_score is None else 0


def _options(arguments: argparse.Namespace) -> EvalOptions:
    """All that can be wrong here is found before a model is loaded."""
    from any_agent.sdk.evaluating import EvalOptions
    from any_agent.sdk.run_plan import ItemSource

    agent = _agent(arguments)
    items = ItemSource(arguments.data)
    count = min(len(items), arguments.limit or len(items))
    version: _Version = arguments.version if arguments.version is not None else "current"
    return EvalOptions(
        agent=agent,
        agent_name=" ".join([arguments.agent, *sorted(arguments.agent_arg)]),
        items=[items[k] for k in range(count)],
        runs=arguments.n,
        concurrency=arguments.concurrency,
        timeout=arguments.timeout,
        retries=arguments.retries,
        threshold=arguments.pass_at,
        failed_score=arguments.reward_on_failure,
        out=arguments.out,
        version=version,
    )


def _agent(arguments: argparse.Namespace) -> Any:
    from any_agent.errors import ConfigError
    from any_agent.runtime.import_string import import_string
    from any_agent.sdk.agent_callable import AgentCallable, callable_of

    # A command's own folder is where Python looks, not the one that it is given in.
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    found = import_string(arguments.agent, "agent")
    if hasattr(found, "arun_episode"):
        raise ConfigError(
            f"{arguments.agent} is a RolloutWorkflow, which samples from a trainer's engines and "
            "not over HTTP: evaluate it where it is trained (eval.every, eval.at_start)"
        )
    agent = callable_of(found, _keywords(arguments.agent_arg))
    AgentCallable(agent)  # Whether it takes what it will be given.
    return agent


def _keywords(texts: list[str]) -> dict[str, Any]:
    import yaml

    from any_agent.errors import ConfigError

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
    """The model's own service, and what has to be called meanwhile."""
    import tempfile

    from any_agent.launcher.checkpoint_service import find_kept, served
    from any_agent.sdk.find_service import ServiceAddress

    kept = find_kept(arguments.model, arguments.overrides)
    # With its version, also where none was named.
    arguments.model = kept.name
    folder = arguments.keep
    if folder is None:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="any-agent-eval-"))
    node, key = stack.enter_context(served(kept, Path(folder).absolute(), _say))
    return ServiceAddress(node.local_url, key), node.check


def _report(arguments: argparse.Namespace, done: EvaluatedRun, ks: list[int], items: int) -> None:
    import json

    from any_agent.errors import ConfigError
    from any_agent.runtime.atomic_files import write_atomic

    evaluation = done.evaluation
    model = f"{done.model}, {evaluation.said_of_versions()}"
    if arguments.model is not None:
        model = arguments.model
    figures = {
        "agent": arguments.agent,
        "model": arguments.model or done.model,
        "data": arguments.data,
        **evaluation.figures(ks),
    }
    if arguments.json == "-":
        print(json.dumps(figures))
        return
    print(f"agent     {arguments.agent}")
    print(f"model     {model}")
    print(f"items     {items} of {arguments.data}, {evaluation.runs} runs each")
    if said := evaluation.said_of_failed():
        print(f"failed    {said}")
    print()
    print("\n".join(evaluation.table(ks)), flush=True)
    if arguments.json is not None:
        try:
            write_atomic(Path(arguments.json), json.dumps(figures, indent=1) + "\n")
        except OSError as error:
            raise ConfigError(f"cannot write {arguments.json}: {error.strerror}") from None


def _require_writable(path: str | None) -> None:
    """ConfigError now, and not when all runs are made."""
    from any_agent.errors import ConfigError

    if path in (None, "-"):
        return
    folder = Path(path or "").absolute().parent
    if not (folder.is_dir() and os.access(folder, os.W_OK)) or Path(path or "").is_dir():
        raise ConfigError(f"--json {path} cannot be written")


def _say(line: str) -> None:
    """Standard output is for what was found."""
    print(line, file=sys.stderr, flush=True)


def _until_signal(evaluation: Coroutine[Any, Any, EvaluatedRun]) -> EvaluatedRun:
    """What comes of it. SystemExit for a signal, once open sessions are aborted."""
    import asyncio

    from any_agent.runtime.signals import run_until_signal

    found: list[EvaluatedRun] = []

    async def evaluated() -> None:
        found.append(await evaluation)

    if threading.current_thread() is not threading.main_thread():
        # Where no signal arrives.
        asyncio.run(evaluated())
    elif (number := run_until_signal(evaluated())) is not None:
        raise SystemExit(128 + number)
    return found[0]


@contextmanager
def _terminable() -> Iterator[None]:
    """What was started so far is ended at SIGTERM, too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminated(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


# -- what options may be ---------------------------------------------------------------------------


def _zero_or_more(text: str) -> int:
    return 0 if text == "0" else _count(text)


def _counts(text: str) -> list[int]:
    return sorted({_count(part.strip()) for part in text.split(",")})


def _version(text: str) -> _Version:
    if text == "any":
        return "any"
    if text == "current":
        return "current"
    return 0 if text == "0" else _count(text)
