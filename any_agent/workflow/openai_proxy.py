"""Agents that know nothing of training, as workflows: their calls go through the service."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal, Self

from any_agent import stats_tracker
from any_agent.agent_environment import environment
from any_agent.errors import AgentFailed, ConfigError
from any_agent.last_words import end_run
from any_agent.record import InteractionWithTokenLogpReward
from any_agent.returned_rewards import give_rewards, rewards_of
from any_agent.workers import (
    WorkerCrashed,
    WorkerFailed,
    WorkerPool,
    WorkerTimeout,
    pack,
    shared_pool,
)
from any_agent.workflow import context as workflow_context
from any_agent.workflow.agent_service import AgentService
from any_agent.workflow.base import RolloutWorkflow
from any_agent.workflow.proxy_client import OpenAIProxyClient

log = logging.getLogger(__name__)

_NO_CALL = (
    "none of its model calls came to the service: make the client with the base_url and api_key "
    "that run is given (in the mode subproc: in OPENAI_BASE_URL and OPENAI_API_KEY), inside run"
)
_GIVEN = ("base_url", "api_key", "http_client")


class OpenAIProxyWorkflow(RolloutWorkflow):
    """Runs an agent, a class's instance with ``async def run(data, **extra_kwargs)``, as a session
    of the service, and returns what was recorded of it.

    What ``run`` returns is the reward: a number (of the last completion), a dict (by completion
    id), or None (as it has set them by calls). In the mode ``inline`` it is given ``base_url``,
    ``api_key`` and ``http_client``; in the mode ``subproc`` it runs in a process of its own, finds
    them in the variables that OpenAI's and Anthropic's clients read, and may block.

    An agent that raises, takes more than ``timeout`` seconds or takes its process down ends its own
    session, of which nothing is trained on, and raises AgentFailed (inline: what it raised).
    """

    def __init__(
        self,
        *,
        agent: Any,
        proxy_addr: str,
        admin_api_key: str | Callable[[], str] | None = None,
        mode: Literal["inline", "subproc"] = "inline",
        discount: float = 1.0,
        export_style: Literal["individual", "concat"] = "individual",
        subproc_max_workers: int = 4,
        timeout: float = 600.0,
        patience: float = 300.0,
    ) -> None:
        """ConfigError naming the agent for one that cannot be run in this mode."""
        if mode not in ("inline", "subproc"):
            raise ConfigError(f"rollout.agent.mode is {mode!r}: use inline or subproc")
        self.agent = agent
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
        self._name = _name_of(agent)
        self._takes = _arguments_for(agent, self._name, mode)
        self._pool: WorkerPool | None = None
        if mode == "subproc":
            pack(agent.run)
            self._pool = shared_pool("agents", subproc_max_workers)
        # Who waits for a worker must not hold a session meanwhile.
        self._free = asyncio.Semaphore(subproc_max_workers)

    @classmethod
    def of(cls, agent: Any, service: AgentService) -> Self:
        """The agent against a service."""
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
        """One session; None if the agent made no call and gave no reward, so skipped the item."""
        if self._pool is None:
            return await self._episode(data)
        async with self._free:
            return await self._episode(data)

    async def _episode(
        self, data: dict[str, Any] | None
    ) -> dict[str, InteractionWithTokenLogpReward] | None:
        context = workflow_context.get()
        key = self.service.admin_key
        client = OpenAIProxyClient(
            await workflow_context.get_aiohttp_session(),
            self.service.url,
            str(_task_of(data, context.task_id)),
            key() if callable(key) else key,
            mode="eval" if context.is_eval else "train",
            patience=self.service.patience,
        )
        if not context.is_eval:
            await client.grant_capacity()
        async with client:
            returned = await self._run(client.session_api_key, data)
            name = f"{self._name}.run"
            await give_rewards(
                rewards_of(returned, name),
                name,
                lambda reward, id: (
                    client.set_last_reward(reward) if id is None else client.set_reward(id, reward)
                ),
                no_call=f"{name} returned a reward, and {_NO_CALL}",
            )
        if not client.interaction_count:
            return None
        try:
            interactions = await client.export_interactions(
                self.service.discount, self.service.export_style
            )
        except BaseException as error:
            await client.discard(error)
            raise
        if interactions:
            last = interactions[next(reversed(interactions))]
            stats_tracker.get(workflow_context.stat_scope()).scalar(reward=last.reward)
        return interactions or None

    # -- running -------------------------------------------------------------------------------

    async def _run(self, api_key: str, data: dict[str, Any] | None) -> Any:
        if self._pool is not None:
            return await self._run_apart(self._pool, api_key, data)
        given: dict[str, Any] = {"base_url": self.service.url, "api_key": api_key}
        if "http_client" in self._takes:
            given["http_client"] = await workflow_context.get_httpx_client()
        wanted = {name: given[name] for name in self._takes}
        run = asyncio.ensure_future(self.agent.run(data, **wanted))
        try:
            await asyncio.wait([run], timeout=self.service.timeout)
            if run.done():
                return run.result()
            raise self._too_slow()
        finally:
            await end_run(run, self._name)

    async def _run_apart(self, pool: WorkerPool, api_key: str, data: dict[str, Any] | None) -> Any:
        environ = environment(self.service.url, api_key)
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
            raise AgentFailed(f"the agent {self._name} failed: {error}{trace}") from None

    def _too_slow(self) -> AgentFailed:
        return AgentFailed(
            f"the agent {self._name} took more than {self.service.timeout:g} s for one run "
            "(rollout.agent.timeout), and was ended",
            code="agent_timeout",
        )


def _task_of(data: Mapping[str, Any] | None, task_id: int | str | None) -> int | str:
    """The item's own name for its task, else the executor's number."""
    own = data.get("task_id") if isinstance(data, Mapping) else None
    if isinstance(own, int | str) and own != "":
        return own
    return "task" if task_id is None else task_id


def _name_of(agent: Any) -> str:
    kind = agent if inspect.isclass(agent) else type(agent)
    return f"{kind.__module__}.{kind.__qualname__}"


def _arguments_for(agent: Any, name: str, mode: str) -> tuple[str, ...]:
    """Which of the things that an agent is given its run takes, by name."""
    run = getattr(agent, "run", None)
    if not callable(run) or inspect.isclass(agent):
        raise ConfigError(
            f"the agent {name} has no run that can be called: give an instance of a class with "
            "async def run(self, data, **extra_kwargs)"
        )
    if mode == "subproc":
        return ()
    if not inspect.iscoroutinefunction(inspect.unwrap(run)):
        raise ConfigError(
            f"{name}.run is no coroutine: write async def run(self, data, **extra_kwargs), or set "
            "rollout.agent.mode=subproc for an agent that blocks"
        )
    parameters = inspect.signature(run).parameters.values()
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters):
        return _GIVEN
    named = [one.name for one in parameters if one.kind is not inspect.Parameter.POSITIONAL_ONLY]
    taken = tuple(one for one in _GIVEN if one in named)
    if "base_url" not in taken or "api_key" not in taken:
        raise ConfigError(
            f"{name}.run takes no base_url and api_key, so its calls would go elsewhere: write "
            "async def run(self, data, **extra_kwargs) and make its client with them"
        )
    return taken
