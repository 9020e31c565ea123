"""A trainer killed -9 at each boundary ends with the weights and the sessions of one that lives.

Two real services of two ranks each, deterministic agents, and every process is the product's own,
but for the trainer's deaths.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
import pytest

from any_agent.client.rl_client import RLClient
from any_agent.config import Config
from any_agent.errors import RunFinished
from any_agent.keys import rank_of_session
from any_agent.launcher import Node, NodeOptions, component
from any_agent.launcher import node as launching
from any_agent.launcher.trial import trial_dir
from any_agent.types import SessionState
from proxy_ext.journal import SessionRow
from tests.support.archives import Exported, Rank
from tests.support.e2e.live_run import live_config, looked_after
from tests.support.e2e.saved import Saved, assert_same, saved

STEPS = 6
# A step that is made again has no checkpoint of its own, so those that have one die at that only.
DEATHS = (
    *("lease=1", "before-publish=1", "checkpoint=2", "step=3", "send=3", "before-checkpoint=4"),
    *("manifest=5", "before-ack=5", "ack=5"),
)
LIMIT = 500.0


def config_for(root: Path, model: Path, **more: Any) -> Config:
    settings: dict[str, Any] = {
        "rollout.deterministic": "true",
        "rollout.eta": 0,
        "rollout.batch_size": 4,
        "rollout.max_concurrent": 4,
        "sessions.group_size": 2,
        "engine.max_running_requests": 1,
        "sampling.max_new_tokens": 12,
        "train.steps": STEPS,
        "train.checkpoint_every": 2,
        "train.keep_checkpoints": 2,
        "train.seed": 3,
    }
    return live_config(root, model, **(settings | more))


async def agent(service: RLClient, number: int) -> None:
    """One session of two turns; what it does follows from its number and what the model says."""
    session = await service.start_session(
        group_id=f"g{number // 2}", group_size=2, wait=60, patience=LIMIT
    )
    talk: list[Any] = [{"role": "user", "content": f"count from {number}"}]
    said = ""
    async with openai.AsyncOpenAI(
        base_url=session.base_url, api_key=session.api_key, max_retries=0, timeout=240
    ) as sdk:
        for _ in range(1 + number % 2):
            done = await sdk.chat.completions.create(model="m", messages=talk)
            text = done.choices[0].message.content or ""
            talk += [{"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]
            said += text
    await service.finalize(session.api_key, (sum(map(ord, said)) % 101) / 100)


async def drive(node: Node, first: int = 0, *, limit: float = LIMIT) -> None:
    """One agent after the other until training has ended."""
    async with (
        asyncio.timeout(limit),
        RLClient(node.url, retry_for=60) as service,
        looked_after(node),
    ):
        with contextlib.suppress(RunFinished):
            for number in range(first, 10**6):
                await agent(service, number)
        while not node.check():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def outcome(config: Config) -> Saved:
    return saved(trial_dir(config), config.train.steps)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Config:
    """A run that nobody interrupted."""
    config = config_for(tmp_path_factory.mktemp("whole"), tiny_model_dir)
    with Node(config, NodeOptions(say=lambda _: None)) as node:
        asyncio.run(drive(node))
    return config


@pytest.fixture(scope="module")
def uninterrupted(whole: Config) -> Saved:
    return outcome(whole)


def test_the_uninterrupted_run_has_every_step_and_sessions_of_both_ranks(
    uninterrupted: Saved,
) -> None:
    assert [step for step, _, _ in uninterrupted.rewards] == list(range(1, STEPS + 1))
    assert len(uninterrupted.consumed) == 4 * STEPS
    assert {rank_of_session(id) for id in uninterrupted.consumed} == {0, 1}
    moments = [t for name, t in uninterrupted.tensors.items() if name.endswith("exp_avg_sq")]
    assert moments and all(bool(moment.any()) for moment in moments[:1])


def test_a_run_killed_at_each_boundary_ends_as_an_uninterrupted_one(
    uninterrupted: Saved,
    tmp_path: Path,
    tiny_model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The other run's weights went by folders.
    config = config_for(tmp_path / "runs", tiny_model_dir, **{"engine.weight_sync": "distributed"})
    run_dying(config, DEATHS, tmp_path / "marks", monkeypatch)
    assert_same(outcome(config), uninterrupted)


def run_dying(
    config: Config, deaths: Sequence[str], marks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Train to the end while the trainer dies at the given boundaries, which it does at each."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    dying = ["tests.support.e2e.dying_trainer", str(marks), *deaths, "--"]
    real = launching.trainer_arguments
    monkeypatch.setattr(launching, "trainer_arguments", lambda *given: [*dying, *real(*given)[1:]])
    # A part that dies so often ends a service, which is another promise.
    for limit in ("MAX_RESTARTS", "MAX_FAILURES", "MAX_DEATHS"):
        monkeypatch.setattr(component, limit, 1000)
    marks.mkdir()
    with Node(config, NodeOptions(say=lambda _: None)) as node:
        asyncio.run(drive(node, limit=LIMIT + 60 * len(deaths)))
        assert sorted(mark.name for mark in marks.iterdir()) == sorted(deaths)
        assert node.parts["trainer"].restarts == len(deaths)


def zero_tensors(path: Path) -> None:
    """Damage a file's tensors and leave its size and its header as they were."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size - 4096)
        file.write(bytes(4096))
    assert path.stat().st_size == size


