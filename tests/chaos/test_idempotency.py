"""Doing it again changes nothing: equal POSTs under one key, at once and while proxies are killed,
and model calls that an SDK repeats over kills."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from any_agent.chat import load_chat_format
from any_agent.client.rl_client import RLClient
from any_agent.launcher.trial import trial_dir
from any_agent.rundir.registry import RegistryEntry, publish, rank_name
from any_agent.types import Interaction, SessionState
from proxy_ext.api.model_routes import model_call_handlers
from proxy_ext.journal import SQLiteJournal
from proxy_ext.run_state import RunState
from proxy_ext.web.permissions import RULES
from tests.chaos.conftest import Figure
from tests.support.chaos.killable import KillableProxy, engine_in_thread
from tests.support.proxy import Proxy, config_for, running_proxy
from tests.support.router import serving
from tests.support.scripted_engine import ScriptedEngine

EQUAL = 100
LIMIT = 600.0


@dataclass(frozen=True)
class Post:
    """A request of a route, and a body that asks for something else, where there is one."""

    body: dict[str, Any] = field(default_factory=dict)
    other: dict[str, Any] | None = None
    session: SessionState | None = None
    """The state of the session that it is of."""
    keyed: bool = True
    """The session's key is its key."""


OPEN, FINAL, LEASED = SessionState.OPEN, SessionState.FINALIZED, SessionState.LEASED
VERSION = {"version": 7, "path": "p", "step": 1}
ACK = {"owner": "trainer", "trained": ["$id"], "rejected": []}
ROUTES = {
    "POST /rl/v1/start_session": Post({"task_id": "t"}, {"task_id": "u"}),
    "POST /rl/v1/set_reward": Post({"reward": 1}, {"reward": 2}, OPEN),
    "POST /rl/v1/feedback": Post({"score": 1, "text": "a"}, {"score": 1, "text": "b"}, OPEN),
    "POST /rl/v1/finalize": Post({"final_reward": 1}, {"final_reward": 2}, OPEN),
    "POST /rl/v1/sessions/{session_id}/abort": Post({"reason": "a"}, {"reason": "b"}, OPEN),
    "POST /rl/v1/sessions/{session_id}/veto": Post(
        {"reason": "a"}, {"reason": "b"}, FINAL, keyed=False
    ),
    "DELETE /rl/v1/sessions/{session_id}": Post({}, None, OPEN),
    "POST /rl/v1/ack": Post(ACK, ACK | {"trained": []}, LEASED, keyed=False),
    "POST /rl/v1/pause": Post({"ttl": 60}, {"ttl": 61}),
    "POST /rl/v1/version": Post(VERSION, VERSION | {"version": 8}),
    "POST /rl/v1/resume": Post(),
    "POST /rl/start_session": Post({"task_id": "t"}, {"task_id": "u"}),
    "POST /rl/set_reward": Post({"reward": 1}, {"reward": 2}, OPEN),
    "POST /rl/end_session": Post({}, None, OPEN),
    "POST /grant_capacity": Post({}, {"of": "run"}),
}
EXEMPT = {
    "POST /rl/v1/lease": "a long poll",
    "POST /rl/v1/sessions/{session_id}/heartbeat": "a second one renews the same idle time",
    "POST /rl/v1/export_trajectories": "the same sessions again are leased to the same owner",
    "POST /export_trajectories": "a second one answers the same",
    "DELETE /v1/responses/{response_id}": "a second one finds nothing",
    "DELETE /responses/{response_id}": "a second one finds nothing",
    **{
        f"POST {prefix}{path}": "its retries are marked, or it changes nothing"
        for path in model_call_handlers()
        for prefix in ("/v1", "")
    },
}


def test_every_route_that_changes_something_has_a_case_in_this_file() -> None:
    known = {f"{m} {path}" for m, path in RULES if m in ("POST", "DELETE")}
    assert known == ROUTES.keys() | EXEMPT.keys()


@dataclass
class Lab:
    """A proxy, and how often each kind of effect was had."""

    proxy: Proxy
    effects: Counter[str]

    async def session(self, state: SessionState = OPEN) -> dict[str, Any]:
        session = await self.proxy.open()
        await self.proxy.complete(session["api_key"])
        if state is not OPEN:
            body = {"final_reward": 1}
            done = await self.proxy.post("/rl/v1/finalize", body, session["api_key"])
            assert done.status_code == 200, done.text
        if state is LEASED:
            await self.proxy.client.replay(owner="trainer", session_ids=[session["session_id"]])
        return session


