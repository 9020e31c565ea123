"""A proxy's pace under many calls: ``python benchmarks/streams.py``.

Streams: 256 at once, each of 20 tokens a second, for half a minute. The event loop's lag is taken
from `any_agent_loop_lag_seconds`; a small request beside the streams shows it from outside. Calls:
20,000 of them in sessions that end, with the memory of the process.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import aiohttp
from common import cpu_seconds, finish, machine, parser, ratio, resident_mib
from proxy import OUTPUT, Contender, Lab, Load

STREAMS, SECONDS, PER_SECOND = 256, 30, 20
CALLS, TURNS, AT_ONCE, TOKENS = 20_000, 10, 8, 32
_LAG = "any_agent_loop_lag_seconds_bucket"
_BOUND = 0.05


async def lag_counts(http: aiohttp.ClientSession, url: str) -> dict[float, float]:
    """Return the observations of the loop's lag so far, by upper ends of buckets (cumulative)."""
    async with http.get(f"{url}/metrics") as response:
        text = await response.text()
    lines = [line for line in text.splitlines() if line.startswith(_LAG)]
    return {float(line.split('le="')[1].split('"')[0]): float(line.split()[-1]) for line in lines}


def share_within(before: Mapping[float, float], after: Mapping[float, float]) -> tuple[float, str]:
    """Return the share of observations within 50 ms, and the bucket of the 99th percentile."""
    counts = {bound: after[bound] - before[bound] for bound in after}
    total = max(counts.values())
    p99 = min(bound for bound, count in counts.items() if count >= 0.99 * total)
    return counts[_BOUND] / total, f"at most {1000 * p99:g} ms"


async def ping(http: aiohttp.ClientSession, url: str, until: float) -> list[float]:
    """Yield the seconds of small requests, four a second."""
    out = []
    while time.monotonic() < until:
        began = time.perf_counter()
        async with http.get(f"{url}/v1/models") as response:
            await response.read()
        out.append(time.perf_counter() - began)
        await asyncio.sleep(0.25)
    return sorted(out)


async def streams(
    http: aiohttp.ClientSession, load: Load, c: Contender, count: int, lasting: float
) -> None:
    """Stream at every place for the whole time, one answer after another."""
    talks = await load.talks(c, count)
    until = time.monotonic() + lasting
    done = 0

    async def one(place: int) -> None:
        nonlocal done
        # Staggered, so that they do not begin and end all at once.
        await asyncio.sleep(place / count)
        while time.monotonic() < until:
            await load.stream(c, talks[place])
            done += 1

    before, cpu, began = await lag_counts(http, c.url), cpu_seconds(c.pid), time.monotonic()
    pings, *_ = await asyncio.gather(ping(http, c.url, until), *map(one, range(count)))
    seconds = time.monotonic() - began
    used = cpu_seconds(c.pid) - cpu
    share, p99 = share_within(before, await lag_counts(http, c.url))
    chunks = done * OUTPUT
    print(
        f"{count} streams at once, {chunks / seconds:.0f} chunks a second for {seconds:.0f} s, "
        f"{done} answers\n"
        f"  the loop's lag: p99 {p99}; {100 * share:.1f}% within 50 ms\n"
        f"  a small request beside them: median {1000 * pings[len(pings) // 2]:.0f} ms, "
        f"worst {1000 * pings[-1]:.0f} ms\n"
        f"  CPU: {1e6 * used / chunks:.0f} us a chunk, {100 * used / seconds:.0f}% of a core",
        flush=True,
    )


async def calls(http: aiohttp.ClientSession, load: Load, c: Contender, count: int) -> None:
    """Run sessions of ten turns, aborted at their end; return the memory after each fifth."""
    sessions = count // TURNS
    left, ended = sessions, 0
    sizes = [resident_mib(c.pid)]

    async def work() -> None:
        nonlocal left, ended
        while left > 0:
            left -= 1
            (talk,) = await load.talks(c, 1)
            for _ in range(TURNS):
                await load.whole(c, talk, TOKENS)
            headers = {"authorization": f"Bearer {talk.key}"}
            abort = f"{c.url}/rl/v1/sessions/{talk.session}/abort"
            async with http.post(abort, json={}, headers=headers) as response:
                assert response.status == 200, await response.text()
            ended += 1
            if ended % (sessions // 5) == 0:
                sizes.append(resident_mib(c.pid))

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    shown = ", ".join(f"{size:.0f}" for size in sizes)
    print(f"{count} calls in {sessions} sessions: MiB before, and after each fifth: {shown}")
    ratio("memory at the end / after two fifths", sizes[-1], sizes[2])
    print(f"  from the second fifth to the last: {sizes[-1] - sizes[2]:+.0f} MiB")


async def measure(lab: Lab, slow: Lab, args: argparse.Namespace) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        for number, each in enumerate((slow, lab)):
            load, ours = Load(http, each.text), each.ours()[0]
            await load.allow(ours)
            if number:
                await calls(http, load, ours, args.calls)
            else:
                await streams(http, load, ours, args.streams, args.seconds)


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--calls", type=int, default=CALLS)
    args = flags.parse_args()
    args.streams, args.seconds = STREAMS, SECONDS
    if args.quick:
        args.calls, args.seconds = CALLS // 4, SECONDS // 3
    if args.smoke:
        args.calls, args.streams, args.seconds = 200, 16, 1
    print(machine(), flush=True)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        labs = [Path(folder) / name for name in ("calls", "streams")]
        for path in labs:
            path.mkdir()
        lab = Lab(labs[0], stack, 1.0)
        slow = Lab(labs[1], stack, 1000 / PER_SECOND)
        asyncio.run(measure(lab, slow, args))
    finish(args)


if __name__ == "__main__":
    main()
