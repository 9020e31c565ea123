"""`OpenAIProxyWorkflow`: runs an ordinary agent as a workflow, with its calls in the service."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, get_args

from any_agent import stats_tracker
from any_agent.client.environment import environment, require_service
from any_agent.config import SECRET_VARIABLES
from any_agent.errors import AgentFailed, AnyAgentError, ConfigError
from any_agent.record import InteractionWithTokenLogpReward
from any_agent.rewards.returned import Rewards, give_rewards, no_reward, rewards_of
from any_agent.runtime.event_loop import cancel_and_wait, measure_steps
from any_agent.runtime.import_string import name_of
from any_agent.runtime.logs import Redactor
from any_agent.runtime.worker_pool import (
    WorkerCrashed,
    WorkerFailed,
    WorkerPool,
    WorkerTimeout,
    pack,
    shared_pool,
)
from any_agent.workflow import context as workflow_context
from any_agent.workflow.base import RolloutWorkflow
from any_agent.workflow.grouped import own_copy
from any_agent.workflow.proxy_client import OpenAIProxyClient, is_of_call

if TYPE_CHECKING:
    import aiohttp

log = logging.getLogger(__name__)

AgentMode: TypeAlias = Literal["auto", "inline", "subproc"]

_NO_CALL = "none of its model calls reached the service: create the client inside run, with the "
_NO_CALL_INLINE = (
    f"{_NO_CALL}base_url that run is called with, or set rollout.agent.mode=subproc for an agent "
    "that reads OPENAI_BASE_URL or blocks"
)
_NO_CALL_APART = f"{_NO_CALL}URL in OPENAI_BASE_URL"
MAX_BLOCKED = 5.0  # seconds for which an agent may block the event loop without a warning
_ARGUMENTS = ("base_url", "api_key", "http_client")
_WRITE = "write async def run(self, data, **extra_kwargs)"
_NEEDS_MAIN_THREAD = "only works in main thread"
"""The error text of Python's ``signal`` outside of the main thread."""


@dataclass(frozen=True, slots=True)
class AgentService:
    """The service that an agent calls, and the way to run the agent, for all episodes."""

    url: str
    """The service's public URL, such as `http://127.0.0.1:8000`, with `/v1` or without."""
    admin_key: str | Callable[[], str] | None = field(default=None, repr=False)
    """An admin's or a trainer's key, or a function that returns it for each episode; None where
    the service has no keys."""
    mode: AgentMode = "auto"
    """``inline`` in this process's event loop, ``subproc`` in a pool of processes, or ``auto`` by
    the agent's needs."""
    export_style: Literal["individual", "concat"] = "individual"
    """One row to train on for each model call, or for each conversation."""
    discount: float = 1.0
    """The share of a later turn's reward that an earlier turn gets, per turn."""
    max_workers: int = 4
    """Processes of the mode `subproc`."""
    timeout: float = 600.0
    """Seconds that one run of an agent may take."""
    patience: float = 300.0
    """Seconds that each request waits for a service that is full, away or restarting."""


class NeedsMainThread(AgentFailed):
    """An agent of the mode ``auto`` cannot run inline; the next run of it is in a process."""


