"""What recording a model call costs at the gateway: ``python benchmarks/proxy.py``.

A chat call with a prompt of 1,000 tokens and an answer of 500 (the last one ends the turn), with
the log-probability of every token. Every contender is a process of its own and talks to the same
canned engine, which answers at once, or streams one token a millisecond. Counted is the CPU time
of the gateway's process alone. Contenders take turns within a round; medians over rounds are shown.

any-agent            `python -m proxy_ext`, journal on disk, a train session for each call; the
                     agent does not ask for log-probabilities, they are recorded all the same
any-agent, logprobs  the same process; the agent asks for them, so that the answer is as large as
                     the others'
LiteLLM              its stock proxy; the engine is an `openai/` model; records nothing
bare                 one FastAPI route over aiohttp that keeps request and parsed answer in a list
relay                the same app, passing bytes on; keeps nothing
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from common import child, cpu_seconds, machine, median, resident_mib, wait_until_up

PROMPT, OUTPUT = 1000, 500
TURNS, TURN_USER, TURN_OUTPUT = 100, 125, 125
CONCURRENT = 32
OURS = "any-agent"
_PEERS = Path(__file__).with_name("peers")
KEY = "sk-benchmark-benchmark-benchmark"
"""LiteLLM does not start without a master key; the bare routes look at none."""
Message = dict[str, Any]

# -- starting the contenders -----------------------------------------------------------------------


@dataclass(slots=True)
class Contender:
    """A gateway under load; ``sessions``: calls go to train sessions of its own."""

    name: str
    url: str
    pid: int
    logprobs: bool = True
    sessions: bool = False
    journal: Path | None = None
    cpu: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """CPU seconds of the process per call, one figure a round, by kind of call."""
    rate: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    turn: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    """CPU seconds of the n-th turn of an episode."""
    memory: float = 0.0
    disk: float = 0.0


class Lab:
    """Starts the engine and the contenders in a folder."""

    def __init__(self, folder: Path, stack: ExitStack, gap: float) -> None:
        self._folder = folder
        self._stack = stack
        self.model = folder / "model"
        log = folder / "model.log"
        with child(
            ["-m", "any_agent.demo.model", str(self.model), "--warmup-steps", "0"], log
        ) as p:
            if p.wait(300):
                raise RuntimeError(log.read_text())
        self.text = Texts(self.model)
        canned = folder / "canned.json"
        canned.write_bytes(orjson.dumps(self.text.canned()))
        command = [str(_PEERS / "canned.py"), "--canned", str(canned), "--gap", str(gap)]
        self.engine, _ = self._start("engine", command, "/get_model_info")

    def _start(self, name: str, command: list[str], health: str) -> tuple[str, int]:
        from any_agent.ports import free_port

        log = self._folder / f"{name}.log"
        port = free_port("127.0.0.1")
        environment = {
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LITELLM_MASTER_KEY": KEY,
            "LITELLM_TELEMETRY": "False",
            "HF_HUB_OFFLINE": "1",
        }
        process = self._stack.enter_context(
            child([*command, "--port", str(port)], log, environment)
        )
        url = f"http://127.0.0.1:{port}"
        wait_until_up(process, url + health, log)
        return url, process.pid

    def ours(self) -> list[Contender]:
        import yaml

        from any_agent.config import load_config
        from any_agent.rundir import RunDir

        settings = {
            "root": self._folder / "runs",
            "model.path": self.model,
            "model.enable_thinking": "false",
            "log_level": "warning",
        }
        config = load_config(None, [f"{k}={v}" for k, v in settings.items()], environ={})
        path = self._folder / "config.yaml"
        path.write_text(yaml.safe_dump(config.dump()))
        command = ["-m", "proxy_ext", "--config", str(path), "--engine-url", self.engine]
        url, pid = self._start("any-agent", [*command, "--training"], "/readyz")
        run = RunDir.of(config.root, config.user, config.experiment, config.trial)
        journal = run.journal(0).parent
        return [
            Contender(OURS, url, pid, logprobs=False, sessions=True, journal=journal),
            Contender(f"{OURS}, logprobs", url, pid, sessions=True, journal=journal),
        ]

    def litellm(self) -> Contender:
        import yaml

        model = {"model": "openai/policy", "api_base": f"{self.engine}/v1", "api_key": "none"}
        config = {
            "model_list": [{"model_name": "policy", "litellm_params": model}],
            "general_settings": {"disable_model_info_refresh": True},
            "litellm_settings": {"num_retries": 0, "telemetry": False},
        }
        path = self._folder / "litellm.yaml"
        path.write_text(yaml.safe_dump(config))
        run = "from litellm import run_server; run_server()"
        command = ["-c", run, "--config", str(path), "--host", "127.0.0.1"]
        url, pid = self._start("litellm", command, "/health/liveliness")
        return Contender("LiteLLM", url, pid)

    def bare(self) -> list[Contender]:
        command = [str(_PEERS / "bare.py"), "--engine-url", self.engine]
        url, pid = self._start("bare", command, "/healthz")
        return [Contender("bare", url, pid), Contender("relay", f"{url}/relay", pid)]


class Texts:
    """Prompts of a known number of tokens, and the engine's canned answer."""

    def __init__(self, model: Path) -> None:
        from tokenizers import Tokenizer

        from any_agent.demo.task import corpus

        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._lines = sorted({line.split("\n")[1] for line in corpus()})
        self._random = random.Random(0)

    def user(self, tokens: int) -> Message:
        """A user message of about so many tokens; another one every time."""
        parts: list[str] = []
        size = 0
        while size < tokens:
            line = self._random.choice(self._lines) + "\n"
            parts.append(line)
            size += len(self._tokenizer.encode(line).ids)
        return {"role": "user", "content": "".join(parts)}

    def first(self) -> list[Message]:
        return [{"role": "system", "content": "You answer with one digit."}, self.user(PROMPT - 20)]

    def canned(self) -> dict[str, Any]:
        """Fixed ids whose texts are visible ASCII, so that every token is a chunk."""
        size = self._tokenizer.get_vocab_size()
        texts = {i: self._tokenizer.decode([i], skip_special_tokens=False) for i in range(size)}
        plain = [i for i, t in texts.items() if t.strip() and t.isascii() and "<" not in t]
        ids = self._random.choices(plain, k=OUTPUT)
        end = self._tokenizer.token_to_id("<|im_end|>")
        return {"ids": ids, "texts": [texts[i] for i in ids], "end": end}