@pytest.fixture
async def lab(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Lab]:
    chat = load_chat_format(str(tiny_model_dir), enable_thinking=False)
    engine = ScriptedEngine(decode=chat.decode)
    effects: Counter[str] = Counter()
    for name in ("pause", "publish", "resume"):
        count(monkeypatch, RunState, name, lambda _, name=name: effects.update([name]))
    async with engine.serve():
        config = config_for(tmp_path, "sessions.group_size=1")
        async with running_proxy(config, chat, engine_url=engine.url) as proxy:
            await proxy.admit(1000)
            count(
                monkeypatch,
                proxy.service.journal,
                "commit",
                lambda made: effects.update(type(each).__name__ for each in made),
            )
            yield Lab(proxy, effects)


def count(
    patch: pytest.MonkeyPatch, owner: object, name: str, tell: Callable[[tuple[Any, ...]], None]
) -> None:
    """Have the arguments of every call of a method told."""
    real = getattr(owner, name)

    def counted(*args: Any) -> Any:
        tell(args)
        return real(*args)

    patch.setattr(owner, name, counted)


@pytest.mark.parametrize("route", ROUTES)
async def test_equal_posts_have_one_effect(lab: Lab, route: str, figure: Figure) -> None:
    post, grants = ROUTES[route], lab.proxy.service.sessions.grants
    method, _, path = route.partition(" ")
    session = await lab.session(post.session) if post.session else {}
    if path == "/rl/end_session":
        await lab.proxy.post("/rl/set_reward", {"reward": 1}, session["api_key"])
    headers = {"idempotency-key": "key"}
    if session and post.keyed:
        headers["authorization"] = f"Bearer {session['api_key']}"
    id = session.get("session_id", "")

    async def send(body: dict[str, Any]) -> httpx.Response:
        content = json.dumps(body).replace("$id", id)
        url = path.replace("{session_id}", id)
        return await lab.proxy.http.request(method, url, content=content, headers=headers)

    before = grants.left
    lab.effects.clear()
    answers = await asyncio.gather(*(send(post.body) for _ in range(EQUAL)))
    first = answers[0]
    assert first.status_code == 200, first.text
    distinct = {(a.status_code, a.content, a.headers["content-type"]) for a in answers}
    assert len(distinct) == 1
    once = Counter(lab.effects)
    assert once.keys() > {"PutAnswer"} and set(once.values()) == {1}, once
    assert grants.left - before == (path == "/grant_capacity")
    refused = ""
    if post.other is not None:
        other = await send(post.other)
        assert other.status_code == 422
        assert other.json()["error"]["code"] == "idempotency_mismatch"
        assert lab.effects == once
        refused = ", another body: 422"
    figure(f"{EQUAL} equal ones: 1 effect, {len(distinct)} answer{refused}")


@pytest.mark.parametrize("keyed", [False, True])
async def test_fifty_finalizes_are_one_transition(lab: Lab, keyed: bool, figure: Figure) -> None:
    session = await lab.session()
    lab.effects.clear()
    finalizing = (
        lab.proxy.post(
            "/rl/v1/finalize",
            {"final_reward": 1},
            session["api_key"],
            **({"idempotency-key": f"k{number}"} if keyed else {}),
        )
        for number in range(50)
    )
    answers = await asyncio.gather(*finalizing)
    assert {(answer.status_code, answer.content) for answer in answers} == {
        (200, answers[0].content)
    }
    assert (lab.effects["SetState"], lab.effects["SetReward"]) == (1, 1)
    (trajectory,) = await lab.proxy.lease()
    assert trajectory.final_reward == 1
    assert await lab.proxy.lease() == []
    figure(f"50 at once, {'each with its key' if keyed else 'without keys'}: 1 transition")


