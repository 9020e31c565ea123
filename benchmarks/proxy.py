"""The cost of recording a model call at the gateway: ``python benchmarks/proxy.py``.

A chat call with a prompt of 1,000 tokens and an answer of 500 (the last one ends the turn), with
the log-probability of every token. Every contender is a process of its own and talks to the same
canned engine, which answers at once, or streams one token a millisecond. Counted is the CPU time
of the gateway's process alone. Contenders take turns within a round; medians over rounds are shown.

any-agent            `python -m proxy_ext`, journal on disk, a train session for each call; the
                     agent does not ask for log-probabilities, they are recorded all the same
any-agent, logprobs  the same process; the agent asks for them, so that the answer is as large as
                     the others'
any-agent with LiteLLM  a process with a LiteLLM configuration and two callbacks: policy calls
any-agent, frozen    the same process; calls of a model of that configuration, which are recorded
LiteLLM              its stock proxy; the engine is an `openai/` model; records nothing
any-agent, responses the same process at `/v1/responses`; the answer has no log-probabilities
any-agent, messages  the same at `/v1/messages`
LiteLLM, responses   LiteLLM at the same routes, before the same engine
LiteLLM, messages
bare                 one FastAPI route over aiohttp that keeps request and parsed answer in a list
relay                the same app, passing bytes on; keeps nothing
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from agents_say import PATHS, Talk, added, body_of, ended
from common import cpu_seconds, finish, machine, median, parser, ratio, resident_mib
from gateways import FROZEN, KEY, OURS, OUTPUT, PROMPT, WITH_LITELLM, Contender, Lab, Texts

TURNS, TURN_USER, TURN_OUTPUT = 100, 125, 125
CONCURRENT = 32
SYSTEM = "You answer with one digit."

# -- the load --------------------------------------------------------------------------------------


class Load:
    """A client that opens sessions and makes calls; its own CPU time is not counted."""

    def __init__(self, http: aiohttp.ClientSession, texts: Texts) -> None:
        self._http = http
        self._texts = texts

    async def talks(self, contender: Contender, count: int) -> list[Talk]:
        opened = [await self._opened(contender) for _ in range(count)]
        return [
            Talk(session, key, SYSTEM, [self._texts.user(PROMPT - 20)]) for session, key in opened
        ]

    async def _opened(self, contender: Contender) -> tuple[str, str]:
        if not contender.sessions:
            return "", KEY
        async with self._http.post(f"{contender.url}/rl/v1/start_session", json={}) as response:
            assert response.status == 200, await response.text()
            opened = await response.json()
            return opened["session_id"], opened["api_key"]

    async def allow(self, contender: Contender) -> None:
        """Act as the trainer: admit as many train sessions as are requested."""
        body = {"limit": 10**9, "ttl": 3600, "owner": "benchmark"}
        async with self._http.put(f"{contender.url}/rl/v1/capacity", json=body) as response:
            assert response.status == 200, await response.text()

    async def whole(self, contender: Contender, talk: Talk, size: int = OUTPUT) -> None:
        """Run one turn; append the answer and a next user message to the conversation."""
        async with self._post(contender, talk, size, stream=False) as response:
            answer = await response.read()
            assert response.status == 200, answer
        talk.said += [*added(contender, answer), self._texts.user(TURN_USER)]

    async def stream(self, contender: Contender, talk: Talk) -> float:
        """Run one streamed turn; return the seconds until the first byte of the answer."""
        began = time.perf_counter()
        first = 0.0
        got: list[bytes] = []
        async with self._post(contender, talk, OUTPUT, stream=True) as response:
            assert response.status == 200, await response.read()
            async for block in response.content.iter_any():
                first = first or time.perf_counter() - began
                got.append(block)
        assert ended(contender, b"".join(got)), got[-3:]
        return first

    def _post(self, contender: Contender, talk: Talk, size: int, *, stream: bool) -> Any:
        return self._http.post(
            contender.url + PATHS[contender.api],
            data=body_of(contender, talk, size, stream=stream),
            headers={"authorization": f"Bearer {talk.key}", "content-type": "application/json"},
        )


class Bench:
    """The measurements of one contender, one round at a time."""

    def __init__(self, load: Load, args: argparse.Namespace) -> None:
        self._load = load
        self._args = args

    async def round(self, c: Contender, *, keep: bool) -> None:
        """Measure first turns, continued turns and streams; ``keep`` False: only warm up."""
        calls = self._args.calls
        talks = await self._load.talks(c, calls)
        for kind in ("first", "continued"):
            began = cpu_seconds(c.pid)
            for talk in talks:
                await self._load.whole(c, talk)
            if keep:
                c.cpu[kind].append((cpu_seconds(c.pid) - began) / calls)
        streams = max(1, calls // 8)
        talks = await self._load.talks(c, streams)
        began = cpu_seconds(c.pid)
        latencies = [await self._load.stream(c, talk) for talk in talks]
        if keep:
            c.cpu["stream"].append((cpu_seconds(c.pid) - began) / streams)
            c.first += latencies

    async def crowd(self, c: Contender) -> None:
        """Measure whole calls from many clients at once."""
        talks = await self._load.talks(c, 4 * CONCURRENT)
        todo = iter(talks)

        async def work() -> None:
            for talk in todo:
                await self._load.whole(c, talk)

        began = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(CONCURRENT)))
        c.rate.append(len(talks) / (time.perf_counter() - began))

    async def pair(self, one: Contender, other: Contender) -> dict[str, float]:
        """Return the ratios of two processes' CPU, by kind of call.

        They take turns call by call, so that the machine's other load falls on both alike.
        """
        ratios: dict[str, float] = {}
        both, calls = (one, other), self._args.calls
        streams = max(1, calls // 4)
        for kinds, count in ((("first", "continued"), calls), (("stream",), streams)):
            talks = [await self._load.talks(c, count) for c in both]
            for kind in kinds:
                began = [cpu_seconds(c.pid) for c in both]
                for pair in zip(*talks, strict=True):
                    for c, talk in zip(both, pair, strict=True):
                        if kind == "stream":
                            await self._load.stream(c, talk)
                        else:
                            await self._load.whole(c, talk)
                spent = [cpu_seconds(c.pid) - b for c, b in zip(both, began, strict=True)]
                ratios[kind] = spent[0] / spent[1]
        return ratios

    async def episodes(self, c: Contender) -> None:
        """Measure long conversations; the first one warms up and is not counted."""
        count = self._args.episodes
        if not count:
            return
        memory = disk = 0.0
        for number in range(count + 1):
            if number == 1:
                memory, disk = resident_mib(c.pid), _size_mib(c.journal)
            (talk,) = await self._load.talks(c, 1)
            for turn in range(1, self._args.turns + 1):
                began = cpu_seconds(c.pid)
                await self._load.whole(c, talk, TURN_OUTPUT)
                if number:
                    c.turn[turn].append(cpu_seconds(c.pid) - began)
        c.memory = (resident_mib(c.pid) - memory) / count
        c.disk = (_size_mib(c.journal) - disk) / count


def _size_mib(folder: Path | None) -> float:
    files = folder.iterdir() if folder is not None else ()
    return sum(f.stat().st_size for f in files) / 2**20


# -- the tables ------------------------------------------------------------------------------------


def print_calls(contenders: list[Contender]) -> None:
    ms = {c.name: {k: 1000 * median(v) for k, v in c.cpu.items()} for c in contenders}
    bare = ms["bare"]
    litellm = {c.api: ms[c.name] for c in contenders if c.name.startswith("LiteLLM")}
    print(f"\nCPU of the gateway's process, ms per call ({PROMPT} tokens in, {OUTPUT} out)")
    print(
        f"{'':<20} {'whole':>7} {'stream':>7} {'us/chunk':>9}   {'x bare':>11}   "
        f"{'LiteLLM is x':>13} {'continued':>10} {'req/s at 32':>12} {'first chunk':>12}"
    )
    for peer in {"bare", "LiteLLM"} & set(ms):
        for kind in ("first", "stream", "continued"):
            ratio(f"{kind} / {peer}", ms[OURS][kind], ms[peer][kind])
    for c in contenders:
        m = ms[c.name]
        over = f"{m['first'] / bare['first']:.1f} / {m['stream'] / bare['stream']:.1f}"
        under = "-"
        if stock := litellm.get(c.api):
            under = f"{stock['first'] / m['first']:.1f} / {stock['stream'] / m['stream']:.1f}"
        print(
            f"{c.name:<20} {m['first']:>7.2f} {m['stream']:>7.1f} "
            f"{1000 * m['stream'] / OUTPUT:>9.0f}   {over:>11}   {under:>13} "
            f"{m['continued']:>10.2f} {median(c.rate):>12.0f} {1000 * median(c.first):>9.1f} ms"
        )


def print_apis(contenders: list[Contender]) -> None:
    """Print the ratio of an API's cost to chat's, and of LiteLLM's cost to it."""
    ms = {c.name: {k: 1000 * median(v) for k, v in c.cpu.items()} for c in contenders}
    kinds = ("first", "stream", "continued")
    print("\nThe other APIs (whole / stream / continued)")
    print(f"{'':<22} {'ms':>20}   {'x chat':>18}   {'LiteLLM is x':>20}")
    for c in contenders:
        if c.api == "chat" or not c.sessions:
            continue
        m, chat, stock = ms[c.name], ms[OURS], ms.get(f"LiteLLM, {c.api}")
        figures = " / ".join(f"{m[k]:.2f}" for k in kinds)
        over = " / ".join(f"{m[k] / chat[k]:.2f}" for k in kinds)
        under = " / ".join(f"{stock[k] / m[k]:.1f}" for k in kinds) if stock else "-"
        print(f"{c.name:<22} {figures:>20}   {over:>18}   {under:>20}")


