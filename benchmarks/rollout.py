"""The cost of episodes, and the gain by running ahead: ``python benchmarks/rollout.py``.

- A chat call of an agent in the trainer's process, by the direct client (`EngineOpenAI`) and
  through a proxy: the CPU of all our processes that take part, the agent's own included.
  1,000 tokens in, 500 out; both record every token. The engine is canned, a process of its own.
- `prepare_batch` at staleness 2 against `rollout_batch`, for the same episodes: each takes a
  log-normal time (half of them under 0.15 s, one in a hundred over 16 times as long), and each
  training step 0.2 s. That time is spent asleep, not computing.
- 1,000 episodes at once in groups of 8, as the trainer takes them: the CPU of the executor for each
  of them, which is the difference to the same episodes under `asyncio.gather`.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from statistics import mean
from typing import Any

import aiohttp
import numpy as np
from common import cpu_seconds, finish, machine, median, parser, ratio
from gateways import KEY, OUTPUT, PROMPT, Contender, Lab

from any_agent.config import RolloutConfig
from any_agent.record import InteractionWithTokenLogpReward
from any_agent.rollout import WorkflowExecutor
from any_agent.workflow import RolloutWorkflow, context

BATCH, STEPS, ETA = 64, 16, 2
MEDIAN, SIGMA = 0.15, 1.2
TRAINING = 0.2
EPISODES, GROUP, ROW = 1000, 8, 512

# -- a call ----------------------------------------------------------------------------------------


async def calls(folder: Path, stack: ExitStack, number: int, rounds: int) -> None:
    """Print the cost of a call on either path."""
    from any_agent.chat import load_chat_format
    from any_agent.engine import EnginePool

    lab = Lab(folder, stack, gap=0.0)
    proxy = lab.ours()[0]
    chat = load_chat_format(str(lab.model), enable_thinking=False)
    direct: list[float] = []
    through: list[tuple[float, float]] = []
    async with (
        EnginePool([lab.engine], decode=chat.decode) as pool,
        aiohttp.ClientSession() as http,
    ):
        body = {"limit": 10**9, "ttl": 3600, "owner": "benchmark"}
        async with http.put(f"{proxy.url}/rl/v1/capacity", json=body) as response:
            assert response.status == 200, await response.text()
        for turn in range(rounds + 1):
            one = await _direct(lab, pool, chat, number)
            other = await _through(lab, proxy, http, number)
            if turn:  # the first one warms up
                direct.append(one)
                through.append(other)
    ours, proxys = (1000 * median(part) for part in zip(*through, strict=True))
    alone = 1000 * median(direct)
    print(f"\nCPU of a chat call, ms ({PROMPT} tokens in, {OUTPUT} out; {number} x {rounds})")
    print(f"{'':<16} {'agent':>7} {'proxy':>7} {'both':>7}")
    print(f"{'direct client':<16} {alone:>7.2f} {'-':>7} {alone:>7.2f}")
    print(f"{'through a proxy':<16} {ours:>7.2f} {proxys:>7.2f} {ours + proxys:>7.2f}")
    ratio("a call through a proxy / direct", ours + proxys, alone)
    print(f"through a proxy is {(ours + proxys) / alone:.2f} x the direct client", flush=True)


async def _direct(lab: Lab, pool: Any, chat: Any, number: int) -> float:
    from any_agent import EngineOpenAI

    clients = [EngineOpenAI(pool, chat) for _ in range(number)]
    texts = [lab.text.user(PROMPT - 20) for _ in clients]
    began = time.process_time()
    for client, text in zip(clients, texts, strict=True):
        await _ask(client, text)
    return (time.process_time() - began) / number


async def _through(
    lab: Lab, proxy: Contender, http: aiohttp.ClientSession, number: int
) -> tuple[float, float]:
    from openai import AsyncOpenAI

    clients = []
    for _ in range(number):
        async with http.post(f"{proxy.url}/rl/v1/start_session", json={}) as response:
            key = (await response.json()).get("api_key", KEY)
        clients.append(AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key=key, max_retries=0))
    texts = [lab.text.user(PROMPT - 20) for _ in clients]
    began, proxys = time.process_time(), cpu_seconds(proxy.pid)
    for client, text in zip(clients, texts, strict=True):
        await _ask(client, text)
    took = time.process_time() - began, cpu_seconds(proxy.pid) - proxys
    for client in clients:
        await client.close()
    return took[0] / number, took[1] / number


async def _ask(client: Any, text: Any) -> None:
    answer = await client.chat.completions.create(
        model="policy", messages=[text], max_tokens=OUTPUT
    )
    assert answer.usage.completion_tokens == OUTPUT, answer.usage


# -- a long tail -----------------------------------------------------------------------------------


def row(length: int, first: int = 0) -> dict[str, InteractionWithTokenLogpReward]:
    """An episode's result: half of it sampled; ``first`` is its first id."""
    sampled = np.arange(length) >= length // 2
    values = {
        "input_ids": np.arange(first, first + length),
        "attention_mask": np.ones(length, np.bool_),
        "loss_mask": sampled,
        "logprobs": np.where(sampled, -0.5, 0.0),
        "versions": np.where(sampled, 0, -1),
        "rewards": 1.0,
    }
    return {"i": InteractionWithTokenLogpReward.from_tensors("i", values)}


class Tail(RolloutWorkflow):
    """A workflow that takes its item's time; ``begun`` has the version that each began with."""

    def __init__(self) -> None:
        self.begun: dict[int, int] = {}

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        self.begun[data["n"]] = context.get().version
        await asyncio.sleep(data["seconds"])
        return row(16, data["n"])


