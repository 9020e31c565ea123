"""The parts of one rank's proxy, and their assembly."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

from any_agent.auth.access import Access, run_dir_of
from any_agent.auth.audit_log import AuditLog
from any_agent.auth.engine_key import key_of_engines
from any_agent.chat import ChatFormat, load_chat_format
from any_agent.completions.completer import Completer
from any_agent.config import Config
from any_agent.engine import RemoteEngine, open_engine
from any_agent.engine.model_fingerprint import ModelFingerprint
from any_agent.errors import AnyAgentError, ConfigError, EngineUnavailable, StoreUnavailable
from any_agent.protocol.conversation_key import rank_tag
from any_agent.rundir.layout import RunDir
from any_agent.rundir.registry import rank_name
from any_agent.runtime.disk_space import DiskForecast
from any_agent.runtime.metrics import loop_lag_histogram, watch_loop_lag
from any_agent.runtime.open_files import connections_for_descriptors
from any_agent.types import GenerationHyperparameters, SessionState
from proxy_ext.admission.fleet_place import FleetPlace
from proxy_ext.admission.implicit_session import ImplicitSessions
from proxy_ext.admission.open_session import SessionOpener
from proxy_ext.archive.archiver import Archiver
from proxy_ext.auth import Authenticator
from proxy_ext.calls.call_manager import CallManager
from proxy_ext.calls.concurrency_limit import call_limit
from proxy_ext.frozen.frozen_models import FrozenModels
from proxy_ext.idempotency import IdempotencyStore
from proxy_ext.journal import Journal, open_journal
from proxy_ext.leases import Fence, LeaseManager, drop_leftovers
from proxy_ext.litellm_app import ConfiguredLiteLLMApp
from proxy_ext.litellm_events import PolicyEvents
from proxy_ext.litellm_shim import LiteLLMProvider
from proxy_ext.run_state import RunState
from proxy_ext.sessions.endings import SessionEnder
from proxy_ext.sessions.expiry import SessionExpirer
from proxy_ext.sessions.ids import SessionIds
from proxy_ext.sessions.rewards import RewardBook
from proxy_ext.sessions.session_store import SessionStore
from proxy_ext.sessions.task_advice import TaskAdvice
from proxy_ext.web.quotas import TenantQuotas

if TYPE_CHECKING:
    from proxy_ext.tracing import SessionTraces

log = logging.getLogger(__name__)

SWEEP_SECONDS = 1.0
_POLL_INTERVAL = 0.25
_DISK_INTERVAL = 10.0
_ARCHIVE_SHARE = 0.25  # of the file system, that all archives may take


class RankService:
    """The parts of a rank's proxy."""

    def __init__(
        self,
        config: Config,
        chat: ChatFormat,
        *,
        rank: int,
        public_url: str,
        training: bool,
        journal: Journal,
        ids: SessionIds,
        engine: RemoteEngine,
        engine_context: int,
        engine_slots: int | None,
        provider: LiteLLMProvider | None,
        litellm: ConfiguredLiteLLMApp | None,
    ) -> None:
        run_dir, rollout, server = run_dir_of(config), config.rollout, config.server
        access = Access(config)
        self.config = config
        self.rank = rank
        self.public_url = public_url
        self.journal = journal
        self.engine = engine
        self.sampling = GenerationHyperparameters(
            max_new_tokens=config.sampling.max_new_tokens, temperature=config.sampling.temperature
        )
        """Sampling of train sessions."""
        temperature = config.eval.temperature
        self.eval_sampling = (
            self.sampling if temperature is None else self.sampling.new(temperature=temperature)
        )
        """Sampling of eval sessions, where their agents set nothing else."""
        self.completer = Completer(
            engine,
            chat,
            context_length=min(config.engine.context_length or engine_context, engine_context),
            keeps_cache=config.engine.update_mode == "in_place",
            id_tag=rank_tag(rank),
            adapters=config.engine.adapters,
        )
        self.sessions = sessions = SessionStore(journal, config.sessions, ids, rank=rank)
        # The one key at which a service of many bills several runs.
        sessions.metered = config.server.lane_tag is not None
        self.run = run = RunState(config, engine, journal, training=training)
        self.rewards = RewardBook(sessions)
        self.task_advice = TaskAdvice(journal, config)
        self.archive = Archiver(
            sessions,
            run_dir.archive,
            about={"experiment": config.experiment, "trial": config.trial},
            keep_seconds=config.sessions.keep_hours * 3600,
            oldest_step=lambda: run.oldest_step,
            limit=lambda: archive_limit(config, run_dir) / self.quotas.ranks,
        )
        self.endings = SessionEnder(
            sessions, self.rewards, needed=run.may_want, unarchive=self.archive.remove
        )
        self.expiry = SessionExpirer(sessions, self.endings)
        self.quotas = _quotas(config, access, sessions)
        sessions.counts.on_decided = self.quotas.on_decided
        self.fleet = FleetPlace(run_dir.fleet, rank, server.ranks)
        self.opening = SessionOpener(
            sessions,
            self.endings,
            access.signer,
            run=run,
            quotas=self.quotas,
            fleet=self.fleet,
            largest_group=min(rollout.batch_size, rollout.max_concurrent),
            public_url=public_url,
            litellm=litellm,
        )
        self.implicit = ImplicitSessions(sessions, self.opening, self.completer)
        self.fence = Fence(journal, partial(drop_leftovers, sessions, self.endings))
        self.leases = LeaseManager(sessions, self.fence, ttl=rollout.lease_ttl, needed=run.may_want)
        limit = call_limit(
            # Each call needs a connection to the engine, too.
            min(server.max_inflight_calls, connections_for_descriptors()),
            slots=engine_slots,
            sessions=rollout.max_concurrent,
        )
        self.calls = CallManager(
            self.completer,
            sessions,
            limit=limit,
            retry_grace=server.retry_grace,
            quotas=self.quotas,
        )
        self.litellm = litellm
        """LiteLLM's app, where the operator has a configuration of it."""
        self.frozen = FrozenModels(config, provider, sessions, self.quotas, litellm)
        self.events = None
        if litellm is not None and (litellm.has_callbacks or litellm.has_keys):
            self.events = PolicyEvents(
                config,
                part=rank_name(rank),
                tells=litellm.has_callbacks,
                charge=litellm.charge if litellm.has_keys else None,
            )
        self.traces = _traces(config, rank)
        sessions.listeners = tuple(x for x in (self.events, self.traces) if x is not None)
        if litellm is not None and config.litellm.policy_guardrails:
            sessions.refuses = litellm.refuses
        self.auth = Authenticator(sessions, access, self.quotas, litellm)
        self.audit = AuditLog(run_dir.audit / f"{rank_name(rank)}.jsonl")
        self.answers = IdempotencyStore(journal, access.signer)
        self.disks = _disks(run_dir, rank)
        self.loop_lag = loop_lag_histogram()
        self.replayable = True
        """False if the rank has retired, and no resume needs a session that it has."""

    async def recover(self) -> None:
        """Load the state from the journal and the archives."""
        await self.sessions.recover(lease_ttl=self.config.rollout.lease_ttl)
        await self.run.recover()
        await self.archive.recover()
        await self.fence.recover()
        await self.answers.recover()

    async def close(self) -> None:
        """End calls and grading, and write the pending delivery marks."""
        self.run.close()
        await self.calls.close()
        await self.frozen.close()
        await self.expiry.close()
        await self.quotas.close()
        if self.events is not None:
            await self.events.close()
        if self.traces is not None:
            await asyncio.to_thread(self.traces.close)
        with suppress(StoreUnavailable):
            await self.sessions.deliveries.flush()

    @property
    def archive_limit_kind(self) -> str:
        return "default" if self.config.sessions.archive_bytes is None else "set"

    @property
    def unfinished(self) -> int:
        """Number of sessions, and of slots for them, for which the rank must stay."""
        ready, counts = (SessionState.FINALIZED, SessionState.LEASED), self.sessions.counts
        for_trainer = counts.for_trainer(*ready) if self.run.state == "training" else 0
        grants = self.sessions.grants.left + self.sessions.run_grants.left
        return sum(
            (
                *(counts.undecided, self.opening.opening, max(0, self.sessions.reserved)),
                *(for_trainer, counts.for_exports(*ready), grants),
            )
        )

    async def follow_fleet(self) -> None:
        """Retire once the rank drains, and learn when nothing of it is needed any more."""
        await self.fleet.refresh()
        self.quotas.ranks = len(self.fleet.fleet.serving)
        if self.fleet.retired and not self.opening.retired:
            log.info("this rank is drained: it takes only members of groups that it has")
            self.opening.retire()
        if not self.opening.retired or self.unfinished:
            self.replayable = True
        elif self.run.state == "finished":
            self.replayable = False
        else:
            last = await self.journal.last_step()
            self.replayable = last is not None and last > (self.run.oldest_step or 0)

    def lose(self, why: str) -> None:
        """Acknowledge nothing any more."""
        if self.journal.stats.lost is None:
            self.journal.stats.lost = why

    async def drain(self) -> None:
        """Refuse new calls and sessions, and answer long polls; calls under way continue."""
        self.calls.draining = True
        self.opening.drain()
        await self.leases.drain()