async def compare_litellm(bench: Bench, contenders: list[Contender], rounds: int) -> None:
    """Print the costs of a LiteLLM configuration: to the policy's calls, and of its own models
    beside stock LiteLLM."""
    by_name = {c.name: c for c in contenders}
    pairs = [
        (WITH_LITELLM, OURS, "the policy, with LiteLLM / without"),
        (FROZEN, "LiteLLM", "its model, recorded / stock LiteLLM"),
    ]
    print("\nThe CPU of two processes that take turns call by call: median (range over rounds)")
    print(f"{'':<38} {'whole':>19} {'continued':>19} {'stream':>19}")
    for one, other, title in pairs:
        found = [await bench.pair(by_name[one], by_name[other]) for _ in range(rounds + 1)][1:]
        columns = []
        for kind in ("first", "continued", "stream"):
            values = [each[kind] for each in found]
            ratio(f"{kind}, {title}", median(values), 1.0)
            columns.append(f"{median(values):.2f} ({min(values):.2f}-{max(values):.2f})")
        print(f"{title:<38} " + " ".join(f"{column:>19}" for column in columns))
    print("\nMemory after all calls, MB:", end=" ")
    told = (f"{name} {_memory(by_name[name].pid)}" for name in (OURS, WITH_LITELLM, "LiteLLM"))
    print("; ".join(told))


