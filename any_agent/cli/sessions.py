"""``any-agent sessions``: list, follow, show, abort, veto, delete or prune sessions."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from any_agent.cli import prune
from any_agent.cli.operator_client import KEY_HELP, add_client_arguments, with_client
from any_agent.errors import (
    AnyAgentError,
    ConfigError,
    Forbidden,
    ServiceUnavailable,
    Unauthenticated,
)
from any_agent.runtime.command_line import (
    WORDS,
    add_commands,
    count,
    moment,
    number,
    option,
    printable,
    seconds,
)
from any_agent.runtime.reasons import reason_text

if TYPE_CHECKING:
    from pydantic import BaseModel

    from any_agent.client.rl_client import RLClient
    from any_agent.protocol.rl import SessionInfo, SessionLine

_EPILOG = (
    f"The key is an operator's or a tenant's. {KEY_HELP} Exit codes: 0 done, 1 not done (standard "
    f"error says why), 2 wrong input. {WORDS}"
)
_LISTED = (
    ". STEP is the step that trained on it, or left it out; NOTE says why, if it taught nothing. "
    "REWARDS is the number of rewards ever set, revisions included; FINAL is the session's final "
    "reward; - means none, ? means that the journal does not hold it any more."
)
_TAIL = (
    ". A session ends when its agent does: it is finalized (with its reward, if it awaits one), "
    "aborted or expired. REWARD is the sum of its final reward and its calls' own; TURNS "
    "are its calls, TOKENS those that they sampled."
)
_SHOWN = ". docs/reference/http-api.md has its fields: SessionDetails."
_ACTIONS = {
    "abort": ("abort open sessions and their calls", "aborted by the operator"),
    "veto": ("keep finalized sessions out of training", "vetoed by the operator"),
    "delete": ("erase the records of sessions permanently", None),
}
_COLUMNS = (
    *("SESSION", "STATE", "MODE", "CALLS", "REWARDS", "FINAL", "STEP", "AGE"),
    *("GROUP OR TASK", "NOTE"),
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    sessions = commands.add_parser(
        "sessions",
        help="list, follow, show, abort, veto or delete the sessions of a running service; prune "
        "those of a stopped one",
        epilog=_EPILOG,
    )
    below = add_commands(sessions, "sessions_command")
    shown = _add(
        below, "list", "list sessions, newest first, including those that have ended", _LISTED
    )
    follow = _add(below, "tail", "print sessions as they end, one line each, until Ctrl-C", _TAIL)
    for parser, state in ((shown, "open"), (follow, "finalized")):
        add = partial(option, parser)
        add("--state STATE", f"only sessions in this state, e.g. {state}")
        add("--task ID", "only sessions of this task_id")
        add("--group ID", "only sessions of this group")
        add("--tenant NAME", "only this tenant's sessions")
    add("--min-reward X", "only sessions with at least this reward", type=number)
    add("--max-reward X", "only sessions with at most this reward", type=number)
    add("--every SECONDS", "time between two looks (default 2)", type=seconds, default=2.0)
    follow.set_defaults(action=_tail)
    add = partial(option, shown)
    add("--reason TEXT", "only sessions whose reason has this text, in any case")
    since = "only sessions opened since then, like 90m, 12h, 7d or 2026-01-31T12:00"
    add("--since TIME", since, type=moment)
    limit = count(10**9, least=0)
    add("--limit N", "list at most N sessions (default 50); 0: all", type=limit, default=50)
    shown.set_defaults(action=_list)
    show = _add(below, "show", "show every detail of sessions, with their rewards", _SHOWN)
    show.add_argument("ids", nargs="+", metavar="ID")
    show.set_defaults(action=_show)
    for name, (help, reason) in _ACTIONS.items():
        parser = _add(below, name, help)
        parser.add_argument("ids", nargs="+", metavar="ID")
        if reason is not None:
            text = f"the recorded reason (default: {reason})"
            option(parser, "--reason TEXT", text, default=reason)
        parser.set_defaults(action=_change)
    prune.add_parser(below)


def _add(
    below: argparse._SubParsersAction[argparse.ArgumentParser], name: str, help: str, more: str = ""
) -> argparse.ArgumentParser:
    parser = below.add_parser(name, help=help, description=f"{help}{more}", epilog=_EPILOG)
    add_client_arguments(parser, "an operator's or a tenant's")
    option(parser, "--json", "print JSON, one line for each session")
    parser.set_defaults(run=_run)
    return parser


def _run(arguments: argparse.Namespace) -> int:
    action: Callable[[RLClient, argparse.Namespace], Awaitable[int]] = arguments.action
    return with_client(arguments, lambda client: action(client, arguments))


async def _list(client: RLClient, arguments: argparse.Namespace) -> int:
    from any_agent.protocol.rl import ListSessions

    filters = {
        "state": arguments.state,
        "task_id": arguments.task,
        "group_id": arguments.group,
        "tenant": arguments.tenant,
        "reason": arguments.reason,
        "created_after": arguments.since,
        "limit": min(arguments.limit or 1000, 1000),
    }
    _check(ListSessions, filters)
    away: set[str] = set()
    rows: list[tuple[str, ...]] = []
    widths: list[int] = []
    left = arguments.limit or float("inf")
    async for line in client.sessions(missing=away.add, **filters):
        if arguments.json:
            print(line.model_dump_json())
        else:
            rows.append(_row(line))
        if len(rows) >= 100:
            rows, widths = [], _print_rows(rows, widths)
        left -= 1
        if left <= 0:
            break
    if rows:
        _print_rows(rows, widths)
    elif not arguments.json and not widths:
        print("no sessions", file=sys.stderr)
    if away:
        print(
            f"warning: rank {', '.join(sorted(away))} did not answer, its sessions are missing",
            file=sys.stderr,
        )
    return 1 if away else 0


def _check(model: type[BaseModel], fields: dict[str, Any]) -> None:
    """Raise ConfigError for options that the service would refuse."""
    from pydantic import ValidationError

    try:
        model(**fields)
    except ValidationError as error:
        problem = error.errors()[0]
        option = str(problem["loc"][0]).removesuffix("_id")
        raise ConfigError(f"--{option}: {problem['msg']}") from None


async def _tail(client: RLClient, arguments: argparse.Namespace) -> int:
    from any_agent.cli.tail import tail
    from any_agent.protocol.rl import ListSessions

    filters = {
        "task_id": arguments.task,
        "group_id": arguments.group,
        "tenant": arguments.tenant,
    }
    _check(ListSessions, filters | {"state": arguments.state})
    return await tail(client, filters, arguments)


async def _show(client: RLClient, arguments: argparse.Namespace) -> int:
    async def show(id: str) -> None:
        details = await client.session_details(id)
        if arguments.json:
            print(details.model_dump_json())
            return
        for name, value in details.model_dump(exclude={"rewards", "reward_history"}).items():
            if value is not None and value != {}:
                print(f"{name + ':':<17} {printable(_readable(name, value))}")
        for entry in details.reward_history:
            target = entry.interaction_id or "the session"
            name = f" ({entry.name})" if entry.name else ""
            value = "words" if entry.value is None else f"{entry.value:g}"
            said = "" if entry.text is None else f": {printable(entry.text)}"
            print(
                f"{'reward:':<17} {value}{name} for {target}, by {printable(entry.by)} at "
                f"{_date(entry.at)}{said}"
            )
        if details.content == "archived":
            print("                  `any-agent export` shows its calls and rewards")

    return await _each(arguments.ids, show)


async def _change(client: RLClient, arguments: argparse.Namespace) -> int:
    from any_agent.protocol.rl import Abort

    name = arguments.sessions_command
    if name != "delete":
        _check(Abort, {"reason": arguments.reason})

    async def change(id: str) -> None:
        done: SessionInfo
        if name == "delete":
            done = await client.delete_session(id)
        elif name == "veto":
            done = await client.veto_session(id, arguments.reason)
        else:
            done = await client.abort_session(id, arguments.reason)
        if arguments.json:
            print(done.model_dump_json())
        else:
            gone = ", its content deleted" if done.content == "deleted" else ""
            print(f"{done.session_id} is {done.state}{gone}")

    return await _each(arguments.ids, change)


async def _each(ids: list[str], act: Callable[[str], Awaitable[None]]) -> int:
    """Act on every session, also after one has failed; return the exit code."""
    code = 0
    for id in ids:
        try:
            await act(id)
        except (ConfigError, Forbidden, ServiceUnavailable, Unauthenticated):
            # The other sessions would fail in the same way.
            raise
        except AnyAgentError as error:
            print(f"error: {error.message}", file=sys.stderr)
            code = 1
    return code


def _print_rows(rows: list[tuple[str, ...]], widths: list[int]) -> list[int]:
    """Print rows in columns of at least these widths, the first ones below a heading.

    Returns the columns' widths.
    """
    if not widths:
        rows = [_COLUMNS, *rows]
    own = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths = list(map(max, own, widths or own))
    for row in rows:
        print("  ".join(map(str.ljust, row, widths)).rstrip())
    return widths


def _row(line: SessionLine) -> tuple[str, ...]:
    notes = [reason_text(line.reason)]
    if line.tenant is not None:
        notes.insert(0, f"tenant {line.tenant}")
    if line.content != "stored":
        notes.append(line.content)
    return (
        line.session_id,
        line.state,
        line.mode,
        "?" if line.content != "stored" else str(line.interactions),
        _reward_count(line),
        "-" if line.final_reward is None else f"{line.final_reward:g}",
        "-" if line.step is None else str(line.step),
        age(time.time() - line.created_at),
        printable(line.group_id or line.task_id or "-"),
        printable(", ".join(filter(None, notes))),
    )


def _reward_count(line: SessionLine) -> str:
    """Return the number of rewards; an archived session's rewards are in its archive."""
    if line.rewards_given is None:
        return "?"
    return str(line.rewards_given or "-")


def age(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f}{unit}"
    return f"{max(0.0, seconds):.0f}s"


def _readable(name: str, value: Any) -> str:
    if name.endswith("_at"):
        return _date(value)
    if name == "reason":
        return reason_text(value)
    if name.endswith("_in"):
        return f"{value:.0f} s"
    if name == "roles":
        return ", ".join(f"{number} of {role or 'no name'}" for role, number in value.items())
    if isinstance(value, dict):
        text = ", ".join(f"{number} {reason}" for reason, number in value.items())
        return f"{text} (docs/reference/calls.md has the reasons)"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _date(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))
