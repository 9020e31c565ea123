"""`AgentCallable`: one interface to every kind of agent.

An agent is a function of an item (and, if it wants it, of the session), or a class or an object
with ``run(data, **extra_kwargs)`` as in training; a coroutine function, or an ordinary one, which
runs in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Callable, Mapping
from contextvars import copy_context
from functools import partial
from typing import Any, TypeAlias

from any_agent.client.environment import require_service
from any_agent.client.retry_transport import SharedClient
from any_agent.errors import AgentFailed, ConfigError
from any_agent.runtime.import_string import import_string, name_of
from any_agent.sdk.session import AsyncSession

AgentLike: TypeAlias = Any
"""``fn(item)``, ``fn(item, session)``, an object or a class with ``run(data, **extra_kwargs)``, or
the dotted name of any of them."""

_CONNECTION = ("base_url", "api_key", "http_client")
"""Arguments that an agent also gets in training."""


class AgentCallable:
    """A callable agent; ConfigError for any other object, and for one with unknown arguments."""

    def __init__(self, agent: AgentLike, kwargs: Mapping[str, Any] | None = None) -> None:
        found = import_string(agent, "agent") if isinstance(agent, str) else agent
        self._call: Callable[..., Any] = callable_of(found, dict(kwargs or {}))
        self.name = name_of(found)
        """The function's name in messages."""
        if hasattr(found, "run") and not inspect.isroutine(found):
            self.name += ".run"
        self.blocks = not _is_async(self._call)
        """True if it runs in a thread."""
        self.hanging = 0
        """The number of threads that still run after the wait for them has ended."""
        self._takes_session, self._named = _arguments(self._call, self.name)

    @property
    def wants_http_client(self) -> bool:
        return "http_client" in self._named

    async def __call__(
        self, item: Any, session: AsyncSession, http_client: SharedClient | None
    ) -> Any:
        """Call the agent with an item. Raise the agent's own errors, but AgentFailed instead of
        SystemExit, so that a library which exits ends only its own run."""
        arguments: dict[str, Any] = {
            "base_url": session.session_url,
            "api_key": session.api_key,
            "session": session.blocking if self.blocks else session,
        }
        if not self.blocks:
            arguments["http_client"] = http_client
        require_service(session.url)
        positional = (item, arguments["session"]) if self._takes_session else (item,)
        named = {name: arguments[name] for name in self._named if name in arguments}
        call = partial(self._call, *positional, **named)
        try:
            returned = await self._in_thread(call) if self.blocks else call()
            return await returned if inspect.isawaitable(returned) else returned
        except SystemExit as error:
            raise AgentFailed(f"{self.name} raised SystemExit: {error}") from error

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        """Call a function in its own thread, in a copy of this context.

        A thread cannot be ended: it runs on after a cancelled wait, and does not keep the process
        alive.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        context = copy_context()

        def set_result(value: Any, error: BaseException | None) -> None:
            if future.done():
                self.hanging -= 1
            elif error is not None:
                future.set_exception(error)
            else:
                future.set_result(value)

        def work() -> None:
            value: Any = None
            failed: BaseException | None = None
            try:
                value = context.run(function)
            except StopIteration as error:
                # A future cannot have one as its exception.
                failed = RuntimeError(f"it raised StopIteration: {error.value}")
            except BaseException as error:
                failed = error
            # The event loop may be closed: then no wait is left.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(set_result, value, failed)

        threading.Thread(target=work, name=self.name, daemon=True).start()
        try:
            return await future
        finally:
            self.hanging += future.cancelled()


def callable_of(found: Any, kwargs: dict[str, Any]) -> Callable[..., Any]:
    """Return the function to call with an item: the agent itself, or its method ``run``; a class is
    instantiated. ConfigError for any other object."""
    if inspect.isclass(found):
        if not callable(getattr(found, "run", None)):
            raise ConfigError(
                f"the agent {name_of(found)} has no method run: write async def run(self, data, "
                "**extra_kwargs) in it, which returns the reward"
            )
        try:
            inspect.signature(found).bind(**kwargs)
        except TypeError as error:
            raise ConfigError(
                f"the agent {name_of(found)} cannot be instantiated with the arguments "
                f"{', '.join(kwargs) or '(none)'}: {error}"
            ) from None
        except ValueError:
            pass  # A class of C without a signature raises its own error for missing arguments.
        found = found(**kwargs)
    elif kwargs:
        raise ConfigError(
            f"the agent {name_of(found)} is not a class: there is no constructor for agent_kwargs "
            f"({', '.join(kwargs)})"
        )
    run = getattr(found, "run", None)
    if callable(run):
        return run  # type: ignore[no-any-return]
    if callable(found):
        return found  # type: ignore[no-any-return]
    raise ConfigError(
        f"the agent is a {name_of(found)}: give a function of an item, or an object or a class "
        "with run(data, **extra_kwargs)"
    )


def _arguments(call: Callable[..., Any], name: str) -> tuple[bool, tuple[str, ...]]:
    """Return whether the agent takes the session as its second argument, and the arguments that it
    takes by name."""
    try:
        parameters = list(inspect.signature(call).parameters.values())
    except ValueError:
        return False, ()
    kinds = inspect.Parameter
    in_order = (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    positional = [p for p in parameters if p.kind in in_order]
    anything = any(p.kind is kinds.VAR_KEYWORD for p in parameters)
    star = any(p.kind is kinds.VAR_POSITIONAL for p in parameters)
    if not positional and not star:
        raise ConfigError(f"{name} takes no item: write it as a function of an item")
    rest = positional[1:]
    second = (
        bool(rest)
        and rest[0].name not in _CONNECTION
        and (rest[0].default is kinds.empty or rest[0].name == "session")
    )
    if second:
        rest = rest[1:]
    known = (*_CONNECTION, "session")
    by_name = [*rest, *(p for p in parameters if p.kind is kinds.KEYWORD_ONLY)]
    for parameter in by_name:
        if parameter.default is kinds.empty and (
            parameter.name not in known or parameter.kind is kinds.POSITIONAL_ONLY
        ):
            raise ConfigError(
                f"{name} requires an unknown argument {parameter.name!r}: an agent is called with "
                f"the item, the session, and by name {', '.join(known)}"
            )
    named = [p.name for p in by_name if p.name in known and p.kind is not kinds.POSITIONAL_ONLY]
    if anything:
        named += [one for one in _CONNECTION if one not in named]
    return second, tuple(named)


def _is_async(call: Any) -> bool:
    call = inspect.unwrap(call)
    while isinstance(call, partial):
        call = call.func
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(
        getattr(call, "__call__", None)  # noqa: B004
    )
