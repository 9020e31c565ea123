"""A tiny model that a few supervised steps teach to call a tool and to say what it answered."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

from any_agent.demo.models.teach import Row, joined
from any_agent.demo.models.teach import teach as teach_rows
from any_agent.types import Message
from tests.support.families import Call, Family
from tests.support.laws.talk import TOOLS

STEPS = 120


def ask(a: int, b: int) -> Message:
    return {"role": "user", "content": f"{a} and {b}"}


def add(arguments: dict[str, Any]) -> str:
    """The tool."""
    return str((arguments["a"] + arguments["b"]) % 10)


def teach(fam: Family, folder: Path, *, steps: int = STEPS, batch: int = 32) -> Path:
    """A folder with the family's tokenizer and a model that adds two digits by the tool."""
    rng = random.Random(0)
    rows = [_row(fam, a, b) for a in range(10) for b in range(10)]
    path = folder / "taught"
    shutil.copytree(fam.weights_dir, path)
    teach_rows(path, lambda _: rng.choices(rows, k=batch), steps=steps)
    return path


def _row(fam: Family, a: int, b: int) -> Row:
    """One solved task, token by token as the service continues it."""
    call = Call("add", {"a": a, "b": b})
    prompt = list(fam.chat.render([ask(a, b)], TOOLS))
    called = fam.say(calls=(call,))
    message = fam.chat.parse(called, prompt_ids=prompt, tools=TOOLS).to_message()
    result = {
        "role": "tool",
        "tool_call_id": message["tool_calls"][0]["id"],
        "content": add({"a": a, "b": b}),
    }
    following = fam.chat.bridge(called, [result], TOOLS, answer=message)
    assert following is not None
    answer = fam.say(result["content"])
    parts = [(prompt, False), (called, True), (list(following), False), (answer, True)]
    return joined(parts)