def _memory(pid: int) -> str:
    children = psutil.Process(pid).children(recursive=True)
    more = "".join(f" + {resident_mib(child.pid):.0f} in a process beside it" for child in children)
    return f"{resident_mib(pid):.0f}{more}"


def print_episodes(contenders: list[Contender], count: int) -> None:
    if not any(c.turn for c in contenders):
        return
    print(
        f"\nAn episode of {count} turns, {TURN_USER} + {TURN_OUTPUT} tokens each: "
        "CPU ms of a turn, and what stays of the whole talk"
    )
    print(f"{'':<20} {'turn 10':>8} {f'turn {count}':>9} {'ratio':>6} {'memory':>12} {'disk':>10}")
    for c in contenders:
        if not c.turn:
            continue
        early, late = (
            1000 * median(itertools.chain(*(c.turn[t] for t in turns)))
            for turns in (range(8, 13), range(count - 4, count + 1))
        )
        if c.name == OURS:
            ratio("last turn / tenth", late, early)
        disk = f"{c.disk:>7.2f} MB" if c.journal else f"{'-':>10}"
        print(
            f"{c.name:<20} {early:>8.2f} {late:>9.2f} {late / early:>6.2f} "
            f"{c.memory:>9.2f} MB {disk}"
        )


async def measure(lab: Lab, args: argparse.Namespace) -> None:
    litellm = [] if args.no_litellm else [*lab.with_litellm(), *lab.litellm()]
    contenders = [*lab.ours(), *litellm, *lab.bare()]
    contenders = [c for c in contenders if c.api in args.apis]
    # Shorter than uvicorn's 5 s: a request on a connection that is being closed would fail.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        load = Load(http, lab.text)
        for c in {c.url: c for c in contenders if c.sessions}.values():
            await load.allow(c)
        bench = Bench(load, args)
        for number in range(args.rounds + 1):
            for c in contenders:
                await bench.round(c, keep=number > 0)
                if number:
                    await bench.crowd(c)
        print_calls(contenders)
        if len(args.apis) > 1:
            print_apis(contenders)
        if litellm:
            await compare_litellm(bench, contenders, args.rounds)
        for c in contenders:
            if c.api == "chat" and c.name not in (f"{OURS}, logprobs", "relay"):
                await bench.episodes(c)
        print_episodes(contenders, args.turns)


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument(
        "--calls", type=int, default=32, help="whole calls of a contender in a round"
    )
    flags.add_argument("--rounds", type=int, default=5)
    flags.add_argument("--episodes", type=int, default=3)
    flags.add_argument(
        "--no-litellm", action="store_true", help="leave LiteLLM out, which starts slowly"
    )
    apis = ("chat", "responses", "messages")
    flags.add_argument(
        "--apis", nargs="+", choices=apis, default=apis, help="further APIs beside chat"
    )
    flags.add_argument("--gap", type=float, default=1.0, help="ms between a stream's tokens")
    args = flags.parse_args()
    args.turns = TURNS
    args.apis = {"chat", *args.apis}
    if args.quick:
        args.calls, args.rounds, args.episodes = 16, 2, 1
    if args.smoke:
        args.calls, args.rounds, args.episodes, args.turns = 2, 1, 1, 12
        args.no_litellm = True
    print(f"{machine()}; {args.calls} calls x {args.rounds} rounds", flush=True)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        asyncio.run(measure(Lab(Path(folder), stack, args.gap), args))
    finish(args)


if __name__ == "__main__":
    main()
