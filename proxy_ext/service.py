"""The parts of one rank's proxy, and their assembly."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial

from any_agent.auth.access import Access, run_dir_of
from any_agent.auth.audit_log import AuditLog
from any_agent.chat import ChatFormat, load_chat_format
from any_agent.completions import Completer
from any_agent.config import Config
from any_agent.engine import RemoteEngine, open_engine
from any_agent.engine.model_fingerprint import ModelFingerprint
from any_agent.errors import AnyAgentError, EngineUnavailable, StoreUnavailable
from any_agent.loop_lag import loop_lag_histogram, watched_loop
from any_agent.protocol.conversation_key import rank_tag
from any_agent.rundir.registry import rank_name
from any_agent.runtime.metrics import Histogram
from any_agent.types import GenerationHyperparameters
from proxy_ext.admission.close_groups import close_groups
from proxy_ext.admission.implicit_session import ImplicitSessions
from proxy_ext.admission.open_session import SessionOpener
from proxy_ext.archive.archiver import Archiver
from proxy_ext.auth import Authenticator
from proxy_ext.calls.call_manager import CallManager
from proxy_ext.calls.concurrency_limit import call_limit
from proxy_ext.frozen.frozen_models import FrozenModels
from proxy_ext.frozen.provider import Provider
from proxy_ext.idempotency import IdempotencyStore
from proxy_ext.journal import Journal, open_journal
from proxy_ext.leases.fence import Fence, drop_leftovers
from proxy_ext.leases.leases import LeaseManager
from proxy_ext.run_state import RunState
from proxy_ext.sessions.endings import SessionEnder
from proxy_ext.sessions.expiry import LateRewardWaiter, SessionExpirer
from proxy_ext.sessions.grading import grader_of
from proxy_ext.sessions.ids import SessionIds
from proxy_ext.sessions.rewards import RewardBook
from proxy_ext.sessions.session_store import SessionStore
from proxy_ext.web.quotas import QuotaLimits, TenantQuotas

log = logging.getLogger(__name__)

_SWEEP_SECONDS = 1.0
_POLL_INTERVAL = 0.25


@dataclass(frozen=True, slots=True)
class RankService:
    """The parts of a rank's proxy."""

    config: Config
    rank: int
    public_url: str
    journal: Journal
    engine: RemoteEngine
    completer: Completer
    sampling: GenerationHyperparameters
    """Sampling of train sessions."""
    eval_sampling: GenerationHyperparameters
    """Sampling of eval sessions, where their agents set nothing else."""
    sessions: SessionStore
    rewards: RewardBook
    endings: SessionEnder
    late: LateRewardWaiter
    expiry: SessionExpirer
    quotas: TenantQuotas
    opening: SessionOpener
    implicit: ImplicitSessions
    leases: LeaseManager
    fence: Fence
    archive: Archiver
    calls: CallManager
    frozen: FrozenModels
    run: RunState
    auth: Authenticator
    audit: AuditLog
    answers: IdempotencyStore
    loop_lag: Histogram

    async def drain(self) -> None:
        """Refuse new calls and sessions, and answer long polls; calls under way go on."""
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
    provider: Provider | None = None,
    journal_url: str | None = None,
) -> AsyncIterator[RankService]:
    """Recover the rank's journal, connect its engine, and sweep until the end.

    ``provider`` serves the frozen models, if there are any. EngineUnavailable if the engine does
    not answer within ``engine_wait`` seconds; ``shape`` is the fingerprint of its model.
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
    )
    journal = open_journal(journal_url or run_dir.journal_url(rank))
    audit = AuditLog(run_dir.audit / f"{rank_name(rank)}.jsonl")
    try:
        known = await _context_length(engine, engine_wait)
        context = min(config.engine.context_length or known, known)
        access = Access(config)
        signer = access.signer
        ids = await SessionIds.recover(config, rank, journal)
        sessions = SessionStore(journal, config.sessions, ids, rank=rank)
        await sessions.recover(lease_ttl=config.rollout.lease_ttl)
        run = RunState(config, engine, journal, training=training)
        await run.recover()
        completer = Completer(
            engine,
            chat,
            context_length=context,
            keeps_cache=config.engine.update_mode == "in_place",
            id_tag=rank_tag(rank),
        )
        rewards = RewardBook(sessions, config.sessions)
        archive = Archiver(
            sessions,
            run_dir.archive,
            about={"experiment": config.experiment, "trial": config.trial},
            keep_seconds=config.sessions.keep_hours * 3600,
            oldest_step=lambda: run.oldest_step,
        )
        await archive.recover()
        endings = SessionEnder(
            sessions, rewards, config.sessions, needed=run.may_want, unarchive=archive.remove
        )
        fence = Fence(journal, partial(drop_leftovers, sessions, endings))
        await fence.recover()
        late = LateRewardWaiter(sessions, endings, config.sessions, grader_of(config.sessions))
        quotas = _quotas(config, access, sessions)
        sampling = GenerationHyperparameters(
            max_new_tokens=config.sampling.max_new_tokens, temperature=config.sampling.temperature
        )
        eval_temperature = config.eval.temperature
        opening = SessionOpener(
            sessions,
            endings,
            signer,
            config.sessions,
            run=run,
            quotas=quotas,
            largest_group=min(config.rollout.batch_size, config.rollout.max_concurrent),
            public_url=public_url,
        )
        service = RankService(
            config=config,
            rank=rank,
            public_url=public_url,
            journal=journal,
            engine=engine,
            completer=completer,
            sampling=sampling,
            eval_sampling=sampling
            if eval_temperature is None
            else sampling.new(temperature=eval_temperature),
            sessions=sessions,
            rewards=rewards,
            endings=endings,
            late=late,
            expiry=SessionExpirer(sessions, endings, late),
            quotas=quotas,
            opening=opening,
            implicit=ImplicitSessions(sessions, opening, completer, config.sessions),
            leases=LeaseManager(sessions, fence, ttl=config.rollout.lease_ttl, needed=run.may_want),
            fence=fence,
            archive=archive,
            calls=CallManager(
                completer,
                sessions,
                limit=call_limit(
                    config.server.max_inflight_calls,
                    slots=await engine.slots(),
                    sessions=config.rollout.max_concurrent,
                ),
                retry_grace=config.server.retry_grace,
                quotas=quotas,
            ),
            frozen=FrozenModels(config, provider, sessions, quotas),
            run=run,
            auth=Authenticator(sessions, access, quotas),
            audit=audit,
            answers=IdempotencyStore(journal, signer),
            loop_lag=loop_lag_histogram(),
        )
        sweeper = asyncio.create_task(_sweep(service))
        archiver = asyncio.create_task(archive.run())
        try:
            async with watched_loop(service.loop_lag):
                yield service
        finally:
            sweeper.cancel()
            archiver.cancel()
            await asyncio.wait([archiver])
            run.close()
            await service.calls.close()
            await service.frozen.close()
            await late.close()
            with suppress(StoreUnavailable):
                await sessions.deliveries.flush()
    finally:
        await engine.close()
        await journal.close()
        await asyncio.to_thread(audit.close)


def _quotas(config: Config, access: Access, sessions: SessionStore) -> TenantQuotas:
    default = QuotaLimits.of(config.server)

    def limits(tenant: str) -> QuotaLimits:
        own = access.limits(tenant)
        return replace(default, **own.model_dump(exclude_none=True)) if own else default

    ranks, open_sessions = config.server.ranks, sessions.counts.undecided_of
    return TenantQuotas(limits, ranks=ranks, open_sessions=open_sessions)


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


async def _sweep(service: RankService) -> None:
    """Expire sessions, groups and leases, and refresh keys, until cancelled."""
    while True:
        await asyncio.sleep(_SWEEP_SECONDS)
        try:
            service.auth.access.look()
            # Clients that `/readyz` sends elsewhere write nothing that would find the room.
            await service.journal.retry_full()
            await service.expiry.sweep()
            await close_groups(service.sessions, service.expiry)
            await service.leases.expire()
            await service.answers.sweep()
            await service.sessions.deliveries.flush()
        except AnyAgentError as error:
            log.warning("the sweep failed and will be tried again: %s", error.message)
        except Exception:
            log.exception("the sweep failed and will be tried again")