def latencies(seed: int) -> Iterator[dict[str, Any]]:
    for n in count():
        seconds = MEDIAN * random.Random(f"{seed}-{n}").lognormvariate(0.0, SIGMA)
        yield {"n": n, "seconds": seconds}


class Endless:
    """A loader that never ends, in batches."""

    batch_size = BATCH

    def __init__(self, items: Iterator[dict[str, Any]]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._items


Taken = list[dict[str, Any]]


def train(take: Callable[[WorkflowExecutor, Tail], Taken], eta: int, steps: int) -> list[float]:
    """Return trajectories a second, those no older than eta steps, and their mean age.

    The run is well under way: samples taken ahead at its start are not counted.
    """
    config = RolloutConfig(  # type: ignore[call-arg]
        batch_size=BATCH, max_concurrent=3 * BATCH, eta=eta
    )
    workflow = Tail()
    ages: list[int] = []
    began = 0.0
    with WorkflowExecutor(None, config) as executor:
        for step in range(steps + ETA + 2):
            if step == ETA + 2:
                began = time.perf_counter()
            got = take(executor, workflow)
            if began:
                ages += [step - workflow.begun[int(r["input_ids"][0, 0])] for r in got]
            time.sleep(TRAINING)
            executor.release(step + 1)
        seconds = time.perf_counter() - began
    fresh = sum(age <= ETA for age in ages)
    return [len(ages) / seconds, fresh / seconds, mean(ages)]


def _whole(seed: int) -> Callable[[WorkflowExecutor, Tail], Taken]:
    items = latencies(seed)
    return lambda executor, workflow: executor.rollout_batch(
        [next(items) for _ in range(BATCH)], workflow
    )


def _ahead(seed: int) -> Callable[[WorkflowExecutor, Tail], Taken]:
    loader = Endless(latencies(seed))
    return lambda executor, workflow: executor.prepare_batch(loader, workflow, timeout=120)


def tails(seeds: int, steps: int) -> None:
    """Print the gain by running ahead."""
    print(
        f"\n{steps} steps of {BATCH} episodes; an episode takes {MEDIAN} s (median), log-normal "
        f"with sigma {SIGMA:g}, a step {TRAINING} s; trajectories a second"
    )
    print(
        f"{'seed':>4} {'rollout_batch':>14} {'prepare_batch':>14} {'ratio':>6} "
        f"{f'{ETA} steps old at most':>21} {'ratio':>6} {'mean age':>9}"
    )
    ratios = []
    for seed in range(seeds):
        whole = train(_whole(seed), 0, steps)[0]
        ahead, fresh, age = train(_ahead(seed), ETA, steps)
        ratios.append((ahead / whole, fresh / whole))
        print(
            f"{seed:>4} {whole:>14.1f} {ahead:>14.1f} {ratios[-1][0]:>6.2f} {fresh:>21.1f} "
            f"{ratios[-1][1]:>6.2f} {age:>9.2f}",
            flush=True,
        )
    both, young = (mean(part) for part in zip(*ratios, strict=True))
    ratio("rollout_batch / prepare_batch, trajectories a second", 1.0, both)
    print(
        f"prepare_batch at eta {ETA} is {both:.2f} x rollout_batch, {young:.2f} x where only what "
        f"began at most {ETA} steps before counts",
        flush=True,
    )


# -- many at once ----------------------------------------------------------------------------------


class Mock(RolloutWorkflow):
    """Three awaits that stand for calls, and a row of 512 tokens."""

    def __init__(self) -> None:
        self.running = self.most = 0

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        self.running += 1
        self.most = max(self.most, self.running)
        for _ in range(3):
            await asyncio.sleep(0.5)
        self.running -= 1
        return row(ROW)


def crowd(rounds: int) -> None:
    """Print what the executor adds to an episode."""
    own, bare = [], []
    for turn in range(rounds + 1):
        mock = Mock()
        began = time.process_time()
        asyncio.run(_gathered(mock))
        without = time.process_time() - began
        assert mock.most == EPISODES
        mock = Mock()
        config = RolloutConfig(  # type: ignore[call-arg]
            batch_size=EPISODES, max_concurrent=EPISODES, eta=0
        )
        items = iter([(n, {"n": n, "task_id": f"t{n}"}) for n in range(EPISODES // GROUP)])
        with WorkflowExecutor(None, config) as executor:
            began = time.process_time()
            batch = executor.sessions_batch(items, mock, group_size=GROUP, timeout=120)
            under = time.process_time() - began
        assert (mock.most, sum(map(len, batch))) == (EPISODES, EPISODES)
        if turn:
            bare.append(without / EPISODES)
            own.append((under - without) / EPISODES)
    print(f"\n{EPISODES} episodes at once, in groups of {GROUP}; CPU of each, ms ({rounds} rounds)")
    ratio("the executor / the episode", median(own), median(bare))
    print(f"the episode itself {1000 * median(bare):.3f}, the executor {1000 * median(own):.3f}")


async def _gathered(mock: Mock) -> None:
    await asyncio.gather(*(mock.arun_episode(None, {"n": n}) for n in range(EPISODES)))


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--only", choices=("calls", "tail", "crowd"), help="run only this part")
    args = flags.parse_args()
    seeds, rounds, steps, number = 3, 5, STEPS, 32
    if args.quick:
        seeds, rounds, steps, number = 1, 2, STEPS // 2, 8
    if args.smoke:
        seeds, rounds, steps, number = 1, 1, 2, 2
    print(machine(), flush=True)
    if args.only in (None, "crowd"):
        crowd(rounds)
    if args.only in (None, "tail"):
        tails(seeds, steps)
    if args.only in (None, "calls"):
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            asyncio.run(calls(Path(folder), stack, number, rounds))
    finish(args)


if __name__ == "__main__":
    main()
