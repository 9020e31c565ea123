"""What a wait for trajectories waits for, in words."""

from __future__ import annotations

from any_agent.protocol.rl import Capacity, Unfilled

_NAMED = 3
"""Groups that are told of one by one."""


def describe_waiting(now: Capacity) -> str:
    """Sessions that are open or asked for, and groups that wait for members."""
    if not (now.running or now.waiting or now.unfilled):
        return "no agent has a session open, or waits for one"
    there = [f"{now.running} open", f"{now.waiting} asked for"]
    return ", ".join(there) + "".join(f"; {_told(group)}" for group in now.unfilled[:_NAMED])


def _told(group: Unfilled) -> str:
    return (
        f"group {group.group_id} has {group.members} of {group.size} sessions, and up to "
        f"{group.closes_in:.0f} s for the others (sessions.group_timeout)"
    )