@dataclass
class Cluster:
    """Two ranks that can be killed, and a router before them."""

    url: str
    ranks: list[KillableProxy]
    root: Path
    engine: ScriptedEngine
    kills: int = 0
    enough: bool = False

    async def killing(self, every: float, seed: int) -> None:
        """Kill a rank again and again, and start it at once, until it is `enough`."""
        rng = random.Random(seed)
        while not self.enough:
            await asyncio.sleep(rng.uniform(0.5, 1.5) * every)
            await self.kill(rng.choice(self.ranks))

    async def kill(self, rank: KillableProxy) -> None:
        await asyncio.to_thread(rank.kill)
        self.kills += 1
        await asyncio.to_thread(rank.start)

    def beat(self) -> None:
        """Write to the registry for the ranks that live."""
        for number, rank in enumerate(self.ranks):
            if not rank.alive:
                continue
            entry = RegistryEntry(
                name=rank_name(number), boot_id=f"life-{rank.lives}", url=rank.url, pid=1
            )
            publish(self.registry, entry)

    @property
    def registry(self) -> Path:
        return trial_dir(config_for(self.root)).registry

    async def beats(self) -> None:
        while True:
            self.beat()
            await asyncio.sleep(0.2)

    @asynccontextmanager
    async def journals(self) -> AsyncIterator[list[SQLiteJournal]]:
        """The ranks' stores, once they are dead."""
        run_dir = trial_dir(config_for(self.root))
        journals = [SQLiteJournal(run_dir.journal(rank)) for rank in range(len(self.ranks))]
        try:
            yield journals
        finally:
            for journal in journals:
                await journal.close()


@pytest.fixture
def engine(tiny_model_dir: Path) -> Iterator[ScriptedEngine]:
    with engine_in_thread(tiny_model_dir) as engine:
        yield engine


@asynccontextmanager
async def running_cluster(
    root: Path, model: Path, engine: ScriptedEngine, *settings: str
) -> AsyncIterator[Cluster]:
    config = config_for(root, "server.ranks=2", *settings)
    trial_dir(config).create()
    trial_dir(config).signing_secret()
    base = ("sessions.group_size=2", "rollout.batch_size=8", "server.ranks=2", *settings)
    async with AsyncExitStack() as stack:
        ranks = []
        for rank in range(2):
            proxy = KillableProxy(root, model, engine.url, *base, rank=rank)
            stack.callback(proxy.close)
            ranks.append(proxy)
            await asyncio.to_thread(proxy.start)
        cluster = Cluster("", ranks, root, engine)
        cluster.beat()
        _, port = await stack.enter_async_context(serving(config))
        cluster.url = f"http://127.0.0.1:{port}"
        stack.callback(asyncio.create_task(cluster.beats()).cancel)
        yield cluster


async def insist(http: httpx.AsyncClient, path: str, body: Any, key: str) -> httpx.Response:
    """Ask until there is an answer, as a client does that has a key for it."""
    deadline = time.monotonic() + LIMIT
    while True:
        assert time.monotonic() < deadline, "no answer came"
        try:
            answer = await http.post(path, json=body, headers={"idempotency-key": key})
        except httpx.TransportError:
            await asyncio.sleep(0.02)
            continue
        if answer.status_code not in (502, 503):
            return answer
        if answer.status_code == 502:
            assert answer.headers["x-should-retry"] == "true", answer.text
        await asyncio.sleep(0.02)


async def test_an_open_is_done_once_over_both_ranks_while_they_are_killed(
    tmp_path: Path, tiny_model_dir: Path, engine: ScriptedEngine, long: bool, figure: Figure
) -> None:
    keys = 60 if long else 3
    async with running_cluster(tmp_path, tiny_model_dir, engine) as cluster:
        limits = httpx.Limits(max_connections=None)
        http = httpx.AsyncClient(
            base_url=cluster.url, timeout=LIMIT, limits=limits, trust_env=False
        )
        killing = asyncio.create_task(cluster.killing(0.3, seed=7))
        answers: list[list[httpx.Response]] = []
        async with http:
            for k in range(keys):
                body = {"mode": "eval", "metadata": {"k": k}}
                asked = [
                    insist(http, "/rl/v1/start_session", body, f"key-{k}") for _ in range(EQUAL)
                ]
                answers.append(await asyncio.gather(*asked))
            # Not cancelled: a rank must not stay dead between its kill and its start.
            cluster.enough = True
            await killing
            # What was answered before all this is still what is answered.
            last = await insist(
                http, "/rl/v1/start_session", {"mode": "eval", "metadata": {"k": 0}}, "key-0"
            )
        for rank in cluster.ranks:
            rank.close()
        assert last.content == answers[0][0].content
        for same in answers:
            assert {a.status_code for a in same} == {200}
            assert len({a.content for a in same}) == 1
        opened = {same[0].json()["session_id"] for same in answers}
        async with cluster.journals() as journals:
            rows = [await journal.sessions(list(SessionState)) for journal in journals]
        stored = [row.id for each in rows for row in each]
        assert sorted(stored) == sorted(opened)
        assert cluster.kills > 0
        figure(
            f"{keys} keys x {EQUAL} equal opens, {cluster.kills} kills: {len(stored)} sessions "
            f"({' + '.join(str(len(each)) for each in rows)} on the ranks), "
            f"{sum(len({a.content for a in same}) for same in answers)} different answers"
        )


