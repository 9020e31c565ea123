"""The cost of sessions: ``python benchmarks/sessions.py``.

A real proxy (``python -m proxy_ext``, with its journal and LiteLLM), a canned engine and a client
share the machine.

open + finalize  32 clients open sessions (eval: these need no model call) and finalize them, one
                 after another, with and without an Idempotency-Key; each of the two is on disk
                 before it is acknowledged. Beside it the raw peer: as many single transactions of
                 two small rows by sqlite3, and a health check, which costs what any request does.
restart          the journal of one recorded session of 20 turns, copied under other names until
                 there are 10,000 open ones. The proxy starts on it, and on an empty one: the
                 latter takes what imports take.
memory           resident memory after that start, and after each session was continued by a call,
                 over that of the proxy on the empty journal, for a session.
first touch      CPU of a continued session's call when its tree has to be read from the journal,
                 beside that of one whose tree is in memory.
"""

from __future__ import annotations

import argparse
import asyncio
import sqlite3
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import yaml
from common import (
    child,
    cpu_seconds,
    finish,
    machine,
    median,
    parser,
    ratio,
    resident_mib,
    wait_until_up,
)
from proxy import KEY, SYSTEM, Lab

from any_agent.auth.access import run_dir_of, signer_of
from any_agent.config import Config, load_config
from any_agent.keys import KeySigner
from any_agent.runtime.ports import free_port
from proxy_ext.journal import PutInteraction, PutSession, SessionRow, SQLiteJournal

TURNS, TURN_USER, TURN_OUTPUT = 20, 100, 100
CONCURRENT = 32
_TOUCHERS = 16
Messages = list[dict[str, Any]]


@dataclass(slots=True)
class Proxy:
    """A running proxy; ``start`` and ``cpu`` are seconds from its start to its first answer."""

    url: str
    pid: int
    start: float
    cpu: float


@dataclass(slots=True)
class Talk:
    """An open session."""

    key: str
    messages: Messages


