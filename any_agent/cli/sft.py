"""``any-agent sft``: its arguments.

`trainer.sft`, which trains, does the work. As a part of the trainer it is another program, which
replaces this one.
"""

from __future__ import annotations

import argparse
from functools import partial

from any_agent.runtime.command_line import (
    add_program,
    add_setting_arguments,
    count,
    number,
    option,
)

_DESCRIPTION = """\
Train a model on conversations, as a warm start before reinforcement learning or on the best
sessions of a run, and write the result as a model folder.
"""
_EPILOG = """\
A line of the data is one of
  {"messages": [...], "tools": [...]}         every assistant message after another message is
                                              trained on, unless it has "weight": 0
  {"input_ids": [...], "loss_mask": [...]}    the tokens with mask 1 are trained on
with an optional reward (or rewards) and group_id or task_id, as any-agent export writes them:

  any-agent export --experiment E --trial T --style concat | \\
    any-agent sft --data - --best 2 --min-reward 0.5 --model DIR --out NEW

--out is written after each epoch, whole or not at all. Settings of train.* are those of `serve`:
lr, lr_schedule, warmup_steps, min_lr_ratio (over the steps of all epochs), betas, weight_decay,
grad_clip, seed, device, dtype, compile, threads, offload_optimizer, gradient_checkpointing,
packing, micro_batch_tokens, max_row_tokens and lora. Others have no meaning here, and are refused.

Exit codes: 0 trained, 1 failed, 2 wrong input, 130 interrupted.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    add_program(
        commands,
        "sft",
        "trainer.sft",
        add_sft_arguments,
        extra="train",
        help="train a model on conversations, before or after reinforcement learning",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )


def add_sft_arguments(parser: argparse.ArgumentParser) -> None:
    add = partial(option, parser)
    add(
        "--data FILE",
        "JSON lines; - is standard input (repeatable)",
        action="append",
        required=True,
    )
    add("--model DIR", "short for model.path=DIR: the model to begin with")
    add("--out DIR", "the new folder of the trained model", required=True)
    add("--epochs N", "passes over the data (default 1)", type=count(10_000), default=1)
    add("--batch N", "lines in one optimizer step (default 32)", type=count(1_000_000), default=32)
    add("--min-reward X", "only lines with at least this reward", type=number)
    add("--best N", "only the N best lines of each task", type=count(1_000_000))
    add("--holdout X", "share of lines to measure on instead (default 0)", type=_share, default=0.0)
    add_setting_arguments(parser, (), help="any setting, e.g. train.lr=1e-5")


def _share(text: str) -> float:
    value = number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to below 1")
    return value
