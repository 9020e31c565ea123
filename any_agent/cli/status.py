"""``any-agent status``: one look at a running service, or a screen that is renewed."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from any_agent.cli.operator_client import KEY_HELP, add_client_arguments, with_client
from any_agent.errors import (
    Forbidden,
    ServiceUnavailable,
    Unauthenticated,
    WrongService,
)
from any_agent.runtime.command_line import WORDS, columns, option, printable, seconds

if TYPE_CHECKING:
    from any_agent.client.rl_client import RLClient

_DESCRIPTION = """\
Show the run of a service as the dashboard's overview does: alarms in words with what to do, every
part and its load, sessions by state, why agents wait, where a step's time goes. On a terminal the
screen is renewed until Ctrl-C; elsewhere, and with --once or --json, it is printed once.
"""
_EPILOG = f"""\
The key is an operator's. {KEY_HELP}

Exit codes: 0 all is well, 1 there are alarms, 2 no service answers, the key is refused, or wrong
input. {WORDS}
"""
_STYLES = {"bad": "bold red", "warn": "yellow", "good": "green", "head": "bold", "dim": "dim"}
Line = tuple[str, str]
"""A style, "" for none, and a text."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "status",
        help="show a running service: alarms, parts, sessions, why agents wait",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = partial(option, parser)
    add("--once", "print once, also on a terminal")
    add("--every SECONDS", "time between two looks (default 2)", type=seconds, default=2.0)
    add("--json", "print JSON, once")
    add_client_arguments(parser, "an operator's")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    live = sys.stdout.isatty() and not (arguments.once or arguments.json)
    if live and find_spec("rich") is None:
        print("note: without rich (pip install rich) it is printed once", file=sys.stderr)
        live = False
    try:
        if live:
            return _live(arguments)
        return with_client(arguments, partial(_once, arguments))
    except (Forbidden, ServiceUnavailable, Unauthenticated, WrongService) as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 2


async def _once(arguments: argparse.Namespace, client: RLClient) -> int:
    run = await client.overview()
    if arguments.json:
        print(json.dumps(run))
    else:
        print("\n".join(text for _, text in screen(run, arguments.url)))
    return _code(run)


def _code(run: dict[str, Any]) -> int:
    return 1 if run["alarms"] else 0


def _live(arguments: argparse.Namespace) -> int:
    """Renew the screen until Ctrl-C; return the exit code of the last look."""
    import asyncio

    from rich.live import Live
    from rich.text import Text

    code, shown = 2, list[Line]()

    def drawn() -> Text:
        return Text("\n").join(Text(text, _STYLES.get(style, "")) for style, text in shown)

    async def watch(client: RLClient) -> int:
        nonlocal code, shown
        run = await client.overview()
        with Live(screen=True, auto_refresh=False) as live:
            while True:
                code, shown = _code(run), list(screen(run, arguments.url))
                live.update(drawn(), refresh=True)
                await asyncio.sleep(arguments.every)
                seen = shown
                while (found := await _look(client)) is None:
                    away = ("bad", "not up to date: the service does not answer")
                    code, shown = 2, [away, *(("dim", text) for _, text in seen)]
                    live.update(drawn(), refresh=True)
                    await asyncio.sleep(arguments.every)
                run = found

    try:
        return with_client(arguments, watch)
    except KeyboardInterrupt:
        print("\n".join(text for _, text in shown))
        return code


async def _look(client: RLClient) -> dict[str, Any] | None:
    """Return the overview; None while no service answers."""
    try:
        return await client.overview()
    except ServiceUnavailable:
        return None


# -- the screen ------------------------------------------------------------------------------------


