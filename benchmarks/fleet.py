"""A fleet's use of hashing, registry and Redis: ``python benchmarks/fleet.py``.

The code of 256 ranks, 20 routers and a million open sessions runs in this process; only Redis is
real, once as one server and once as a cluster of three, with `appendfsync always`. So the figures
are the servers' CPU a command, their memory, and times that do not depend on this process's speed.

homes     the lookups by which routers find the ranks of groups, and how evenly these spread
registry  one router's look at every rank's entry, beside plain reads of the same files
leases    each rank's claim of its log, and the renewals of its lease
quotas    the reports of every tenant's open sessions from each rank, and counted requests
log       commits of eight interactions of 10 KB
storm     a tenth of the ranks is lost at once, with their disks: until all of them are carried on
          with their sessions elsewhere, while the others renew their leases
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
from common import child, cpu_seconds, finish, machine, parser, ratio

from any_agent.rundir import RunDir
from any_agent.rundir.registry import Registry, RegistryEntry, publish, rank_name
from any_agent.runtime.ports import free_port
from any_agent.types import SessionState
from proxy_ext.journal import PutSession, SessionRow, open_journal
from proxy_ext.journal.files import open_file
from proxy_ext.journal.redis_log import RedisLog
from proxy_ext.journal.redis_server import LogOptions
from proxy_ext.web.quota_server import QuotaServer
from proxy_ext.web.quotas import OPEN
from proxy_ext.web.shared_quotas import SharedQuotas

# The folder of this file comes first, where `router` is a benchmark.
sys.path.insert(0, str(Path(__file__).parents[1]))
from router.affinity import home_of

ROUTERS, TENANTS, GROUP = 20, 100, 8
SECONDS_A_CALL = 30.0  # of a session, between its calls
INTERACTION, COMMIT = 10_000, 8  # bytes of an interaction; interactions in a commit


@dataclass(frozen=True)
class Servers:
    """The processes of one Redis."""

    url: str
    pids: list[int]
    clients: list[redis.Redis]

    def cpu(self) -> float:
        return sum(map(cpu_seconds, self.pids))

    def memory(self) -> int:
        """Return the bytes of the data, in all servers."""
        infos: list[Any] = [client.info("memory") for client in self.clients]
        return sum(int(info["used_memory_dataset"]) for info in infos)


@contextmanager
def servers(folder: Path, count: int) -> Iterator[Servers]:
    """Run one server, or a cluster of several."""
    with ExitStack() as stack:
        ports, pids, clients = [], [], []
        for number in range(count):
            port, bus = free_port("127.0.0.1"), free_port("127.0.0.1")
            own = folder / f"redis-{count}-{number}"
            own.mkdir()
            words = f"--port {port} --bind 127.0.0.1 --dir {own} --appendonly yes".split()
            words += ["--appendfsync", "always", "--save", ""]
            if count > 1:
                words += ["--cluster-enabled", "yes", "--cluster-port", str(bus)]
            process = stack.enter_context(child(words, own / "log", program="redis-server"))
            client = stack.enter_context(redis.Redis(port=port))
            wait_for(lambda client=client: client.ping())  # type: ignore[misc]
            ports.append((port, bus))
            pids.append(process.pid)
            clients.append(client)
        if count > 1:
            edges = [16384 * k // count for k in range(count + 1)]
            for k, client in enumerate(clients):
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", edges[k], edges[k + 1] - 1)
            for port, bus in ports[1:]:
                clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", port, bus)
            for client in clients:
                wait_for(lambda client=client: client.cluster("info")["cluster_state"] == "ok")  # type: ignore[misc]
        scheme = "redis+cluster" if count > 1 else "redis"
        yield Servers(f"{scheme}://127.0.0.1:{ports[0][0]}", pids, clients)


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with suppress(redis.RedisError):
            if condition():
                return
        time.sleep(0.05)
    raise RuntimeError("Redis did not come up within a minute")


def show(name: str, text: str) -> None:
    print(f"{name:<10}{text}", flush=True)


# -- without Redis ---------------------------------------------------------------------------------


def measure_homes(args: argparse.Namespace) -> None:
    groups = args.sessions // GROUP
    began = time.process_time()
    homes = Counter(home_of(f"group-{number}", range(args.ranks)) for number in range(groups))
    each = (time.process_time() - began) / groups
    sizes = [GROUP * homes[rank] for rank in range(args.ranks)]
    mean = sum(sizes) / args.ranks
    show(
        "homes",
        f"{1e6 * each:.0f} us CPU a lookup; sessions of a rank: {min(sizes)} to {max(sizes)}, "
        f"mean {mean:.0f}",
    )
    ratio("homes: fullest rank / mean", max(sizes), mean)


def measure_registry(folder: Path, args: argparse.Namespace) -> None:
    names = [rank_name(rank) for rank in range(args.ranks)]
    registry, seen, plain = Registry(folder), [], []
    for turn in range(args.rounds + 1):
        for name in names:
            publish(folder, RegistryEntry(name=name, boot_id=f"{turn}", url="http://h:1", pid=1))
        began = time.process_time()
        registry.refresh()
        middle = time.process_time()
        for name in names:
            (folder / f"{name}.json").read_bytes()
        seen.append(middle - began)
        plain.append(time.process_time() - middle)
    ours, peer = min(seen), min(plain)
    show(
        "registry",
        f"{1e3 * ours:.1f} ms CPU a look at {args.ranks} entries, plain reads {1e3 * peer:.1f}; "
        f"{ROUTERS} routers read {ROUTERS * args.ranks} files a second",
    )
    ratio("registry: look / plain reads", ours, peer)


# -- with Redis ------------------------------------------------------------------------------------


def measure_leases(redis_: Servers, args: argparse.Namespace) -> tuple[list[RedisLog], float]:
    """Claim a log for each rank; return them, and the servers' CPU seconds of a renewal."""
    logs = []
    began = time.perf_counter()
    for rank in range(args.ranks):
        name = f"user/fleet/leases/{rank_name(rank)}"
        options = LogOptions(redis_.url, name, args.lease, "always", 0)
        logs.append(RedisLog(options, owner=f"host {rank} 1 boot id", home=f"machine-{rank}"))
        logs[-1].claim()
    claimed, cpu = time.perf_counter() - began, redis_.cpu()
    for _ in range(args.rounds):
        for log in logs:
            log.renew()
    each = (redis_.cpu() - cpu) / (args.rounds * args.ranks)
    show(
        "leases",
        f"{args.ranks} claims in {claimed:.1f} s, one after another; {1e6 * each:.0f} us of the "
        f"server a renewal, {3 * args.ranks / args.lease:.0f} renewals a second in all",
    )
    return logs, each


