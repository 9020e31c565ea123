"""Quotas of tenants: buckets on a clock of their own, and what refusals say."""

from __future__ import annotations

import pytest

from any_agent.auth.key_store import TenantLimits
from any_agent.errors import TooManyRequests
from proxy_ext.web.quotas import TenantQuotas
from tests.support.errors import fails_with


class Lab:
    def __init__(self, *, ranks: int = 1, **limits: float) -> None:
        self.now = 1000.0
        self.limits = {"alice": TenantLimits(**limits)}  # type: ignore[arg-type]
        self.open = 0
        self.quotas = TenantQuotas(
            lambda tenant, quota: getattr(self.limits.get(tenant), quota, None),
            ranks=ranks,
            open_sessions=lambda _: self.open,
            clock=lambda: self.now,
        )

    async def allowed(self, most: int = 10_000) -> int:
        """Requests until one is refused."""
        for number in range(most):
            try:
                await self.quotas.require_tokens("alice")
                await self.quotas.charge_request("alice")
            except TooManyRequests:
                return number
        return most


async def test_a_rate_allows_a_burst_and_then_its_pace() -> None:
    lab = Lab(requests_per_second=10)
    assert await lab.allowed() == 50, "five seconds' worth"
    assert await lab.allowed() == 0
    lab.now += 0.35
    assert await lab.allowed() == 3
    lab.now += 3600
    assert await lab.allowed() == 50, "rest is not saved up beyond the burst"


async def test_a_refused_request_is_told_how_long_its_bucket_needs() -> None:
    lab = Lab(requests_per_second=1)
    assert await lab.allowed() == 5
    with pytest.raises(TooManyRequests) as refused:
        await lab.quotas.charge_request("alice")
    error = refused.value
    assert error.code == "quota_exceeded"
    assert error.details == {"quota": "requests_per_second"}
    assert "requests_per_second (1)" in error.message, "of ranks only if several share"
    assert error.headers()["Retry-After"] == "1"
    lab.now += error.retry_after or 0
    await lab.quotas.charge_request("alice")


async def test_tokens_are_charged_afterwards_and_may_overdraw() -> None:
    lab = Lab(tokens_per_second=100)
    await lab.quotas.require_tokens("alice")
    lab.quotas.charge_tokens("alice", 2500)
    with fails_with(TooManyRequests, details={"quota": "tokens_per_second"}) as refused:
        await lab.quotas.require_tokens("alice")
    # 500 were there, 2,000 are owed: 20 seconds, and one token for the next call.
    assert refused.value.headers()["Retry-After"] == "21"
    lab.now += 21
    await lab.quotas.require_tokens("alice")


async def test_waits_are_bounded_and_never_zero() -> None:
    lab = Lab(tokens_per_second=1, requests_per_second=1000)
    lab.quotas.charge_tokens("alice", 10**9)
    with pytest.raises(TooManyRequests) as owing:
        await lab.quotas.require_tokens("alice")
    assert owing.value.headers()["Retry-After"] == "60"
    for _ in range(5000):
        await lab.quotas.charge_request("alice")
    with pytest.raises(TooManyRequests) as brief:
        await lab.quotas.charge_request("alice")
    assert brief.value.headers()["Retry-After"] == "1"


async def test_a_call_that_is_refused_for_its_tokens_costs_no_request() -> None:
    lab = Lab(tokens_per_second=1, requests_per_second=1)
    lab.quotas.charge_tokens("alice", 6)
    assert await lab.allowed() == 0
    lab.now += 2.1
    assert await lab.allowed() == 5


async def test_open_sessions_count_those_being_opened() -> None:
    lab = Lab(open_sessions=3)
    lab.open = 1
    await lab.quotas.begin_open("alice")
    place = await lab.quotas.begin_open("alice")
    with fails_with(TooManyRequests, details={"quota": "open_sessions"}) as refused:
        await lab.quotas.begin_open("alice")
    assert int(refused.value.headers()["Retry-After"]) >= 1
    place.release()
    place.release()
    with await lab.quotas.begin_open("alice"), pytest.raises(TooManyRequests):
        await lab.quotas.begin_open("alice")
    await lab.quotas.begin_open("alice")


async def test_each_rank_enforces_its_share_rounded_up() -> None:
    lab = Lab(ranks=3, open_sessions=5, requests_per_second=4, tokens_per_second=1)
    assert await lab.allowed() == 10
    for _ in range(2):
        await lab.quotas.begin_open("alice")
    with pytest.raises(TooManyRequests):
        await lab.quotas.begin_open("alice")
    lab.quotas.charge_tokens("alice", 10)
    with pytest.raises(TooManyRequests) as refused:
        await lab.quotas.require_tokens("alice")
    assert refused.value.headers()["Retry-After"] == "6", "five of ten are owed at one a second"


async def test_a_tenant_over_its_quota_holds_no_other_up() -> None:
    lab = Lab(open_sessions=1, requests_per_second=1, tokens_per_second=1)
    lab.limits["bob"] = lab.limits["alice"]
    await lab.quotas.begin_open("alice")
    lab.quotas.charge_tokens("alice", 10**6)
    assert await lab.allowed() == 0
    await lab.quotas.begin_open("bob")
    await lab.quotas.require_tokens("bob")
    lab.quotas.charge_tokens(None, 10**6)
    for _ in range(100):
        await lab.quotas.require_tokens(None)
        await lab.quotas.begin_open(None)


async def test_a_changed_limit_holds_at_once() -> None:
    lab = Lab(requests_per_second=1)
    assert await lab.allowed() == 5
    lab.limits["alice"] = TenantLimits()
    assert await lab.allowed(100) == 100
    lab.limits["alice"] = TenantLimits(requests_per_second=2)
    assert await lab.allowed() == 10
    lab.limits["alice"] = TenantLimits(requests_per_second=4)
    lab.now += 1
    assert await lab.allowed() == 2, (
        "the second before was at the old rate, and what was used stays used"
    )


async def test_buckets_are_bounded_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy_ext.web.quotas.MAX_BUCKETS", 8)
    now = 0.0
    quotas = TenantQuotas(
        lambda _, quota: 1 if quota == "requests_per_second" else None,
        ranks=1,
        open_sessions=lambda _: 0,
        clock=lambda: now,
    )
    for number in range(100):
        await quotas.charge_request(f"t{number}")
        now += 1.0
        assert len(quotas.buckets) <= 8
    for number in range(5):
        with await quotas.begin_open(f"t{number}"):
            pass
        assert quotas.held(f"t{number}") == 0
