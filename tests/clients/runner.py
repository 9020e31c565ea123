"""Runs steps of a client's script for the tests, where the client is: `runner.py SCRIPT`.

A line of the input is `{"step": ..., "given": [...], "variables": {...}}`, one of the output what
that step returned, or `{"raised": ...}`. One process runs them all: these packages take long to
import.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import runpy
import sys
import traceback


def main(script: str) -> None:
    # Packages print what they like; it is not to be taken for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    steps = runpy.run_path(script)
    for line in sys.stdin:
        asked = json.loads(line)
        os.environ.update(asked["variables"])
        try:
            step = steps[asked["step"]]
            answer = step(*asked["given"])
            if inspect.iscoroutine(answer):
                answer = asyncio.run(answer)
        except Exception:
            answer = {"raised": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
