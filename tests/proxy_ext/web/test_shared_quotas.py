"""Quotas that eight ranks count together: a real Redis, killed, paused, emptied, and shared."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import redis

from any_agent.errors import TooManyRequests
from proxy_ext.web import shared_quotas
from proxy_ext.web.quotas import BURST_SECONDS
from tests.support.errors import fails_with
from tests.support.quota_rank import RANKS, QuotaRank
from tests.support.redis_server import RedisServer, make_cluster

LIMIT = 100
SHARE = 13
"""The share of one of eight ranks in the limit."""
RATE = 50.0
LONG = 30.0
"""Seconds after which a test gives up."""


class Run:
    """The ranks of one run, and what Redis has of it."""

    def __init__(self, server: RedisServer, name: str, stack: AsyncExitStack) -> None:
        self.server = server
        self.name = name
        self._stack = stack

    async def rank(self, number: int = 0, *, claim: int = 1, **fields: float) -> QuotaRank:
        rank = QuotaRank(self.server.url, self.name, number, claim=claim, **fields)
        self._stack.push_async_callback(rank.close)
        assert not rank.quotas.exact
        await rank.reconcile()
        assert rank.quotas.exact
        return rank

    async def ranks(self, **limits: float) -> list[QuotaRank]:
        return [await self.rank(number, **limits) for number in range(RANKS)]

    def stored(self, kind: str, tenant: str = "alice") -> dict[str, str]:
        with self.server.client() as client:
            found: Any = client.hgetall(f"any-agent:{{{self.name}/tenant-{tenant}}}:{kind}")
        return {name.decode(): value.decode() for name, value in found.items()}

    @property
    def total(self) -> int:
        """Open sessions of all ranks, as Redis has them, which must be the sum of its parts."""
        found = self.stored("open")
        total = int(found.pop("total", 0))
        assert total == sum(int(text.split()[0]) for text in found.values()), found
        return total


@pytest.fixture
async def run(server: RedisServer) -> AsyncIterator[Run]:
    async with AsyncExitStack() as stack:
        yield Run(server, "user/experiment/trial", stack)


def round_trips(rank: QuotaRank, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the rank's round trips from now on."""
    seen: list[int] = []
    inner = rank.server.run

    async def counted(commands: Any) -> Any:
        seen.append(len(commands))
        return await inner(commands)

    monkeypatch.setattr(rank.server, "run", counted)
    return seen