class Bench:
    """Proxies over a canned engine, with the measurements on them."""

    def __init__(self, folder: Path, stack: ExitStack, args: argparse.Namespace) -> None:
        self._folder = folder
        self._args = args
        self.lab = Lab(folder, stack, gap=0.001)

    def config(self, name: str) -> Config:
        settings = {
            "root": self._folder / name,
            "model.path": self.lab.model,
            "model.enable_thinking": "false",
            "log_level": "warning",
        }
        return load_config(None, [f"{k}={v}" for k, v in settings.items()], environ={})

    @contextmanager
    def proxy(self, config: Config) -> Iterator[Proxy]:
        path = config.root.with_suffix(".yaml")
        path.write_text(yaml.safe_dump(config.dump()))
        log, port = config.root.with_suffix(".log"), free_port("127.0.0.1")
        command = ["-m", "proxy_ext", "--config", str(path), "--port", str(port)]
        command += ["--engine-url", self.lab.engine]
        began = time.monotonic()
        environment = {"HF_HUB_OFFLINE": "1", "LITELLM_MASTER_KEY": KEY}
        with child(command, log, environment) as process:
            url = f"http://127.0.0.1:{port}"
            wait_until_up(process, f"{url}/healthz", log)
            start, cpu = time.monotonic() - began, cpu_seconds(process.pid)
            yield Proxy(url, process.pid, start, cpu)

    # -- open + finalize -----------------------------------------------------------------------

    async def rates(self) -> None:
        rows: dict[str, list[tuple[float, float, float]]] = {}
        with self.proxy(self.config("rates")) as proxy:
            async with client() as http:
                for number in range(self._args.rounds + 1):
                    timed = {
                        "open + finalize": await self._rate(proxy, http, keyed=False),
                        "... with keys": await self._rate(proxy, http, keyed=True),
                        "health check": await self._healthy(proxy, http),
                    }
                    if number:  # the first one warms up
                        for name, figures in timed.items():
                            rows.setdefault(name, []).append(figures)
        raw = self._raw_rate()
        pair, health = (median(f[1] for f in rows[n]) for n in ("open + finalize", "health check"))
        ratio("CPU of open + finalize / health check", pair, health)
        print(f"\nopen + finalize through one proxy, {CONCURRENT} clients at once")
        print(f"{'':<18} {'per s':>8} {'CPU ms, proxy':>14} {'client':>8}")
        for name, figures in rows.items():
            rate, mine, theirs = (median(f[k] for f in figures) for k in range(3))
            print(f"{name:<18} {rate:>8.0f} {1e3 * mine:>14.2f} {1e3 * theirs:>8.2f}")
        print(f"{'raw sqlite3':<18} {raw:>8.0f}   (one after another, two transactions each)")

    async def _rate(
        self, proxy: Proxy, http: aiohttp.ClientSession, *, keyed: bool
    ) -> tuple[float, float, float]:
        async def one() -> None:
            opened = await post(proxy, http, "start_session", {"mode": "eval"}, keyed=keyed)
            await post(proxy, http, "finalize", {}, key=opened["api_key"], keyed=keyed)

        return await self._timed(proxy, one)

    async def _healthy(
        self, proxy: Proxy, http: aiohttp.ClientSession
    ) -> tuple[float, float, float]:
        async def one() -> None:
            async with http.get(f"{proxy.url}/healthz") as response:
                assert response.status == 200

        return await self._timed(proxy, one)

    async def _timed(self, proxy: Proxy, one: Any) -> tuple[float, float, float]:
        """Return repetitions per second, and CPU seconds of proxy and this process for each."""
        count = self._args.pairs

        async def work() -> None:
            for _ in range(count // CONCURRENT):
                await one()

        done = count // CONCURRENT * CONCURRENT
        wall, mine, theirs = time.perf_counter(), time.process_time(), cpu_seconds(proxy.pid)
        await asyncio.gather(*(work() for _ in range(CONCURRENT)))
        return (
            done / (time.perf_counter() - wall),
            (cpu_seconds(proxy.pid) - theirs) / done,
            (time.process_time() - mine) / done,
        )

    def _raw_rate(self) -> float:
        raw = sqlite3.connect(self._folder / "raw.sqlite", isolation_level=None)
        raw.execute("PRAGMA journal_mode = WAL")
        raw.execute("PRAGMA synchronous = FULL")
        raw.execute("CREATE TABLE rows (id TEXT PRIMARY KEY, data BLOB) STRICT")
        began = time.perf_counter()
        for _ in range(self._args.pairs):
            for _ in range(2):
                raw.execute("BEGIN IMMEDIATE")
                raw.execute("INSERT INTO rows VALUES (?, ?)", (uuid.uuid4().hex, bytes(300)))
                raw.execute("COMMIT")
        rate = self._args.pairs / (time.perf_counter() - began)
        raw.close()
        return rate

    # -- many open sessions --------------------------------------------------------------------

    async def crowd(self) -> None:
        count = self._args.sessions
        empty, full = self.config("empty"), self.config("full")
        with self.proxy(full) as proxy:
            async with client() as http:
                recorded = await self._recorded(proxy, http)
        talks = await copy_session(full, recorded, count)
        starts: list[tuple[Proxy, Proxy]] = []
        for _ in range(self._args.starts):
            with self.proxy(empty) as without:
                base = resident_mib(without.pid)
            with self.proxy(full) as proxy:
                starts.append((without, proxy))
        with self.proxy(full) as proxy:
            started = resident_mib(proxy.pid)
            async with client() as http:
                cold = await self._continue(proxy, http, talks)
                touched = resident_mib(proxy.pid)
                # The last ones are the warm ones.
                warm = await self._continue(proxy, http, talks[-200:])
        print(f"\n{count} open sessions of {TURNS} turns, {TURN_USER} + {TURN_OUTPUT} tokens each")
        for name, what in (("restart", "start"), ("restart, CPU", "cpu")):
            imports, took = (median(getattr(pair[k], what) for pair in starts) for k in range(2))
            print(f"{name:<18} {took:.1f} s; with an empty journal {imports:.1f} s", end="")
            print(f": {took - imports:+.1f} s")
        for name, now in (("after the start", started), ("after a call of each", touched)):
            print(f"{'memory, ' + name:<28} {1024 * (now - base) / count:.1f} KB a session")
        ratio("CPU of a cold call / warm", cold, warm)
        print(f"{'first touch':<18} {1e3 * cold:.2f} ms CPU a call, {1e3 * warm:.2f} ms when warm")

    async def _recorded(self, proxy: Proxy, http: aiohttp.ClientSession) -> Messages:
        """Return the messages of a recorded session, the first one in the journal."""
        opened = await post(proxy, http, "start_session", {"mode": "eval"})
        messages: Messages = [{"role": "system", "content": SYSTEM}, self.lab.text.user(TURN_USER)]
        for _ in range(TURNS):
            await complete(proxy, http, Talk(opened["api_key"], messages))
            messages.append(self.lab.text.user(TURN_USER))
        return messages

    async def _continue(
        self, proxy: Proxy, http: aiohttp.ClientSession, talks: list[Talk]
    ) -> float:
        """Return the CPU seconds of a call."""
        todo = iter(talks)

        async def work() -> None:
            for talk in todo:
                await complete(proxy, http, Talk(talk.key, list(talk.messages)))

        began = cpu_seconds(proxy.pid)
        await asyncio.gather(*(work() for _ in range(_TOUCHERS)))
        return (cpu_seconds(proxy.pid) - began) / len(talks)


@asynccontextmanager
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        yield http


async def post(
    proxy: Proxy,
    http: aiohttp.ClientSession,
    route: str,
    body: Any,
    *,
    key: str | None = None,
    keyed: bool = False,
) -> Any:
    headers = {"content-type": "application/json"}
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    if keyed:
        headers["idempotency-key"] = uuid.uuid4().hex
    url = f"{proxy.url}/rl/v1/{route}"
    async with http.post(url, data=orjson.dumps(body), headers=headers) as response:
        answer = await response.read()
        assert response.status == 200, answer
    return orjson.loads(answer)


async def complete(proxy: Proxy, http: aiohttp.ClientSession, talk: Talk) -> None:
    """Run one turn; append the answer to the messages."""
    body = {"model": "policy", "messages": talk.messages, "max_tokens": TURN_OUTPUT}
    headers = {"authorization": f"Bearer {talk.key}", "content-type": "application/json"}
    url = f"{proxy.url}/v1/chat/completions"
    async with http.post(url, data=orjson.dumps(body), headers=headers) as response:
        answer = await response.read()
        assert response.status == 200, answer
    message = orjson.loads(answer)["choices"][0]["message"]
    talk.messages.append({"role": "assistant", "content": message["content"]})


async def copy_session(config: Config, messages: Messages, count: int) -> list[Talk]:
    """Fill the journal with copies of its one session, each open and with a key of its own."""
    run = run_dir_of(config)
    signer = signer_of(run)
    journal = SQLiteJournal(run.journal(0))
    try:
        (row,) = await journal.sessions(["open"])  # type: ignore[list-item]
        stored = await journal.interactions(row.id)
        assert len(stored) == TURNS
        assert all(one.interaction.continuation == "exact" for one in stored[1:])
        return [await _copy(journal, signer, row, stored, messages) for _ in range(count - 1)]
    finally:
        await journal.close()


async def _copy(
    journal: SQLiteJournal, signer: KeySigner, row: SessionRow, stored: list[Any], talk: Messages
) -> Talk:
    lane, key = signer.mint(0)
    session_id = f"ses-0-{uuid.uuid4().hex[:16]}"
    names = {one.interaction.id: f"chatcmpl-{uuid.uuid4().hex}" for one in stored}
    copies = [
        PutInteraction(
            replace(
                one.interaction,
                id=names[one.interaction.id],
                session_id=session_id,
                parent_id=names.get(one.interaction.parent_id),
            ),
            one.key,
        )
        for one in stored
    ]
    await journal.commit(PutSession(replace(row, id=session_id, lane=lane.id)), *copies)
    return Talk(key, talk)


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument(
        "--pairs", type=int, default=1600, help="sessions opened and ended in a round"
    )
    flags.add_argument("--rounds", type=int, default=5)
    flags.add_argument(
        "--sessions", type=int, default=10_000, help="sessions that are open at once"
    )
    flags.add_argument("--starts", type=int, default=3)
    flags.add_argument("--only", choices=["rates", "crowd"])
    args = flags.parse_args()
    if args.quick:
        args.rounds, args.sessions, args.starts = 2, 1000, 1
    if args.smoke:
        args.pairs, args.rounds, args.sessions, args.starts = 64, 1, 20, 1
    print(machine(), flush=True)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        bench = Bench(Path(folder), stack, args)
        if args.only != "crowd":
            asyncio.run(bench.rates())
        if args.only != "rates":
            asyncio.run(bench.crowd())
    finish(args)


if __name__ == "__main__":
    main()
