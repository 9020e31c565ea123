"""The cost of the one URL: ``python benchmarks/router.py``.

Requests of 2 KB with answers of 2 KB, and streams of stamped events, through each router in turn.
A router has a core to itself; the load (this process) and the ranks behind share the others.
Counted is the CPU time of the router's process alone, kernel included. Contenders take turns
within a round; medians over rounds are shown. Last, many slow streams at once through ours:
none may be cut.

any-agent    `python -m router`: checks the session key, reads the rank from it
nginx        one worker; reads the rank by a regular expression, cannot check a key
obvious      aiohttp on both sides, a client session for each request; checks the key alike
direct       the load on the ranks themselves: what the latencies are counted from
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import uvloop
from common import child, cpu_seconds, finish, machine, median, parser, ratio, wait_until_up
from wire import Answer, Connection, connections, request

SIZE = 2048
RANKS = 2
CONCURRENT = 32
STREAMS, EVENTS, GAP = 64, 100, 0.04
OURS, NGINX, OBVIOUS, DIRECT = "any-agent", "nginx", "obvious", "direct"
LONG_STREAMS, LONG_RATE = 200, 10
REQUEST, ALONE, CHUNK, LATE = "request", "alone", "chunk", "late"
CPU = (REQUEST, ALONE, CHUNK)
_PEERS = Path(__file__).with_name("peers")

# -- starting the contenders -----------------------------------------------------------------------


@dataclass(slots=True)
class Contender:
    """A router under load; ``pid`` None: there is none in between."""

    name: str
    urls: list[str]
    """Where the load goes; connections take turns."""
    pid: int | None
    us: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """One figure a round, in microseconds, by kind of measurement."""
    rate: list[float] = field(default_factory=list)

    def cpu(self) -> float:
        return cpu_seconds(self.pid) if self.pid is not None else 0.0

    def median(self, kind: str) -> float:
        return median(self.us[kind])


class Cores:
    """Give the router one core and everything else the rest, where possible."""

    def __init__(self) -> None:
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []
        self.pinned = len(cores) > 1
        self._router, self._rest = set(cores[:1]), set(cores[1:])

    def pin(self, pid: int, *, router: bool) -> None:
        if self.pinned:
            os.sched_setaffinity(pid, self._router if router else self._rest)


class Lab:
    """The ranks and the routers, started in a folder."""

    def __init__(self, folder: Path, stack: ExitStack, cores: Cores) -> None:
        from any_agent.config import load_config
        from any_agent.keys import KeySigner
        from any_agent.rundir.layout import RunDir

        self._folder = folder
        self._stack = stack
        self._cores = cores
        settings = {"root": folder / "runs", "server.ranks": RANKS, "log_level": "warning"}
        self._config = load_config(None, [f"{k}={v}" for k, v in settings.items()], environ={})
        config = self._config
        self._run = RunDir.of(config.root, config.user, config.experiment, config.trial)
        self._run.create()
        self._signer = KeySigner(self._run.signing_secret())
        cores.pin(os.getpid(), router=False)
        ports = [self._free_port() for _ in range(RANKS)]
        self._ports = ports
        self._ranks = [f"http://127.0.0.1:{port}" for port in ports]
        command = [str(_PEERS / "upstream.py"), "--ports", *map(str, ports)]
        self._start("ranks", command, f"{self._ranks[0]}/healthz")

    @staticmethod
    def _free_port() -> int:
        from any_agent.runtime.ports import free_port

        return free_port("127.0.0.1")

    def _start(
        self, name: str, command: list[str], health: str, program: str = sys.executable
    ) -> int:
        log = self._folder / f"{name}.log"
        process = self._stack.enter_context(child(command, log, program=program))
        self._cores.pin(process.pid, router=name != "ranks")
        wait_until_up(process, health, log)
        return process.pid

    def keys(self, count: int) -> list[str]:
        """Return session keys, of the ranks in turn."""
        return [self._signer.mint(number % RANKS)[1] for number in range(count)]

    def direct(self) -> Contender:
        return Contender(DIRECT, self._ranks, None)

    def ours(self) -> Contender:
        import yaml

        path = self._folder / "resolved.yaml"
        path.write_text(yaml.safe_dump(self._config.dump()))
        self._stack.enter_context(self._registered())
        port = self._free_port()
        url = f"http://127.0.0.1:{port}"
        command = ["-m", "router", "--config", str(path), "--host", "127.0.0.1"]
        pid = self._start("any-agent", [*command, "--port", str(port)], f"{url}/readyz")
        return Contender(OURS, [url], pid)

    @contextlib.contextmanager
    def _registered(self) -> Iterator[None]:
        """Keep the ranks' entries in the run's registry fresh, as the ranks would."""
        from any_agent.rundir.registry import HEARTBEAT, RegistryEntry, publish, rank_name

        entries = [
            RegistryEntry(name=rank_name(rank), boot_id="benchmark", url=url, pid=os.getpid())
            for rank, url in enumerate(self._ranks)
        ]
        ended = threading.Event()

        def beat() -> None:
            while True:
                for entry in entries:
                    publish(self._run.registry, entry)
                if ended.wait(HEARTBEAT):
                    return

        thread = threading.Thread(target=beat)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def obvious(self) -> Contender:
        port = self._free_port()
        url = f"http://127.0.0.1:{port}"
        command = [str(_PEERS / "obvious.py"), "--run-dir", str(self._run.path)]
        command += ["--ranks", *self._ranks, "--port", str(port)]
        return Contender(OBVIOUS, [url], self._start("obvious", command, f"{url}/healthz"))

    def nginx(self, program: str) -> Contender:
        port = self._free_port()
        url = f"http://127.0.0.1:{port}"
        text = (_PEERS / "nginx.conf").read_text(encoding="utf-8")
        values = {"folder": self._folder, "port": port}
        values |= {f"rank{rank}": port for rank, port in enumerate(self._ports)}
        for name, value in values.items():
            text = text.replace(f"@{name}@", str(value))
        path = self._folder / "nginx.conf"
        path.write_text(text, encoding="utf-8")
        command = ["-p", str(self._folder), "-c", str(path)]
        pid = self._start("nginx", command, f"{url}/healthz", program)
        return Contender(NGINX, [url], pid)


def find_nginx() -> str:
    """Return the path of nginx, which users' PATH often lacks."""
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"))
    found = shutil.which("nginx", path=path)
    if found is None:
        sys.exit("nginx is missing: apt-get install nginx-light, or leave it out by --no-nginx")
    return found


