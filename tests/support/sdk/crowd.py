"""A crowd of agents in one process, each in a session of its own, by unmodified clients.

Run as a program it is given nothing but the environment that agents have, and prints a line of JSON
for each kind of client: what each session was asked, by session. An answer that is of another
session ends it.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack
from os import environ
from typing import Any, TypeAlias

from any_agent import AgentSession

TURNS = 2
_OF_SESSION = "x-any-agent-session"
_FULL = 429
_PATIENCE = 300.0
"""Seconds: httpx's own pools are slow with hundreds of threads."""

Headers: TypeAlias = Any
AsyncAsk: TypeAlias = Callable[[str], Awaitable[Headers]]
Ask: TypeAlias = Callable[[str], Headers]
"""One call with this text; the headers of its answer."""


def _chat(text: str) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 2}


def _url() -> str:
    return f"{environ['OPENAI_BASE_URL']}/chat/completions"


def _own_key() -> dict[str, str]:
    return {"Authorization": f"Bearer {environ['OPENAI_API_KEY']}"}


# -- on one event loop: one client for all sessions ------------------------------------------------


async def aiohttp(stack: AsyncExitStack) -> AsyncAsk:
    import aiohttp

    http = await stack.enter_async_context(aiohttp.ClientSession(headers=_own_key()))

    async def ask(text: str) -> Headers:
        while True:
            async with http.post(_url(), json=_chat(text)) as response:
                await response.read()
            if response.status != _FULL:
                return response.headers
            await asyncio.sleep(0.1)

    return ask


async def httpx(stack: AsyncExitStack) -> AsyncAsk:
    import httpx

    return await _httpx(stack, httpx)


async def httpx2(stack: AsyncExitStack) -> AsyncAsk:
    import httpx2

    return await _httpx(stack, httpx2)


async def _httpx(stack: AsyncExitStack, module: Any) -> AsyncAsk:
    http = await stack.enter_async_context(
        module.AsyncClient(timeout=_PATIENCE, headers=_own_key())
    )

    async def ask(text: str) -> Headers:
        while True:
            response = await http.post(_url(), json=_chat(text))
            if response.status_code != _FULL:
                return response.headers
            await asyncio.sleep(0.1)

    return ask


async def openai(stack: AsyncExitStack) -> AsyncAsk:
    from openai import AsyncOpenAI

    client = await stack.enter_async_context(AsyncOpenAI(max_retries=20))

    async def ask(text: str) -> Headers:
        response = await client.chat.completions.with_raw_response.create(**_chat(text))
        return response.headers

    return ask


async def anthropic(stack: AsyncExitStack) -> AsyncAsk:
    from anthropic import AsyncAnthropic

    client = await stack.enter_async_context(AsyncAnthropic(max_retries=20))

    async def ask(text: str) -> Headers:
        return (await client.messages.with_raw_response.create(**_chat(text))).headers

    return ask


# -- in threads ------------------------------------------------------------------------------------


def requests_blocking(stack: ExitStack) -> Ask:
    import requests

    return _blocking(stack.enter_context(requests.Session()))


def httpx_blocking(stack: ExitStack) -> Ask:
    import httpx

    return _blocking(stack.enter_context(httpx.Client(timeout=_PATIENCE, limits=_limits(httpx))))


def httpx2_blocking(stack: ExitStack) -> Ask:
    import httpx2

    return _blocking(stack.enter_context(httpx2.Client(timeout=_PATIENCE, limits=_limits(httpx2))))


def _limits(module: Any) -> Any:
    """Kept connections without end: with less, httpcore's pool closes some that another thread has
    just been given (its issue 1110), and that one waits in vain."""
    return module.Limits(
        max_connections=None, max_keepalive_connections=None, keepalive_expiry=None
    )


def _blocking(http: Any) -> Ask:
    def ask(text: str) -> Headers:
        while True:
            response = http.post(_url(), json=_chat(text), headers=_own_key())
            if response.status_code != _FULL:
                return response.headers
            threading.Event().wait(0.1)

    return ask


def openai_blocking(stack: ExitStack) -> Ask:
    import openai

    # httpx's up to 2.x, httpx2's since 3.0.
    package = openai.DefaultHttpxClient.__base__.__module__.split(".")[0]
    http = openai.DefaultHttpxClient(limits=_limits(sys.modules[package]))
    client = stack.enter_context(openai.OpenAI(max_retries=20, http_client=http))
    return lambda text: client.chat.completions.with_raw_response.create(**_chat(text)).headers


