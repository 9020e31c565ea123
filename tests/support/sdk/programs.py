"""Programs that `any-agent run` runs in tests: they know the usual variables, and nothing of us."""

from __future__ import annotations

import sys
from pathlib import Path

AGENT = """
import json, os, sys, time, urllib.request


def post(url, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
               "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
        return json.load(answer)


def ask(text="Say a number."):
    body = {"model": "gpt-4o", "messages": [{"role": "user", "content": text}], "max_tokens": 8}
    return post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)


def reward(value, **more):
    return post(os.environ["OPENAI_BASE_URL"].removesuffix("/v1") + "/rl/v1/set_reward",
                {"reward": value, **more})
"""


def agent(folder: Path, does: str, name: str = "agent.py") -> list[str]:
    """The command of an agent that does this; `ask()` is a model call."""
    path = folder / name
    path.write_text(f"{AGENT}\n{does}\n", encoding="utf-8")
    return [sys.executable, str(path)]


def marks_itself(folder: Path) -> str:
    """Code that makes a call, writes its process's number and then never ends."""
    return f"""
ask()
with open({str(folder / "pid")!r}, "w") as file:
    print(os.getpid(), file=file)
time.sleep(600)
"""
