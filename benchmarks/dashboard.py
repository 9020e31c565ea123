"""The cost of looking at a run: ``python benchmarks/dashboard.py``.

A real rank (``python -m proxy_ext``) and a real router without keys, and a journal of many
sessions, one of them a long conversation.

pages       seconds until a page is there, over one connection; beside a scrape of ``/metrics``.
visitors    CPU of router and rank while overviews are open, each renewed as the page does it.
paint       seconds until Chromium has painted a page for the first time, and until the long
            conversation's tokens are there; the time of a frame while it is scrolled. Left out
            where there is no Chromium.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
from common import child, cpu_seconds, finish, machine, median, parser, ratio, wait_until_up
from sessions import Bench, Proxy, Talk, client, complete, post

from any_agent.auth.access import run_dir_of
from any_agent.config import Config
from any_agent.runtime.ports import free_port
from any_agent.types import SessionState
from proxy_ext.journal import PutSession, SQLiteJournal

_AT_ONCE = 1000  # sessions in one commit
_TASKS = 200
_PAINTED = """new Promise((done, failed) => {
setTimeout(failed, 60000, "nothing was painted")
new PerformanceObserver(seen => {
  const [first] = seen.getEntriesByName("first-contentful-paint")
  if (first) done(first.startTime)
}).observe({type: "paint", buffered: true})
})"""
_SCROLLED = """new Promise(done => {
  const frames = []
  let before = performance.now()
  const step = (now) => {
    frames.push(now - before)
    before = now
    scrollBy(0, 300)
    frames.length < 300 ? requestAnimationFrame(step) : done(frames)
  }
  requestAnimationFrame(step)
})"""
_ASKED = 400  # tokens of each turn's question; the answer has 100
_RENEWED = 5.0  # seconds, as the overview's page asks again


@dataclass(frozen=True, slots=True)
class Service:
    """A rank behind a router, and a long session in it."""

    rank: Proxy
    url: str
    router: int
    session_id: str


async def record(bench: Bench, proxy: Proxy, turns: int) -> str:
    """Record a long conversation; return its session's id."""
    async with client() as http:
        opened = await post(proxy, http, "start_session", {"mode": "eval"})
        talk = Talk(opened["api_key"], [bench.lab.text.user(_ASKED)])
        for _ in range(turns):
            await complete(proxy, http, talk)
            talk.messages.append(bench.lab.text.user(_ASKED))
    return str(opened["session_id"])


async def fill(config: Config, count: int) -> None:
    """Fill the journal with ended sessions: many groups of many tasks."""
    journal = SQLiteJournal(run_dir_of(config).journal(0))
    try:
        (row,) = await journal.sessions([SessionState.OPEN])
        done: list[PutSession] = []
        for number in range(count):
            fields = {
                "id": f"ses-0-{uuid.uuid4().hex[:16]}",
                "lane": uuid.uuid4().hex,
                "mode": "train",
                "state": SessionState.TRAINED,
                "task_id": f"task-{number // 8 % _TASKS}",
                "group_id": f"group-{number // 8}",
                "created_at": row.created_at - count + number,
                "ended_at": row.created_at - count + number + 0.5,
                "final_reward": number % 3 / 2,
                "step": number // 64,
            }
            done.append(PutSession(replace(row, **fields)))
            if len(done) == _AT_ONCE or number == count - 1:
                await journal.commit(*done)
                done = []
    finally:
        await journal.close()


@contextlib.contextmanager
def running(bench: Bench, config: Config, session_id: str) -> Iterator[Service]:
    port, log = free_port("127.0.0.1"), config.root.with_suffix(".router.log")
    url = f"http://127.0.0.1:{port}"
    with bench.proxy(config) as rank:
        settings = str(config.root.with_suffix(".yaml"))
        command = ["-m", "router", "--config", settings, "--host", "127.0.0.1", "--port", str(port)]
        with child(command, log) as process:
            wait_until_up(process, f"{url}/readyz", log)
            yield Service(rank, url, process.pid, session_id)


def pages_of(service: Service) -> dict[str, str]:
    return {
        "overview": "/ui",
        "tasks": "/ui/tasks",
        "sessions": "/ui/sessions",
        "sessions, one task": "/ui/sessions?task_id=task-7",
        "sessions, none found": "/ui/sessions?task_id=unknown",
        "the long session": f"/ui/sessions/{service.session_id}",
        "training": "/ui/training",
        "service": "/ui/service",
    }


