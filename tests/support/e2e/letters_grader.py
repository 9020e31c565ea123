"""What the operator knows of a good answer."""

from __future__ import annotations

from typing import Any


def share_of_letters(session: dict[str, Any]) -> float:
    """Small letters among the characters of all answers of a conversation."""
    said = "".join(i["output_message"]["content"] or "" for i in session["interactions"])
    return sum(c.islower() for c in said) / max(1, len(said))