def load_chat(config: Config, path: str | None = None) -> ChatFormat:
    """Return the policy's chat format; ConfigError if its template cannot be used."""
    return load_chat_format(
        path or config.model.path,
        renderer=config.model.renderer,
        enable_thinking=config.model.enable_thinking,
        thinking_retention=config.model.thinking_retention,
    )


@asynccontextmanager
async def open_service(
    config: Config,
    chat: ChatFormat,
    *,
    rank: int,
    engine_url: str,
    public_url: str,
    training: bool,
    engine_wait: float = 0.0,
    shape: ModelFingerprint | None = None,
    provider: LiteLLMProvider | None = None,
    litellm: ConfiguredLiteLLMApp | None = None,
    journal_url: str | None = None,
) -> AsyncIterator[RankService]:
    """Recover the rank's journal, connect its engine, and sweep until the end.

    ``provider`` or ``litellm`` serves the frozen models, if there are any. EngineUnavailable if the
    engine does not answer within ``engine_wait`` seconds; ``shape`` is its model's fingerprint.
    """
    run_dir = run_dir_of(config)
    run_dir.create()
    engine = open_engine(
        config.engine.kind,
        engine_url,
        decode=chat.decode,
        update_mode=config.engine.update_mode,
        update_wait=config.engine.update_wait,
        request_timeout=config.engine.request_timeout,
        shape=shape,
        key=key_of_engines(config),
    )
    journal = None
    try:
        # With a log in Redis it may wait until the lease of the rank's last process ends.
        journal = await asyncio.to_thread(open_journal, journal_url or _journal_url(config, rank))
        service = RankService(
            config,
            chat,
            rank=rank,
            public_url=public_url,
            training=training,
            journal=journal,
            engine=engine,
            engine_context=await _context_length(engine, engine_wait),
            ids=await SessionIds.recover(config, rank, journal),
            engine_slots=await engine.slots(),
            provider=provider,
            litellm=litellm,
        )
        try:
            await service.recover()
            if service.events is not None:
                service.events.start()
            sweeper = asyncio.create_task(_sweep(service))
            counter = asyncio.create_task(_reconcile(service))
            archiver = asyncio.create_task(service.archive.run())
            disks = asyncio.create_task(_watch_disks(service))
            watcher = asyncio.create_task(engine.watch(hung_after=config.engine.hung_after))
            try:
                async with watch_loop_lag(service.loop_lag):
                    yield service
            finally:
                sweeper.cancel()
                counter.cancel()
                archiver.cancel()
                watcher.cancel()
                disks.cancel()
                await asyncio.wait([archiver, watcher])
                await service.close()
        finally:
            await asyncio.to_thread(service.audit.close)
    finally:
        await engine.close()
        if journal is not None:
            await journal.close()


