"""The reward of a session, from its conversation; `sessions.grader` of a service may be the same
function."""

from __future__ import annotations

import re
from typing import Any


def correct(session: dict[str, Any]) -> dict[str, float]:
    """Return rewards for the right last number of the last answer, and for using the tool."""
    last = session["interactions"][-1]
    numbers = re.findall(r"-?\d+", last["output_message"].get("content") or "")
    right = numbers[-1:] == [session["metadata"]["answer"]]
    used = any(message["role"] == "tool" for message in last["messages"])
    return {"correct": float(right), "tool": 0.1 * used}
