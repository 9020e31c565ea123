"""The policy's calls, rewards and ends on their way to LiteLLM: to its callbacks, and to its count
of what virtual keys spend.

Nothing waits for either: a process of its own runs the callbacks (`proxy_ext.litellm_teller`),
events queue up to a bound, and further ones are counted and dropped.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import orjson

from any_agent.config import Config
from any_agent.runtime.signals import die_with_parent
from any_agent.types import Interaction, SessionMode
from proxy_ext.journal import SessionRow, SetReward, Statement
from proxy_ext.litellm_keys import hash_in
from proxy_ext.litellm_policy import PolicyEvent
from proxy_ext.litellm_teller import MAX_LINE, METRICS
from proxy_ext.sessions.session import RecordedSession

log = logging.getLogger(__name__)

EVENT_OUTCOMES = ("told", "failed", "dropped", "charged", "uncharged")
Charge = Callable[[PolicyEvent, float, float], Awaitable[None]]
"""Counts a call for its virtual key, at the USD of an input and of an output token."""
_RESTART_DELAY = 5.0  # seconds between two starts of the process
_CLOSING = 5.0
"""Seconds for the events that wait when the rank ends, and then for the process's own end."""
_METRICS_TIMEOUT = 1.0  # seconds for which a scrape waits for the process
_CHARGING = 30.0  # seconds that LiteLLM may take to count a call
_MAX_UNANSWERED = 64
"""Events that the process has and has not answered for."""
_TELLER = (sys.executable, "-m", "proxy_ext.litellm_teller")