def screen(run: dict[str, Any], url: str) -> Iterator[Line]:
    """Yield the lines of an overview, as `GET /rl/v1/overview` has it."""
    from any_agent.launcher.health import verdict

    step = run["step"] or {}
    yield "head", f"{run['trial']} at {url}, {time.strftime('%H:%M:%S')}"
    for alarm in run["alarms"]:
        yield alarm["level"], f"{alarm['level']:<9} {_said(alarm['what'])} {_said(alarm['do'])}"
    if not run["alarms"]:
        how = verdict(run)
        what = "All parts are well." if how == "well" else "The trainer loads its model."
        yield "good", f"{how:<9} {what}"
    figures = {
        "version": run["version"],
        "step": step.get("step"),
        "reward": step.get("reward"),
        "reward of all since": run["since_step"]["reward"],
        "staleness": step.get("staleness_mean"),
        "calls/s": run["calls_rate"],
        "tokens/s": run["tokens_rate"],
    }
    yield "", "run       " + "   ".join(f"{name} {_number(v)}" for name, v in figures.items())
    yield "", ""
    yield from _parts(run, step)
    yield "", ""
    for mode, counts in run["sessions"].items():
        some = [f"{state.replace('_', ' ')} {n}" for state, n in counts.items() if n]
        yield "", f"{mode:<9} {', '.join(some) or 'no sessions'}"
    if not run["sessions"]:
        yield "", "sessions  none yet: agents open them with start_session"
    for rank in run["missing"]:
        yield "bad", f"missing   rank {rank} gave no figures: its sessions are not in these counts"
    if run["why"]:
        yield "", f"waits     {_said(run['why'])}"
    if slots := _slots(run):
        yield "", f"slots     {slots}"
    for group in run["groups"]:
        yield (
            "",
            f"group     {_said(group['group_id'])} has {group['members']} of {group['size']} "
            f"members, closes in {_span(group['closes_in'])}",
        )
    yield from _phases(run["phases"])


def _slots(run: dict[str, Any]) -> str:
    """Describe the slots of train sessions; "" where nothing trains, or no more."""
    state = next((part["state"] for part in run["parts"] if part["name"] == "trainer"), "done")
    slots = run["slots"]
    if state == "done" and not slots["waiting"]:
        return ""
    opens = f"{slots['waiting']} opens wait for one"
    if state == "starting":
        return f"{opens}; the trainer gives them as soon as it has its model"
    return (
        f"{opens}; since the run began {slots['limit']} were given, {slots['admitted']} are taken, "
        f"{slots['reserved']} kept for groups"
    )


def _parts(run: dict[str, Any], step: dict[str, Any]) -> Iterator[Line]:
    names = ("VERSION", "OPEN", "WAITING", "CALLS", "CALLS/S", "TOKENS/S")
    rows: list[tuple[str, ...]] = [("PART", "STATE", *names)]
    notes = {"router": f"requests under way: {run['requests_running']}", "trainer": "no step yet"}
    if step:
        ago = _span(max(0.0, time.time() - step["time"])) if "time" in step else "some time"
        notes["trainer"] = f"step {step['step']}, {ago} ago"
    for part in run["parts"]:
        limit = f" / {part['calls_limit']}" if part["calls_limit"] else ""
        cells = [part["version"], part["open"], part["waiting"], part["calls"]]
        shown = [_number(value) for value in (*cells, part["calls_rate"], part["tokens_rate"])]
        shown[3] += limit
        if part["name"] in notes:
            shown = [""] * len(names)
        rows.append((part["name"], part["state"], *shown))
    head, *lines = columns(rows)
    yield "head", head
    for part, line in zip(run["parts"], lines, strict=True):
        note = notes.get(part["name"])
        yield "" if part["well"] else "bad", f"{line}  {note}" if note else line


def _phases(phases: dict[str, float]) -> Iterator[Line]:
    whole = sum(phases.values())
    if whole:
        shares = [
            f"{name} {100 * t / whole:.0f} %" for name, t in phases.items() if t / whole > 0.01
        ]
        yield "", f"a step    {_span(whole)}: {', '.join(shares)}"


def _said(text: Any) -> str:
    return printable(str(text))


def _number(value: float | None) -> str:
    """Return a number in four figures, - for none."""
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def _span(length: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if length >= size:
            return f"{length / size:.1f} {unit}"
    return f"{length:.1f} s"
