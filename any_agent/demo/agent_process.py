"""A long-lived agent process: for each line on standard input, run the agent in that session.

A line names the session's base URL and key; they are set as the two environment variables, and
the agent is called as it is. Answers go to standard output, a line each.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from typing import Any

from any_agent.demo.agent import answer
from any_agent.demo.task import RETRY, Item, is_correct, messages


def main() -> None:
    for line in sys.stdin:
        job = json.loads(line)
        item = Item(**job["item"])
        os.environ["OPENAI_BASE_URL"] = job["base_url"]
        os.environ["OPENAI_API_KEY"] = job["api_key"]
        reply: dict[str, Any]
        try:
            judge = partial(is_correct, item=item)
            reply = {"turns": answer(messages(item), judge, RETRY)}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"[:500]}
        print(json.dumps({"job": job["job"], **reply}), flush=True)


if __name__ == "__main__":
    main()
