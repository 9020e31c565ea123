"""The opening of sessions: a key's lane, a slot or a place in a group, a row in the journal."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass

from any_agent.auth.access import Caller, Scope
from any_agent.errors import (
    AnyAgentError,
    Conflict,
    Forbidden,
    InvalidRequest,
    TooManyRequests,
    Unauthenticated,
    VersionGone,
)
from any_agent.keys import JUDGE_KEY_PREFIX, KeySigner, Lane
from any_agent.protocol.rl import Rewards, SessionStarted, StartSession
from any_agent.runtime.boot_clock import clock_stamp
from any_agent.types import SessionMode, SessionState
from proxy_ext.admission.fleet_place import FleetPlace, RouterChoice, retiring
from proxy_ext.journal import PutSession, SessionRow
from proxy_ext.journal.base import GRANT_OWNER, IMPLICITLY, KeepAnswer, Rewarder, no_receipt
from proxy_ext.litellm_app import ConfiguredLiteLLMApp
from proxy_ext.run_state import RunState
from proxy_ext.sessions.endings import SessionEnder
from proxy_ext.sessions.groups import Group, closed_error, group_key, public_id
from proxy_ext.sessions.rewards import JUDGE_ONLY
from proxy_ext.sessions.session import RecordedSession
from proxy_ext.sessions.session_store import SessionStore
from proxy_ext.sessions.slots import GrantBook
from proxy_ext.web.drain import draining
from proxy_ext.web.quotas import OpenPlace, TenantQuotas

_ANY = RouterChoice()
_STRICTNESS: tuple[Rewarder, ...] = ("agent", "both", "judge", "grader", "operator")


@dataclass(frozen=True, slots=True)
class _OpenTarget:
    """The owner and the key of a session that is to be opened."""

    caller: Caller
    lane: Lane
    key: str
    tenant: str | None
    place: OpenPlace
    rewards: Rewarder
    ids: Generator[str] | None
    """The ids of the task's sessions, under the names of the AReaL documents."""
    grant_only: bool
    implicit: bool
    choice: RouterChoice


