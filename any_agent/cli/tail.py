"""``any-agent sessions tail``: sessions of a running service as they end, one line each."""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import time
from typing import TYPE_CHECKING, Any

from any_agent.errors import NotFound, ServiceUnavailable
from any_agent.keys import rank_of_session
from any_agent.runtime.command_line import printable
from any_agent.runtime.reasons import reason_text

if TYPE_CHECKING:
    from any_agent.client.rl_client import RLClient
    from any_agent.protocol.rl import SessionDetails

_GOES_ON = ("open", "awaiting_reward")
_SLACK = 10.0
"""Seconds by which ranks' clocks, and so the order of their sessions, may differ."""
_AT_ONCE = 8  # sessions that are read at the same time
_WIDTHS = (9, 15, 5, 8, 5, 7, 20)
_COLUMNS = ("ENDED", "STATE", "MODE", "REWARD", "TURNS", "TOKENS", "SESSION", "GROUP OR TASK, NOTE")


class Endings:
    """Finds the sessions that have ended since the last look.

    It keeps the ids of the sessions that go on, and of those that began lately.
    """

    def __init__(self, client: RLClient, filters: dict[str, Any]) -> None:
        self._client = client
        self._filters = filters
        self._running: set[str] = set()
        self._lately: dict[str, float] = {}
        """When each session began that is known, of the newest ones."""
        self.missing: set[str] = set()
        """The ranks that did not answer at the last look."""

    async def begin(self) -> None:
        """Take what has ended before as known."""
        await self._begun()
        self._running = await self._going_on()

    async def look(self) -> list[SessionDetails]:
        """Return the sessions that have ended since the last look, in the order of their ends."""
        self.missing.clear()
        candidates = self._running | await self._begun()
        self._running = await self._going_on()
        away = {id for id in candidates if str(rank_of_session(id)) in self.missing}
        self._running |= away
        room = asyncio.Semaphore(_AT_ONCE)

        async def read(id: str) -> SessionDetails | None:
            async with room:
                return await self._ended(id)

        ended = await asyncio.gather(*map(read, sorted(candidates - self._running)))
        return sorted(filter(None, ended), key=lambda one: one.ended_at or math.inf)

    async def _begun(self) -> set[str]:
        """Return the sessions that have begun since the last call."""
        found: dict[str, float] = {}
        newest = max(self._lately.values(), default=None)
        lines = self._client.sessions(missing=self._miss, limit=100, **self._filters)
        async for line in lines:
            # Before the first look only the newest session says what is new.
            newest = line.created_at if newest is None else newest
            if line.created_at < newest - _SLACK:
                break
            found[line.session_id] = line.created_at
        new = found.keys() - self._lately.keys()
        since = max(found.values(), default=0.0) - _SLACK
        self._lately = {id: at for id, at in (self._lately | found).items() if at >= since}
        return new

    async def _going_on(self) -> set[str]:
        found: set[str] = set()
        for state in _GOES_ON:
            lines = self._client.sessions(
                missing=self._miss, state=state, limit=1000, **self._filters
            )
            found |= {line.session_id async for line in lines}
        return found

    async def _ended(self, id: str) -> SessionDetails | None:
        """Return a session that has ended; None if it goes on after all, or is deleted."""
        try:
            details = await self._client.session_details(id)
        except NotFound:
            return None
        except ServiceUnavailable:
            # At a later look.
            self._running.add(id)
            return None
        if details.state in _GOES_ON:
            self._running.add(id)
            return None
        return details

    def _miss(self, ranks: str) -> None:
        self.missing.update(ranks.split(","))


async def tail(client: RLClient, filters: dict[str, Any], arguments: argparse.Namespace) -> int:
    """Print sessions as they end, of those that the service's ``filters`` choose, until Ctrl-C."""
    endings = Endings(client, filters)
    await endings.begin()
    if not arguments.json:
        print(_line(_COLUMNS), flush=True)
    problem = ""
    while True:
        await asyncio.sleep(arguments.every)
        before, problem = problem, ""
        try:
            for one in await endings.look():
                if _wanted(one, arguments):
                    print(_shown(one, as_json=arguments.json), flush=True)
            if endings.missing:
                ranks = ", ".join(sorted(endings.missing))
                problem = f"rank {ranks} does not answer, its sessions are missing"
        except ServiceUnavailable as error:
            problem = f"{error.message}; still trying"
        if problem and problem != before:
            print(f"warning: {problem}", file=sys.stderr, flush=True)


def _wanted(one: SessionDetails, arguments: argparse.Namespace) -> bool:
    reward = reward_of(one)
    least, most = arguments.min_reward, arguments.max_reward
    return (
        arguments.state in (None, one.state)
        and (least is None or (reward is not None and reward >= least))
        and (most is None or (reward is not None and reward <= most))
    )


def reward_of(one: SessionDetails) -> float | None:
    """Return the sum of a session's rewards, as the service's lists do: the final one and its
    calls' own; None without any."""
    given = list(one.rewards.values())
    if one.final_reward is not None:
        given.append(one.final_reward)
    return sum(given) if given else None


def _shown(one: SessionDetails, *, as_json: bool) -> str:
    if as_json:
        return one.model_dump_json(exclude={"reward_history"})
    reward, tokens = reward_of(one), one.output_tokens
    about = [one.group_id or one.task_id or "-", reason_text(one.reason)]
    return _line(
        (
            time.strftime("%H:%M:%S", time.localtime(one.ended_at)),
            one.state,
            one.mode,
            "-" if reward is None else f"{reward:.4g}",
            str(one.interactions),
            "-" if tokens is None else str(tokens),
            one.session_id,
            printable(", ".join(filter(None, about))),
        )
    )


def _line(cells: tuple[str, ...]) -> str:
    padded = [cell.ljust(width) for cell, width in zip(cells, _WIDTHS, strict=False)]
    return "  ".join([*padded, cells[-1]])
