"""The command ``python -m any_agent.demo.model OUT --seed N``: make a tiny model."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from any_agent.errors import ConfigError
from any_agent.runtime.command_line import guarded, require_installed

_INTERVAL = 5.0  # seconds between two words on how far it is
_MADE = "any_agent_demo_model.json"
"""The file of what a folder's model was made of: written last, so a model that has it is whole."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make a tiny model.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--skill",
        choices=("echo", "sums", "judge"),
        default="echo",
        help="the skill that the model learns: the demo's task; adding two digits, with a tool and "
        "without; or judging whether an answer is right",
    )
    parser.add_argument("--warmup-steps", type=int, default=80, help="supervised steps of echo")
    parser.add_argument("--overwrite", action="store_true", help="whatever the folder holds")
    args = parser.parse_args(argv)
    return guarded(lambda: _make(args))


def _make(args: argparse.Namespace) -> int:
    require_installed("train")
    asked = {"skill": args.skill, "seed": args.seed, "warmup_steps": args.warmup_steps}
    made = args.out / _MADE
    if args.out.exists() and not args.overwrite:
        if made.is_file() and made.read_text("utf-8") == json.dumps(asked):
            print(f"{args.out} holds this model already")
            return 0
        if not args.out.is_dir() or any(args.out.iterdir()):
            raise ConfigError(
                f"{args.out} holds something else: name a new folder, or add --overwrite"
            )
    made.unlink(missing_ok=True)
    from transformers.utils import logging

    from any_agent.demo.models.judge import make_judge_model
    from any_agent.demo.models.sums import make_sums_model
    from any_agent.demo.models.teach import warm_up
    from any_agent.demo.models.tiny import save_tiny_model

    logging.disable_progress_bar()
    needs = "a minute" if args.skill == "sums" else "half a minute"
    print(f"training a tiny model on {args.skill}: about {needs} of one core", flush=True)
    if args.skill != "echo":
        make = {"sums": make_sums_model, "judge": make_judge_model}[args.skill]
        make(args.out, args.seed, report=now_and_then())
    else:
        save_tiny_model(args.out, args.seed)
        if args.warmup_steps:
            steps, report = args.warmup_steps, now_and_then()
            warm_up(args.out, steps=steps, seed=args.seed, report=report)
    made.write_text(json.dumps(asked), "utf-8")
    for file in args.out.iterdir():
        # safetensors makes files that only their owner may read.
        file.chmod(file.stat().st_mode | 0o444)
    print(f"made {args.out}")
    return 0


def now_and_then(clock: Callable[[], float] = time.monotonic) -> Callable[[str], None]:
    """Return a function that prints its first text, and then one every few seconds."""
    began = clock()
    told = began - _INTERVAL

    def report(what: str) -> None:
        nonlocal told
        now = clock()
        if now - told >= _INTERVAL:
            told = now
            print(f"{what}, after {now - began:.0f} s", flush=True)

    return report


if __name__ == "__main__":
    sys.exit(main())
