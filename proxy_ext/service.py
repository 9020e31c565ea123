"""Everything one rank's proxy is made of, put together once."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from any_agent.chat import ChatFormat, load_chat_format
from any_agent.completions import Completer
from any_agent.config import Config
from any_agent.engine import SGLangEngine
from any_agent.errors import AnyAgentError, EngineUnavailable
from any_agent.keys import KeySigner
from any_agent.rundir import RunDir
from any_agent.types import GenerationHyperparameters
from proxy_ext.auth import Auth
from proxy_ext.calls import Calls
from proxy_ext.idempotency import Answers
from proxy_ext.journal import Journal, SQLiteJournal
from proxy_ext.leases import Leases
from proxy_ext.names import Names
from proxy_ext.opening import Opening
from proxy_ext.run_state import RunState
from proxy_ext.sessions import Sessions

log = logging.getLogger(__name__)

_SWEEP_SECONDS = 1.0
_ASK_EVERY = 0.25


@dataclass(frozen=True, slots=True)
class Service:
    """The parts of a rank's proxy."""

    config: Config
    rank: int
    public_url: str
    journal: Journal
    engine: SGLangEngine
    completer: Completer
    sampling: GenerationHyperparameters
    """What train sessions are sampled with."""
    sessions: Sessions
    opening: Opening
    leases: Leases
    calls: Calls
    run: RunState
    auth: Auth
    answers: Answers

    async def drain(self) -> None:
        """Begin nothing new and answer long polls; calls under way go on."""
        self.calls.draining = True
        self.opening.drain()
        await self.leases.drain()


def load_chat(config: Config, path: str | None = None) -> ChatFormat:
    """The policy's chat format; ConfigError when its template cannot be used."""
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
) -> AsyncIterator[Service]:
    """Recover the rank's journal, connect its engine, and sweep until the end.

    The engine may take ``engine_wait`` seconds to be there: EngineUnavailable after that.
    """
    run_dir = RunDir.of(config.root, config.user, config.experiment, config.trial)
    run_dir.create()
    engine = SGLangEngine(
        engine_url,
        decode=chat.decode,
        update_mode=config.engine.update_mode,
        update_wait=config.engine.update_wait,
        request_timeout=config.engine.request_timeout,
    )
    journal = SQLiteJournal(run_dir.journal(rank))
    try:
        known = await _context_length(engine, engine_wait)
        context = min(config.engine.context_length or known, known)
        signer = KeySigner(run_dir.signing_secret())
        names = await Names.recover(config, rank, journal)
        sessions = Sessions(journal, config.sessions, names, rank=rank)
        await sessions.recover(lease_ttl=config.rollout.lease_ttl)
        run = RunState(config, engine, journal, training=training)
        await run.recover()
        completer = Completer(
            engine,
            chat,
            context_length=context,
            keeps_cache=config.engine.update_mode == "in_place",
        )
        admin = config.server.admin_key
        s = config.sampling
        service = Service(
            config=config,
            rank=rank,
            public_url=public_url,
            journal=journal,
            engine=engine,
            completer=completer,
            sampling=GenerationHyperparameters(
                max_new_tokens=s.max_new_tokens, temperature=s.temperature
            ),
            sessions=sessions,
            opening=Opening(
                sessions,
                signer,
                config.sessions,
                largest_group=min(config.rollout.batch_size, config.rollout.max_concurrent),
            ),
            leases=Leases(sessions, ttl=config.rollout.lease_ttl),
            calls=Calls(completer, sessions, limit=config.server.max_inflight_calls),
            run=run,
            auth=Auth(sessions, signer, admin.get_secret_value() if admin else None),
            answers=Answers(journal, signer),
        )
        sweeper = asyncio.create_task(_sweep(service))
        try:
            yield service
        finally:
            sweeper.cancel()
            run.close()
            await service.calls.close()
    finally:
        await engine.close()
        await journal.close()


async def _context_length(engine: SGLangEngine, wait: float) -> int:
    """It may have died since it was seen alive, before LiteLLM was imported."""
    deadline = time.monotonic() + wait
    while True:
        try:
            return await engine.context_length()
        except EngineUnavailable:
            if time.monotonic() >= deadline:
                raise
        await asyncio.sleep(_ASK_EVERY)


async def _sweep(service: Service) -> None:
    """Expire sessions, groups and leases."""
    while True:
        await asyncio.sleep(_SWEEP_SECONDS)
        try:
            await service.sessions.expire()
            await service.leases.expire()
            await service.answers.sweep()
        except AnyAgentError as error:
            log.warning("the sweep failed and will be tried again: %s", error.message)
        except Exception:
            log.exception("the sweep failed and will be tried again")