class OpenAIProxyWorkflow(RolloutWorkflow):
    """Runs an agent, an instance with ``async def run(data, **extra_kwargs)``, in a session of the
    service, and returns the session's recorded interactions.

    ``run`` returns the reward: a number (of the last completion), a dict (by completion id), or
    None (it has set rewards by requests). In the mode ``inline`` it is called with ``base_url``,
    which names its session, ``api_key`` and ``http_client``; in the mode ``subproc`` it runs in its
    own process, finds them in the variables that OpenAI's and Anthropic's clients read, and may
    block. In the mode ``auto`` it runs inline until it turns out to need a main thread, or in
    processes from the start if its ``run`` is no coroutine function.

    A subclass may override ``arun_episode`` with :meth:`_grant_capacity`, an
    :class:`OpenAIProxyClient` and :meth:`_run_agent`, with ``discount`` and ``export_style``.

    An agent that raises, takes more than ``timeout`` seconds or crashes its process ends its own
    session, which is not trained on, and raises AgentFailed (inline: its own error).
    """

    def __init__(
        self,
        *,
        agent: Any,
        proxy_addr: str,
        admin_api_key: str | Callable[[], str] | None = None,
        mode: AgentMode = "auto",
        discount: float = 1.0,
        export_style: Literal["individual", "concat"] = "individual",
        subproc_max_workers: int = 4,
        timeout: float = 600.0,
        patience: float = 300.0,
    ) -> None:
        """Raise ConfigError for an agent that cannot be run in this mode."""
        if mode not in get_args(AgentMode):
            raise ConfigError(f"rollout.agent.mode is {mode!r}: use auto, inline or subproc")
        self.agent = agent
        self.discount = discount
        self.export_style = export_style
        self.service = AgentService(
            proxy_addr.rstrip("/").removesuffix("/v1"),
            admin_api_key,
            mode,
            export_style,
            discount,
            subproc_max_workers,
            timeout,
            patience,
        )
        self._name = name_of(agent)
        if not callable(getattr(agent, "run", None)) or inspect.isclass(agent):
            raise ConfigError(
                f"the agent {self._name} has no callable run: give an instance of a class with "
                "async def run(self, data, **extra_kwargs)"
            )
        self._pool: WorkerPool | None = None
        self._takes: tuple[str, ...] = ()
        if mode == "subproc":
            self._use_processes()
        elif mode == "auto" and not _is_coroutine_function(agent.run):
            self._switch_to_processes("is no coroutine function")
        else:
            self._takes = _arguments_for(agent, self._name)
        self._warned_of_blocking = False
        # An episode that waits for a worker must not have a session open.
        self._free = asyncio.Semaphore(subproc_max_workers)

    @classmethod
    def of(cls, agent: Any, service: AgentService) -> Self:
        """Return the workflow that runs an agent in sessions of a service."""
        return cls(
            agent=agent,
            proxy_addr=service.url,
            admin_api_key=service.admin_key,
            mode=service.mode,
            discount=service.discount,
            export_style=service.export_style,
            subproc_max_workers=service.max_workers,
            timeout=service.timeout,
            patience=service.patience,
        )

    async def arun_episode(
        self, engine: Any, data: dict[str, Any] | None
    ) -> dict[str, InteractionWithTokenLogpReward] | None:
        """Run one session; return None if the agent skipped the item: no call and no reward."""
        if self._pool is None:
            try:
                # A repeated run needs the unchanged item.
                repeatable = data is not None and self.service.mode == "auto"
                return await self._episode(own_copy(data or {}) if repeatable else data)
            except NeedsMainThread:
                log.info("the failed run of %s is repeated in a process", self._name)
        async with self._free:
            return await self._episode(data)

    async def _episode(
        self, data: dict[str, Any] | None
    ) -> dict[str, InteractionWithTokenLogpReward] | None:
        http_session = await workflow_context.get_aiohttp_session()
        await self._grant_capacity(http_session, data)
        client = self._client(http_session, data)
        await self._run_session(client, data)
        if not client.interaction_count:
            return None
        try:
            interactions = await client.export_interactions(self.discount, self.export_style)
        except BaseException as error:
            await client.discard(error)
            raise
        if interactions:
            last = interactions[next(reversed(interactions))]
            stats_tracker.get(workflow_context.stat_scope()).scalar(reward=last.reward)
        return interactions or None

    async def _run_session(self, client: OpenAIProxyClient, data: dict[str, Any] | None) -> None:
        """Open the session, run the agent in it, set its rewards and end it."""
        name, inline = f"{self._name}.run", self._pool is None
        no_call = _NO_CALL_INLINE if inline else _NO_CALL_APART
        rewards: Rewards = None
        rewarded = False
        try:
            async with client:
                rewards = await self._run_agent(client.session_url, data)
                await give_rewards(
                    rewards,
                    name,
                    lambda reward, id: (
                        client.set_last_reward(reward)
                        if id is None
                        else client.set_reward(id, reward)
                    ),
                    no_call=f"{name} returned a reward, and {no_call}",
                )
                rewarded = True
        except Exception as error:
            code = error.code if isinstance(error, AnyAgentError) else None
            if rewarded and code == "no_reward":
                raise no_reward(rewards, name) from None
            told = code == "no_model_call" or not is_of_call(error)
            if inline and client.called is False and not told:
                error.add_note(no_call)
            raise

    def _client(
        self, http_session: aiohttp.ClientSession, data: Mapping[str, Any] | None
    ) -> OpenAIProxyClient:
        context = workflow_context.get()
        return OpenAIProxyClient(
            http_session,
            self.service.url,
            str(_task_of(data, context.task_id)),
            self.service.admin_key,
            mode="eval" if context.is_eval else "train",
            patience=self.service.patience,
        )

    async def _grant_capacity(
        self, http_session: aiohttp.ClientSession, data: Mapping[str, Any] | None = None
    ) -> None:
        """Grant a slot for one more session of this episode's task, except in an evaluation.

        Without ``data`` the task is that of the workflow's context.
        """
        if not workflow_context.get().is_eval:
            await self._client(http_session, data).grant_capacity()

    async def _run_agent(self, session_url: str, data: dict[str, Any] | None) -> Rewards:
        """Run the agent on an item in the session of this URL; return its reward as a number, a
        dict by completion id, or None.

        Raises AgentFailed, NeedsMainThread or, inline, the agent's own error.
        """
        if self._pool is not None:
            returned = await self._run_apart(self._pool, session_url, data)
        else:
            returned = await self._run_inline(session_url, data)
        return rewards_of(returned, f"{self._name}.run")

    async def _run_inline(self, session_url: str, data: dict[str, Any] | None) -> Any:
        arguments: dict[str, Any] = {"base_url": session_url, "api_key": _key_in(session_url)}
        if "http_client" in self._takes:
            arguments["http_client"] = await workflow_context.get_httpx_client()
        wanted = {name: arguments[name] for name in self._takes}
        require_service(self.service.url)
        run = asyncio.ensure_future(
            measure_steps(self.agent.run(data, **wanted), self._warn_of_blocking)
        )
        try:
            await asyncio.wait([run], timeout=self.service.timeout)
            if not run.done():
                raise self._too_slow()
            return run.result()
        except Exception as error:
            if self.service.mode != "auto" or not _needs_main_thread(error):
                raise
            self._switch_to_processes("needs a main thread")
            raise NeedsMainThread(
                f"the agent {self._name} needs a main thread: from now on it runs in processes",
                code="agent_failed",
            ) from error
        finally:
            await cancel_and_wait(run, self._name)

    def _warn_of_blocking(self, seconds: float) -> None:
        """Warn once of an agent that has blocked the event loop for so long in one step."""
        if seconds <= MAX_BLOCKED or self._warned_of_blocking:
            return
        self._warned_of_blocking = True
        log.warning(
            "%s.run blocked the event loop, and so all other runs, for %.0f s: set "
            "rollout.agent.mode=subproc for an agent that blocks",
            self._name,
            seconds,
        )

    def _switch_to_processes(self, why: str) -> None:
        """Run the agent in processes from now on, and log this once."""
        if self._pool is not None:
            return
        try:
            self._use_processes()
        except ConfigError as error:
            raise ConfigError(
                f"{self._name}.run {why}, so that it must run in its own process, but: {error}. Or "
                "make it a coroutine function that works in any thread"
            ) from error
        log.warning(
            "%s.run %s: it runs in processes from now on, %d at once (rollout.agent.max_workers); "
            "set rollout.agent.mode=subproc to do so from the start",
            self._name,
            why,
            self.service.max_workers,
        )

    def _use_processes(self) -> None:
        """Create the pool; ConfigError for an agent that cannot be sent to a process."""
        pack(self.agent.run)
        self._pool = shared_pool("agents", self.service.max_workers, secrets=SECRET_VARIABLES)

    async def _run_apart(
        self, pool: WorkerPool, session_url: str, data: dict[str, Any] | None
    ) -> Any:
        environ = environment(session_url.removesuffix("/v1"), _key_in(session_url))
        try:
            return await pool.run(
                self.agent.run, data, timeout=self.service.timeout, environ=environ
            )
        except WorkerTimeout:
            raise self._too_slow() from None
        except WorkerCrashed as error:
            raise AgentFailed(
                f"the agent {self._name} took its process down: {error}", code="agent_crashed"
            ) from None
        except WorkerFailed as error:
            trace = f"\n{error.failure.trace}" if error.failure is not None else ""
            text = Redactor().text(f"{error}{trace}")
            raise AgentFailed(f"the agent {self._name} failed: {text}") from None

    def _too_slow(self) -> AgentFailed:
        return AgentFailed(
            f"the agent {self._name} took more than {self.service.timeout:g} s for one run "
            "(rollout.agent.timeout), and was stopped",
            code="agent_timeout",
        )


