"""The command line: ``any-agent COMMAND``. Only what a command needs is imported."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from any_agent import __version__
from any_agent.cli.doctor import add_doctor_command
from any_agent.cli.eval import add_eval_command
from any_agent.cli.export import add_export_command
from any_agent.cli.keys import add_keys_commands
from any_agent.cli.run import add_run_command
from any_agent.cli.sessions import add_sessions_commands
from any_agent.errors import ConfigError
from any_agent.runtime.command_line import add_service_arguments, guarded, overrides_of, parse

if TYPE_CHECKING:
    from any_agent.config import Config
    from any_agent.launcher.trial import SavedWeights


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit code. 0 ended well, 1 failed, 2 wrong input, 130 interrupted."""
    arguments = parse(_parser(), argv)
    return guarded(lambda: arguments.run(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="any-agent",
        description="Makes any OpenAI-compatible agent trainable by reinforcement learning.",
    )
    parser.add_argument("--version", action="version", version=f"any-agent {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_demo(commands)
    serve = commands.add_parser(
        "serve",
        help="start the service on this machine: engines, proxies, router and, unless told not to, "
        "trainer",
    )
    add_service_arguments(serve)
    serve.add_argument(
        "--no-train",
        action="store_true",
        help="serve only; with --experiment and --trial of an earlier run, its latest checkpoint",
    )
    serve.set_defaults(run=_serve)
    train = commands.add_parser(
        "train", help="as serve, but end when the configured steps are done"
    )
    add_service_arguments(train)
    train.set_defaults(run=_train)
    config = commands.add_parser("config", help="print the settings that would be used, as YAML")
    add_service_arguments(config)
    config.set_defaults(run=_config)
    add_run_command(commands)
    add_doctor_command(commands)
    add_sessions_commands(commands)
    add_eval_command(commands)
    add_export_command(commands)
    add_keys_commands(commands)
    return parser


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    demo = commands.add_parser(
        "demo",
        help="make a tiny model, serve it, and train it on what agents do; nothing is downloaded",
    )
    demo.add_argument(
        "--seed", type=int, default=0, help="of the model and the prompts (default 0)"
    )
    demo.add_argument("--steps", type=_positive, default=None, help="optimizer steps (default 25)")
    demo.add_argument(
        "--ranks", type=_positive, default=None, help="engines and proxies, a pair each (default 2)"
    )
    demo.add_argument("--json", metavar="FILE", help="write the figures there")
    demo.add_argument("--keep", metavar="DIR", help="keep the run there (default: a new one)")
    demo.add_argument(
        "--permute-rewards",
        action="store_true",
        help="a control: give each session another session's rewards; nothing should be learned",
    )
    demo.set_defaults(run=_demo)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _demo(arguments: argparse.Namespace) -> int:
    from any_agent.demo.run import run_demo

    return run_demo(
        seed=arguments.seed,
        steps=arguments.steps,
        ranks=arguments.ranks,
        json_path=arguments.json,
        keep=arguments.keep,
        permute=arguments.permute_rewards,
    )


def _config(arguments: argparse.Namespace) -> int:
    import yaml

    from any_agent.launcher.trial import resolve_config

    config = resolve_config(arguments.config, overrides_of(arguments))
    print(yaml.safe_dump(config.dump(), sort_keys=False), end="")
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    return run_service(
        arguments.config, overrides_of(arguments), train=not arguments.no_train, stay=True
    )


def _train(arguments: argparse.Namespace) -> int:
    return run_service(arguments.config, overrides_of(arguments), train=True, stay=False)


def run_service(config_path: str | None, overrides: list[str], *, train: bool, stay: bool) -> int:
    """Start the service and watch it until Ctrl-C, SIGTERM or, unless ``stay``, the last step.

    SIGTERM lets what is under way end and exits with code 0; Ctrl-C, or a second SIGTERM, ends it
    at once.
    """
    from any_agent.launcher import Node, NodeOptions
    from any_agent.launcher.reachability import listening
    from any_agent.launcher.shutdown import terminate
    from any_agent.launcher.trial import resolve_config
    from any_agent.runtime.logs import set_up_logging

    config = resolve_config(config_path, overrides)
    set_up_logging(config.log_level, secrets=config.secrets())
    signal.signal(signal.SIGTERM, terminate)
    options = NodeOptions(train=train, say=partial(print, flush=True))
    if not train:
        options = replace(options, weights=_served_weights(config))
    with Node(config, options) as node:
        print(listening(node.url), flush=True)
        options.say(_describe_auth(config))
        node.watch(until_trained=not stay)
    return 0


def _describe_auth(config: Config) -> str:
    """Whether the service asks for keys, in one line."""
    from shlex import quote

    from any_agent.auth.access import is_open

    if not is_open(config):
        return "keys      API keys are required"
    default = type(config)()
    names = ("root", "user", "experiment", "trial")
    other = [name for name in names if getattr(config, name) != getattr(default, name)]
    trial = "".join(f" {name}={quote(str(getattr(config, name)))}" for name in other)
    return (
        "keys      no key is needed: whoever reaches this machine's loopback is the operator; "
        f"`any-agent keys create --scope admin{trial}` makes a key, which is required from then on"
    )


def _served_weights(config: Config) -> SavedWeights | None:
    """The trial's latest checkpoint; None for a model that is served as it is."""
    from any_agent.launcher.trial import latest_weights, trial_dir

    found = latest_weights(config)
    if found is not None:
        return found
    if not config.model.path:
        raise ConfigError(
            f"there is no run {config.experiment}/{config.trial} of the user {config.user} in "
            f"{config.root.absolute()}: is that the folder (root=) that it was trained in?"
        )
    if (trial_dir(config).path / "config.yaml").is_file():
        raise ConfigError(
            f"{config.experiment}/{config.trial} has no whole checkpoint to serve in "
            f"{trial_dir(config).checkpoints}"
        )
    return None


if __name__ == "__main__":
    # Children find the packages that this process found, installed or not.
    os.environ.setdefault("PYTHONPATH", os.pathsep.join(p for p in sys.path if p))
    sys.exit(main())