def anthropic_blocking(stack: ExitStack) -> Ask:
    import anthropic
    import httpx2

    http = anthropic.DefaultHttpxClient(limits=_limits(httpx2))
    client = stack.enter_context(anthropic.Anthropic(max_retries=20, http_client=http))
    return lambda text: client.messages.with_raw_response.create(**_chat(text)).headers


ON_A_LOOP = (aiohttp, httpx, httpx2, openai, anthropic)
IN_THREADS = (
    requests_blocking,
    httpx_blocking,
    httpx2_blocking,
    openai_blocking,
    anthropic_blocking,
)

Asked: TypeAlias = dict[str, list[str]]
"""By session, in the order of asking."""


async def on_a_loop(
    client: Callable[[AsyncExitStack], Awaitable[AsyncAsk]], count: int, kind: str
) -> Asked:
    """So many sessions at once, all open before the first call."""
    asked: Asked = {}
    together = asyncio.Barrier(count)

    async def agent(number: int, ask: AsyncAsk) -> None:
        async with AgentSession(mode="eval", on_missing_reward="abort") as session:
            asked[session.session_id] = []
            await together.wait()
            for turn in range(TURNS):
                await asyncio.sleep(random.random() * 0.05)
                text = f"{kind} {number} {turn}"
                _check(session.session_id, await ask(text))
                asked[session.session_id].append(text)
            await session.set_reward(number)

    async with AsyncExitStack() as stack:
        ask = await client(stack)
        async with asyncio.TaskGroup() as tasks:
            for number in range(count):
                tasks.create_task(agent(number, ask))
    return asked


def in_threads(client: Callable[[ExitStack], Ask], count: int, kind: str) -> Asked:
    """So many threads at once, whose sessions are all open before the first call."""
    asked: Asked = {}
    failed: list[BaseException] = []
    together = threading.Barrier(count, timeout=120)

    def agent(number: int, ask: Ask) -> None:
        try:
            with AgentSession(mode="eval", on_missing_reward="abort") as session:
                asked[session.session_id] = []
                together.wait()
                for turn in range(TURNS):
                    text = f"{kind} {number} {turn}"
                    _check(session.session_id, ask(text))
                    asked[session.session_id].append(text)
                session.set_reward(number)
        except BaseException as error:
            failed.append(error)
            together.abort()

    with ExitStack() as stack:
        ask = client(stack)
        threads = [threading.Thread(target=agent, args=(k, ask)) for k in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failed:
        raise failed[0]
    return asked


def _check(session_id: str, headers: Headers) -> None:
    found = headers.get(_OF_SESSION)
    if found != session_id:
        raise AssertionError(f"a call of {session_id} landed in {found}")


async def own_clients(kind: str) -> Asked:
    """The clients that a session gives are its own also outside of its context."""
    opening = AgentSession(mode="eval", on_missing_reward="abort")
    session = await asyncio.create_task(opening.__aenter__())
    asked = [f"{kind} {number}" for number in range(4)]
    chat = session.openai().chat.completions.with_raw_response
    _check(session.session_id, (await chat.create(**_chat(asked[0]))).headers)
    messages = session.anthropic().messages.with_raw_response
    _check(session.session_id, (await messages.create(**_chat(asked[1]))).headers)
    blocking = session.blocking
    with blocking.openai() as client:
        chats = client.chat.completions.with_raw_response
        answer = await asyncio.to_thread(chats.create, **_chat(asked[2]))
        _check(session.session_id, answer.headers)
    with blocking.anthropic() as client:
        answer = await asyncio.to_thread(
            client.messages.with_raw_response.create, **_chat(asked[3])
        )
        _check(session.session_id, answer.headers)
    await session.finalize(1.0)
    await asyncio.create_task(opening.__aexit__(None, None, None))
    return {session.session_id: asked}


def main(count: int) -> None:
    kind = "clients of the session"
    print(json.dumps([kind, asyncio.run(own_clients(kind))]), flush=True)
    for client in ON_A_LOOP:
        kind = f"{client.__name__} on a loop"
        print(json.dumps([kind, asyncio.run(on_a_loop(client, count, kind))]), flush=True)
    for blocking in IN_THREADS:
        kind = f"{blocking.__name__} in threads"
        print(json.dumps([kind, in_threads(blocking, count, kind)]), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
