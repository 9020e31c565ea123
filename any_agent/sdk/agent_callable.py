"""What a user gives as the agent, as one way to call it.

A function of an item (and, if it wants it, of the session), or a class or an object with
``run(data, **extra_kwargs)`` as in training; coroutine functions or ordinary ones, which run in
threads.
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

from any_agent.client.environment import require_some_key
from any_agent.client.retry_transport import SharedClient
from any_agent.errors import AgentFailed, ConfigError
from any_agent.runtime.import_string import import_string
from any_agent.sdk.session import AsyncSession

AgentLike: TypeAlias = Any
"""``fn(item)``, ``fn(item, session)``, an object or a class with ``run(data, **extra_kwargs)``, or
the dotted name of any of them."""

_CONNECTION = ("base_url", "api_key", "http_client")
"""What an agent is given in training, too."""


class AgentCallable:
    """An agent that can be called. ConfigError for what is none, or takes arguments that nobody
    gives it."""

    def __init__(self, agent: AgentLike, kwargs: Mapping[str, Any] | None = None) -> None:
        found = import_string(agent, "agent") if isinstance(agent, str) else agent
        self._call: Callable[..., Any] = callable_of(found, dict(kwargs or {}))
        self.name = _name(found)
        """For messages: what is called."""
        if hasattr(found, "run") and not inspect.isroutine(found):
            self.name += ".run"
        self.blocks = not _is_async(self._call)
        """Whether it is run in a thread."""
        self.hanging = 0
        """Threads that go on though nobody waits for them any more."""
        self._second, self._named = _arguments(self._call, self.name)

    @property
    def wants_http_client(self) -> bool:
        return "http_client" in self._named

    async def __call__(
        self, item: Any, session: AsyncSession, http_client: SharedClient | None
    ) -> Any:
        """What it returns for an item. It raises what the agent raises, but for SystemExit, which
        is AgentFailed: a library that wants to end the process ends its own run."""
        given: dict[str, Any] = {
            "base_url": session.session_url,
            "api_key": session.api_key,
            "session": session.blocking if self.blocks else session,
        }
        if not self.blocks:
            given["http_client"] = http_client
        require_some_key()
        positional = (item, given["session"]) if self._second else (item,)
        call = partial(
            self._call, *positional, **{name: given[name] for name in self._named if name in given}
        )
        try:
            returned = await self._in_thread(call) if self.blocks else call()
            return await returned if inspect.isawaitable(returned) else returned
        except SystemExit as error:
            raise AgentFailed(f"{self.name} raised SystemExit: {error}") from error

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        """Call it in a thread of its own, in a copy of this context.

        A thread cannot be ended: one that nobody waits for any more goes on, and does not keep the
        process alive.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        context = copy_context()

        def tell(value: Any, error: BaseException | None) -> None:
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
                # No future can hold one.
                failed = RuntimeError(f"it raised StopIteration: {error.value}")
            except BaseException as error:
                failed = error
            # Whose loop has ended waits for nothing any more.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(tell, value, failed)

        threading.Thread(target=work, name=self.name, daemon=True).start()
        try:
            return await future
        finally:
            self.hanging += future.cancelled()


def callable_of(found: Any, kwargs: dict[str, Any]) -> Callable[..., Any]:
    """What is called with an item: a function, or the method run of an object, made where a class
    is given. ConfigError for anything else."""
    if inspect.isclass(found):
        if not callable(getattr(found, "run", None)):
            raise ConfigError(
                f"the agent {_name(found)} has no method run: write async def run(self, data, "
                "**extra_kwargs) in it, which returns the reward"
            )
        try:
            inspect.signature(found).bind(**kwargs)
        except TypeError as error:
            raise ConfigError(
                f"the agent {_name(found)} cannot be made with the arguments "
                f"{', '.join(kwargs) or '(none)'}: {error}"
            ) from None
        except ValueError:
            pass  # A class of C without a signature says itself what it misses.
        found = found(**kwargs)
    elif kwargs:
        raise ConfigError(
            f"the agent {_name(found)} is no class: agent_kwargs ({', '.join(kwargs)}) have "
            "nothing to be given to"
        )
    run = getattr(found, "run", None)
    if callable(run):
        return run  # type: ignore[no-any-return]
    if callable(found):
        return found  # type: ignore[no-any-return]
    raise ConfigError(
        f"the agent is a {_name(found)}: give a function of an item, or an object or a class with "
        "run(data, **extra_kwargs)"
    )


def _arguments(call: Callable[..., Any], name: str) -> tuple[bool, tuple[str, ...]]:
    """Whether it takes the session behind the item, and what it takes by name."""
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
        raise ConfigError(f"{name} takes no item: write it as a function of one")
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
                f"{name} needs an argument {parameter.name!r} that nobody gives it: it gets the "
                f"item, the session, and by name {', '.join(known)}"
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


def _name(found: Any) -> str:
    named = found if hasattr(found, "__qualname__") else type(found)
    return f"{named.__module__}.{named.__qualname__}"
