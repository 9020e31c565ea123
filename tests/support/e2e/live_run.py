"""A short live run: concurrent agents on the real service while it trains."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openai

from any_agent.client.rl_client import RLClient
from any_agent.config import Config, load_config
from any_agent.errors import AnyAgentError, RunFinished
from any_agent.launcher import Node, NodeOptions
from any_agent.record import InteractionTree
from any_agent.rundir.layout import RunDir
from any_agent.types import Interaction, SessionState
from proxy_ext.journal import SessionRow, SQLiteJournal
from tests.support.waiting import until


def live_config(root: Path, model: Path, **overrides: object) -> Config:
    settings: dict[str, object] = {
        "root": root,
        "model.path": model,
        "model.enable_thinking": "false",
        "server.port": 0,
        "sampling.max_new_tokens": 100,
        "sampling.temperature": 0.8,
        "sessions.group_size": 4,
        "rollout.batch_size": 16,
        "rollout.max_concurrent": 48,
        "train.steps": 6,
        "train.lr": 1e-3,
        "train.discount": 0.9,
        "train.keep_weights": 1000,
    }
    settings |= overrides
    return load_config(None, [f"{k}={v}" for k, v in settings.items()], environ={})


async def agent(
    service: RLClient, number: int, rng: random.Random, group_size: int, *, turns: int = 3
) -> bool:
    """One session of up to three turns, each whole or streaming; False when the run has ended."""
    try:
        session = await service.start_session(
            task_id=f"task-{number // group_size % 3}",
            group_id=f"g{number // group_size}",
            group_size=group_size,
            wait=20,
            patience=240,
        )
    except RunFinished:
        return False
    client = openai.AsyncOpenAI(
        base_url=session.base_url, api_key=session.api_key, max_retries=0, timeout=240
    )
    talk: list = [{"role": "user", "content": f"count from {number}"}]
    try:
        for _ in range(rng.randint(1, turns)):
            if rng.random() < 0.5:
                done = await client.chat.completions.create(model="x", messages=talk)
                text = done.choices[0].message.content or ""
            else:
                stream = await client.chat.completions.create(model="x", messages=talk, stream=True)
                text = "".join(
                    [c.choices[0].delta.content or "" async for c in stream if c.choices]
                )
            talk += [{"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]
        await service.set_reward(session.api_key, rng.random())
        await service.finalize(session.api_key)
    finally:
        await client.close()
    return True


@asynccontextmanager
async def looked_after(node: Node) -> AsyncIterator[None]:
    """Check a node's parts all the time, as its launcher does; an error of it ends the block."""

    async def watch() -> None:
        while True:
            node.check()
            await asyncio.sleep(0.05)

    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(watch())
        yield
        watching.cancel()


async def drive(node: Node, *, agents: int, seed: int = 0, admin_key: str | None = None) -> int:
    """Keep ``agents`` sessions going until training has ended; how many were finalized."""
    numbers = iter(range(10**6))
    rng = random.Random(seed)
    group_size = node.config.sessions.group_size
    finalized = 0
    failures: list[str] = []

    async def work(service: RLClient) -> None:
        nonlocal finalized
        while True:
            node.check()
            try:
                if not await agent(service, next(numbers), rng, group_size):
                    return
                finalized += 1
            except (AnyAgentError, openai.OpenAIError) as error:
                failures.append(repr(error))
                if len(failures) > 50:
                    raise

    async with RLClient(node.url, admin_key=admin_key) as service, asyncio.timeout(480):
        await asyncio.gather(*(work(service) for _ in range(agents)))
    assert not failures, failures[:5]
    return finalized


async def some_steps(node: Node, steps: int, *, admin_key: str | None = None) -> None:
    """Keep agents at work until so many steps are made; then they are gone."""
    work = asyncio.create_task(drive(node, agents=8, admin_key=admin_key))
    try:
        await until(lambda: work.done() or len(steps_of(node.dir)) >= steps, "steps", within=400)
        if work.done():
            work.result()
    finally:
        work.cancel()
        await asyncio.wait([work])


def steps_of(run: RunDir) -> list[dict[str, Any]]:
    """The lines of the steps that were made, in their order."""
    text = run.metrics.read_text() if run.metrics.exists() else ""
    lines = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
    return [line for line in lines if "eval" not in line]


def run_live(config: Config, *, agents: int = 12) -> int:
    with Node(config, NodeOptions(say=lambda _: None)) as node:
        return asyncio.run(drive(node, agents=agents))


@dataclass(frozen=True, slots=True)
class Record:
    """What a journal holds of a session."""

    row: SessionRow
    interactions: list[Interaction]


def read_records(run: RunDir, ranks: int) -> dict[str, Record]:
    """Every session of every rank's journal, by its id."""

    async def read() -> dict[str, Record]:
        out = {}
        for rank in range(ranks):
            journal = SQLiteJournal(run.journal(rank))
            try:
                for row in await journal.sessions(list(SessionState)):
                    stored = await journal.interactions(row.id)
                    out[row.id] = Record(row, [one.interaction for one in stored])
            finally:
                await journal.close()
        return out

    return asyncio.run(read())


def recorded(config: Config) -> list[list[Interaction]]:
    """The interactions of every session in the ranks' journals."""
    run = RunDir.of(config.root, config.user, config.experiment, config.trial)
    return [record.interactions for record in read_records(run, config.server.ranks).values()]


@dataclass
class Check:
    """One interaction's ids, and its recorded against recomputed log-probabilities."""

    interaction: Interaction
    prompt_ids: np.ndarray
    recomputed: np.ndarray

    @property
    def error(self) -> float:
        gap = np.abs(self.recomputed - self.interaction.output_logprobs)
        return float(gap.max(initial=0.0))


def recompute(
    config: Config,
    sessions: Iterable[list[Interaction]],
    *,
    version_shift: int = 0,
    weights: Path | None = None,
) -> list[Check]:
    """A fresh forward pass over each interaction's whole context, per version of its tokens.

    ``version_shift`` plants an error: the weights of another version. ``weights``: where the
    versions are, if not in the run's folder.
    """
    import torch
    from transformers import AutoModelForCausalLM

    run = RunDir.of(config.root, config.user, config.experiment, config.trial)
    weights = weights or run.weights
    newest = max((int(p.name[1:]) for p in weights.iterdir()), default=0)
    models: dict[int, object] = {}

    def model_of(version: int) -> object:
        version = min(max(version + version_shift, 0), newest)
        if version not in models:
            path = weights / f"v{version:08d}" if version else config.model.path
            models[version] = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        return models[version]

    checks = []
    for interactions in sessions:
        tree = InteractionTree.from_interactions(interactions)
        for node in interactions:
            prompt = tree.prompt_ids(node.id)
            ids = torch.tensor(np.concatenate([prompt, node.output_ids])[None].astype(np.int64))
            out = np.zeros(len(node.output_ids), np.float32)
            for version in np.unique(node.output_versions):
                with torch.inference_mode():
                    logits = model_of(int(version))(ids).logits[0]  # type: ignore[operator]
                logp = torch.log_softmax(logits.double() / node.gconfig.temperature, -1)
                at = torch.arange(len(prompt) - 1, ids.shape[1] - 1)
                chosen = logp[at, ids[0, len(prompt) :]].numpy()
                mine = node.output_versions == version
                out[mine] = chosen[mine]
            checks.append(Check(node, prompt, out))
    return checks
