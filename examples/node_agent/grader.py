"""What a session was worth, from what was said in it; the service's own `sessions.grader` may be
the same function."""

from __future__ import annotations

import re
from typing import Any


def correct(session: dict[str, Any]) -> dict[str, float]:
    """Whether the last number of the last answer is the one of the session's metadata, and a
    little for having it worked out by the tool."""
    last = session["interactions"][-1]
    numbers = re.findall(r"-?\d+", last["output_message"].get("content") or "")
    right = numbers[-1:] == [session["metadata"]["answer"]]
    used = any(message["role"] == "tool" for message in last["messages"])
    return {"correct": float(right), "tool": 0.1 * used}
