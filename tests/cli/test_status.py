"""`any-agent status`: what an operator sees of a service, and what a script learns by its code."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from any_agent.cli.status import screen
from tests.support.command import typed
from tests.support.proxy import Proxy
from tests.support.router import Lab, running_lab

RUN: dict[str, Any] = {
    "trial": "exp/one",
    "parts": [
        {"name": "router", "state": "ready", "well": True},
        {"name": "rank-0", "state": "ready", "well": True, "version": 3, "open": 2, "waiting": 0,
         "calls": 5, "calls_limit": 64, "calls_rate": 1.25, "tokens_rate": 1234.5},
        {"name": "rank-1", "state": "no engine", "well": False, "version": 2},
        {"name": "trainer", "state": "ready", "well": True},
    ],
    "sessions": {"train": {"open": 2, "awaiting_reward": 1, "trained": 0}, "eval": {"open": 0}},
    "slots": {"waiting": 3, "admitted": 10, "limit": 16, "reserved": 4},
    "groups": [{"group_id": "g\x1b[31m", "members": 1, "size": 4, "closes_in": 90.0}],
    "calls_rate": None,
    "tokens_rate": 1234.5,
    "version": 2,
    "requests_running": 7,
    "waiting": "",
    "why": "for slots, 3 opens",
    "since_step": {"reward": 0.75, "sessions": 16, "dull": 8},
    "missing": [1],
    "alarms": [{"level": "bad", "what": "Rank 1 has no engine.", "do": "Read\x1b its log."}],
    "step": {"step": 12, "reward": 0.5, "staleness_mean": 0.25, "time": 0.0},
    "phases": {"wait": 3.0, "forward": 1.0, "report": 0.001},
}  # fmt: skip
EMPTY = dict.fromkeys(
    ("version", "open", "waiting", "calls", "calls_limit", "calls_rate", "tokens_rate")
)
RUN["parts"] = [{**EMPTY, **part} for part in RUN["parts"]]


def test_the_screen_shows_parts_sessions_waits_and_alarms() -> None:
    lines = list(screen(RUN, "http://x"))
    texts = [text for _, text in lines]
    assert texts[0].startswith("exp/one at http://x, ")
    assert lines[1] == ("bad", "bad       Rank 1 has no engine. Read\ufffd its log.")
    assert texts[2] == (
        "run       version 2   step 12   reward 0.5   reward of all since 0.75   "
        "staleness 0.25   calls/s -   tokens/s 1234"
    )
    table = [re.split(r" {2,}", text) for text in texts[4:9]]
    assert table[0] == ["PART", "STATE", "VERSION", "OPEN", "WAITING", "CALLS", "CALLS/S",
                        "TOKENS/S"]  # fmt: skip
    assert table[1] == ["router", "ready", "requests under way: 7"]
    assert table[2] == ["rank-0", "ready", "3", "2", "0", "5 / 64", "1.25", "1234"]
    assert table[3] == ["rank-1", "no engine", "2", "-", "-", "-", "-", "-"]
    assert table[4][:2] == ["trainer", "ready"] and table[4][2].startswith("step 12, ")
    assert [style for style, _ in lines[4:9]] == ["head", "", "", "bad", ""]
    assert texts[10:] == [
        "train     open 2, awaiting reward 1",
        "eval      no sessions",
        "missing   rank 1 gave no figures: its sessions are not in these counts",
        "waits     for slots, 3 opens",
        "slots     3 opens wait for one; since the run began 16 were given, 10 are taken, "
        "4 kept for groups",
        "group     g\ufffd[31m has 1 of 4 members, closes in 1.5 min",
        "a step    4.0 s: wait 75 %, forward 25 %",
    ]


def test_a_run_that_has_just_begun_is_shown_as_well_without_figures() -> None:
    fresh = {"alarms": [], "missing": [], "step": None, "phases": {}, "sessions": {}, "groups": []}
    lines = list(screen(RUN | fresh, "http://x"))
    assert lines[1] == ("good", "well      All parts are well.")
    texts = [text for _, text in lines]
    assert "sessions  none yet: agents open them with start_session" in texts
    assert texts[8].endswith("no step yet")


def with_trainer(state: str | None) -> dict[str, Any]:
    trainer = [{**EMPTY, "name": "trainer", "state": state, "well": True}] if state else []
    return RUN | {"parts": [*RUN["parts"][:-1], *trainer]}


def test_slots_are_shown_as_the_trainer_gives_them() -> None:
    """A service that does not train shows no waits, unless an open waits."""

    def slots(run: dict[str, Any]) -> list[str]:
        return [text for _, text in screen(run, "http://x") if text.startswith("slots")]

    for state in ("done", None):
        run = with_trainer(state)
        idle = run | {"slots": {"waiting": 0, "admitted": 1504, "limit": 0, "reserved": 0}}
        assert not slots(idle)
        assert slots(run)
    (starting,) = slots(with_trainer("starting"))
    assert "trainer" in starting and "16" not in starting


@pytest.fixture
async def lab(tmp_path: Path) -> AsyncIterator[Lab]:
    async with running_lab(tmp_path) as lab:
        yield lab


@pytest.mark.service
async def test_the_exit_code_says_whether_the_run_is_well(lab: Lab) -> None:
    status = partial(typed, "status", "--url")
    url = f"http://127.0.0.1:{lab.port}"
    said = await status(url)
    assert said.code == 0 and "All parts are well." in said.out
    said = await status(url, "--json")
    assert said.code == 0 and json.loads(said.out)["alarms"] == []
    lab.ranks[0].engine_up = False
    await asyncio.sleep(1.7)  # The router shares a look for 1.5 seconds.
    said = await status(url, "--once")
    assert said.code == 1 and "\nbad       Rank 0 has no engine" in said.out
    said = await status("http://127.0.0.1:1")
    assert (said.code, said.out) == (2, "") and "does not answer" in said.err


@pytest.mark.service
async def test_a_key_and_a_router_are_needed(tmp_path: Path, proxy: Proxy) -> None:
    status = partial(typed, "status", "--url")
    async with running_lab(tmp_path, "server.admin_key=admin-key-1") as lab:
        url = f"http://127.0.0.1:{lab.port}"
        said = await status(url)
        assert said.code == 2 and "no key was given" in said.err
        assert (await status(url, "--key", "admin-key-1")).code == 0
    said = await status(proxy.url)
    assert said.code == 2 and "not that of a rank" in said.err


@pytest.mark.service
async def test_the_live_screen_follows_the_run_and_leaves_its_last_look(lab: Lab) -> None:
    code, shown = await asyncio.to_thread(watched, f"http://127.0.0.1:{lab.port}", lab)
    assert code == 1
    assert "All parts are well." in shown
    # After the screen the last look stays.
    assert "has no engine" in shown.rpartition("\x1b[?1049l")[2]


def watched(url: str, lab: Lab) -> tuple[int, str]:
    """Watch on a terminal until an alarm is there, and press Ctrl-C."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "any_agent.cli", "status", "--url", url, "--every", "0.2"]
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    shown, pressed = b"", False
    try:
        while True:
            try:
                shown += os.read(ours, 65_536)
            except OSError:
                break
            if b"All parts are well." in shown:
                lab.ranks[0].engine_up = False
            # Once: a second one, after the screen was left, ends Python itself.
            if b"has no engine" in shown and not pressed:
                process.send_signal(signal.SIGINT)
                pressed = True
        return process.wait(30), shown.decode()
    finally:
        process.kill()
        os.close(ours)
