"""Asks a trained model a few held-out prompts, loaded by experiment and trial alone.

Run as ``python -m any_agent.demo.sample EXPERIMENT TRIAL --user U --root DIR``; prints JSON.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from any_agent.demo.task import items, messages, shuffled
from any_agent.inference import load_engine


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask a trained demo model held-out prompts.")
    parser.add_argument("experiment")
    parser.add_argument("trial")
    parser.add_argument("--user", required=True)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0, help="of the choice of prompts")
    parser.add_argument("--count", type=int, default=3)
    args = parser.parse_args()
    asked = shuffled(items(held_out=True), args.seed)[: args.count]
    with load_engine(args.experiment, args.trial, user=args.user, root=args.root) as model:
        said = [model.chat(messages(item), max_new_tokens=4)["content"] for item in asked]
        checkpoint = str(model.path)
    answers = [[item.prompt, text] for item, text in zip(asked, said, strict=True)]
    print(json.dumps({"checkpoint": checkpoint, "answers": answers}))


if __name__ == "__main__":
    main()
