"""The arguments of ``any-agent export``.

`proxy_ext.export` does the work: it knows the journals. As everything of the proxy it is another
program, and is started in this one's place.
"""

from __future__ import annotations

import argparse
import datetime
import math
import os
import sys
import time

_DESCRIPTION = """\
Write what was recorded as JSON lines: journals and archives of all ranks, whether the service runs
or not. Each session comes once, in the order of creation. Nothing is leased or changed.
"""
_EPILOG = """\
Without --style each line is a session: number, session (id, state, metadata, step, ...), rewards
(every one that was ever set, by whom and when) and interactions (ids, logprobs, versions, messages;
each holds what it adds to its parent). With a style each line is a row, its reward run back through
the session's tree: individual and concat give session_id, interaction_id, group_id, task_id, state,
step, input_ids, loss_mask, logprobs, versions, attention_mask, rewards; messages gives messages and
tools of each conversation instead of the last six, and its reward. In a session that nobody has
rewarded (open, aborted, rejected for want of a reward) rewards and reward are null, not 0; where a
session has any, calls without one of their own count as 0.

--out replaces a plain file when all is written, and keeps what it held if that fails; a pipe or a
device is written to as it goes.

Exit codes: 0 all of it was written, 1 something could not be (damaged, missing, or no exact token
sequence for --style concat; standard error says what), 2 wrong input, 141 the reader left.
"""


def add_export_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The parser of ``export``."""
    parser = commands.add_parser(
        "export",
        help="write recorded sessions as JSON lines, from journals and archives",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_export_arguments(parser)
    parser.set_defaults(run=_run)


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """What may be asked for."""
    add = parser.add_argument
    add("--config", metavar="FILE", help="YAML settings")
    add("--experiment", metavar="NAME", help="short for experiment=NAME")
    add("--trial", metavar="NAME", help="short for trial=NAME")
    add("--rank", type=_whole, action="append", metavar="N", help="only this rank's (repeatable)")
    add(
        "--state",
        action="append",
        choices=_STATES,
        metavar="STATE",
        help=f"only sessions in this state (repeatable): {', '.join(_STATES)}",
    )
    add("--task", metavar="ID", help="only sessions of this task_id")
    add(
        "--since",
        type=_moment,
        metavar="TIME",
        help="only sessions opened since then: 2026-01-31, 2026-01-31T12:00, or like 90m, 12h, 7d; "
        "a time without a zone is local",
    )
    add(
        "--style",
        choices=("individual", "concat", "messages"),
        help="rows: a model call each, a token-exact conversation each, or its messages",
    )
    add(
        "--discount",
        type=_discount,
        metavar="X",
        help="of rewards, per turn, with --style; default: the run's train.discount",
    )
    add("--out", default="-", metavar="FILE", help="default: - (standard output)")
    add(
        "overrides",
        nargs="*",
        default=(),
        metavar="key=value",
        help="any setting, e.g. root=FOLDER",
    )


def _run(_: argparse.Namespace) -> int:
    # Children find the packages that this process found, installed or not.
    os.environ.setdefault("PYTHONPATH", os.pathsep.join(p for p in sys.path if p))
    arguments = sys.argv[sys.argv.index("export") + 1 :]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "proxy_ext.export", *arguments])


_STATES = (
    *("open", "awaiting_reward", "finalized", "leased", "trained", "rejected", "evaluated"),
    *("expired", "aborted"),
)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or len(text) > 6:
        raise argparse.ArgumentTypeError(f"{text!r} is no rank: it is a whole number from 0")
    return int(text)


def _discount(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return value


def _moment(text: str) -> float:
    """Seconds since the epoch."""
    number, unit = text[:-1], text[-1:]
    if unit in _SECONDS and number.isascii() and number.isdecimal():
        return time.time() - int(number) * _SECONDS[unit]
    try:
        return datetime.datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no time: write it like 2026-01-31T12:00, 90m, 12h or 7d"
        ) from None
