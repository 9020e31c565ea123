"""``any-agent serve``, ``train`` and ``config``: start the service of a run, or print its
settings."""

from __future__ import annotations

import argparse
import signal
from dataclasses import replace
from typing import TYPE_CHECKING

from any_agent.errors import ConfigError
from any_agent.runtime.command_line import (
    WORDS,
    add_service_arguments,
    option,
    overrides_of,
    require_installed,
    told_if_slow,
)

if TYPE_CHECKING:
    from any_agent.config import Config
    from any_agent.launcher.trial import SavedWeights


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    serve = commands.add_parser(
        "serve",
        help="start the service on this machine: engines, proxies, router and, unless --no-train "
        "is given, trainer",
        epilog=WORDS,
    )
    add_service_arguments(serve)
    option(
        serve,
        "--no-train",
        "serve only; with --experiment and --trial of an earlier run, its latest checkpoint",
    )
    serve.set_defaults(run=_serve)
    train = commands.add_parser(
        "train",
        help="start the service as `serve` does, and end after the configured steps",
        epilog=WORDS,
    )
    add_service_arguments(train)
    train.set_defaults(run=_train)
    config = commands.add_parser("config", help="print the resulting settings as YAML")
    add_service_arguments(config)
    option(config, "--json", "print JSON")
    config.set_defaults(run=_config)


def _config(arguments: argparse.Namespace) -> int:
    import json

    import yaml

    from any_agent.launcher.trial import resolve_config

    settings = resolve_config(arguments.config, overrides_of(arguments)).dump()
    if arguments.json:
        print(json.dumps(settings))
    else:
        print(yaml.safe_dump(settings, sort_keys=False), end="")
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    return run_service(
        arguments.config, overrides_of(arguments), train=not arguments.no_train, stay=True
    )


def _train(arguments: argparse.Namespace) -> int:
    return run_service(arguments.config, overrides_of(arguments), train=True, stay=False)


def run_service(config_path: str | None, overrides: list[str], *, train: bool, stay: bool) -> int:
    """Start the service and watch it until Ctrl-C, SIGTERM or, unless ``stay``, the last step.

    SIGTERM lets running requests and the step finish and exits with code 0; Ctrl-C, or a second
    SIGTERM, ends the service at once.
    """
    require_installed("train" if train else "serve")
    from any_agent.launcher.health import Console
    from any_agent.launcher.node import Node, NodeOptions, listening
    from any_agent.launcher.shutdown import terminate
    from any_agent.launcher.trial import resolve_config
    from any_agent.runtime.logs import set_up_logging

    config = resolve_config(config_path, overrides)
    console = Console()
    set_up_logging(config.log_level, secrets=config.secrets(), before=console.clear)
    signal.signal(signal.SIGTERM, terminate)
    # A script's shell starts what runs in the background with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    say = console.say
    options = NodeOptions(train=train, say=say, show=console.show if console.live else None)
    if not train:
        with told_if_slow(say, "waiting   for the checksums of the checkpoint's weights"):
            options = replace(options, weights=_served_weights(config))
    with Node(config, options) as node:
        for line in (*listening(config, node.url), describe_auth(config)):
            options.say(line)
        try:
            node.watch(until_trained=not stay)
        finally:
            console.clear()
    return 0


def describe_auth(config: Config) -> str:
    """Return a line that says whether the service requires keys."""
    from shlex import quote

    from any_agent.auth.access import is_open

    if not is_open(config):
        return "keys      API keys are required"
    default = type(config)()
    names = ("root", "user", "experiment", "trial")
    other = [name for name in names if getattr(config, name) != getattr(default, name)]
    trial = "".join(f" {name}={quote(str(getattr(config, name)))}" for name in other)
    return (
        "keys      no key is needed: every client on this machine's loopback is an operator; "
        f"`any-agent keys create --scope admin{trial}` creates a key, and keys are required then"
    )


def _served_weights(config: Config) -> SavedWeights | None:
    """Return the trial's latest whole checkpoint; None for a model that is served unchanged."""
    from any_agent.launcher.trial import latest_weights, trial_dir
    from any_agent.rundir.checksums import sound

    while (found := latest_weights(config)) is not None:
        if sound(found.path):
            return found
    if not config.model.path:
        raise ConfigError(
            f"there is no run {config.experiment}/{config.trial} of the user {config.user} in "
            f"{config.root.absolute()}: set root= to the folder that it was trained in"
        )
    if (trial_dir(config).path / "config.yaml").is_file():
        raise ConfigError(
            f"{config.experiment}/{config.trial} has no complete checkpoint to serve in "
            f"{trial_dir(config).checkpoints}"
        )
    return None