# -- the load --------------------------------------------------------------------------------------


@dataclass(slots=True)
class Talk:
    """One conversation and the key that it is held under."""

    session: str
    key: str
    messages: list[Message]


class Load:
    """Opens sessions and makes calls; its own CPU time is not counted."""

    def __init__(self, http: aiohttp.ClientSession, texts: Texts) -> None:
        self._http = http
        self._texts = texts

    async def talks(self, contender: Contender, count: int) -> list[Talk]:
        opened = [await self._opened(contender) for _ in range(count)]
        return [Talk(session, key, self._texts.first()) for session, key in opened]

    async def _opened(self, contender: Contender) -> tuple[str, str]:
        if not contender.sessions:
            return "", KEY
        async with self._http.post(f"{contender.url}/rl/v1/start_session", json={}) as response:
            assert response.status == 200, await response.text()
            opened = await response.json()
            return opened["session_id"], opened["api_key"]

    async def allow(self, contender: Contender) -> None:
        """Play the trainer: as many train sessions as are asked for."""
        body = {"limit": 10**9, "ttl": 3600, "owner": "benchmark"}
        async with self._http.put(f"{contender.url}/rl/v1/capacity", json=body) as response:
            assert response.status == 200, await response.text()

    async def whole(self, contender: Contender, talk: Talk, size: int = OUTPUT) -> None:
        """One turn; the answer and a next user message join the conversation."""
        async with self._post(contender, talk, size, stream=False) as response:
            answer = await response.read()
            assert response.status == 200, answer
        message = orjson.loads(answer)["choices"][0]["message"]
        talk.messages += [
            {"role": "assistant", "content": message["content"]},
            self._texts.user(TURN_USER),
        ]

    async def stream(self, contender: Contender, talk: Talk) -> float:
        """One streamed turn; seconds until the first byte of the answer."""
        began = time.perf_counter()
        first = 0.0
        tail = b""
        async with self._post(contender, talk, OUTPUT, stream=True) as response:
            assert response.status == 200, await response.read()
            async for block in response.content.iter_any():
                first = first or time.perf_counter() - began
                tail = (tail + block)[-20:]
        assert b"[DONE]" in tail
        return first

    def _post(self, contender: Contender, talk: Talk, size: int, *, stream: bool) -> Any:
        body: dict[str, Any] = {"model": "policy", "messages": talk.messages, "max_tokens": size}
        if stream:
            body["stream"] = True
        if contender.logprobs:
            body["logprobs"] = True
        return self._http.post(
            f"{contender.url}/v1/chat/completions",
            data=orjson.dumps(body),
            headers={"authorization": f"Bearer {talk.key}", "content-type": "application/json"},
        )


