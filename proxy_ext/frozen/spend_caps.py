"""The cost of calls of frozen models by session and by tenant, and the caps on both.

A session's sum is that of its recorded calls. A tenant's sum is stored in the same write, because
sessions may be deleted; its cap is for the whole trial, and each rank enforces its share. A call's
cost is known when it has ended, so calls that are under way when a cap is reached may exceed it.

Callers without a tenant count as one tenant without a name. Calls without a session have a sum of
their own for each tenant: where there is no tenant's cap, a session's cap holds for it.
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
    """The caps and the sums of one rank."""

    def __init__(self, journal: Journal, config: FrozenConfig, *, ranks: int) -> None:
        self._journal = journal
        self._session_cap = config.session_usd
        self._no_session_cap = None if config.session_usd is None else config.session_usd / ranks
        self._tenant_cap = None if config.tenant_usd is None else config.tenant_usd / ranks
        self._ranks = ranks
        self._sessions: WeakKeyDictionary[RecordedSession, float] = WeakKeyDictionary()
        self._sums: dict[str, float] = {}
        """Stored sums by their keys."""
        self.refused: Counter[str] = Counter()
        """Refused calls by the cap."""

    async def require(self, session: RecordedSession | None, tenant: str | None) -> None:
        """Raise SpendCapExceeded if the session or the tenant has used up its cap."""
        if session is not None and self._session_cap is not None:
            spent = await self.spent_by(session)
            self._check("session", f"session {session.id}", spent, self._session_cap)
        who = f"tenant {tenant}" if tenant else "the caller without a tenant"
        share = f", its share of each of {self._ranks} ranks"
        if self._tenant_cap is not None:
            self._check("tenant", who, await self._sum(_tenants(tenant)), self._tenant_cap, share)
        elif session is None and self._no_session_cap is not None:
            who += ", in calls without a session,"
            spent = await self._sum(_without_session(tenant))
            self._check("session", who, spent, self._no_session_cap, share)

    async def spent_by(self, session: RecordedSession) -> float:
        """Return the USD that a session's recorded calls have cost."""
        if session not in self._sessions:
            stored = await self._journal.interactions(session.id)
            spent = sum(cost_of(each.interaction) for each in stored)
            # Another reader may have come first, and added to it since.
            self._sessions.setdefault(session, spent)
        return self._sessions[session]

    async def _sum(self, key: str) -> float:
        """Return a stored sum in USD of this rank."""
        if key not in self._sums:
            spent = await self._journal.meta(key)
            self._sums.setdefault(key, float(spent or 0.0))
        return self._sums[key]

    async def add(
        self, session: RecordedSession | None, tenant: str | None, cost: float | None
    ) -> tuple[PutMeta, ...]:
        """Count a call at once, and return the statements to commit with it.

        The money is spent even if the commit fails.
        """
        if not cost:
            return ()
        if session is not None and self._session_cap is not None:
            await self.spent_by(session)
            self._sessions[session] += cost
        keys = [_tenants(tenant), *([_without_session(tenant)] if session is None else [])]
        for key in keys:
            await self._sum(key)
            self._sums[key] += cost
        return tuple(PutMeta(key, self._sums[key]) for key in keys)

    def _check(self, cap: str, who: str, spent: float, limit: float, share: str = "") -> None:
        if spent < limit:
            return
        self.refused[cap] += 1
        raise SpendCapExceeded(
            f"{who} has spent {spent:.6g} USD on frozen models, of {limit:.6g} at most "
            f"(frozen.{cap}_usd{share}); the policy can still be called",
            details={"cap": cap, "spent_usd": spent, "cap_usd": limit},
        )


def cost_of(interaction: Interaction) -> float:
    """Return the USD of a recorded call; 0 for the policy's, and where no price was known."""
    if not is_frozen(interaction):
        return 0.0
    cost = interaction.request.get("frozen", {}).get("cost_usd")
    return float(cost) if isinstance(cost, int | float) else 0.0


def _tenants(tenant: str | None) -> str:
    return f"frozen_usd/{tenant or ''}"


def _without_session(tenant: str | None) -> str:
    return f"frozen_usd_without_session/{tenant or ''}"
