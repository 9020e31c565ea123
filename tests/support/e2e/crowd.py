"""Agents under load: each solves the demo's task in sessions of its own, over and over.

They are what a service meets: OpenAI's SDK with its default retries for calls, the `/rl` routes
for sessions, no knowledge of ranks. What they are told goes into a ledger.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import httpx
import openai

from any_agent.client.rl_client import RLClient
from any_agent.demo.driver import GROUP_SIZE
from any_agent.demo.task import RETRY, Item, is_correct, items, messages, shuffled
from any_agent.errors import (
    AnyAgentError,
    Conflict,
    ReplyLost,
    RunFinished,
    SessionClosed,
    StoreFull,
)
from tests.support.e2e.ledger import Answer, Ledger, Told

T = TypeVar("T")

MAX_TOKENS = 4
"""Of an answer to the demo's task."""
EVALS = 2
"""Eval sessions for every held-out prompt, as in the demo."""
_STREAMING = 0.4
_TALKS = 0.12
"""Share of sessions that are long hot talks: their calls are under way when something is killed."""
_TALK_TURNS = 4
_TRIES = 2
_INSIST = 120.0
"""Seconds that an agent repeats what may be repeated."""
_BETWEEN = 0.3


class Crowd:
    """``agents`` agents at one service, at work from :meth:`work` until :meth:`leave`."""

    def __init__(
        self,
        url: str,
        service: RLClient,
        ledger: Ledger,
        *,
        agents: int,
        seed: int,
        noise: float = 0.0,
    ) -> None:
        """``noise``: the share of rewards that are chance, so that groups never cease to differ."""
        self._url = f"{url}/v1"
        self._service = service
        self._ledger = ledger
        self._agents = agents
        self._seed = seed
        self._noise = noise
        self._leaving = False

    def leave(self) -> None:
        """Open no further group; :meth:`work` returns when those that were begun have ended."""
        self._leaving = True

    async def work(self) -> None:
        jobs = self._jobs()

        async def agent(number: int) -> None:
            rng = random.Random(f"{self._seed}-{number}")
            async with self._sdk() as sdk:
                for item, group in jobs:
                    while rng.random() < _TALKS:
                        await self._talk(sdk, rng)
                    await self._solve(sdk, item, group, rng)

        async with asyncio.TaskGroup() as tasks:
            for number in range(self._agents):
                tasks.create_task(agent(number))

    async def evaluate(self) -> float:
        """The share of held-out prompts whose first answer is right: the demo's statistic."""
        todo = iter(items(held_out=True) * EVALS)
        right: list[bool] = []

        async def agent() -> None:
            async with self._sdk() as sdk:
                for item in todo:
                    told = await self._open(mode="eval", task_id=item.task_id)
                    assert told is not None, "an eval session was refused"
                    got = await self._ask(sdk, told, messages(item), max_tokens=MAX_TOKENS)
                    assert got is not None, "a call failed in a quiet service"
                    right.append(is_correct(got[1], item))
                    await self._finalize(told)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._agents):
                tasks.create_task(agent())
        return sum(right) / len(right)

    def _jobs(self) -> Iterator[tuple[Item, str]]:
        """Each prompt as often as a group is large; ends between two groups."""
        number = 0
        while True:
            for item in shuffled(items(held_out=False), self._seed + number):
                if self._leaving:
                    return
                number += 1
                for _ in range(GROUP_SIZE):
                    yield item, f"{item.task_id}-{number}"

    async def _solve(
        self, sdk: openai.AsyncOpenAI, item: Item, group: str, rng: random.Random
    ) -> None:
        """The demo's agent: a second turn if the first answer is wrong; one reward at the end."""
        told = await self._open(
            mode="train", task_id=item.task_id, group_id=group, group_size=GROUP_SIZE
        )
        if told is None:
            return
        talk: list[dict[str, Any]] = [*messages(item)]
        completion_id, text = "", ""
        for _ in range(2):
            stream = rng.random() < _STREAMING
            got = await self._ask(sdk, told, talk, stream=stream, max_tokens=MAX_TOKENS)
            if got is None:
                # Left open, it would keep its group waiting.
                await self._abort(told)
                return
            completion_id, text = got
            if is_correct(text, item):
                break
            talk += [{"role": "assistant", "content": text}, {"role": "user", "content": RETRY}]
        reward = float(is_correct(text, item))
        if self._noise and rng.random() < self._noise:
            reward = float(rng.random() < 0.5)
        if await self._reward(told, completion_id, reward):
            await self._finalize(told)
        else:
            await self._abort(told)

    async def _talk(self, sdk: openai.AsyncOpenAI, rng: random.Random) -> None:
        """A long eval session, streamed: its answers do not end by themselves soon."""
        told = await self._open(mode="eval", task_id="talk")
        if told is None:
            return
        talk: list[dict[str, Any]] = [{"role": "user", "content": f"talk {rng.random()}"}]
        for _ in range(rng.randint(1, _TALK_TURNS)):
            got = await self._ask(sdk, told, talk, stream=True, temperature=2.0)
            if got is None:
                await self._abort(told)
                return
            talk += [{"role": "assistant", "content": got[1]}, {"role": "user", "content": "on"}]
        await self._finalize(told)

    @asynccontextmanager
    async def _sdk(self) -> AsyncIterator[openai.AsyncOpenAI]:
        """One agent's SDK, with its default retries; sessions set URL and key."""
        async with openai.AsyncOpenAI(api_key="none", base_url=self._url) as sdk:
            yield sdk

    async def _open(self, **fields: Any) -> Told | None:
        """A session; None when its group has all its members, or nothing is trained any more."""

        async def start() -> Told:
            started = await self._service.start_session(wait=30.0, patience=_INSIST, **fields)
            return self._ledger.open(started.session_id, started.api_key, started.mode)

        try:
            return await self._insist("open", start)
        except RunFinished:
            self._leaving = True
        except Conflict:
            # An open whose reply was lost took the place.
            return None
        return None

    async def _ask(
        self,
        sdk: openai.AsyncOpenAI,
        told: Told,
        talk: list[dict[str, Any]],
        *,
        stream: bool = False,
        **options: Any,
    ) -> tuple[str, str] | None:
        """(completion id, text). After a failure it asks once more; None if that fails, too."""
        mine = sdk.with_options(base_url=self._url, api_key=told.api_key)
        call = self._streamed if stream else _whole
        for _ in range(_TRIES):
            began = time.time()
            try:
                completion_id, text = await call(mine, talk, options)
            except (openai.OpenAIError, httpx.HTTPError) as error:
                self._ledger.fail("call", error)
                continue
            told.answers[completion_id] = Answer(text, began, time.time())
            return completion_id, text
        return None

    async def _streamed(
        self, sdk: openai.AsyncOpenAI, talk: Any, options: dict[str, Any]
    ) -> tuple[str, str]:
        completion_id, parts, finished = "", [], False
        stream = await sdk.chat.completions.create(
            model="gpt-4o-mini", messages=talk, stream=True, **options
        )
        async for chunk in stream:
            completion_id = chunk.id
            for choice in chunk.choices:
                parts.append(choice.delta.content or "")
                finished = finished or choice.finish_reason is not None
        if not finished:
            self._ledger.broken.append(f"{completion_id}: the stream ended without its last event")
            raise httpx.RemoteProtocolError("the stream ended without its last event")
        return completion_id, "".join(parts)

    async def _reward(self, told: Told, completion_id: str, reward: float) -> bool:
        async def give() -> bool:
            await self._service.set_reward(told.api_key, reward, completion_id=completion_id)
            told.rewards[completion_id] = reward
            return True

        return await self._insist("reward", give) is True

    async def _finalize(self, told: Told) -> None:
        async def end() -> None:
            try:
                await self._service.finalize(told.api_key)
            except SessionClosed:
                # An earlier try may have done it, its reply lost.
                info = await self._service.session_info(told.session_id)
                if info.state in ("expired", "aborted"):
                    raise
            told.finalized = True

        await self._insist("finalize", end)

    async def _abort(self, told: Told) -> None:
        async def end() -> None:
            with suppress(SessionClosed):
                await self._service.abort(told, "its agent gave up")  # type: ignore[arg-type]

        await self._insist("abort", end)

    async def _insist(self, what: str, request: Callable[[], Awaitable[T]]) -> T | None:
        """Repeat while the service is away or the reply was lost; None when it is in vain.

        Raises Conflict for a group that has its members, RunFinished when training has ended.
        """
        deadline = time.monotonic() + _INSIST
        while time.monotonic() < deadline:
            try:
                return await request()
            except RunFinished:
                raise
            except AnyAgentError as error:
                if isinstance(error, Conflict) and error.code == "group_closed":
                    raise
                self._ledger.fail(what, error)
                if isinstance(error, SessionClosed):
                    return None
                if not (error.retryable or isinstance(error, (ReplyLost, StoreFull))):
                    self._ledger.broken.append(f"{what}: {error.message}")
                    return None
            await asyncio.sleep(_BETWEEN)
        return None


async def _whole(sdk: openai.AsyncOpenAI, talk: Any, options: dict[str, Any]) -> tuple[str, str]:
    done = await sdk.chat.completions.create(model="gpt-4o-mini", messages=talk, **options)
    return done.id, done.choices[0].message.content or ""
