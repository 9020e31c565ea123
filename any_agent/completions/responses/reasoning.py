"""Reasoning as an opaque text, for agents that keep no reasoning but send `encrypted_content` back.

It hides nothing, because the answer tells the reasoning anyway: it only brings it back.
"""

from __future__ import annotations

import binascii
from base64 import urlsafe_b64decode, urlsafe_b64encode

_OURS = "aa1."


def encoded(reasoning: str) -> str:
    """The text that brings it back."""
    return _OURS + urlsafe_b64encode(reasoning.encode()).decode()


def decoded(text: str) -> str | None:
    """The reasoning of a text of ours; None of anybody else's."""
    if not text.startswith(_OURS):
        return None
    try:
        return urlsafe_b64decode(text.removeprefix(_OURS)).decode()
    except (binascii.Error, ValueError):
        return None
