"""``any-agent sessions prune``: its arguments.

`proxy_ext.export.prune`, which writes journals and archives, does the work. As a part of the proxy
it is another program, which replaces this one.
"""

from __future__ import annotations

import argparse
from functools import partial

from any_agent.runtime.command_line import (
    add_program,
    add_trial_arguments,
    duration,
    option,
)

SETTLED = ("trained", "rejected", "evaluated", "expired", "aborted")
_DESCRIPTION = """\
Remove the content of sessions that ended long ago from a trial's journals and archives: their
calls, texts and tokens. Without --apply it is a dry run, which prints what would go, and its bytes.
The service of the trial must be stopped.
"""
_EPILOG = f"""\
Only settled sessions go: {", ".join(SETTLED)}. Of those
that a step of the training took, only the ones go that a resume from the oldest kept checkpoint
does not need. Their rows stay, so that states, counts, rewards and closed groups remain right; no
export has the sessions any more.

A running service keeps to sessions.keep_hours and sessions.archive_bytes by itself. Single sessions
of it go by `any-agent sessions delete`.

Exit codes: 0 done, 1 not done, 2 wrong input.
"""


def add_parser(below: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    add_program(
        below,
        "prune",
        "proxy_ext.export.prune",
        add_prune_arguments,
        help="remove the content of settled sessions of a stopped trial, or show what would go",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )


def add_prune_arguments(parser: argparse.ArgumentParser) -> None:
    add = partial(option, parser)
    add(
        "--older-than AGE",
        "only sessions that ended at least this long ago: 90m, 12h, 30d",
        type=duration,
        required=True,
    )
    add("--state STATE", "only sessions in this state (repeatable)", action="append", type=_settled)
    add("--apply", "remove them; without it nothing changes")
    add("--json", "print JSON")
    add_trial_arguments(parser)


def _settled(text: str) -> str:
    if text in ("open", "awaiting_reward", "finalized", "leased"):
        raise argparse.ArgumentTypeError(
            f"{text} sessions are not settled: abort or veto them first (any-agent sessions abort, "
            "veto), or let the training take them"
        )
    if text not in SETTLED:
        raise argparse.ArgumentTypeError(f"{text!r} is no state: choose {', '.join(SETTLED)}")
    return text
