"""Who has a session: a trainer, an export, or whoever granted it."""

from __future__ import annotations

from any_agent.types import SessionState
from proxy_ext.journal import SessionRow

EXPORT_OWNER = "export"
"""Holds what `export_trajectories` leased; a trainer does not take these back."""
GRANT_OWNER = "grant"
"""Has what was opened on a grant, until its end: whoever granted it exports it, and polls never get
it."""


NO_PLACE = "no-place"
"""Of what was aborted with `keep_place`: it is no member of its group any more, in which another
session takes its place. Nobody has it."""


def handed_out(row: SessionRow) -> bool:
    """Whether a trainer has had it, and it waits again.

    A step may have taken it that was killed before it could say so: then a resume makes that step
    again, as it was, and nothing of it must have changed.
    """
    return row.state is SessionState.FINALIZED and row.owner not in (None, GRANT_OWNER)


def for_export(row: SessionRow) -> bool:
    """Whether an export has it, or nobody but an export may."""
    return row.owner in (EXPORT_OWNER, GRANT_OWNER)


def holds(row: SessionRow, owner: str) -> bool:
    """Whether this is its lease's holder, if it is leased."""
    return row.owner == owner or (owner == EXPORT_OWNER and row.owner == GRANT_OWNER)
