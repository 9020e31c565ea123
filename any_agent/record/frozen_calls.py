"""Calls of other models than the policy: recorded with their session, and no part of its tree."""

from __future__ import annotations

import secrets

from any_agent.types import Interaction

FROZEN_MODEL = "frozen_model"
"""Why none of them is trained on."""
_PREFIX = "frozen-"
"""What their ids begin with, and no others."""


def frozen_id() -> str:
    """A new one's."""
    return f"{_PREFIX}{secrets.token_hex(16)}"


def is_frozen(interaction: Interaction) -> bool:
    """Whether it is one of them: it has no token ids, and no parent."""
    return interaction.untrainable_reason == FROZEN_MODEL