@dataclass
class Talks:
    """What agents asked, and what they got: each question is asked by one call of the SDK."""

    cluster: Cluster
    answered: dict[str, str] = field(default_factory=dict)
    """Question to the answer's id."""
    sessions: list[str] = field(default_factory=list)
    repeated: int = 0
    """Requests that the SDK marked as retries."""

    async def agent(self, number: int, turns: int) -> None:
        async with RLClient(self.cluster.url, retry_for=LIMIT) as service:
            started = await service.start_session(mode="eval")
            self.sessions.append(started.session_id)
            transport = httpx.AsyncClient(
                trust_env=False, event_hooks={"request": [self._watch]}, timeout=120
            )
            sdk = openai.AsyncOpenAI(
                api_key=started.api_key,
                base_url=f"{self.cluster.url}/v1",
                http_client=transport,
                timeout=120,
                max_retries=40,
            )
            async with sdk:
                await self._talk(sdk, number, turns)
            await service.finalize(started.api_key)

    async def _talk(self, sdk: openai.AsyncOpenAI, number: int, turns: int) -> None:
        talk: list[Any] = []
        for turn in range(turns):
            question = f"agent {number} turn {turn}"
            talk.append({"role": "user", "content": question})
            done = await sdk.chat.completions.create(model="any", messages=talk, max_tokens=12)
            self.answered[question] = done.id
            talk.append({"role": "assistant", "content": done.choices[0].message.content})

    async def _watch(self, request: httpx.Request) -> None:
        self.repeated += request.headers["x-stainless-retry-count"] != "0"

    async def recorded(self) -> dict[str, list[Interaction]]:
        """What the journals hold of each question."""
        found: dict[str, list[Interaction]] = {question: [] for question in self.answered}
        async with self.cluster.journals() as journals:
            for journal in journals:
                for session in self.sessions:
                    for stored in await journal.interactions(session):
                        question = stored.interaction.message_delta[-1]["content"]
                        found[question].append(stored.interaction)
        return found


async def test_a_call_that_is_repeated_over_kills_is_recorded_once(
    tmp_path: Path, tiny_model_dir: Path, engine: ScriptedEngine, long: bool, figure: Figure
) -> None:
    agents, turns = (32, 25) if long else (16, 4)
    engine.pace = 0.03
    async with running_cluster(tmp_path, tiny_model_dir, engine) as cluster:
        talks, rounds = Talks(cluster), 0
        killing = asyncio.create_task(cluster.killing(0.3, seed=11))
        # Kills may all come between calls, where nothing has to be repeated.
        while rounds == 0 or (not talks.repeated and rounds < 20):
            numbers = range(rounds * agents, (rounds + 1) * agents)
            await asyncio.gather(*(talks.agent(k, turns) for k in numbers))
            rounds += 1
        cluster.enough = True
        await killing
        for rank in cluster.ranks:
            rank.close()
        recorded = await talks.recorded()
    calls = rounds * agents * turns
    assert len(talks.answered) == calls
    twice = {question: found for question, found in recorded.items() if len(found) != 1}
    assert not twice
    assert {q: found[0].id for q, found in recorded.items()} == talks.answered
    untrained = sum(not found[0].trainable for found in recorded.values())
    assert cluster.kills > 0
    assert talks.repeated > 0
    figure(
        f"{calls} calls, {cluster.kills} kills, {talks.repeated} repeated by the SDK: "
        f"recorded twice {len(twice)}, begun anew because a kill cut them "
        f"{len(engine.requests) - calls}, received but not trained on {untrained}"
    )
