"""``any-agent ranks``: list, add and drain the ranks of a service that runs on this machine."""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from any_agent.errors import StartupError
from any_agent.runtime.command_line import (
    add_below,
    add_commands,
    add_trial_arguments,
    columns,
    count,
    overrides_of,
)

if TYPE_CHECKING:
    from any_agent.rundir.fleet import Fleet
    from any_agent.rundir.layout import RunDir
    from any_agent.rundir.registry import RegistryEntry

_EPILOG = (
    "The command works on the trial's folder, as the owner of the service. Exit codes: 0 done, 1 "
    "refused (the error says why, and nothing was changed) or no service runs, 2 wrong input."
)
_ANSWER_TIMEOUT = 30.0
_POLL_INTERVAL = 0.1


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    ranks = commands.add_parser(
        "ranks",
        help="list the ranks of a running service, add one, or drain one",
        epilog=_EPILOG,
    )
    below = add_commands(ranks, "ranks_command")
    add = partial(add_below, below, epilog=_EPILOG, run=run)
    add("list", "show every rank: state, weight version, sessions")
    drain = add(
        "drain",
        "let a rank end: it takes no new sessions and groups, its sessions end there and are "
        "trained on, then its engine and its proxy end",
    )
    drain.add_argument(
        "rank", metavar="N", type=count(999, least=0), help="the rank's number, as in `ranks list`"
    )
    add(
        "add",
        "start another engine and proxy; the rank serves once it has the present weights",
    )
    for parser in below.choices.values():
        # The positional arguments of one command come first.
        add_trial_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit code. Raises AnyAgentError."""
    from any_agent.auth.access import run_dir_of
    from any_agent.config import load_config
    from any_agent.rundir.fleet import load_fleet

    run_dir = run_dir_of(load_config(arguments.config, overrides_of(arguments)))
    run_dir.check_format()
    fleet = load_fleet(run_dir.fleet)
    if fleet is None:
        raise StartupError(
            f"there is no service of a trial at {run_dir.path}; name it with root=, --experiment "
            "and --trial"
        )
    if arguments.ranks_command == "list":
        return _list(arguments, run_dir, fleet)
    return _command(arguments, run_dir)


def _list(arguments: argparse.Namespace, run_dir: RunDir, fleet: Fleet) -> int:
    from any_agent.rundir.registry import SILENT_AFTER, rank_name, read_entry, read_stamp

    running = run_dir.in_use()
    found = []
    for rank in fleet.ranks:
        stamp = read_stamp(run_dir.registry, rank_name(rank))
        # The machine's clock and a file server's may differ by a little.
        heard = stamp is not None and time.time() - stamp[0] / 1e9 < SILENT_AFTER
        entry = read_entry(run_dir.registry, rank_name(rank)) if running and heard else None
        found.append(_fields(rank, fleet, entry))
    if arguments.json:
        print(json.dumps(found))
        return 0
    rows = [tuple(name.upper() for name in found[0])]
    rows += [tuple("-" if value is None else str(value) for value in row.values()) for row in found]
    print("\n".join(columns(rows)))
    if not running:
        print("no service of this trial runs now")
    return 0


def _fields(rank: int, fleet: Fleet, entry: RegistryEntry | None) -> dict[str, Any]:
    """Return what is shown of a rank; without an entry it is away."""
    return {
        "rank": rank,
        "state": fleet.state(rank),
        "version": entry.version if entry else None,
        "open": entry.load.open if entry else None,
        "calls": entry.load.calls if entry else None,
        "unfinished": entry.unfinished if entry else None,
        "url": entry.url if entry else None,
    }


def _command(arguments: argparse.Namespace, run_dir: RunDir) -> int:
    import getpass
    import uuid

    from any_agent.launcher.fleet_control import RanksAnswer, RanksRequest, exchange_paths
    from any_agent.runtime.atomic_files import write_atomic

    none_runs = StartupError(
        f"no service of {run_dir.path} runs on this machine: its number of ranks is server.ranks "
        "at the next start"
    )
    if not run_dir.in_use():
        raise none_runs
    rank = getattr(arguments, "rank", None)
    request = RanksRequest(action=arguments.ranks_command, rank=rank, who=getpass.getuser())
    asked, answered = exchange_paths(run_dir, uuid.uuid4().hex)
    write_atomic(asked, request.model_dump_json())
    deadline = time.monotonic() + _ANSWER_TIMEOUT
    try:
        while not answered.exists():
            if not run_dir.in_use():
                raise none_runs
            if time.monotonic() > deadline:
                raise StartupError(
                    f"the service has not answered within {_ANSWER_TIMEOUT:g} s, so the request "
                    "is withdrawn: it starts, or its launcher hangs; try again"
                )
            time.sleep(_POLL_INTERVAL)
        answer = RanksAnswer.model_validate_json(answered.read_bytes())
    finally:
        asked.unlink(missing_ok=True)
        answered.unlink(missing_ok=True)
    if not answer.done:
        raise StartupError(answer.message)
    print(answer.model_dump_json() if arguments.json else answer.message)
    return 0