async def measure_quotas(redis_: Servers, args: argparse.Namespace) -> tuple[float, float]:
    """Return the servers' CPU seconds of a report and of a counted request."""
    held = max(1, args.sessions // args.ranks // TENANTS)
    tenants = [f"tenant-{number}" for number in range(TENANTS)]
    limits = {OPEN: 2 * held * args.ranks}
    ranks = [
        SharedQuotas(
            lambda tenant, quota: limits.get(quota, 1e6) if tenant else None,
            ranks=args.ranks,
            open_sessions=lambda tenant: held if tenant else 0,
            server=QuotaServer(redis_.url, "user/fleet/quotas", rank, 1, timeout=30),
            keep=3600,
            timeout=30,
        )
        for rank in range(args.ranks)
    ]

    async def settled(quotas: SharedQuotas) -> None:
        while quotas.pump is not None and not quotas.pump.done():
            await quotas.pump

    memory, cpu = redis_.memory(), redis_.cpu()
    for quotas in ranks:
        quotas.reconcile(tenants)
        await settled(quotas)
        assert quotas.exact
    report = (redis_.cpu() - cpu) / (args.ranks * TENANTS)
    grown = redis_.memory() - memory
    cpu, number = redis_.cpu(), 0
    for turn in range(args.rounds):
        # Each rank has one request at a time, which is the dearest: nothing is shared.
        waits = (q.charge_request(tenants[(turn + k) % TENANTS]) for k, q in enumerate(ranks))
        await asyncio.gather(*waits)
        number += len(ranks)
    request = (redis_.cpu() - cpu) / number
    cpu = redis_.cpu()
    for client in redis_.clients:  # the one that has the key
        with suppress(redis.exceptions.MovedError):
            for turn in range(number):
                client.execute_command("SET", "{any}", turn)
    plain = max(1e-7, (redis_.cpu() - cpu) / number)
    show(
        "quotas",
        f"{1e6 * report:.0f} us of the server a report, {1e6 * request:.0f} a counted request "
        f"(a plain SET {1e6 * plain:.0f}); {grown / 1e6:.1f} MB for {args.ranks} ranks x {TENANTS} "
        "tenants",
    )
    if len(redis_.pids) == 1:
        ratio("quotas: counted request / SET", request, plain)
    for quotas in ranks:
        await quotas.close()
    return report, request


def measure_log(folder: Path, redis_: Servers, logs: list[RedisLog], rounds: int) -> float:
    """Return the servers' CPU seconds of an interaction."""
    connection, _ = open_file(folder / f"commits-{len(redis_.pids)}.sqlite")
    connection.execute("BEGIN")
    lines = [("put_meta", (f"k{k}", os.urandom(INTERACTION))) for k in range(COMMIT)]
    some = logs[:32]
    for log in some:
        log.begin("run", 0)
        log.seed(0, "none")
    began, cpu = time.perf_counter(), redis_.cpu()
    for _ in range(rounds):
        for log in some:
            log.append(connection, lines, lazy=False)
    wall, number = time.perf_counter() - began, rounds * len(some) * COMMIT
    each = (redis_.cpu() - cpu) / number
    connection.close()
    show(
        "log",
        f"{1e6 * each:.0f} us of the server an interaction of {INTERACTION // 1000} KB; "
        f"{number / wall:.0f} a second from one writer",
    )
    return each


# -- the storm -------------------------------------------------------------------------------------


def session_row(rank: int, number: int) -> SessionRow:
    now = time.time()
    return SessionRow(
        id=f"s-{rank}-{number:016x}",
        lane=f"{rank:04x}{number:020x}",
        mode="train",
        state=SessionState.OPEN,
        task_id=f"task-{number // GROUP}",
        group_id=f"task-{number // GROUP}~{number:08x}",
        group_size=GROUP,
        metadata={},
        created_at=now,
        expires_at=now + 3600,
    )


async def measure_storm(
    folder: Path, redis_: Servers, others: list[RedisLog], args: argparse.Namespace
) -> None:
    lost = max(1, args.ranks // 10)
    each = args.sessions // args.ranks
    runs = [RunDir.of(folder / "run", "user", "fleet", "storm", folder / m) for m in "ab"]

    def url(run: RunDir, rank: int) -> str:
        return run.logged_journal_url(
            rank, redis_.url, lease=args.lease, durability="always", replicas=0
        )

    first = []
    for rank in range(lost):
        first.append(await asyncio.to_thread(open_journal, url(runs[0], rank)))
        for k in range(0, each, 500):
            rows = (session_row(rank, number) for number in range(k, min(each, k + 500)))
            await first[-1].commit(*map(PutSession, rows))
    over, renewed = threading.Event(), 0

    def renew() -> None:
        nonlocal renewed
        while not over.is_set():
            for log in others[lost:]:
                log.renew()
                renewed += 1
            over.wait(args.lease / 3)

    renewing = threading.Thread(target=renew)
    renewing.start()
    for journal in first:
        # Nothing renews its lease, or will end it.
        journal.keeper.closed.set()  # type: ignore[attr-defined]
        journal.stats.lost = "its machine is lost"
    shutil.rmtree(folder / "a")
    began, times, found = time.perf_counter(), [], 0

    def carry_on(rank: int) -> Any:
        journal = open_journal(url(runs[1], rank))
        times.append(time.perf_counter() - began)
        return journal

    with ThreadPoolExecutor(lost) as threads:
        loop = asyncio.get_running_loop()
        taken = (loop.run_in_executor(threads, carry_on, rank) for rank in range(lost))
        second = await asyncio.gather(*taken)
    over.set()
    renewing.join()
    for journal in second:
        found += len(await journal.sessions([SessionState.OPEN]))
    assert found == lost * each, (found, lost * each)
    assert all(log.stats.lost is None for log in others)
    show(
        "storm",
        f"{lost} ranks with {each} sessions each were carried on {min(times):.1f} to "
        f"{max(times):.1f} s after the loss (a lease is {args.lease:g} s); all sessions are "
        f"there; {renewed} renewals of the others went well",
    )
    ratio(f"storm / lease, {len(redis_.pids)} servers", max(times), args.lease)
    for journal in (*first, *second):
        await journal.close()


def measure(folder: Path, args: argparse.Namespace) -> None:
    if args.only in (None, "local"):
        measure_homes(args)
        (folder / "registry").mkdir()
        measure_registry(folder / "registry", args)
    if args.only == "local":
        return
    if shutil.which("redis-server") is None:
        print("\nthe rest is left out, because redis-server is not installed")
        return
    for name, count in (("one", 1), ("cluster", 3)):
        if args.only not in (None, name):
            continue
        print(f"\nRedis: {'one server' if count == 1 else f'a cluster of {count}'}")
        with servers(folder, count) as redis_:
            logs, renewal = measure_leases(redis_, args)
            report, request = asyncio.run(measure_quotas(redis_, args))
            interaction = measure_log(folder, redis_, logs, args.rounds)
            own = folder / f"storm-{count}"
            own.mkdir()
            asyncio.run(measure_storm(own, redis_, logs, args))
            calls = args.sessions / SECONDS_A_CALL
            shares = {
                "leases": 3 * args.ranks / args.lease * renewal,
                "reports": args.ranks * TENANTS / 60 * report,
                "requests": calls * request,
                "log": calls * interaction,
            }
            text = ", ".join(f"{name} {cores:.2f}" for name, cores in shares.items())
            show("fleet", f"cores of Redis at {calls:.0f} calls a second: {text}")
            for log in logs:
                log.close()


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--ranks", type=int, default=256)
    flags.add_argument("--sessions", type=int, default=1_000_000)
    flags.add_argument("--rounds", type=int, default=20)
    flags.add_argument("--lease", type=float, default=5.0, help="seconds of a rank's lease")
    flags.add_argument("--only", choices=("local", "one", "cluster"), help="run one part")
    args = flags.parse_args()
    if args.quick:
        args.sessions, args.rounds = 200_000, 5
    if args.smoke:
        args.ranks, args.sessions, args.rounds, args.lease = 20, 4000, 2, 1.0
    print(f"{machine()}; {args.ranks} ranks, {args.sessions} sessions, {TENANTS} tenants")
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), args)
    finish(args)


if __name__ == "__main__":
    main()
