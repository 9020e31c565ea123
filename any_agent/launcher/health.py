"""The console's line on how a running service goes, from the overview that the dashboard shows."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self, TextIO

from any_agent.launcher.process import DIRECT
from any_agent.launcher.training_progress import all_before, describe_all
from any_agent.runtime.command_line import printable

INTERVAL = 1.0  # seconds from one look to the next; the overview is made anew less often
_TIMEOUT = 4.0
_MISSED = 2  # looks in a row without an answer that are a change: a router may be restarting
_PLAIN_INTERVAL = 60.0  # seconds between two lines where nothing is rewritten
_SETTLED = 5.0  # seconds after an event until the overview has its figures
_PART = re.compile(r"[Rr]ank[ -]\d+")
_UNDECIDED = ("open", "awaiting_reward")


class Console:
    """Prints lines, and below them, on a terminal, one line that is rewritten."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = sys.stdout if out is None else out
        self.live = self._out.isatty() and os.environ.get("TERM") != "dumb"
        self._lock = threading.Lock()
        self._shown = False

    def say(self, line: str) -> None:
        """Print a line; a full disk behind the output ends nothing."""
        with self._lock, suppress(OSError):
            self._erase()
            print(line, file=self._out, flush=True)

    def show(self, line: str) -> None:
        """Rewrite the last line, cut to the terminal's width."""
        if self.live:
            width = shutil.get_terminal_size().columns
            with self._lock, suppress(OSError):
                self._erase()
                self._out.write(line[: width - 1])
                self._out.flush()
                self._shown = True

    def clear(self, _: object = None) -> bool:
        """Erase the rewritten line, for lines of others, such as a log's; return True, as a log
        handler's filter does."""
        with self._lock, suppress(OSError):
            self._erase()
            self._out.flush()
        return True

    def _erase(self) -> None:
        if self._shown:
            self._out.write("\r\x1b[2K")
            self._shown = False


@dataclass(frozen=True, slots=True)
class Health:
    """One look at the service."""

    line: str
    alarms: tuple[str, ...] = ()
    """A line for each alarm."""
    kind: tuple[str, ...] = ()
    """The alarms' remedies and parts without figures: equal as long as the health is the same."""


def describe_health(run: Mapping[str, Any], steps: int) -> Health:
    """Describe an overview, as `GET /rl/v1/overview` has it.

    ``steps`` is the number of the training's steps; 0: nothing is to be trained.
    """
    alarms = run["alarms"]
    counts = list(run["sessions"].values())
    opened = sum(states.get("open", 0) for states in counts)
    finished = sum(n for states in counts for name, n in states.items() if name not in _UNDECIDED)
    cells = [
        verdict(run, trains=steps > 0),
        f"{opened} open, {run['slots']['waiting']} waiting, {finished} finished",
    ]
    if reward := _reward(run, steps):
        cells.append(reward)
    if run["why"]:
        cells.append(f"waits {run['why']}")
    if run["version"] is not None:
        cells.append(f"version {run['version']}")
    if run["calls_rate"] is not None:
        cells.append(f"{run['calls_rate']:.1f} calls/s")
    return Health(
        printable(f"now       {'  '.join(cells)}"),
        tuple(printable(f"{a['level']:<9} {a['what']} {a['do']}") for a in alarms),
        tuple(sorted(f"{a['level']} {a['do']} {_PART.findall(a['what'])}" for a in alarms)),
    )


def verdict(run: Mapping[str, Any], *, trains: bool = False) -> str:
    """Return the health of an overview in a word, or two; ``trains``: it is to have a trainer."""
    alarms = run["alarms"]
    if not alarms:
        states = [part["state"] for part in run["parts"] if part["name"] == "trainer"]
        return "starting" if "starting" in states or (trains and not states) else "well"
    return f"{alarms[0]['level']}, {len(alarms)} alarm{'s' if len(alarms) > 1 else ''}"


def _reward(run: Mapping[str, Any], steps: int) -> str:
    """Return the last step's reward beside that of all sessions since; "" before any."""
    step, since = run["step"] or {}, run["since_step"]
    last = f"/{steps}" if steps else ""
    text = f"step {step['step']}{last} reward {step['reward']:.3f}" if step else ""
    if since["sessions"]:
        return f"{text}, since then {describe_all(since)}" if step else describe_all(since)
    return text + all_before(step)


class HealthWatch:
    """Looks at the service every second, in a thread, until the context ends."""

    def __init__(self, url: str, key: Callable[[], str], steps: int) -> None:
        self._url = url
        self._key = key
        self._steps = steps
        self._ended = threading.Event()
        self.latest: Health | None = None
        """The last look; a new object after each one."""

    def __enter__(self) -> Self:
        threading.Thread(target=self._run, name="health", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _run(self) -> None:
        missed = 0
        while not self._ended.is_set():
            try:
                self.latest, missed = describe_health(self._look(), self._steps), 0
            except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
                missed += 1
                if missed >= _MISSED:
                    text = f"bad, the service does not answer at {self._url}"
                    do = "bad       It is started again by itself; logs/router.log has the reason."
                    self.latest = Health(f"now       {text}", (do,), (do,))
            self._ended.wait(INTERVAL)

    def _look(self) -> dict[str, Any]:
        """Return the overview. Raises OSError or HTTPException without one, ValueError for what is
        none."""
        request = urllib.request.Request(
            f"{self._url}/rl/v1/overview", headers={"Authorization": f"Bearer {self._key()}"}
        )
        with DIRECT.open(request, timeout=_TIMEOUT) as response:
            found = json.load(response)
        if not isinstance(found, dict):
            raise ValueError("the overview is no object")
        return found


class HealthReport:
    """Says what has changed. ``show``, on a terminal, gets the line that is rewritten."""

    def __init__(
        self,
        say: Callable[[str], None],
        show: Callable[[str], None] | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say = say
        self._show = show
        self._clock = clock
        self._seen: Health | None = None
        self._kind: tuple[str, ...] | None = None
        self._said = ("", 0.0)
        """The last line without a terminal, and when it was said."""

    def renew(self) -> None:
        """Say the figures again soon: what was said is of before an event, as the last step."""
        line, _ = self._said
        self._said = (line, self._clock() - _PLAIN_INTERVAL + _SETTLED)

    def update(self, now: Health | None) -> None:
        """Take the latest look: a change of health is said at once, figures only now and then."""
        if now is None or now is self._seen:
            return
        before, self._seen, self._kind = self._kind, now, now.kind
        changed = now.kind != before
        if self._show is None:
            line, at = self._said
            due = self._clock() - at >= _PLAIN_INTERVAL and now.line != line
            if changed or due:
                self._said = (now.line, self._clock())
                self._say(now.line)
        if changed:
            for alarm in now.alarms or (["well      All parts are well again."] if before else []):
                self._say(alarm)
        if self._show is not None:
            self._show(now.line)