def _journal_url(config: Config, rank: int) -> str:
    run_dir, server = run_dir_of(config), config.server
    if server.journal is None:
        return run_dir.journal_url(rank)
    return run_dir.logged_journal_url(
        rank,
        server.journal.get_secret_value(),
        lease=server.journal_lease,
        durability=server.journal_durability,
        replicas=server.journal_replicas,
    )


def _disks(run_dir: RunDir, rank: int) -> dict[str, DiskForecast]:
    """Return the forecasts of the disk of the run, and of the journal's, if it is another one."""
    folders = {"run": run_dir.path, "journal": run_dir.journal(rank).parent}
    if folders["run"].stat().st_dev == folders["journal"].stat().st_dev:
        del folders["journal"]
    return {name: DiskForecast(folder) for name, folder in folders.items()}


def archive_limit(config: Config, run_dir: RunDir) -> float:
    """Return the most bytes of all archives of a run."""
    if config.sessions.archive_bytes is not None:
        return config.sessions.archive_bytes
    return shutil.disk_usage(run_dir.archive).total * _ARCHIVE_SHARE


def _quotas(config: Config, access: Access, sessions: SessionStore) -> TenantQuotas:
    def limit(tenant: str, quota: str) -> float | None:
        own: float | None = getattr(access.limits(tenant), quota, None)
        default: float | None = getattr(config.server, f"tenant_{quota}")
        return default if own is None else own

    ranks, open_sessions = config.server.ranks, sessions.counts.undecided_of
    url, kept = config.server.journal, sessions.config
    if url is None:
        return TenantQuotas(limit, ranks=ranks, open_sessions=open_sessions)
    # Only such a rank needs the package.
    from proxy_ext.web.quota_server import QuotaServer
    from proxy_ext.web.shared_quotas import SharedQuotas

    run, claim = run_dir_of(config).full_name, sessions.journal.stats.claim
    server = QuotaServer(url.get_secret_value(), run, sessions.rank, claim)
    keep = kept.ttl + kept.reward_deadline
    return SharedQuotas(limit, ranks=ranks, open_sessions=open_sessions, server=server, keep=keep)


