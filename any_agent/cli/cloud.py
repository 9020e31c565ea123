"""``any-agent cloud``: a service for many accounts, which starts a run for each training."""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

from any_agent.errors import ConfigError
from any_agent.runtime.command_line import WORDS, option, require_installed

_DESCRIPTION = """\
Serve many accounts at one URL: an account has a key and nothing else, points an agent here, and a
run is started for it, queued while no place is free, stopped while nothing asks for it, and started
again where it was. docs/how-to/run-a-service.md has the file and the routes.

`any-agent cloud usage --config FILE` prints what the accounts of the cloud that runs have used.
"""
_ABOUT = ("account", "run", "experiment", "trial", "deleted", "day")
_USAGE_ONLY = ("from", "to", "account", "csv")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "cloud",
        help="serve many accounts at one URL, with a run for each of their trainings",
        description=_DESCRIPTION,
        epilog=WORDS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "what", nargs="?", choices=("serve", "usage"), default="serve", help="default: serve"
    )
    option(parser, "--config FILE", "the YAML of models, presets and limits", required=True)
    option(parser, "--from DAY", "usage: the first day, like 2026-11-30, by UTC (default: all)")
    option(parser, "--to DAY", "usage: the last day, included (default: all)")
    option(parser, "--account NAME", "usage: of this account alone")
    option(parser, "--csv", "usage: print CSV, a line for each day of a run; default: JSON")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    given = vars(arguments)
    if arguments.what == "usage":
        return _usage(arguments.config, {name: given[name] for name in _USAGE_ONLY})
    if wrong := [f"--{name}" for name in _USAGE_ONLY if given[name]]:
        raise ConfigError(f"{', '.join(wrong)}: only for any-agent cloud usage")
    require_installed("train")
    sys.stdout.flush()
    command = [sys.executable, "-m", "router.cloud", "--config", arguments.config]
    os.execv(sys.executable, command)


def _usage(path: str, given: dict[str, Any]) -> int:
    """Print what the accounts of the cloud that runs with this file have used."""
    import asyncio

    from any_agent.client.rl_client import RLClient
    from any_agent.config.cloud import load_cloud
    from any_agent.runtime.ports import reachable, url_of

    config = load_cloud(path)
    server, as_csv = config.server, given.pop("csv")
    url = url_of(reachable(server.host), server.port) if server.port else server.public_url
    if url is None:
        raise ConfigError(f"{path}: server.port is 0 and there is no server.public_url to ask")
    query = urlencode({name: text for name, text in given.items() if text is not None})

    async def ask() -> dict[str, Any]:
        key = config.admin_key.get_secret_value()
        async with RLClient(url, admin_key=key, timeout=120.0, retry_for=2.0) as client:
            answer = await client.request("GET", f"/usage?{query}", repeatable=True)
            return dict(json.loads(answer.content))

    used = asyncio.run(ask())
    if as_csv:
        lines = csv.writer(sys.stdout, lineterminator="\n")
        lines.writerows(_rows(used))
    else:
        print(json.dumps(used, indent=1))
    return 0


def _rows(used: dict[str, Any]) -> Iterator[list[Any]]:
    """Yield the lines of a CSV, the names of its columns first."""
    yield [*_ABOUT, *used["total"]]
    for account in used["accounts"]:
        for run in account["runs"]:
            about = (account["account"], run["id"], run["experiment"], run["trial"], run["deleted"])
            for day in run["days"]:
                yield [*about, day["day"], *(day[name] for name in used["total"])]
