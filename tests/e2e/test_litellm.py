"""An agent whose planner is a model of a LiteLLM configuration, with a fallback, and whose actor is
the policy: it trains, and LiteLLM's callbacks see every call once."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from aiohttp import web

from any_agent.client.rl_client import RLClient
from any_agent.config import Config
from any_agent.errors import RunFinished
from any_agent.launcher import Node, NodeOptions
from any_agent.launcher.trial import trial_dir
from any_agent.record import is_frozen
from proxy_ext.archive.records import ArchiveRecord, read_record
from proxy_ext.export.reader import read_rank
from proxy_ext.journal.reader import ExportFilter
from tests.support import litellm
from tests.support.e2e.live_run import live_config
from tests.support.fake_provider import Answer, Provider
from tests.support.in_thread import served_in_thread

STEPS, AGENTS, LIMIT = 3, 8, 300.0
_FAILS = 4
"""The planner's first place fails if it is asked at each request of this number."""


class Flaky(Provider):
    """Fails at one of its models from time to time, and never at another."""

    async def _handle(self, answer: Answer, request: web.Request) -> web.StreamResponse:
        model = (await request.json())["model"]
        if model == "gpt-4o-mini" and len(self.requests) % _FAILS == 0:
            self.fail("500")
        return await super()._handle(answer, request)


async def episode(service: RLClient, number: int, rng: random.Random) -> Counter[str] | None:
    """One session: a plan, then an act; the calls that were answered, None when the run is over."""
    try:
        session = await service.start_session(
            group_id=f"g{number // 4}", group_size=4, wait=20, patience=LIMIT
        )
    except RunFinished:
        return None
    done: Counter[str] = Counter()
    async with openai.AsyncOpenAI(
        base_url=session.base_url, api_key=session.api_key, max_retries=0, timeout=LIMIT
    ) as client:
        ask: Any = [{"role": "user", "content": f"plan {number}"}]
        if number % 2:
            plan = await client.chat.completions.create(model="planner", messages=ask)
            text = plan.choices[0].message.content or ""
        else:
            stream = await client.chat.completions.create(
                model="planner", messages=ask, stream=True
            )
            text = "".join([part.choices[0].delta.content or "" async for part in stream])
        done["frozen"] += 1
        act: Any = [{"role": "user", "content": text}]
        await client.chat.completions.create(model="policy", messages=act)
        done["policy"] += 1
    await service.set_reward(session.api_key, rng.random())
    await service.finalize(session.api_key)
    done["ended"] += 1
    return done


async def listed(node: Node) -> None:
    async with httpx.AsyncClient(base_url=node.url, timeout=LIMIT) as http:
        answer = await http.get("/v1/model/info")
        assert answer.status_code == 200, answer.text


async def drive(node: Node) -> Counter[str]:
    numbers, rng = iter(range(10**6)), random.Random(0)
    total: Counter[str] = Counter()

    async def work(service: RLClient) -> None:
        while (done := await episode(service, next(numbers), rng)) is not None:
            total.update(done)
            node.check()

    async with RLClient(node.url) as service, asyncio.timeout(LIMIT):
        for _ in range(node.config.server.ranks):
            # The ranks take turns; each answers once its LiteLLM has started.
            await listed(node)
        await asyncio.gather(*(work(service) for _ in range(AGENTS)))
    return total


def told(path: Path) -> dict[str, list[str]]:
    """Return the ids that the callback was told, by kind: of the policy's calls and of the
    planner's, and of the sessions of rewards and ends."""
    told: dict[str, list[str]] = {"completion": [], "planner": [], "reward": [], "end": []}
    for line in map(json.loads, path.read_text().splitlines()):
        kind = line["about"].get("any_agent_event", "planner")
        calls = kind in ("completion", "planner")
        told[kind].append(line["call"] if calls else line["about"]["session_id"])
    return told


def exported(config: Config) -> list[ArchiveRecord]:
    """The sessions as `any-agent export` reads them, from journals and archives."""
    run = trial_dir(config)
    problems: list[str] = []
    found = [
        read_record(each.line)
        for rank in range(config.server.ranks)
        for each in read_rank(run.journal(rank), run.archive, rank, ExportFilter(), problems.append)
    ]
    assert not problems
    return found


def test_only_the_actor_is_trained_beside_a_planner_with_a_fallback(
    tmp_path: Path,
    tiny_model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Any,
) -> None:
    path = tmp_path / "told.jsonl"
    path.touch()
    monkeypatch.setenv("TEST_CALLBACK_LOG", str(path))
    monkeypatch.setenv(litellm.VARIABLE, litellm.SECRET)
    provider = Flaky()
    with served_in_thread(provider, within=30):
        data = litellm.examples(provider.url)
        del data["general_settings"]
        brought = litellm.write_litellm(tmp_path / "litellm", data)
        config = live_config(
            tmp_path,
            tiny_model_dir,
            **{
                "litellm.config": brought,
                "sampling.max_new_tokens": 8,
                "rollout.batch_size": 8,
                "rollout.max_concurrent": 16,
                "train.steps": STEPS,
                # So that the export may find sessions in archives, too.
                "sessions.keep_hours": 0.001,
            },
        )
        with Node(config, NodeOptions(say=lambda _: None)) as node:
            answered = asyncio.run(drive(node))
            deadline = time.monotonic() + 60
            while True:
                seen = told(path)
                counts = {kind: len(ids) for kind, ids in seen.items()}
                if (
                    counts["planner"] >= answered["frozen"]
                    and counts["reward"] >= answered["ended"]
                ):
                    break
                assert time.monotonic() < deadline, (counts, answered)
                time.sleep(0.2)
        models = Counter(body["model"] for body in provider.bodies)
    lines = [json.loads(line) for line in trial_dir(config).metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    records = exported(config)
    kept = [call for record in records for call in record.interactions]
    planner = [call for call in kept if is_frozen(call)]
    actor = [call for call in kept if not is_frozen(call)]
    assert models["gpt-4o"] > 0 < models["gpt-4o-mini"], models
    assert len(planner) == answered["frozen"]
    seen = told(path)
    assert Counter(seen["completion"]) == Counter(call.id for call in actor)
    assert Counter(seen["planner"]) == Counter(call.id for call in planner)
    ended = [record.session["id"] for record in records if record.session["ended_at"] is not None]
    assert Counter(seen["end"]) == Counter(ended)
    # A session that is finalized ends when a step has used it.
    assert len(ended) >= STEPS * 8
    rewarded = [record.session["id"] for record in records for _ in record.rewards]
    assert Counter(seen["reward"]) == Counter(rewarded) and len(rewarded) >= answered["ended"]
    for call in planner:
        usage = call.request["frozen"]["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (7, 3)
        assert call.request["frozen"]["estimated"] is False
    record_property(
        "figure",
        f"{STEPS} steps; callbacks were told of {len(actor)} calls of the policy and "
        f"{len(planner)} of the planner, {models['gpt-4o']} of them by its fallback, and of "
        f"{len(ended)} ends: the journals have the same",
    )