def _traces(config: Config, rank: int) -> SessionTraces | None:
    if config.tracing.endpoint is None:
        return None
    try:
        from proxy_ext.tracing import SessionTraces
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"tracing.endpoint needs the package {error.name}: pip install 'any-agent-rl[otel]'"
        ) from error
    return SessionTraces(config, part=rank_name(rank))


async def _context_length(engine: RemoteEngine, wait: float) -> int:
    """Ask the engine, which may have died since the check before the slow imports."""
    deadline = time.monotonic() + wait
    while True:
        try:
            return await engine.context_length()
        except EngineUnavailable:
            if time.monotonic() >= deadline:
                raise
        await asyncio.sleep(_POLL_INTERVAL)


async def _reconcile(service: RankService) -> None:
    """Let the quotas' counts agree with the sessions, until cancelled."""
    while True:
        try:
            service.quotas.reconcile(service.sessions.counts.tenants)
        except Exception:
            log.exception("the quotas' counts could not be compared, which will be tried again")
        await asyncio.sleep(SWEEP_SECONDS)


async def _watch_disks(service: RankService) -> None:
    """Look at the disks until cancelled."""
    while True:
        for disk in service.disks.values():
            # A folder that is gone ends the service by itself.
            with suppress(OSError):
                await asyncio.to_thread(disk.look)
        await asyncio.sleep(_DISK_INTERVAL)


async def _sweep(service: RankService) -> None:
    """Expire sessions, groups and leases, and refresh keys, until cancelled."""
    while True:
        await asyncio.sleep(SWEEP_SECONDS)
        try:
            service.auth.access.refresh()
            await service.follow_fleet()
            # While `/readyz` fails, clients write nothing that would show that there is room.
            await service.journal.retry_full()
            await service.expiry.sweep()
            await service.expiry.close_groups()
            await service.leases.expire()
            await service.answers.sweep()
            await service.sessions.deliveries.flush()
        except AnyAgentError as error:
            log.warning("the sweep failed and will be tried again: %s", error.message)
        except Exception:
            log.exception("the sweep failed and will be tried again")
