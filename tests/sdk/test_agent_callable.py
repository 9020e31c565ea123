from __future__ import annotations

import asyncio
import functools
import os
import threading
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import pytest

from any_agent.client.environment import PLACEHOLDER_KEY
from any_agent.errors import AgentFailed, ConfigError
from any_agent.sdk.agent_callable import AgentCallable
from tests.support.errors import fails_with

URL = "http://s/k/v1"
SESSION: Any = SimpleNamespace(
    url="http://service", session_url=URL, api_key="k", blocking="blocking session"
)
HTTP: Any = object()


async def given(agent: Any, **kwargs: Any) -> Any:
    return await AgentCallable(agent, kwargs or None)("item", SESSION, HTTP)


class Trained:
    def __init__(self, extra: int = 0) -> None:
        self.extra = extra

    async def run(self, data: Any, **extra_kwargs: Any) -> Any:
        return data, self.extra, extra_kwargs


class Called:
    async def __call__(self, item: Any, session: Any = None) -> Any:
        return item, session


async def named(item: Any, api_key: str, base_url: str = "") -> Any:
    return item, api_key, base_url


async def test_a_client_made_without_arguments_does_not_call_openai_unasked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def called(item: Any) -> Any:
        return os.environ.get("OPENAI_BASE_URL"), os.environ["OPENAI_API_KEY"]

    nobodys = "http://service/sk-v1.placeholder/v1"
    for before, url in (
        ({}, nobodys),
        ({"OPENAI_BASE_URL": "http://old/sk-v1.placeholder/v1"}, nobodys),
        ({"OPENAI_BASE_URL": "http://other/v1"}, "http://other/v1"),
        ({"OPENAI_API_KEY": "sk-proj-1"}, None),
    ):
        for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY"):
            # So that it is as before at the end.
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
        for name, value in before.items():
            monkeypatch.setenv(name, value)
        assert await given(called) == (url, before.get("OPENAI_API_KEY", PLACEHOLDER_KEY))


async def test_an_agent_is_given_what_it_asks_for() -> None:
    async def one(item: Any) -> Any:
        return item

    async def two(item: Any, here: Any) -> Any:
        return item, here

    async def with_default(item: Any, temperature: float = 1.0, *, session: Any) -> Any:
        return item, temperature, session

    def blocking(item: Any, session: Any) -> Any:
        return item, session, threading.current_thread() is threading.main_thread()

    def makes_a_coroutine(item: Any) -> Any:
        return one(item)

    assert await given(one) == "item"
    assert await given(two) == ("item", SESSION)
    assert await given(functools.partial(two, here="mine")) == ("item", "mine")
    assert await given(with_default) == ("item", 1.0, SESSION)
    assert await given(blocking) == ("item", "blocking session", False)
    assert await given(makes_a_coroutine) == "item"
    assert await given(named) == ("item", "k", URL)
    assert await given(Called()) == ("item", SESSION)
    connection = {"base_url": URL, "api_key": "k", "http_client": HTTP}
    assert await given(Trained) == ("item", 0, connection)
    assert await given(Trained, extra=2) == ("item", 2, connection)
    assert await given(f"{__name__}.Trained", extra=3) == ("item", 3, connection)
    assert await given(f"{__name__}.named") == ("item", "k", URL)


def test_an_object_that_is_no_agent_is_refused() -> None:
    refused: list[tuple[Any, dict[str, Any], str]] = [
        (7, {}, "builtins.int"),
        (SimpleNamespace(), {}, "types.SimpleNamespace"),
        (object, {}, "method run"),
        (Trained, {"size": 1}, "arguments size"),
        (named, {"size": 1}, "agent_kwargs (size)"),
        (lambda: 1.0, {}, "takes no item"),
        (lambda item, session, tools: 1.0, {}, "'tools'"),
        ("no_such_module.Agent", {}, "no module 'no_such_module'"),
        (f"{__name__}.Trainee", {}, f"{__name__}.Trained?"),
        (f"{__name__}:Trained", {}, f"{__name__}.Trained"),
    ]
    for agent, kwargs, said in refused:
        with fails_with(ConfigError, said):
            AgentCallable(agent, kwargs)


async def test_a_blocking_agent_has_the_context_of_its_run() -> None:
    here: ContextVar[str] = ContextVar("here")
    here.set("mine")

    def agent(_: Any) -> str:
        return here.get()

    assert await given(agent) == "mine"


@pytest.mark.parametrize("blocks", [False, True])
async def test_an_exception_of_a_blocking_agent_reaches_its_caller(blocks: bool) -> None:
    def raising(error: BaseException) -> Any:
        def agent(_: Any) -> Any:
            raise error

        async def agent_of_the_loop(_: Any) -> Any:
            raise error

        return agent if blocks else agent_of_the_loop

    with fails_with(OSError, "away"):
        await given(raising(OSError("away")))
    with fails_with(AgentFailed, "SystemExit: 3"):
        await given(raising(SystemExit(3)))
    with fails_with(RuntimeError, "StopIteration"):
        await given(raising(StopIteration(1)))


async def test_a_thread_that_nobody_waits_for_is_counted_until_it_ends() -> None:
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def agent(_: Any) -> None:
        begun.set()
        go_on.wait(60)
        ended.set()

    one = AgentCallable(agent)
    running = asyncio.ensure_future(one("item", SESSION, None))
    await asyncio.to_thread(begun.wait, 60)
    running.cancel()
    await asyncio.wait([running])
    assert one.hanging == 1
    go_on.set()
    assert await asyncio.to_thread(ended.wait, 60)
    await asyncio.wait_for(_until_none_hangs(one), 60)


async def _until_none_hangs(one: AgentCallable) -> None:
    while one.hanging:  # noqa: ASYNC110  (a thread says so)
        await asyncio.sleep(0.005)