class PolicyEvents:
    """Bounded queues of events, and the process that gives them to LiteLLM's callbacks."""

    def __init__(
        self,
        config: Config,
        *,
        part: str,
        tells: bool = True,
        charge: Charge | None = None,
        command: Sequence[str] = _TELLER,
    ) -> None:
        """``tells``: False without callbacks. ``charge``: None without virtual keys."""
        self._config = config
        self._part = part
        self._tells = tells
        self._charge = charge
        self._command = command
        room = config.litellm.max_waiting_events
        self._queue: asyncio.Queue[PolicyEvent] = asyncio.Queue(room)
        self._uncharged: asyncio.Queue[PolicyEvent] = asyncio.Queue(room)
        self._charging: asyncio.Task[None] | None = None
        self._unanswered = 0
        self._answered = asyncio.Event()
        self._pipe: asyncio.StreamWriter | None = None
        """The process's input, once it is ready."""
        self._metrics: asyncio.Future[bytes] | None = None
        """The metrics that the process was asked for."""
        self._running: asyncio.Task[None] | None = None
        self.outcomes: Counter[str] = Counter()

    @property
    def waiting(self) -> int:
        """Number of events that no callback has been told of."""
        return self._queue.qsize() + self._unanswered

    async def metrics(self) -> bytes:
        """Return the text of the metrics that LiteLLM's callback for Prometheus has of the policy;
        nothing if the process does not answer in time."""
        if self._pipe is None:
            return b""
        asked = self._metrics
        if asked is None or asked.done():
            asked = self._metrics = asyncio.get_running_loop().create_future()
            self._pipe.write(METRICS + b"\n")
        with suppress(TimeoutError):
            async with asyncio.timeout(_METRICS_TIMEOUT):
                return await asyncio.shield(asked)
        return b""

    def on_call(
        self, session: RecordedSession | None, interaction: Interaction, tenant: str | None
    ) -> None:
        """Queue a call that is durable, or, without a session, complete."""
        charged = self._charge is not None and hash_in(tenant) is not None
        if not self._tells and not charged:
            return
        messages, prompt = interaction.message_delta, interaction.prompt_delta_ids
        if session is not None:
            messages = session.tree.messages(interaction.id)
            prompt = session.tree.prompt_ids(interaction.id)
        keeps = self._config.sessions.store_content
        gconfig = interaction.gconfig
        event = PolicyEvent(
            kind="completion",
            id=interaction.id,
            model=self._config.model.name,
            messages=list(messages) if keeps else [],
            answer=dict(interaction.output_message) if keeps else {"role": "assistant"},
            finish_reason=interaction.finish_reason,
            prompt_tokens=len(prompt),
            output_tokens=len(interaction.output_ids),
            parameters={"temperature": gconfig.temperature, "max_tokens": gconfig.max_new_tokens},
            metadata=_about(session.row if session is not None else None)
            | {"interaction_id": interaction.id, "version": _version(interaction)},
            tenant=tenant,
            began=interaction.created_at,
            ended=time.time(),
        )
        self._put(event)
        if charged:
            try:
                self._uncharged.put_nowait(event)
            except asyncio.QueueFull:
                self.outcomes["uncharged"] += 1
                log.error("a call was not counted for its virtual key: too many wait for LiteLLM")

    def on_write(
        self, before: SessionRow, after: SessionRow, statements: Iterable[Statement]
    ) -> None:
        """Queue the rewards and the end of a session that are durable."""
        for each in statements:
            if isinstance(each, SetReward) and each.value is not None:
                reward = {"interaction_id": each.interaction_id, "name": each.name}
                self._put(self._about_session(after, "reward", reward | {"reward": each.value}))
        if before.ended_at is None and after.ended_at is not None:
            end = {"state": str(after.state), "reason": after.reason, "reward": after.final_reward}
            self._put(self._about_session(after, "end", end))

    def _about_session(self, row: SessionRow, kind: str, more: dict[str, Any]) -> PolicyEvent:
        now = time.time()
        return PolicyEvent(
            kind=kind,
            id=f"{row.id}-{kind}-{time.monotonic_ns()}",
            model=self._config.model.name,
            messages=[],
            answer={"role": "assistant"},
            finish_reason="stop",
            prompt_tokens=0,
            output_tokens=0,
            parameters={},
            metadata=_about(row) | more,
            tenant=row.tenant,
            began=now,
            ended=now,
        )

    def _put(self, event: PolicyEvent) -> None:
        if not self._tells:
            return
        try:
            self._queue.put_nowait(event)
        except asyncio.QueueFull:
            self.outcomes["dropped"] += 1

    def start(self) -> None:
        if self._tells:
            self._running = asyncio.create_task(self._run())
        if self._charge is not None:
            self._charging = asyncio.create_task(self._charge_all(self._charge))

    async def close(self) -> None:
        """Tell and charge what waits, for a bounded time, and end the process."""
        try:
            async with asyncio.timeout(_CLOSING):
                await self._uncharged.join()
                while self.waiting:
                    self._answered.clear()
                    await self._answered.wait()
        except TimeoutError:
            log.warning(
                "%d events were not told to LiteLLM's callbacks, and %d calls not counted for "
                "their virtual keys",
                *(self.waiting, self._uncharged.qsize()),
            )
        tasks = [task for task in (self._running, self._charging) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _charge_all(self, charge: Charge) -> None:
        """Charge the calls of virtual keys one after the other."""
        prices = self._config.litellm
        costs = (prices.policy_input_cost_per_token, prices.policy_output_cost_per_token)
        while True:
            event = await self._uncharged.get()
            outcome = "uncharged"
            try:
                async with asyncio.timeout(_CHARGING):
                    await charge(event, *costs)
                outcome = "charged"
            except Exception as error:
                log.error(
                    "LiteLLM did not count a call for its virtual key: %s: %s",
                    *(type(error).__name__, error),
                )
            finally:
                self.outcomes[outcome] += 1
                self._uncharged.task_done()

    async def _run(self) -> None:
        while True:
            try:
                await self._run_once()
            except (OSError, ValueError) as error:
                log.warning("the process of LiteLLM's callbacks cannot be used: %s", error)
            self.outcomes["failed"] += self._unanswered
            self._unanswered = 0
            self._answered.set()
            await asyncio.sleep(_RESTART_DELAY)

    async def _run_once(self) -> None:
        """Run the process until it ends."""
        child = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=MAX_LINE,
            preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGKILL),
        )
        assert child.stdin is not None and child.stdout is not None
        feeding = None
        try:
            child.stdin.write(orjson.dumps(self._settings()) + b"\n")
            await child.stdin.drain()
            while line := await child.stdout.readline():
                if line == b"ready\n":
                    self._pipe = child.stdin
                    feeding = asyncio.create_task(self._feed(child.stdin))
                    continue
                if line.startswith(METRICS):
                    if self._metrics is not None and not self._metrics.done():
                        text: str = orjson.loads(line.removeprefix(METRICS))
                        self._metrics.set_result(text.encode())
                    continue
                self.outcomes[line.decode().strip()] += 1
                self._unanswered -= 1
                self._answered.set()
            log.warning("the process of LiteLLM's callbacks ended; starting it again")
        finally:
            self._pipe = self._metrics = None
            if feeding is not None:
                feeding.cancel()
            # Many callbacks send what they were told in batches, the last one at the end.
            child.stdin.close()
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLOSING):
                    await child.wait()
            if child.returncode is None:
                child.kill()
                await child.wait()

    async def _feed(self, pipe: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while True:
                while self._unanswered >= _MAX_UNANSWERED:
                    self._answered.clear()
                    await self._answered.wait()
                event = await self._queue.get()
                self._unanswered += 1
                pipe.write(orjson.dumps(event, default=str) + b"\n")
                await pipe.drain()

    def _settings(self) -> dict[str, Any]:
        config = self._config
        prices = config.litellm
        return {
            "path": prices.config,
            "log_level": config.log_level,
            "log_format": config.log_format,
            "part": self._part,
            "secrets": config.secrets(),
            "prices": [prices.policy_input_cost_per_token, prices.policy_output_cost_per_token],
        }


def _version(interaction: Interaction) -> int | None:
    versions = interaction.output_versions
    return int(versions[-1]) if len(versions) else None


def _about(row: SessionRow | None) -> dict[str, Any]:
    if row is None:
        return {}
    return {
        "session_id": row.id,
        "task_id": row.task_id,
        "group_id": row.group_id,
        "mode": str(SessionMode(row.mode)),
    }
