"""The settings of a training script: ``python train.py --config my.yaml train.lr=1e-5``."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from any_agent.config import Config, load_config
from any_agent.errors import ConfigError
from any_agent.runtime.command_line import add_short_options, one_line_errors, overrides_of

if TYPE_CHECKING:
    from any_agent.types import GenerationHyperparameters


class GRPOConfig(Config):
    """Every setting of a run, as a training script reads it.

    A script with its own settings derives a class, whose fields can then be set in the YAML file,
    in the environment and on the command line like all others::

        class MyConfig(GRPOConfig):
            max_turns: int = 8
    """

    workflow: str = ""
    """The dotted name of the workflow that `trainer.train()` runs on the dataset, such as
    `my_agent.MyAgent`."""
    eval_workflow: str = ""
    """The dotted name of the workflow of evaluations. Empty: that of training."""

    @property
    def async_training(self) -> bool:
        """True if tokens may be older than the step that trains on them (`rollout.eta`). As a
        setting, false means `rollout.eta=0`."""
        return self.rollout.eta > 0

    @property
    def tokenizer_path(self) -> str:
        """The folder or hub name of the policy's tokenizer, which is the model's."""
        return self.model.path

    @property
    def experiment_name(self) -> str:
        return self.experiment

    @property
    def trial_name(self) -> str:
        return self.trial

    @property
    def gconfig(self) -> GenerationHyperparameters:
        """The sampling parameters of train sessions."""
        return sampling_of(self)


def sampling_of(config: Config, temperature: float | None = None) -> GenerationHyperparameters:
    """Return the default sampling parameters of workflows; ``temperature`` replaces the run's."""
    from any_agent.types import GenerationHyperparameters

    c = config.sampling
    return GenerationHyperparameters(
        max_new_tokens=c.max_new_tokens,
        temperature=c.temperature if temperature is None else temperature,
        top_p=c.top_p,
        top_k=c.top_k,
    )


_ConfigT = TypeVar("_ConfigT", bound=Config)


def load_expr_config(argv: Sequence[str], config_cls: type[_ConfigT]) -> tuple[_ConfigT, str]:
    """Read a script's settings from its arguments (``sys.argv[1:]``), the environment and a file.

    ``argv``: an optional ``--config FILE``, any number of ``key=value``, and the commands' short
    options for settings, such as ``--trial NAME``. Returns the settings and the file's path, which
    is empty without a file. From here on an uncaught AnyAgentError ends the script with one line,
    unless ``log_level=debug``, which keeps its traceback; and names in settings (`workflow`) are
    also found in the current folder, after all other places.

    Raises ConfigError naming the setting and what to do; SystemExit for ``--help``.
    """
    one_line_errors()
    if dataclasses.is_dataclass(config_cls):
        raise ConfigError(
            f"remove @dataclass from {config_cls.__name__}: the annotated attributes of a class "
            "derived from GRPOConfig are settings already"
        )
    if not (isinstance(config_cls, type) and issubclass(config_cls, Config)):
        raise ConfigError(f"{config_cls!r} must be GRPOConfig or a class derived from it")
    # Callers may pass all of sys.argv, with the script's own name.
    argv = argv[1:] if argv and argv[0].endswith(".py") else argv
    parser = argparse.ArgumentParser(
        usage="%(prog)s [--config FILE] [--trial NAME] [key=value ...]",
        description="Any setting can be given as key=value, e.g. train.lr=1e-5 rollout.eta=1; "
        "`any-agent config` shows all of them with their defaults.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="a YAML file of settings")
    add_short_options(parser)
    arguments, rest = parser.parse_known_args(argv)
    arguments.overrides = rest
    config = load_config(arguments.config, overrides_of(arguments), kind=config_cls)
    if not {"", os.getcwd()}.intersection(sys.path):
        sys.path.append(os.getcwd())
    one_line_errors(debug=config.log_level == "debug")
    return config, arguments.config or ""
