"""A rank's quotas and its sessions, as numbers: ``python -m tests.support.quota_rank URL RUN``.

As a program it opens sessions of alice until it is refused, prints their number, and waits.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter

from any_agent.errors import TooManyRequests
from proxy_ext.web.quota_server import QuotaServer
from proxy_ext.web.shared_quotas import SharedQuotas

RANKS = 8


class QuotaRank:
    """One of eight ranks with limits for every tenant."""

    def __init__(
        self,
        url: str,
        run: str,
        number: int = 0,
        *,
        claim: int = 1,
        timeout: float = 30.0,
        **limits: float,
    ) -> None:
        """``timeout``: by default so long that a busy machine does not make Redis seem away."""
        self.limits = limits
        self.open: Counter[str] = Counter()
        """Open sessions by tenant."""
        self.now = 1000.0
        """The rank's own clock, which stands still."""
        self.server = QuotaServer(url, run, number, claim, timeout=timeout)
        self.quotas = SharedQuotas(
            lambda tenant, quota: self.limits.get(quota) if tenant else None,
            ranks=RANKS,
            open_sessions=lambda tenant: self.open[tenant],
            server=self.server,
            keep=3600,
            timeout=timeout,
            clock=lambda: self.now,
        )

    def held(self, tenant: str = "alice") -> int:
        """Return its sessions that are open or being opened."""
        return self.quotas.held(tenant)

    async def begin(self, tenant: str = "alice") -> bool:
        """Open a session; return whether it was admitted."""
        try:
            with await self.quotas.begin_open(tenant) as place:
                await asyncio.sleep(0)
                self.open[tenant] += 1
                place.release()
        except TooManyRequests:
            return False
        return True

    def end(self, number: int = 1, tenant: str = "alice") -> None:
        """End sessions."""
        self.open[tenant] -= number
        self.quotas.on_decided(tenant)

    async def ask(self, tenant: str = "alice") -> bool:
        """Send a request; return whether it was admitted."""
        try:
            await self.quotas.charge_request(tenant)
        except TooManyRequests:
            return False
        return True

    async def settled(self) -> None:
        """Wait until nothing is left to be sent."""
        while self.quotas.pump is not None and not self.quotas.pump.done():
            await self.quotas.pump

    async def reconcile(self) -> None:
        """Compare the counts as a rank does every second."""
        self.now += 2.0
        self.quotas.reconcile([tenant for tenant, number in self.open.items() if number])
        await self.settled()

    async def close(self) -> None:
        await self.quotas.close()


async def _main(url: str, run: str) -> None:
    rank = QuotaRank(url, run, open_sessions=100)
    await rank.reconcile()
    while await rank.begin():
        pass
    print(rank.held(), flush=True)
    await asyncio.sleep(300)


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
