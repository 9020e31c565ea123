"""The reasons that a trainer gives for leaving out a session, in words."""

from __future__ import annotations

_REASONS = {
    "zero_variance": "zero_variance: taught nothing, its group scored alike",
    "group_too_small": "group_too_small: its group had too few members",
    "untrainable": "untrainable: none of its calls can be trained on",
    "stale": "stale: all of its tokens were too old",
    "truncated": "truncated: all of its outputs were cut off (train.mask_truncated)",
    "too_long": "too_long: one of its rows is above train.max_row_tokens or the model's context",
    "unusable": "unusable: the trainer cannot compute it; its log says why",
}
"""Reasons that the trainer gives, with what they mean."""


def reason_text(reason: str | None) -> str:
    """Return the reason for a session's state in words, "" without any."""
    return _REASONS.get(reason, reason) if reason else ""