def killed_while_it_holds(run: Run) -> int:
    """Let a process open sessions as rank 0 until it is refused, and kill it; their number."""
    command = [sys.executable, "-m", "tests.support.quota_rank", run.server.url, run.name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            return int(process.stdout.readline())
        finally:
            process.kill()


async def test_all_ranks_together_never_open_more_sessions_than_the_limit(
    run: Run, figure: Callable[[str], None]
) -> None:
    """Eight ranks open and end sessions at random, and some openers leave."""
    ranks, chance = await run.ranks(open_sessions=LIMIT), random.Random(1)
    most, refused, left = 0, 0, 0

    def look() -> None:
        nonlocal most
        most = max(most, sum(rank.held() for rank in ranks))
        assert most <= LIMIT

    async def work(rank: QuotaRank) -> None:
        nonlocal refused, left
        for _ in range(70):
            opening = asyncio.create_task(rank.begin())
            if chance.random() < 0.2:
                for _ in range(chance.randrange(30)):
                    await asyncio.sleep(0)
                opening.cancel()
                left += 1
            await asyncio.wait([opening])
            refused += not opening.cancelled() and not opening.result()
            look()
            if rank.open["alice"] and chance.random() < 0.45:
                rank.end()

    await asyncio.gather(*(work(rank) for rank in ranks for _ in range(3)))
    figure(f"{len(ranks)} ranks, limit {LIMIT}: at most {most} open, {refused} refused")
    # Openings that are on their way or were given up hold a place, too.
    assert (most > 0.9 * LIMIT, refused > 100, left > 200) == (True, True, True), most
    for rank in ranks:
        await rank.settled()
        assert rank.held() == rank.open["alice"], "no place is held for who left"
    assert run.total == sum(rank.open["alice"] for rank in ranks)
    for rank in ranks:
        rank.end(rank.open["alice"])
        await rank.settled()
    assert run.total == 0


async def test_one_rank_may_use_all_of_the_limit(run: Run) -> None:
    first, second = await run.rank(0, open_sessions=LIMIT), await run.rank(1, open_sessions=LIMIT)
    assert [await first.begin() for _ in range(LIMIT)] == [True] * LIMIT
    with fails_with(TooManyRequests, details={"quota": "open_sessions"}) as refused:
        await second.quotas.begin_open("alice")
    assert "open_sessions (100); wait" in refused.value.message, "not that of each rank"
    assert await second.begin("bob")
    first.end()
    await first.settled()
    assert await second.begin()
    assert not await first.begin()
    first.limits["open_sessions"] = second.limits["open_sessions"] = 101
    assert await first.begin()
    # Groups reserve slots of their rank, so each enforces its share of them.
    first.quotas.require_group("alice", SHARE - 1)
    with pytest.raises(TooManyRequests):
        first.quotas.require_group("alice", SHARE)


async def test_a_killed_rank_counts_until_its_next_process_ends_the_sessions(run: Run) -> None:
    assert killed_while_it_holds(run) == LIMIT
    other = await run.rank(1, open_sessions=LIMIT)
    assert not await other.begin()
    # Another machine carries it on; its journal has the sessions, of which one ended meanwhile.
    again = await run.rank(0, claim=2, open_sessions=LIMIT)
    again.open["alice"] = LIMIT - 1
    await again.reconcile()
    assert run.total == LIMIT - 1
    assert await other.begin()
    assert not await again.begin()
    again.end(LIMIT - 1)
    await again.settled()
    assert run.total == 1


async def test_a_rank_that_was_replaced_is_not_heard(run: Run) -> None:
    old, new = [await run.rank(claim=claim, open_sessions=LIMIT) for claim in (7, 8)]
    assert await old.begin()
    assert await new.begin()
    assert await old.begin(), "by its share"
    assert not old.quotas.exact
    await old.reconcile()
    assert run.total == 1
    assert not old.quotas.exact
    # Nor does a report that arrives late have an effect.
    late = new.server.report("alice", held=40, wanted=3, limit=LIMIT, keep=60)
    again = new.server.report("alice", held=5, wanted=2, limit=LIMIT, keep=60)
    assert await new.server.run([again, again]) == [2, 2]
    with fails_with(Exception, "another process"):
        await new.server.run([late])
    assert run.total == 7


async def test_a_rank_that_is_silent_for_good_is_forgotten(run: Run) -> None:
    gone, here = await run.rank(0, open_sessions=3), await run.rank(1, open_sessions=3)
    assert [await gone.begin() for _ in range(3)] == [True] * 3
    assert not await here.begin()
    with run.server.client() as client:
        # As if it had not reported for longer than a session may be open.
        heard = f"any-agent:{{{run.name}/tenant-alice}}:heard"
        client.zadd(heard, {"0": 1000 * (time.time() - 3700)}, xx=True)
    assert await here.begin()
    assert set(run.stored("open")) == {"total", "1"}
    assert run.total == 1


async def test_requests_of_all_ranks_keep_the_rate(run: Run, figure: Callable[[str], None]) -> None:
    """All ranks ask as fast as they can; every time is the server's, so that none is a guess."""
    ranks = await run.ranks(requests_per_second=RATE)
    # Of the burst nearly all, so that the bucket is never full again.
    assert all(await asyncio.gather(*(ranks[0].ask() for _ in range(240))))
    began = float(run.stored("rates")["at"])
    admitted, refused, until = 240, 0, time.monotonic() + 2.0

    async def hammer(rank: QuotaRank) -> None:
        nonlocal admitted, refused
        while time.monotonic() < until:
            allowed = await rank.ask()
            admitted += allowed
            refused += not allowed

    await asyncio.gather(*(hammer(rank) for rank in ranks for _ in range(2)))
    end = run.stored("rates")
    seconds, level = float(end["at"]) - began, float(end["requests"])
    allowance = BURST_SECONDS * RATE + RATE * seconds
    figure(
        f"{RATE} requests a second: {admitted} admitted in {seconds:.2f} s of {allowance:.1f} "
        f"allowed, {refused} refused"
    )
    assert admitted + level == pytest.approx(allowance, abs=0.01)
    assert level < 0.05 * admitted
    assert refused > admitted
    assert all(rank.quotas.exact for rank in ranks)


async def test_tokens_of_all_ranks_are_one_debt(run: Run) -> None:
    ranks = await run.ranks(tokens_per_second=100)
    for rank in ranks:
        await rank.quotas.require_tokens("alice")
    for rank in ranks:
        rank.quotas.charge_tokens("alice", 300)
        await rank.settled()
    for rank in ranks:
        rank.now += 1.0  # What it saw before is too old.
        with fails_with(TooManyRequests, details={"quota": "tokens_per_second"}) as refused:
            await rank.quotas.require_tokens("alice")
        # 500 were there, 1,900 are owed, and the next call needs one.
        assert 10 < (refused.value.retry_after or 0) <= 19.01
    await ranks[0].quotas.require_tokens("bob")


async def test_a_call_costs_one_round_trip_and_an_operator_none(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = await run.rank(requests_per_second=1000, tokens_per_second=1000)
    seen = round_trips(rank, monkeypatch)
    await rank.quotas.charge_request("alice")
    await rank.quotas.require_tokens("alice")
    assert seen == [1]
    with run.server.client() as client:
        (key,) = client.keys("*:rates")
        assert 0 < client.pttl(key) <= 1002, "a bucket that is full needs no key"
    rank.quotas.charge_tokens("alice", 7)
    await rank.settled()
    assert seen == [1, 1]
    assert float(run.stored("rates")["tokens"]) <= 4993
    # Many at once share theirs.
    tenants = [f"t{number % 10}" for number in range(200)]
    assert all(await asyncio.gather(*(rank.ask(tenant) for tenant in tenants)))
    assert seen[2:] == [10]
    await rank.quotas.charge_request(None)
    await rank.quotas.require_tokens(None)
    rank.quotas.charge_tokens(None, 7)
    with await rank.quotas.begin_open(None), await rank.quotas.begin_open("alice"):
        rank.limits.clear()
        assert await rank.ask()
        await rank.quotas.require_tokens("alice")
    await rank.reconcile()
    assert seen[3:] == []


async def test_without_redis_each_rank_enforces_its_share(run: Run) -> None:
    ranks = await run.ranks(open_sessions=LIMIT, requests_per_second=RATE)
    first, second, *others = ranks
    assert [await first.begin() for _ in range(60)] == [True] * 60
    assert all(await asyncio.gather(*(second.ask() for _ in range(240))))
    run.server.kill()
    for rank in ranks:
        held = rank.held()
        assert [await rank.begin() for _ in range(20)].count(True) == max(0, SHARE - held)
        assert not rank.quotas.exact
    with fails_with(TooManyRequests, "8 ranks"):
        await first.quotas.begin_open("alice")
    # The bucket was nearly empty, and so is each rank's share of what was left.
    assert [await second.ask() for _ in range(40)].count(True) < 20
    run.server.start()
    assert not await others[0].begin(), "it asks Redis again only when it reconciles"
    for rank in ranks:
        await rank.reconcile()
        assert rank.quotas.exact
    assert run.total == 60 + 7 * SHARE
    assert not any([await rank.begin() for rank in ranks])
    first.end(52)
    await first.settled()
    assert run.total == 60 + 7 * SHARE - 52 == LIMIT - 1
    assert [await rank.begin() for rank in ranks].count(True) == 1


async def test_a_redis_that_lost_everything_is_told_again(run: Run) -> None:
    first, second = [await run.rank(number, open_sessions=LIMIT) for number in (0, 1)]
    for _ in range(30):
        assert await first.begin()
    with run.server.client() as client:
        client.flushall()
        client.script_flush()
    assert await second.begin()
    assert run.total == 1
    first.now += shared_quotas.REFRESH_SECONDS
    await first.reconcile()
    assert run.total == 31


async def test_a_redis_that_hangs_holds_up_the_first_request_only(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = await run.rank(open_sessions=LIMIT, requests_per_second=RATE)
    rank.quotas.timeout = shared_quotas.TIMEOUT
    assert await rank.begin()
    seen = round_trips(rank, monkeypatch)
    run.server.pause()
    waits = []
    for _ in range(5):
        began = time.monotonic()
        assert all(await asyncio.gather(*(rank.ask() for _ in range(5)), rank.begin()))
        waits.append(time.monotonic() - began)
    assert 0.2 < waits[0] < LONG
    assert len(seen) == 1, "the others asked nothing"
    assert not rank.quotas.exact
    # A try that fails holds up nobody, either.
    rank.now += 2.0
    rank.quotas.reconcile(["alice"])
    assert await rank.ask()
    assert rank.quotas.pump is not None and not rank.quotas.pump.done()
    await rank.settled()
    assert (len(seen), rank.quotas.exact) == (2, False)
    run.server.go_on()
    rank.quotas.timeout = LONG
    await rank.reconcile()
    # What it was asked while it hung has been done by now, and counts no more.
    assert rank.quotas.exact
    assert run.total == rank.held() == 6


async def test_a_cluster_shares_quotas_and_a_wrong_password_does_not(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis", "--cluster-enabled", "yes") as server:
        server.url = make_cluster(server)
        stack = AsyncExitStack()
        run = Run(server, "user/experiment/trial", stack)
        ranks = await run.ranks(open_sessions=2, requests_per_second=RATE)
        opened = [await rank.begin(t) for t in ("alice", "bob") for rank in ranks]
        assert opened == [True, True, *[False] * 6] * 2
        assert all([await rank.ask() for rank in ranks])
        assert all(rank.quotas.exact for rank in ranks)
        await stack.aclose()
        with redis.Redis(port=server.port) as client:
            client.config_set("requirepass", "right")
        wrong = QuotaRank(f"redis://:wrong@127.0.0.1:{server.port}", "u/e/t", open_sessions=8)
        await wrong.reconcile()
        assert [await wrong.begin() for _ in range(2)] == [True, False]
        assert not wrong.quotas.exact
        await wrong.close()