async def pages(service: Service, http: aiohttp.ClientSession, rounds: int) -> None:
    """Print the seconds of each page: of the first time, and the median of the others."""
    print(f"\n{'page':<22} {'first ms':>9} {'median ms':>10} {'KB':>7}")
    taken: dict[str, float] = {}
    for name, path in {"/metrics": "/metrics", **pages_of(service)}.items():
        each, size = [], 0
        for _ in range(rounds + 1):
            began = time.perf_counter()
            async with http.get(f"{service.url}{path}") as answer:
                size = len(await answer.read())
                assert answer.status == 200, (path, answer.status)
            each.append(time.perf_counter() - began)
        taken[name] = median(each[1:])
        print(f"{name:<22} {1e3 * each[0]:>9.0f} {1e3 * taken[name]:>10.1f} {size / 1e3:>7.0f}")
    ratio("overview / metrics", taken["overview"], taken["/metrics"])


async def visitors(service: Service, http: aiohttp.ClientSession, seconds: float) -> None:
    """Print the CPU while one and ten overviews are open."""
    pids = (service.router, service.rank.pid)
    print(f"\n{'open overviews':<22} {'router %':>9} {'rank %':>10} of a core")
    used = {}

    async def look(after: float, end: float) -> None:
        await asyncio.sleep(after)
        while time.perf_counter() < end:
            async with http.get(f"{service.url}/ui") as answer:
                assert answer.status == 200
                await answer.read()
            await asyncio.sleep(_RENEWED)

    for count in (0, 1, 10):
        before = [cpu_seconds(pid) for pid in pids]
        began = time.perf_counter()
        looks = (look(k * _RENEWED / count, began + seconds) for k in range(count))
        await asyncio.gather(*looks, asyncio.sleep(seconds))
        spent = [cpu_seconds(pid) - was for pid, was in zip(pids, before, strict=True)]
        shares = [100 * one / (time.perf_counter() - began) for one in spent]
        used[count] = sum(shares)
        print(f"{count:<22} {shares[0]:>9.2f} {shares[1]:>10.2f}")
    ratio("CPU of ten overviews / one", used[10] + 0.01, used[1] + 0.01)


def paint(service: Service) -> None:
    """Print when a browser has painted pages for the first time."""
    program = shutil.which("chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        program = None
    if program is None:
        print("\nno Chromium, or no playwright: nothing is painted")
        return
    print(f"\n{'in Chromium':<22} {'painted ms':>11} {'tokens ms':>10}")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 860})
        for name, path in pages_of(service).items():
            if not path.startswith("/ui"):
                continue
            page.goto(f"{service.url}{path}")
            painted = page.evaluate(_PAINTED)
            tokens = ""
            if name == "the long session":
                page.check("[value=logprob]")
                page.locator(".answer").first.scroll_into_view_if_needed()
                page.locator(".tokens > span").first.wait_for(timeout=60_000)
                tokens = f"{page.evaluate('performance.now()'):.0f}"
                frames = sorted(page.evaluate(_SCROLLED))
                print(
                    f"scrolled through the long session, ms a frame: {median(frames):.0f}, "
                    f"95th percentile {frames[len(frames) * 95 // 100]:.0f}, most {frames[-1]:.0f}"
                )
            print(f"{name:<22} {painted:>11.0f} {tokens:>10}")
        browser.close()


async def measure(service: Service, args: argparse.Namespace) -> None:
    async with client() as http:
        await pages(service, http, args.rounds)
        await visitors(service, http, args.seconds)


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--sessions", type=int, default=100_000)
    flags.add_argument("--turns", type=int, default=200, help="of the long conversation")
    flags.add_argument("--rounds", type=int, default=20)
    flags.add_argument("--seconds", type=float, default=30.0, help="for which overviews are open")
    args = flags.parse_args()
    if args.smoke:
        args.sessions, args.turns, args.rounds, args.seconds = 300, 3, 1, 1.0
    elif args.quick:
        args.sessions, args.rounds, args.seconds = 20_000, 5, 10.0
    with tempfile.TemporaryDirectory(prefix="any-agent-bench-") as folder, ExitStack() as stack:
        args.pairs = 0
        bench = Bench(Path(folder), stack, args)
        config: Any = bench.config("run")
        with bench.proxy(config) as proxy:
            session_id = asyncio.run(record(bench, proxy, args.turns))
        began = time.perf_counter()
        asyncio.run(fill(config, args.sessions))
        print(
            f"{machine()}; {args.sessions} sessions (written in {time.perf_counter() - began:.0f} "
            f"s), a conversation of {args.turns} turns"
        )
        with running(bench, config, session_id) as service:
            asyncio.run(measure(service, args))
            if not args.smoke:
                paint(service)
    finish(args)


if __name__ == "__main__":
    main()