class SessionOpener:
    """Opens sessions of one rank."""

    def __init__(
        self,
        sessions: SessionStore,
        endings: SessionEnder,
        signer: KeySigner,
        *,
        run: RunState,
        quotas: TenantQuotas,
        fleet: FleetPlace,
        largest_group: int,
        public_url: str,
        litellm: ConfiguredLiteLLMApp | None = None,
    ) -> None:
        """``litellm`` judges its virtual keys, for which sessions may be opened."""
        self._sessions = sessions
        self._endings = endings
        self._signer = signer
        self._config = sessions.config
        graded = self._config.late_reward == "grade" or self._config.implicit
        self._graded = graded
        judged = graded and self._config.rewards == "judge"
        self._tenants_rewards: Rewarder = "operator" if judged else self._config.rewards or "agent"
        """The least strict source of rewards that an opening with a tenant's key may name."""
        self._run = run
        self._quotas = quotas
        self.litellm = litellm
        self._fleet = fleet
        self._largest_group = largest_group
        self._base_url = f"{public_url}/v1"
        self._opening: set[str] = set()
        """Lanes of sessions that are being opened."""
        self.refused: Counter[str] = Counter()
        """Number of refused opens, by the error's code."""
        self._draining = False
        self.retired = False
        """True once only members of groups that began are admitted."""

    @property
    def opening(self) -> int:
        """Number of sessions that are being opened."""
        return len(self._opening)

    def retire(self) -> None:
        """Admit only members of groups that have begun, from now on."""
        self.retired = True
        self._sessions.admission.close(retiring())

    def drain(self) -> None:
        """Refuse all opens from now on, those that wait for a slot included."""
        self._draining = True
        self._sessions.admission.close(draining())

    async def open(
        self,
        body: StartSession,
        caller: Caller,
        keep: KeepAnswer = no_receipt,
        *,
        areal_task: str | None = None,
        grant_only: bool = False,
        implicit: bool = False,
        choice: RouterChoice = _ANY,
    ) -> SessionStarted:
        """Open a session: take a slot (train), write it, and return it with its key.

        ``areal_task``: for an open under the names of the AReaL documents; its id is
        `<task>-<rank>-<n>`, and it uses a granted slot, without a group, if one is left.
        ``grant_only``: it uses no other slot. ``implicit``: for a model call that names no session.
        Misdirected if the router that made the ``choice`` must ask another rank.
        """
        try:
            await self._fleet.catch_up(choice)
            self._require_room(body, caller, on_grant=areal_task is not None)
            ids = await self._sessions.areal_ids.ids_of(areal_task) if areal_task else None
            lane, key, tenant, before = await self._resolve_key(body, caller, choice)
            if self.litellm is not None:
                await self.litellm.require_key(tenant)
            default = self._default_rewards(implicit=implicit)
            rewards = self._rewards(body.rewards, before or default, caller)
            self._opening.add(lane.id)
            try:
                with await self._quotas.begin_open(tenant) as place:
                    target = _OpenTarget(
                        caller, lane, key, tenant, place, rewards, ids, grant_only, implicit, choice
                    )
                    return await self._open(body, target, keep)
            finally:
                self._opening.discard(lane.id)
        except AnyAgentError as error:
            self.refused[error.code] += 1
            raise

    def _require_room(self, body: StartSession, caller: Caller, *, on_grant: bool) -> None:
        """Refuse an open while the rank drains, is full, or has no training for a train session."""
        if self._draining:
            raise draining()
        granted = on_grant and self._sessions.grants_of(caller).left > 0
        if body.mode == "train" and not granted:
            # Sessions on grants are trained on elsewhere, whatever becomes of the training here.
            self._run.require_training()
        if self._sessions.counts.undecided + len(self._opening) >= self._config.max_open:
            raise TooManyRequests(
                f"{self._config.max_open} sessions are open here, as many as sessions.max_open "
                "allows; finalize or abort some, or try again later",
                code="too_many_sessions",
                retry_after=5,
            )

    async def _open(
        self, body: StartSession, target: _OpenTarget, keep: KeepAnswer
    ) -> SessionStarted:
        mode = SessionMode(body.mode)
        pinned = self._pinned(body)
        group: Group | None = None
        granted: GrantBook | None = None
        if target.ids is not None and mode is SessionMode.TRAIN:
            grants = self._sessions.grants_of(target.caller)
            granted = grants if grants.spend() else None
        if mode is SessionMode.TRAIN and granted is None:
            # Another open may have taken the last grant meanwhile.
            self._run.require_training()
            if target.grant_only:
                raise self._no_slot(target.tenant)
            group = await self._admit(body, target)
        elif mode is not SessionMode.TRAIN:
            self._require_new(body, target)
        session = self._session(body, target, group, pinned, GRANT_OWNER if granted else None)
        row = session.row
        answer = SessionStarted(
            session_id=row.id,
            api_key=target.key,
            base_url=self._base_url,
            mode=body.mode,
            version=self._run.version,
            group_id=public_id(row.group_id) if row.group_id else None,
            task_id=row.task_id,
            expires_in=row.expires_at - row.created_at,
            idle_in=self._sessions.idle_timeout(row),
            judge_key=None
            if row.rewarded_by in ("agent", "operator")
            else self._signer.key_of(target.lane, JUDGE_KEY_PREFIX),
        )
        # Shielded: if the client leaves now, memory and journal must still agree.
        insert = asyncio.ensure_future(
            self._insert(session, group, granted, target.place, answer, keep)
        )
        try:
            await asyncio.shield(insert)
        except asyncio.CancelledError:
            await asyncio.wait([insert])
            # A request with an idempotency key may be repeated, and gets this session then.
            if insert.exception() is None and keep is no_receipt:
                await self._endings.abort(session, "its opener left")
            raise
        return answer

    def _session(
        self,
        body: StartSession,
        target: _OpenTarget,
        group: Group | None,
        pinned: int | None,
        owner: str | None,
    ) -> RecordedSession:
        wall = time.time()
        ttl = min(body.ttl or self._config.ttl, self._config.ttl)
        row = SessionRow(
            id=self._new_id(target, group),
            lane=target.lane.id,
            mode=SessionMode(body.mode),
            state=SessionState.OPEN,
            task_id=body.task_id,
            group_id=group.id if group else None,
            group_size=group.size if group else 1,
            metadata=body.metadata,
            created_at=wall,
            expires_at=wall + ttl,
            owner=owner,
            tenant=target.tenant,
            opened_by=f"{IMPLICITLY if target.implicit else ''}{target.caller.name}",
            pinned_version=pinned,
            rewarded_by=target.rewards,
            clock=clock_stamp(),
        )
        return RecordedSession(row, self._sessions.idle_timeout(row))

    def _new_id(self, target: _OpenTarget, group: Group | None) -> str:
        if target.ids is not None:
            return next(target.ids)
        groups, ids = self._sessions.groups, self._sessions.ids
        return groups.new_member(group) if group else ids.new_session()

    def _pinned(self, body: StartSession) -> int | None:
        """Return the weight version that all tokens must have; VersionGone for another one."""
        if body.version not in (None, "current", self._run.version):
            raise VersionGone.at_open(body.version, self._run.version)
        return None if body.version is None else self._run.version

    async def _insert(
        self,
        session: RecordedSession,
        group: Group | None,
        granted: GrantBook | None,
        place: OpenPlace,
        answer: SessionStarted,
        keep: KeepAnswer,
    ) -> None:
        spent = (granted.statement(),) if granted is not None else ()
        try:
            await self._sessions.journal.commit(PutSession(session.row), *spent, *keep(answer))
        except BaseException:
            if granted is not None:
                granted.refund()
            elif group is not None:
                await self._give_up_place(group)
            elif session.mode is SessionMode.TRAIN:
                self._sessions.admission.release(1)
            raise
        self._sessions.add(session)
        # From here on the session itself counts.
        place.release()
        if group is not None:
            group.promised -= 1
            if not group.started:
                self._sessions.groups.start_clock(group)
            group.update(session.row)

    async def _give_up_place(self, group: Group) -> None:
        """Return the place of a session that was not opened; an expired group frees its slot, and
        may be complete without it."""
        group.promised -= 1
        if group.expired:
            self._sessions.admission.release(1)
            await self._sessions.group_changed(group)
        else:
            self._discard_unused(group)

    def _default_rewards(self, *, implicit: bool) -> Rewarder:
        """Return the source of rewards of a session whose opening names none.

        An agent that opens its session knows when to reward it, also where others' sessions are
        implicit.
        """
        judged = implicit or self._config.late_reward == "grade"
        default: Rewarder = self._config.rewards or ("judge" if judged else "agent")
        return "grader" if self._graded and default == "judge" else default

    def _rewards(self, named: Rewards | None, default: Rewarder, caller: Caller) -> Rewarder:
        """Return the source of a session's rewards; Forbidden if a tenant names a looser one than
        the operator."""
        rewards, least = named or default, self._tenants_rewards
        strict = _STRICTNESS.index(rewards) >= _STRICTNESS.index(least)
        if strict or caller.scope is not Scope.TENANT:
            return rewards
        if named is None:
            return least
        raise Forbidden(
            f"rewards: {named} is looser than this service's sessions.rewards="
            f"{self._config.rewards}, which binds tenants: leave `rewards` out, or open the "
            "session with an admin's key",
            code=JUDGE_ONLY,
            param="rewards",
        )

    # -- lanes ---------------------------------------------------------------------------------

    async def _resolve_key(
        self, body: StartSession, caller: Caller, choice: RouterChoice
    ) -> tuple[Lane, str, str | None, Rewarder | None]:
        """Return the lane, the key and the tenant of the session that is to be opened, and the
        source of rewards of the session before it."""
        api_key = body.api_key
        if api_key is None:
            lane, key = self._signer.mint(self._sessions.rank)
            return lane, key, caller.tenant, None
        lane = self._lane(api_key)
        if lane.rank != self._sessions.rank:
            if choice.member and not self._has_group(body, caller.tenant):
                self._fleet.require_new(choice)
            raise Conflict(
                "the key belongs to another rank; open without api_key", code="lane_on_other_rank"
            )
        current = await self._sessions.by_lane(lane.id)
        tenant = current.row.tenant if current is not None else caller.tenant
        if caller.scope is Scope.TENANT and (current is None or tenant != caller.tenant):
            # Another tenant's key is refused as one that never existed.
            raise Unauthenticated(_NOT_A_KEY)
        if current is not None and current.state is SessionState.OPEN:
            raise Conflict(
                f"the key's session {current.id} is still open; finalize it first",
                code="lane_busy",
            )
        if lane.id in self._opening:
            raise Conflict("another open with this key is under way", code="lane_busy")
        return lane, api_key, tenant, current.row.rewarded_by if current is not None else None

    def _lane(self, api_key: str) -> Lane:
        lane = self._signer.verify(api_key)
        if lane is None:
            raise Unauthenticated(_NOT_A_KEY)
        return lane

    def _has_group(self, body: StartSession, tenant: str | None) -> bool:
        key = group_key(body.group_id, body.task_id, tenant)
        return not self._sessions.groups.is_full(key)

    # -- slots ---------------------------------------------------------------------------------

    def _require_new(self, body: StartSession, target: _OpenTarget) -> None:
        self._fleet.require_new(target.choice, lane=body.api_key is not None)

    async def _admit(self, body: StartSession, target: _OpenTarget) -> Group | None:
        """Take a slot, or a place in a group; TooManyRequests if none came free in time."""
        wait = min(body.wait, self._config.max_wait)
        if body.group_id is not None or body.task_id is not None:
            return await self._admit_member(body, target, wait)
        if body.group_size not in (None, 1):
            raise InvalidRequest("group_size needs a group_id or a task_id", param="group_size")
        self._require_new(body, target)
        ticket = self._sessions.admission.request(1)
        try:
            granted = await ticket.wait(wait)
        except asyncio.CancelledError:
            self._sessions.admission.withdraw(ticket)
            raise
        if not granted:
            self._sessions.admission.withdraw(ticket)
            if body.api_key is not None:
                # No other rank can open it.
                self._sessions.admission.remember(body.api_key, 1)
            raise self._no_slot(target.tenant)
        return None

    async def _admit_member(self, body: StartSession, target: _OpenTarget, wait: float) -> Group:
        size = body.group_size or self._config.group_size
        if size > self._largest_group:
            raise InvalidRequest(
                f"group_size {size} exceeds {self._largest_group}, the smaller of the run's "
                "batch_size and max_concurrent: such a group could never be admitted",
                param="group_size",
            )
        groups, deadline, tenant = self._sessions.groups, time.monotonic() + wait, target.tenant
        key = group_key(body.group_id, body.task_id, tenant)
        unknown = key.named and groups.get(key.name) is None
        stored = await self._sessions.journal.group(key.name) if unknown else []
        # Checked again: another open may have started it meanwhile, whose sessions were read.
        if stored and groups.get(key.name) is None:
            # The group is closed for good, and its sessions have ended.
            raise closed_error(key.name)
        while True:
            if groups.is_full(key):
                if not key.named or groups.get(key.name) is None:
                    self._require_new(body, target)
                self._quotas.require_group(tenant, groups.unfilled(tenant))
            group = groups.join_or_create(
                key, tenant=tenant, size=size, by_default=body.group_size is None
            )
            await self._wait_for(group, deadline - time.monotonic())
            if group.room > 0:
                group.promised += 1
                return group
            if key.named:
                raise closed_error(group.id)
            # Other opens took the places; this one joins the task's next generation.

    async def _wait_for(self, group: Group, seconds: float) -> None:
        """Wait until the group has its slots; TooManyRequests if they did not come in time."""
        if group.ticket is None and not group.started:
            try:
                group.ticket = self._sessions.admission.request(group.size)
            except AnyAgentError:
                self._sessions.groups.discard(group)
                raise
        group.openers += 1
        granted = False
        try:
            granted = group.ticket is None or await group.ticket.wait(seconds)
        finally:
            group.openers -= 1
            if not granted:
                self._discard_unused(group)
        if not granted:
            raise self._no_slot(group.tenant)
        self._sessions.admission.forget(str(group.key))

    def _discard_unused(self, group: Group) -> None:
        """Withdraw the slots of a group that never had a member."""
        if group.ticket is not None and group.unused:
            if not group.ticket.granted:
                self._sessions.admission.remember(str(group.key), group.size)
            self._sessions.admission.withdraw(group.ticket)
            self._sessions.groups.discard(group)

    def _no_slot(self, tenant: str | None) -> TooManyRequests:
        message = (
            f"no slot for a train session is free: {self._sessions.admission.no_slot_reason}; "
            "try again later, or wait for one: a (longer) `wait` of POST /rl/v1/start_session"
        )
        # A tenant must not learn of another tenant's groups.
        groups = [g for g in self._sessions.groups.all() if g.tenant == tenant]
        partial = next((g for g in groups if g.started and g.room > 0), None)
        if partial is not None:
            reserved = sum(group.room for group in groups if group.started)
            message += (
                f". {reserved} slots are kept for groups that are not full: "
                f"{public_id(partial.id)} has {len(partial.members)} of {partial.size} sessions"
            )
        for notice in self._sessions.trainability.notices:
            message += f". {notice}"
        return TooManyRequests(message, retry_after=2)


_NOT_A_KEY = (
    "api_key must be the key of an earlier session of this service; leave it out for a new one"
)
