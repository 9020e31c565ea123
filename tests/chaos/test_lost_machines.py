"""A rank whose machine is lost, and a Redis that dies, hangs, is cut off or is full, under agents
and a trainer."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from any_agent.launcher.trial import trial_dir
from tests.chaos.conftest import Figure
from tests.chaos.test_proxy_kills import PACE, SETTINGS, Load, judge, under_fire
from tests.support.chaos.killable import Killable, MovingProxy, engine_in_thread
from tests.support.cut_link import CutLink
from tests.support.e2e import audit
from tests.support.proxy import config_for, turned_away
from tests.support.redis_server import RedisServer

LEASE = "server.journal_lease=1"
PATIENT = ("sessions.ttl=300", "sessions.group_timeout=200", "rollout.max_concurrent=64")


class FailingRedis(Killable):
    """A server that is killed and started again, or in turn stopped for a while."""

    def __init__(self, server: RedisServer, rng: random.Random) -> None:
        super().__init__()
        self._server = server
        self._rng = rng
        self._dead = False

    def kill(self) -> None:
        self._dead = not self._dead
        (self._server.kill if self._dead else self._server.pause)()

    def start(self) -> None:
        self.lives += 1
        if self._dead:
            self._server.start()
        else:
            threading.Event().wait(self._rng.uniform(0.2, 4))
            self._server.go_on()


class Outage(Killable):
    """A Redis that is away for so long. Meanwhile the rank is asked what needs it, and what not."""

    def __init__(
        self,
        begin: Callable[[], object],
        end: Callable[[], object],
        seconds: float,
        rank: str,
        refused: tuple[int, str],
    ) -> None:
        """``refused``: the status and the code of a write meanwhile."""
        super().__init__()
        self._begin = begin
        self._end = end
        self._seconds = seconds
        self._rank = rank
        self._refused = refused
        self.reads: list[float] = []
        """Seconds that they took."""
        self.refusals: list[float] = []
        """Seconds until a write was refused."""

    def kill(self) -> None:
        self._begin()

    def start(self) -> None:
        self.lives += 1
        over = time.monotonic() + self._seconds
        with httpx.Client(base_url=self._rank, timeout=60, trust_env=False) as http:
            while time.monotonic() < over:
                began = time.monotonic()
                assert http.get("/rl/v1/sessions").status_code == 200
                self.reads.append(time.monotonic() - began)
                began = time.monotonic()
                opening = http.post("/rl/v1/start_session", json={"mode": "eval"})
                turned_away(opening, *self._refused)
                self.refusals.append(time.monotonic() - began)
        self._end()


AWAY, FULL = (503, "store_unavailable"), (507, "store_full")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("victim", ["machine", "redis"])
def test_what_was_acknowledged_outlives_a_lost_machine_or_a_failing_redis(
    victim: str, tmp_path: Path, tiny_model_dir: Path, long: bool, figure: Figure
) -> None:
    kills, agents = (50, 32) if long else (4, 16)
    rng = random.Random(0)
    with RedisServer(tmp_path / "redis") as server, engine_in_thread(tiny_model_dir) as engine:
        engine.pace = PACE
        proxy = MovingProxy(tmp_path, tiny_model_dir, engine.url, server.url, *SETTINGS, LEASE)
        target = proxy if victim == "machine" else FailingRedis(server, rng)
        check(proxy, engine, target, agents, kills, figure)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("how", "seconds"), [("cut off", 30), ("stopped", 60), ("full", 30)])
def test_a_rank_goes_on_after_its_redis_was_out_of_reach(
    how: str, seconds: float, tmp_path: Path, tiny_model_dir: Path, long: bool, figure: Figure
) -> None:
    if how == "stopped" and not long:
        pytest.skip("its short form is the one that is cut off; --long runs this one")
    seconds, agents = (seconds, 32) if long else (4, 16)
    with (
        RedisServer(tmp_path / "redis") as server,
        CutLink(server.port) as link,
        engine_in_thread(tiny_model_dir) as engine,
    ):
        engine.pace = PACE
        url = f"redis://127.0.0.1:{link.port}/0"
        # No client waits for room, so groups lack members.
        soon = ("sessions.group_timeout=15",) if how == "full" else ()
        proxy = MovingProxy(tmp_path, tiny_model_dir, engine.url, url, *PATIENT, LEASE, *soon)
        limit = partial(server.client().config_set, "maxmemory")
        ways: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "cut off": (link.cut, link.mend),
            "stopped": (server.pause, server.go_on),
            "full": (partial(limit, "1mb"), partial(limit, "0")),
        }
        refused = FULL if how == "full" else AWAY
        outage = Outage(*ways[how], seconds, proxy.url, refused)
        check(proxy, engine, outage, agents, 2, figure)
        figure(
            f"{len(outage.reads)} reads meanwhile, the slowest {max(outage.reads):.2f} s; "
            f"{len(outage.refusals)} writes refused, the slowest after "
            f"{max(outage.refusals):.2f} s"
        )
        assert max(outage.reads) < 2
        assert max(outage.refusals) < 10


def check(
    proxy: MovingProxy,
    engine: Any,
    target: Killable,
    agents: int,
    kills: int,
    figure: Figure,
) -> None:
    """Let agents work while the target is killed; then judge what another machine finds."""
    rng = random.Random(0)
    try:
        proxy.start()
        load = Load(proxy, proxy.url)
        away = asyncio.run(under_fire(load, target, agents=agents, kills=kills, rng=rng))
        counters = audit.counters_of(httpx.get(f"{proxy.url}/metrics", timeout=60).text)
        # Also what no file of a machine has any more comes out of the log.
        proxy.kill()
        proxy.start()
    finally:
        Killable.kill(proxy)
    config = config_for(proxy.disk.parent, f"server.journal_dir={proxy.disk}")
    figure(f"longest away {max(away):.2f} s")
    judge(load, engine, counters, trial_dir(config), away, figure)
