"""Graders for the tests of late rewards: they run in the workers' processes."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from any_agent.rewards.next_message import next_message


def by_length(session: dict[str, Any]) -> float:
    """A number for each message of the last conversation, and what the metadata adds."""
    last = session["interactions"][-1]
    assert last["output_message"]["role"] == "assistant"
    return len(last["messages"]) + float(session["metadata"].get("plus", 0))


def share_of_letters(session: dict[str, Any]) -> float:
    """Small letters among the characters of all answers of a conversation."""
    said = "".join(i["output_message"]["content"] or "" for i in session["interactions"])
    return sum(c.islower() for c in said) / max(1, len(said))


async def by_name(session: dict[str, Any]) -> dict[str, float]:
    return {"correct": 1, "format": 0.5}


def misbehaves(session: dict[str, Any]) -> Any:
    """Fail in the way that the session's metadata names."""
    match session["metadata"]["how"]:
        case "raises":
            raise RuntimeError("no judge is there\nat all")
        case "hangs":
            Path(session["metadata"]["pid"]).write_text(str(os.getpid()), encoding="ascii")
            while True:
                time.sleep(0.01)
        case "dies":
            os._exit(3)
        case "exits":
            sys.exit(0)
        case "nan":
            return float("nan")
        case "text":
            return "1.0"
        case "none":
            return None
        case "huge":
            return 1e9
        case "names":
            return {"a b": 1}
        case "odd":
            return _Odd()
        case "half a character":
            raise RuntimeError("half \ud800 of it")
        case "fine":
            return 1


def by_reply(call: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> Any:
    """The number in the last message; or what it asks for."""
    match messages[-1]["content"]:
        case "raise":
            raise RuntimeError("no judge is there")
        case "nan":
            return float("nan")
        case "text":
            return "1.0"
        case "hang":
            time.sleep(600)
        case "no opinion":
            return None
        case number:
            assert call["output_message"]["role"] == "assistant"
            return float(number)


async def by_reply_later(call: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> Any:
    await asyncio.sleep(0)
    return by_reply(call, messages)


reply = next_message(by_reply, name="reply")
reply_later = next_message(by_reply_later)


def of_calls(session: dict[str, Any]) -> Any:
    """Return the rewards in the session's metadata; "first" and "last" are ids of its calls."""
    said = json.dumps(session["metadata"]["rewards"])
    for name, call in (("first", 0), ("last", -1)):
        said = said.replace(f'"{name}"', json.dumps(session["interactions"][call]["id"]))
    return json.loads(said)


class _Odd:
    """Of no use outside."""

    def __float__(self) -> float:
        raise ValueError("not a number at all")

    def __reduce__(self) -> Any:
        raise TypeError("cannot be pickled")


not_callable = 5
