"""The arguments of ``any-agent keys``; `any_agent.keys_commands` does what they ask for."""

from __future__ import annotations

import argparse
import re

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
LIMITS = ("open_sessions", "requests_per_second", "tokens_per_second")
_EPILOG = (
    "A service that runs follows within two seconds. Exit codes: 0 done, 1 not done (no such key "
    "or trial, a file that cannot be written), 2 wrong input."
)


def add_keys_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The parsers of ``keys`` and of what is below it."""
    keys = commands.add_parser(
        "keys",
        help="make, list and revoke keys of operators, trainers and tenants; rotate secrets",
        epilog=_EPILOG,
    )
    below = keys.add_subparsers(
        dest="keys_command", required=True, metavar="COMMAND", help="what to do"
    )
    _add_create(below)
    _add(below, "list", "show every key: id, scope, tenant, state, limits; never the key itself")
    _add(below, "revoke", "make a key void; a tenant's open sessions go on with their own keys")
    rotate = _add(
        below,
        "rotate",
        "sign session keys with a new secret; those signed by earlier ones stay good",
    )
    rotate.add_argument(
        "--drop-old", action="store_true", help="earlier session keys are void, too"
    )


def _add_create(below: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    create = _add(below, "create", "make a key and print it, this once")
    create.add_argument(
        "--scope",
        required=True,
        choices=("admin", "trainer", "tenant"),
        help="what it is good for",
    )
    create.add_argument("--tenant", metavar="NAME", help="whose it is; for --scope tenant")
    for limit in LIMITS:
        create.add_argument(
            f"--{limit.replace('_', '-')}",
            type=_whole if limit == "open_sessions" else _number,
            metavar="N",
            help="what the tenant may have of the whole service; default: server.tenant_" + limit,
        )
    create.add_argument(
        "--expires-in", type=_seconds, metavar="TIME", help="like 90s, 12h or 30d; default: never"
    )


def _add(
    below: argparse._SubParsersAction[argparse.ArgumentParser], name: str, help: str
) -> argparse.ArgumentParser:
    parser = below.add_parser(name, help=help, description=help, epilog=_EPILOG)
    if name == "revoke":
        parser.add_argument("id", metavar="ID", help="as `any-agent keys list` shows it")
    parser.add_argument("--config", metavar="FILE", help="YAML settings")
    parser.add_argument("--experiment", metavar="NAME", help="short for experiment=NAME")
    parser.add_argument("--trial", metavar="NAME", help="short for trial=NAME")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "overrides",
        nargs="*",
        default=(),
        metavar="key=value",
        help="any setting, e.g. root=FOLDER",
    )
    parser.set_defaults(run=_run)
    return parser


def _run(arguments: argparse.Namespace) -> int:
    from any_agent.keys_commands import run

    return run(arguments)


def _whole(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _seconds(text: str) -> float:
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smhd])", text)
    if match is None or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no time with its unit, like 90s, 12h or 30d")
    return float(match[1]) * _SECONDS[match[2]]
