"""What calls of frozen models cost: per session and per tenant, and caps on both.

A session's sum is that of its recorded calls. A tenant's is kept beside them, in the same write, as
sessions may be deleted; its cap is for the whole trial, and each rank enforces its share. A call's
cost is known when it has ended, so those that are under way when a cap is reached may exceed it.

Whoever is no tenant counts as one, of no name. Calls without a session have a sum of their own for
each tenant: where there is no tenant's cap a session's holds for it.
"""

from __future__ import annotations

from collections import Counter
from weakref import WeakKeyDictionary

from any_agent.config import FrozenConfig
from any_agent.errors import SpendCapExceeded
from any_agent.record import is_frozen
from any_agent.types import Interaction
from proxy_ext.journal import Journal, PutMeta
from proxy_ext.sessions.session import RecordedSession

CAPS = ("session", "tenant")


class SpendCaps:
    """One rank's."""

    def __init__(self, journal: Journal, config: FrozenConfig, *, ranks: int) -> None:
        self._journal = journal
        self._session_cap = config.session_usd
        self._loose_cap = None if config.session_usd is None else config.session_usd / ranks
        self._tenant_cap = None if config.tenant_usd is None else config.tenant_usd / ranks
        self._ranks = ranks
        self._sessions: WeakKeyDictionary[RecordedSession, float] = WeakKeyDictionary()
        self._kept: dict[str, float] = {}
        """By the key that a sum is written under."""
        self.refused: Counter[str] = Counter()
        """Calls that a cap refused, by the cap."""

    async def require(self, session: RecordedSession | None, tenant: str | None) -> None:
        """SpendCapExceeded if the session or the tenant has used up what it may."""
        if session is not None and self._session_cap is not None:
            spent = await self.of_session(session)
            if spent >= self._session_cap:
                raise self._exceeded("session", f"session {session.id}", spent, self._session_cap)
        who = f"tenant {tenant}" if tenant else "who is no tenant"
        if self._tenant_cap is not None:
            spent = await self._sum(_tenants(tenant))
            if spent >= self._tenant_cap:
                raise self._exceeded("tenant", who, spent, self._tenant_cap)
        elif session is None and self._loose_cap is not None:
            spent = await self._sum(_without_session(tenant))
            if spent >= self._loose_cap:
                who += ", in calls without a session,"
                raise self._exceeded("session", who, spent, self._loose_cap, loose=True)

    async def of_session(self, session: RecordedSession) -> float:
        """USD that its recorded calls have cost."""
        if session not in self._sessions:
            stored = await self._journal.interactions(session.id)
            spent = sum(cost_of(each.interaction) for each in stored)
            # Whoever read it earlier may have added to it since.
            self._sessions.setdefault(session, spent)
        return self._sessions[session]

    async def _sum(self, key: str) -> float:
        """USD at this rank."""
        if key not in self._kept:
            spent = await self._journal.meta(key)
            self._kept.setdefault(key, float(spent or 0.0))
        return self._kept[key]

    async def add(
        self, session: RecordedSession | None, tenant: str | None, cost: float | None
    ) -> tuple[PutMeta, ...]:
        """Count a call; what is to be written with it. At once: whatever becomes of the write, the
        money is gone."""
        if not cost:
            return ()
        if session is not None and self._session_cap is not None:
            await self.of_session(session)
            self._sessions[session] += cost
        keys = [_tenants(tenant), *([_without_session(tenant)] if session is None else [])]
        for key in keys:
            await self._sum(key)
            self._kept[key] += cost
        return tuple(PutMeta(key, self._kept[key]) for key in keys)

    def _exceeded(
        self, cap: str, who: str, spent: float, limit: float, *, loose: bool = False
    ) -> SpendCapExceeded:
        self.refused[cap] += 1
        shared = cap == "tenant" or loose
        share = f", its share of each of {self._ranks} ranks" if shared else ""
        return SpendCapExceeded(
            f"{who} has spent {spent:.6g} USD on frozen models of the {limit:.6g} that it may "
            f"(frozen.{cap}_usd{share}); the policy can still be called",
            details={"cap": cap, "spent_usd": spent, "cap_usd": limit},
        )


def cost_of(interaction: Interaction) -> float:
    """USD of a recorded call; 0 of the policy's, and where no price was known."""
    if not is_frozen(interaction):
        return 0.0
    cost = interaction.request.get("frozen", {}).get("cost_usd")
    return float(cost) if isinstance(cost, int | float) else 0.0


def _tenants(tenant: str | None) -> str:
    return f"frozen_usd/{tenant or ''}"


def _without_session(tenant: str | None) -> str:
    return f"frozen_usd_without_session/{tenant or ''}"