# -- the load --------------------------------------------------------------------------------------


class Bench:
    """The measurements of one contender, one round at a time."""

    def __init__(self, lab: Lab, args: argparse.Namespace) -> None:
        self._keys = lab.keys(max(CONCURRENT, STREAMS, LONG_STREAMS))
        self._args = args

    async def round(self, c: Contender, *, keep: bool) -> None:
        """Measure requests at once, one at a time, and streams; ``keep`` False: only warm up."""
        requests = self._args.requests
        cpu, seconds = await self._requests(c, CONCURRENT, requests)
        alone, _ = await self._requests(c, 1, requests // 4)
        events = self._args.events
        answers, streamed = await self.streams(c, STREAMS, events, GAP)
        if any(not answer.whole_stream(events) for answer in answers):
            raise RuntimeError(f"{c.name} cut a stream")
        if not keep:
            return
        c.us[REQUEST].append(cpu / requests * 1e6)
        c.rate.append(requests / seconds)
        c.us[ALONE].append(alone / (requests // 4) * 1e6)
        c.us[CHUNK].append(streamed / (STREAMS * events) * 1e6)
        c.us[LATE].append(median(late for a in answers for late in a.late) / 1e3)

    async def _requests(self, c: Contender, concurrent: int, count: int) -> tuple[float, float]:
        """Return the CPU and wall seconds of ``count`` requests."""
        todo = iter(range(count))
        async with connections(c.urls, concurrent) as opened:

            async def work(connection: Connection, key: str) -> None:
                data = request(key, SIZE)
                for _ in todo:
                    answer = await connection.call(data)
                    if answer.status != 200 or not answer.complete:
                        raise RuntimeError(f"{c.name} answered {answer}")

            cpu, began = c.cpu(), time.perf_counter()
            # Without a router, a rank's keys must go to that rank's connections.
            await asyncio.gather(*map(work, opened, self._keys))
            return c.cpu() - cpu, time.perf_counter() - began

    async def streams(
        self, c: Contender, count: int, events: int, gap: float
    ) -> tuple[list[Answer], float]:
        """Run ``count`` streams at once; return the CPU seconds of all."""
        async with connections(c.urls, count) as opened:
            cpu = c.cpu()
            calls = [
                connection.call(request(key, SIZE, stream=True, events=events, gap=gap))
                for connection, key in zip(opened, self._keys, strict=False)
            ]
            answers = await asyncio.gather(*calls)
            return answers, c.cpu() - cpu


# -- the tables ------------------------------------------------------------------------------------


def print_table(contenders: list[Contender]) -> None:
    routers = {c.name: c for c in contenders}
    direct = routers.pop(DIRECT)
    figures = {
        name: [*(c.median(kind) for kind in CPU), c.median(LATE) - direct.median(LATE)]
        for name, c in routers.items()
    }
    print(f"{'us':<14} {'request':>9} {'alone':>9} {'chunk':>9} {'added p50':>10} {'req/s':>9}")
    for name, row in figures.items():
        print(f"{name:<14} {_cells(row)} {median(routers[name].rate):>9.0f}")
    own = f"(own: {direct.median(LATE):.0f})"
    print(f"{DIRECT:<14} {'-':>9} {'-':>9} {'-':>9} {own:>10} {median(direct.rate):>9.0f}")
    print()
    for name, row in figures.items():
        if name != NGINX and NGINX in figures:
            print(f"{name + ', x nginx':<24} {_ratios(row, figures[NGINX])}")
    print(f"{'obvious, x any-agent':<24} {_ratios(figures[OBVIOUS], figures[OURS])}")
    for peer in {NGINX, OBVIOUS} & set(figures):
        for kind, ours, theirs in zip(CPU, figures[OURS], figures[peer], strict=False):
            ratio(f"{kind} / {peer}", ours, theirs)


def _cells(row: list[float]) -> str:
    return f"{row[0]:>9.1f} {row[1]:>9.1f} {row[2]:>9.1f} {row[3]:>10.0f}"


def _ratios(row: list[float], of: list[float]) -> str:
    return " ".join(f"{x / y:>9.1f}" for x, y in zip(row, of, strict=True))


def print_long(answers: list[Answer], events: int, cpu: float, seconds: float) -> int:
    """Print the result of the many slow streams; return the number of those cut."""
    cut = sum(not answer.whole_stream(events) for answer in answers)
    late = sorted(late / 1e6 for answer in answers for late in answer.late)
    print(
        f"\n{len(answers)} streams through any-agent, {events} chunks each in {seconds:.0f} s: "
        f"{cut} cut, {len(answers) * events - len(late)} chunks lost; "
        f"late p50 {late[len(late) // 2]:.2f} ms, p99 {late[len(late) * 99 // 100]:.2f} ms, "
        f"most {late[-1]:.0f} ms; {cpu / len(late) * 1e6:.0f} us CPU a chunk"
    )
    return cut


async def measure(lab: Lab, args: argparse.Namespace) -> int:
    bench = Bench(lab, args)
    contenders = [lab.nginx(args.nginx)] if args.nginx else []
    contenders += [lab.ours(), lab.obvious(), lab.direct()]
    for number in range(args.rounds + 1):
        for contender in contenders:
            await bench.round(contender, keep=number > 0)
    print_table(contenders)
    events = int(args.seconds * LONG_RATE)
    (ours,) = (c for c in contenders if c.name == OURS)
    began = time.perf_counter()
    answers, cpu = await bench.streams(ours, LONG_STREAMS, events, 1 / LONG_RATE)
    return print_long(answers, events, cpu, time.perf_counter() - began)


def main() -> int:
    flags = parser(__doc__)
    flags.add_argument(
        "--requests", type=int, default=2000, help="requests of a contender in a round"
    )
    flags.add_argument("--rounds", type=int, default=5)
    flags.add_argument("--seconds", type=float, default=60, help="length of the last streams")
    flags.add_argument("--no-nginx", action="store_true", help="leave nginx out")
    args = flags.parse_args()
    args.events = EVENTS
    if args.quick:
        args.requests, args.rounds, args.seconds = 1000, 2, 10
    if args.smoke:
        args.requests, args.rounds, args.seconds, args.events = 100, 1, 1, 5
        args.no_nginx = True
    args.nginx = None if args.no_nginx else find_nginx()
    cores = Cores()
    pinned = "the router on one of them" if cores.pinned else "not pinned"
    print(f"{machine()}, {pinned}; {args.requests} requests x {args.rounds} rounds\n", flush=True)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        lab = Lab(Path(folder), stack, cores)
        cut = uvloop.run(measure(lab, args))
    finish(args)
    return 1 if cut else 0


if __name__ == "__main__":
    sys.exit(main())
