"""A rank's app for code in the same process: its engine, its sessions, and its trajectories.

Everything may be used from any event loop; the work itself runs on the app's own.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any, TypeVar

from any_agent.engine import RolloutEngine
from any_agent.engine.base import CrossLoopEngine
from any_agent.errors import ConfigError, Draining, ServiceUnavailable, StartupError
from any_agent.protocol.training import Ack, Lease
from any_agent.record import CompletionWithTokenLogpReward, pack_trajectories
from any_agent.types import SessionState
from proxy_ext.middleware import EntryMiddleware
from proxy_ext.service import RankService
from proxy_ext.sessions.session import RecordedSession

T = TypeVar("T")

_VISIBLE = (SessionState.OPEN, SessionState.AWAITING_REWARD, SessionState.FINALIZED)
_LIMIT_MARGIN = 30.0  # seconds that slots stay offered after a poll: the next one renews them


class RankApp(EntryMiddleware):
    """The ASGI app of a rank; start it (by uvicorn, say) before you use these methods."""

    _service: RankService | None = None
    _loop: asyncio.AbstractEventLoop | None = None

    def __init__(self, *parts: Any, **settings: Any) -> None:
        super().__init__(*parts, **settings)
        self.refused: ConfigError | StartupError | None = None
        """The error with which the process is to end: of its start, or LiteLLM's configuration."""
        self.on_refused: Callable[[], None] = lambda: None
        self.waiting: Counter[str] = Counter()
        """Number of groups that each workflow waits for, by its owner."""
        self._engine = CrossLoopEngine(self._run_engine, lambda: self.service.engine.version)
        self.session_cache = SessionCache(lambda: self.service.sessions.live)
        """A live view of the sessions that were not handed over yet."""

    def refuse(self, error: ConfigError) -> None:
        """Note the error of a configuration that cannot be used."""
        self.refused = error
        self.on_refused()

    def on_started(self, service: RankService) -> None:
        """Bind the app to its parts and to the running event loop."""
        self._service, self._loop = service, asyncio.get_running_loop()

    def on_stopped(self) -> None:
        self._service = None

    @property
    def service(self) -> RankService:
        """The rank's parts; ServiceUnavailable while the app is not running."""
        if self._service is None:
            raise ServiceUnavailable(
                "this app is not running: serve it by uvicorn, whose lifespan starts it, first"
            )
        return self._service

    @property
    def engine(self) -> RolloutEngine:
        """The engine of the app's calls, always one object: token ids in, token ids out.

        It is there before the app runs; its calls raise ServiceUnavailable until then.
        """
        return self._engine

    async def load(self, session_id: str) -> None:
        """Load a session's completions into memory, where they stay for a while; NotFound."""

        async def loaded(service: RankService) -> None:
            await service.sessions.load(await service.sessions.by_id(session_id))

        await self.run(loaded)

    async def lease(self, *, owner: str, wait: float, max_groups: int = 1) -> bytes | None:
        """Return packed trajectories of closed groups, or None; see `RLClient.lease`."""

        async def leased(service: RankService) -> bytes | None:
            if service.calls.draining:
                raise Draining("the service is stopping and leases no more trajectories; try again")
            body = Lease(owner=owner, wait=wait, max_groups=max_groups)
            return pack_trajectories(found) if (found := await service.leases.lease(body)) else None

        return await self.run(leased)

    async def ack(self, *, owner: str, trained: list[str], rejected: list[Any]) -> int:
        """End leases for good; see `RLClient.ack`."""
        body = Ack(owner=owner, trained=trained, rejected=rejected)
        return await self.run(lambda service: service.leases.ack(body))

    async def give_back(self, *, owner: str) -> None:
        """End all leases of one owner without an effect."""
        await self.run(lambda s: s.leases.give_back(list(s.leases.leased_by(owner)), owner))

    async def admit(self, *, seconds: float) -> None:
        """Allow as many sessions, open or ready to be leased, as the awaited groups need.

        The limit lasts so many seconds, counts the present sessions, and overwrites a trainer's.
        """

        async def admitted(service: RankService) -> None:
            now = service.leases.capacity()
            wanted = self.waiting.total() * service.config.sessions.group_size
            free = max(0, wanted - now.running - now.buffered - now.reserved)
            service.sessions.admission.set_limit(now.admitted + free, seconds + _LIMIT_MARGIN)

        await self.run(admitted)

    async def _run_engine(self, work: Callable[[Any], Coroutine[Any, Any, T]]) -> T:
        return await self.run(lambda service: work(service.engine))

    async def run(self, work: Callable[[RankService], Coroutine[Any, Any, T]]) -> T:
        """Run work on the app's event loop; it is cancelled with its caller."""
        service = self.service
        if self._loop is None or asyncio.get_running_loop() is self._loop:
            return await work(service)
        there = asyncio.run_coroutine_threadsafe(work(service), self._loop)
        return await asyncio.wrap_future(there)


class SessionCache(Mapping[str, Mapping[str, CompletionWithTokenLogpReward]]):
    """A read-only view of a rank's sessions, by id: their completions, by id.

    ServiceUnavailable while the app is not running.
    """

    def __init__(self, live: Callable[[], Mapping[str, RecordedSession]]) -> None:
        self._live = live

    def __getitem__(self, session_id: str) -> Mapping[str, CompletionWithTokenLogpReward]:
        session = self._live()[session_id]
        if session.state not in _VISIBLE:
            raise KeyError(session_id)
        return Completions(session)

    def __iter__(self) -> Iterator[str]:
        return (s.id for s in list(self._live().values()) if s.state in _VISIBLE)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Completions(Mapping[str, CompletionWithTokenLogpReward]):
    """A read-only view of one session's recorded completions."""

    def __init__(self, session: RecordedSession) -> None:
        self._session = session

    def __getitem__(self, completion_id: str) -> CompletionWithTokenLogpReward:
        tree = self._tree
        return _Recorded.of(tree[completion_id], tree.messages(completion_id))

    def __iter__(self) -> Iterator[str]:
        return (interaction.id for interaction in list(self._tree))

    def __len__(self) -> int:
        return len(self._tree)

    @property
    def _tree(self) -> Any:
        if not self._session.loaded:
            raise ServiceUnavailable(
                f"the completions of session {self._session.id} are in the journal, not in memory: "
                "await app.load(session_id) first"
            )
        return self._session.tree


class _Recorded(CompletionWithTokenLogpReward):
    """A recorded completion; setting an attribute raises AttributeError."""

    _complete = False

    @classmethod
    def of(cls, *args: Any) -> _Recorded:
        made = super().of(*args)
        made._complete = True
        return made

    def __setattr__(self, name: str, value: object) -> None:
        if self._complete:
            raise AttributeError(
                f"{name} of a recorded completion cannot be set, since the journal would not "
                "have it: set rewards by POST /rl/v1/set_reward"
            )
        super().__setattr__(name, value)
