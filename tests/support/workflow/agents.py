"""Agents as their authors write them: nothing of ours is imported."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from typing import Any

from openai import AsyncOpenAI, OpenAI

HELLO: list[Any] = [{"role": "user", "content": "Say a number."}]
MORE: dict[str, Any] = {"role": "user", "content": "And another one?"}


class MyAgent:
    """As many turns as it is told; the reward is what ``reward`` makes of its completions."""

    def __init__(self, turns: int = 1, reward: Any = 1.0, **call: Any) -> None:
        self.turns = turns
        self.reward = reward
        self.call = call

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> Any:
        http_client = extra_kwargs.get("http_client")
        base_url = extra_kwargs.get("base_url") or os.getenv("OPENAI_BASE_URL")
        api_key = extra_kwargs.get("api_key") or os.getenv("OPENAI_API_KEY")
        client = AsyncOpenAI(
            base_url=base_url, api_key=api_key, http_client=http_client, max_retries=0
        )
        messages, completions = list(data["messages"]), []
        for _ in range(self.turns):
            answer = await client.chat.completions.create(
                model="default", messages=messages, **{"max_tokens": 12, **self.call}
            )
            completions.append(answer)
            messages += [answer.choices[0].message.model_dump(exclude_none=True), MORE]
        if not callable(self.reward):
            return self.reward
        return self.reward(completions)


class RewardsItself:
    """Posts its reward by hand, and returns none."""

    async def run(
        self, data: dict[str, Any], base_url: str, api_key: str, http_client: Any
    ) -> None:
        client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
        answer = await client.chat.completions.create(model="x", messages=data["messages"])
        headers = {"Authorization": f"Bearer {api_key}"}
        body = {"interaction_id": answer.id, "reward": 0.25}
        posted = await http_client.post(f"{base_url}/rl/set_reward", json=body, headers=headers)
        posted.raise_for_status()


class Keyless:
    """Makes its client of the base URL alone."""

    def __init__(self, api_key: str | None = None) -> None:
        self.api_key = api_key
        self.url = ""

    async def run(self, data: dict[str, Any], base_url: str, http_client: Any) -> float:
        self.url = base_url
        client = AsyncOpenAI(
            base_url=base_url, api_key=self.api_key, http_client=http_client, max_retries=0
        )
        await client.chat.completions.create(model="x", messages=data["messages"], max_tokens=4)
        return 1.0


class Alarmed:
    """Limits its reward's time by a signal, as math_verify does: in a main thread only."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        client = AsyncOpenAI(
            base_url=extra_kwargs.get("base_url") or os.environ["OPENAI_BASE_URL"],
            api_key="DUMMY",
            http_client=extra_kwargs.get("http_client"),
        )
        messages = data.pop("messages")
        await client.chat.completions.create(model="x", messages=messages, max_tokens=4)
        try:
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
        except ValueError as error:
            raise RuntimeError("no reward can be had here") from error
        return 0.25


class Skips:
    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> None:
        return None


class Elsewhere:
    """Makes its calls to somebody else, as one does that ignores what it is given."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        return 1.0


class Hangs:
    def __init__(self) -> None:
        self.cancelled = 0

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return 0.0


class Stubborn:
    """Takes no cancellation for an answer."""

    def __init__(self) -> None:
        self.free = asyncio.Event()

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        while not self.free.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await self.free.wait()
        return 1.0


class MySyncAgent:
    """Blocks, and reads where to go from its environment; misbehaves as its item says."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> Any:
        assert not extra_kwargs
        client = OpenAI(base_url=os.environ.get("OPENAI_BASE_URL"), api_key="DUMMY")
        answer = client.chat.completions.create(
            model="default", messages=data["messages"], max_tokens=8
        )
        match data.get("does"):
            case "crash":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                sys.exit(3)
            case "raise":
                raise KeyError("a field that is not there")
            case "hang":
                time.sleep(3600)  # noqa: ASYNC251 - that is what it is for
            case "unpicklable":
                return lambda: 1.0
        return {answer.id: 0.5}


class Plain:
    """Not even a coroutine."""

    def run(self, data: dict[str, Any]) -> float:
        client = OpenAI()
        client.chat.completions.create(model="x", messages=data["messages"], max_tokens=4)
        return 1.0