async def archive(config: Config) -> dict[str, SessionRow]:
    """What the ranks' sweeps do in time; every session then."""
    found = {}
    for number in range(config.server.ranks):
        rank = await Rank(trial_dir(config).path, number=number).start()
        rank.oldest_step = (await rank.journal.meta("run"))["oldest_step"]
        while await rank.archive.sweep():
            pass
        found |= {row.id: row for row in await rank.journal.sessions(SessionState)}
        await rank.stop()
    return found


def test_the_oldest_checkpoint_is_enough_after_retention(
    whole: Config, uninterrupted: Saved, tmp_path: Path, tiny_model_dir: Path
) -> None:
    """The newest checkpoint is damaged, and what only it could do without is in archives.

    So is what the engines served last: they begin with other weights that are whole.
    """
    config = config_for(tmp_path / "runs", tiny_model_dir)
    shutil.copytree(trial_dir(whole).path, trial_dir(config).path)
    rows = asyncio.run(archive(config))
    taken = [row for row in rows.values() if row.step is not None]
    assert len(taken) == 4 * STEPS
    # Of six steps the first four are in the oldest checkpoint.
    assert {row.step for row in taken if row.content == "archived"} == {1, 2, 3, 4}
    assert {row.step for row in taken if row.content == "stored"} == {5, 6}
    checkpoints = trial_dir(config).checkpoints
    assert sorted(path.name for path in checkpoints.glob("step-*")) == [
        f"step-{step:08d}" for step in (STEPS - 2, STEPS)
    ]
    served = trial_dir(config).weights / f"v{STEPS:08d}"
    for folder in (checkpoints / f"step-{STEPS:08d}", served):
        zero_tensors(folder / "model.safetensors")
    said: list[str] = []
    with Node(config, NodeOptions(say=said.append)) as node:
        asyncio.run(drive(node))
        assert node.parts["trainer"].restarts == 0
    assert f"model     {served.with_name(f'v{STEPS - 1:08d}')}, version {STEPS - 1}" in said
    assert (checkpoints / f"damaged-step-{STEPS:08d}").is_dir()
    assert served.with_name(f"damaged-{served.name}").is_dir()
    assert_same(outcome(config), uninterrupted)
    done = Exported(config)
    assert done.code == 0 and set(done.ids) >= rows.keys(), done.said
    assert len(set(done.ids)) == len(done.ids)