class Bench:
    """The measurements of one contender, one round at a time."""

    def __init__(self, load: Load, args: argparse.Namespace) -> None:
        self._load = load
        self._args = args

    async def round(self, c: Contender, *, keep: bool) -> None:
        """First turns, continued turns, streams; ``keep`` False: to warm up."""
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
        """Whole calls from many clients at once."""
        talks = await self._load.talks(c, 4 * CONCURRENT)
        todo = iter(talks)

        async def work() -> None:
            for talk in todo:
                await self._load.whole(c, talk)

        began = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(CONCURRENT)))
        c.rate.append(len(talks) / (time.perf_counter() - began))

    async def episodes(self, c: Contender) -> None:
        """Long conversations; the first one warms up and is not counted."""
        count = self._args.episodes
        memory = disk = 0.0
        for number in range(count + 1):
            if number == 1:
                memory, disk = resident_mib(c.pid), _size_mib(c.journal)
            (talk,) = await self._load.talks(c, 1)
            for turn in range(1, TURNS + 1):
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
    bare, litellm = ms["bare"], ms.get("LiteLLM", {})
    print(f"\nCPU of the gateway's process, ms per call ({PROMPT} tokens in, {OUTPUT} out)")
    print(
        f"{'':<20} {'whole':>7} {'stream':>7} {'us/chunk':>9}   {'x bare':>11}   "
        f"{'LiteLLM is x':>13} {'continued':>10} {'req/s at 32':>12} {'first chunk':>12}"
    )
    for c in contenders:
        m = ms[c.name]
        over = f"{m['first'] / bare['first']:.1f} / {m['stream'] / bare['stream']:.1f}"
        under = "-"
        if litellm:
            under = f"{litellm['first'] / m['first']:.1f} / {litellm['stream'] / m['stream']:.1f}"
        print(
            f"{c.name:<20} {m['first']:>7.2f} {m['stream']:>7.1f} "
            f"{1000 * m['stream'] / OUTPUT:>9.0f}   {over:>11}   {under:>13} "
            f"{m['continued']:>10.2f} {median(c.rate):>12.0f} {1000 * median(c.first):>9.1f} ms"
        )


def print_episodes(contenders: list[Contender]) -> None:
    print(
        f"\nAn episode of {TURNS} turns, {TURN_USER} + {TURN_OUTPUT} tokens each: "
        "CPU ms of a turn, and what stays of the whole talk"
    )
    print(f"{'':<20} {'turn 10':>8} {'turn 100':>9} {'ratio':>6} {'memory':>12} {'disk':>10}")
    for c in contenders:
        if not c.turn:
            continue
        early, late = (
            1000 * median(itertools.chain(*(c.turn[t] for t in turns)))
            for turns in (range(8, 13), range(TURNS - 4, TURNS + 1))
        )
        disk = f"{c.disk:>7.2f} MB" if c.journal else f"{'-':>10}"
        print(
            f"{c.name:<20} {early:>8.2f} {late:>9.2f} {late / early:>6.2f} "
            f"{c.memory:>9.2f} MB {disk}"
        )


async def measure(lab: Lab, args: argparse.Namespace) -> None:
    contenders = [*lab.ours(), *([] if args.no_litellm else [lab.litellm()]), *lab.bare()]
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        load = Load(http, lab.text)
        await load.allow(contenders[0])
        bench = Bench(load, args)
        for number in range(args.rounds + 1):
            for c in contenders:
                await bench.round(c, keep=number > 0)
                if number:
                    await bench.crowd(c)
        print_calls(contenders)
        for c in contenders:
            if c.name not in (f"{OURS}, logprobs", "relay"):
                await bench.episodes(c)
        print_episodes(contenders)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=32, help="whole calls of a contender a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--episodes", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="16 calls, 2 rounds, 1 episode")
    parser.add_argument("--no-litellm", action="store_true", help="leave the slow one out")
    parser.add_argument("--gap", type=float, default=1.0, help="ms between a stream's tokens")
    args = parser.parse_args()
    if args.quick:
        args.calls, args.rounds, args.episodes = 16, 2, 1
    print(f"{machine()}; {args.calls} calls x {args.rounds} rounds", flush=True)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        asyncio.run(measure(Lab(Path(folder), stack, args.gap), args))


if __name__ == "__main__":
    main()