def _task_of(data: Mapping[str, Any] | None, task_id: int | str | None) -> int | str:
    """Return the item's own task id, else the executor's number."""
    own = data.get("task_id") if isinstance(data, Mapping) else None
    if isinstance(own, int | str) and own != "":
        return own
    return "task" if task_id is None else task_id


def _key_in(session_url: str) -> str:
    return session_url.removesuffix("/v1").rpartition("/")[2]


def _needs_main_thread(error: BaseException) -> bool:
    """Return True if the error, its cause or its context is that of ``signal`` in a thread."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, ValueError) and _NEEDS_MAIN_THREAD in str(one):
            return True
        left += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            left += one.exceptions
    return False


def _is_coroutine_function(run: Any) -> bool:
    return inspect.iscoroutinefunction(inspect.unwrap(run))


def _arguments_for(agent: Any, name: str) -> tuple[str, ...]:
    """Return those of the service's arguments that the agent's run takes by name."""
    if not _is_coroutine_function(agent.run):
        raise ConfigError(
            f"{name}.run is no coroutine: {_WRITE}, or set rollout.agent.mode=subproc for an agent "
            "that blocks"
        )
    parameters = inspect.signature(agent.run).parameters.values()
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters):
        return _ARGUMENTS
    named = [one.name for one in parameters if one.kind is not inspect.Parameter.POSITIONAL_ONLY]
    taken = tuple(one for one in _ARGUMENTS if one in named)
    if "base_url" not in taken:
        raise ConfigError(
            f"{name}.run takes no base_url, so its calls would go elsewhere: {_WRITE} and create "
            "its client with that, or set rollout.agent.mode=subproc for an agent that reads "
            "OPENAI_BASE_URL"
        )
    return taken
