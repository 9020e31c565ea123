"""The `/rl` API against a plain-Python model of it, step by step, with kill -9 among the steps."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from any_agent.record import unpack_trajectories
from any_agent.types import Trajectory
from tests.chaos.conftest import EITHER_JOURNAL, Figure
from tests.support.chaos.killable import KillableProxy, engine_in_thread
from tests.support.chaos.model import EXPORT, OK, TAKEN, Model, Opened, Session, Verdict

RL = "/rl/v1"
MESSAGES = [{"role": "user", "content": "Say a number."}]
SETTINGS = ("sessions.group_size=3", "rollout.batch_size=8", "rollout.max_concurrent=8")
GROUPS = {"pair": 2, "three": 3, "one": 1}
SETTLED_WITHIN = 30.0

picks = st.integers(0, 1 << 16)
values = st.sampled_from([0.0, 0.25, 1.0, -2.0])
named = st.one_of(
    values.map(lambda value: {"": value}),
    st.dictionaries(st.sampled_from(["right", "format"]), values, min_size=1),
)
optional = st.one_of(st.just({}), named)


@dataclass
class Service:
    """What all runs share, and how much they did."""

    root: Path
    model: Path
    engine_url: str
    numbers: Iterator[int]
    steps: int = 0
    kills: int = 0
    repeats: int = 0


def in_body(rewards: dict[str, float]) -> float | dict[str, float]:
    return rewards[""] if list(rewards) == [""] else rewards


class Machine(RuleBasedStateMachine):
    """One life of a trial; ``service`` is set by the test."""

    service: Service

    def __init__(self) -> None:
        super().__init__()
        number = next(self.service.numbers)
        self.proxy = KillableProxy(
            self.service.root / str(number), self.service.model, self.service.engine_url, *SETTINGS
        )
        self.proxy.start()
        self.http = httpx.Client(base_url=self.proxy.url, timeout=60, trust_env=False)
        self.model = Model()
        self.owner = "trainer-0"
        self.messages = 0
        self.keys = 0
        self.kept: list[tuple[str, dict[str, Any], dict[str, str], bytes]] = []
        """Keyed requests that were answered by 2xx, with their answers."""

    def teardown(self) -> None:
        try:
            for session in self.model.sessions:
                self.compare(session)
        finally:
            self.http.close()
            self.proxy.close()

    def send(
        self,
        path: str,
        body: dict[str, Any],
        session: Session | None,
        expected: Verdict,
        keyed: bool,
    ) -> Any:
        """Post, with a session's key, and hold the answer against the model's."""
        self.service.steps += 1
        headers = self.headers(session) if session is not None else {}
        if keyed:
            self.keys += 1
            headers["idempotency-key"] = f"key-{self.keys}"
        answer = self.http.post(path, json=body, headers=headers)
        self.judge(answer, expected, path)
        if answer.status_code == 200 and keyed:
            self.kept.append((path, body, headers, answer.content))
        return answer.json()

    def headers(self, session: Session) -> dict[str, str]:
        headers = {"authorization": f"Bearer {session.key}"}
        if self.model.lanes[session.key] is not session:
            # Its key means the next session by now.
            headers["x-any-agent-session"] = session.id
        return headers

    def judge(self, answer: httpx.Response, expected: Verdict, what: str) -> None:
        code = "" if answer.status_code == 200 else answer.json()["error"]["code"]
        assert (answer.status_code, code) == expected, f"{what}: {answer.text}"

    def pick(self, number: int) -> Session:
        return self.model.sessions[number % len(self.model.sessions)]

    def pick_done(self, number: int) -> Session:
        """Mostly one that is finalized, or was."""
        done = [s for s in self.model.sessions if s.state in ("finalized", "leased", *TAKEN)]
        if not done or number % 4 == 0:
            return self.pick(number)
        return done[number % len(done)]

    def info(self, session: Session) -> dict[str, Any]:
        answer = self.http.get(f"{RL}/sessions/{session.id}", headers=self.headers(session))
        return dict(answer.json())

    def compare(self, session: Session) -> None:
        """What the service says of a session is what the model has of it."""
        self.service.steps += 1
        info = self.info(session)
        assert info["state"] == session.state, info
        assert info["content"] == ("deleted" if session.erased else "stored")
        assert session.erased or info["interactions"] == len(session.calls)
        assert session.erased or info["rewards"] == session.own_rewards()
        assert info["final_reward"] == session.final_reward

    @initialize()
    def begin(self) -> None:
        self.capacity(16)

    def capacity(self, more: int) -> None:
        self.service.steps += 1
        self.messages += 1
        self.model.limit = self.model.admitted + more
        body = {
            "limit": self.model.limit,
            "ttl": 3600,
            "owner": self.owner,
            "held": [session.id for session in self.model.leased(self.owner)],
            "number": self.messages,
        }
        answer = self.http.put(f"{RL}/capacity", json=body)
        self.judge(answer, OK, "capacity")
        self.model.taken_over(self.owner)

    @rule(more=st.integers(0, 12))
    def set_capacity(self, more: int) -> None:
        self.capacity(more)

    @rule()
    def another_trainer(self) -> None:
        name, _, number = self.owner.partition("-")
        self.owner = f"{name}-{int(number) + 1}"
        self.capacity(8)

    @rule(
        mode=st.sampled_from(["train", "train", "train", "eval"]),
        group=st.sampled_from([None, *GROUPS]),
        task=st.booleans(),
        generation=st.integers(0, 3),
        earlier=st.one_of(st.none(), picks),
        keyed=st.booleans(),
    )
    def open(
        self,
        mode: str,
        group: str | None,
        task: bool,
        generation: int,
        earlier: int | None,
        keyed: bool,
    ) -> None:
        """By `group_id` or `task_id`, or alone; with a new key, or an earlier session's."""
        body: dict[str, Any] = {"mode": mode, "metadata": {"n": generation}}
        wanted = Opened(mode)
        if group is not None and mode == "train":
            name, size = f"{group}-{generation}", GROUPS[group]
            body |= {"task_id" if task else "group_id": name, "group_size": size}
            wanted = Opened(mode, None if task else name, name if task else None, size)
        if earlier is not None and self.model.sessions:
            body["api_key"] = self.pick(earlier).key
            wanted = replace(wanted, key=body["api_key"])
        expected = self.model.may_open(wanted)
        answer = self.send(f"{RL}/start_session", body, None, expected, keyed)
        if expected == OK:
            key = answer["api_key"]
            assert wanted.key in (None, key)
            session = Session(answer["session_id"], key, mode, answer["group_id"])
            self.model.opened(session, wanted)

    @precondition(lambda self: self.model.sessions)
    @rule(at=picks)
    def call(self, at: int) -> None:
        session = self.pick(at)
        body = {"model": "any", "messages": MESSAGES, "max_tokens": 4}
        expected = self.model.call(session)
        answer = self.send("/v1/chat/completions", body, session, expected, False)
        if expected == OK:
            session.calls.append(answer["id"])

    @precondition(lambda self: self.model.sessions)
    @rule(at=picks, which=st.one_of(st.none(), picks), rewards=named, keyed=st.booleans())
    def reward(self, at: int, which: int | None, rewards: dict[str, float], keyed: bool) -> None:
        session = self.pick(at)
        body: dict[str, Any] = {"reward": in_body(rewards)}
        completion = None
        if which is not None:
            known = [*session.calls, "chatcmpl-unknown"]
            completion = body["completion_id"] = known[which % len(known)]
        expected = self.model.reward(session, completion, rewards)
        self.send(f"{RL}/set_reward", body, session, expected, keyed)

    @precondition(lambda self: self.model.sessions)
    @rule(at=picks, rewards=named, keyed=st.booleans())
    def reward_final(self, at: int, rewards: dict[str, float], keyed: bool) -> None:
        session = self.pick(at)
        expected = self.model.reward_final(session, rewards)
        body = {"final_reward": in_body(rewards)}
        self.send(f"{RL}/set_reward", body, session, expected, keyed)

    @precondition(lambda self: self.model.sessions)
    @rule(at=picks, rewards=optional, keyed=st.booleans())
    def finalize(self, at: int, rewards: dict[str, float], keyed: bool) -> None:
        session = self.pick(at)
        body = {"final_reward": in_body(rewards)} if rewards else {}
        expected = self.model.finalize(session, rewards)
        self.send(f"{RL}/finalize", body, session, expected, keyed)

    @precondition(lambda self: any(s.state == "open" for s in self.model.sessions))
    @rule(rewards=named)
    def finish(self, rewards: dict[str, float]) -> None:
        """All that are open do what most do, so that what comes after it is seen more often."""
        for at, session in enumerate(self.model.sessions):
            if session.state == "open":
                self.call(at)
                self.finalize(at, rewards, keyed=False)

    @precondition(lambda self: any(s.train for s in self.model.sessions))
    @rule(at=picks, keyed=st.booleans())
    def await_reward(self, at: int, keyed: bool) -> None:
        train = [s for s in self.model.sessions if s.train]
        session = train[at % len(train)]
        expected = self.model.await_reward(session)
        body = {"await_reward": True, "deadline": 3000}
        self.send(f"{RL}/finalize", body, session, expected, keyed)

    @precondition(lambda self: self.model.sessions)
    @rule(at=picks, keyed=st.booleans())
    def abort(self, at: int, keyed: bool) -> None:
        session = self.pick(at)
        expected = self.model.abort(session)
        self.send(f"{RL}/sessions/{session.id}/abort", {}, session, expected, keyed)

    @precondition(lambda self: self.model.sessions)
    @rule(at=picks, keyed=st.booleans())
    def veto(self, at: int, keyed: bool) -> None:
        session = self.pick(at)
        expected = self.model.veto(session)
        self.send(f"{RL}/sessions/{session.id}/veto", {}, session, expected, keyed)

    @precondition(lambda self: self.model.sessions)
    @rule(at=picks)
    def delete(self, at: int) -> None:
        self.service.steps += 1
        session = self.pick(at)
        expected = self.model.delete(session)
        answer = self.http.delete(f"{RL}/sessions/{session.id}", headers=self.headers(session))
        self.judge(answer, expected, "delete")

    @precondition(lambda self: self.model.sessions)
    @rule(at=picks)
    def heartbeat(self, at: int) -> None:
        session = self.pick(at)
        expected = self.model.call(session)
        self.send(f"{RL}/sessions/{session.id}/heartbeat", {}, session, expected, False)

    @rule(most=st.integers(1, 3))
    def lease(self, most: int) -> None:
        self.service.steps += 1
        body = {"owner": self.owner, "wait": 0, "max_groups": most}
        answer = self.http.post(f"{RL}/lease", json=body)
        ready = {frozenset(s.id for s in group) for group in self.model.ready()}
        if answer.status_code == 204:
            assert not ready
            return
        got = unpack_trajectories(answer.content)
        by_id = {session.id: session for session in self.model.sessions}
        groups = itertools.groupby(got, key=lambda trajectory: trajectory.group_id)
        taken = [frozenset(t.session_id for t in group) for _, group in groups]
        assert len(taken) == min(most, len(ready)) and set(taken) <= ready
        for trajectory in got:
            session = by_id[trajectory.session_id]
            self.check_handed_out(trajectory, session)
            session.state, session.owner = "leased", self.owner

    def check_handed_out(self, trajectory: Trajectory, session: Session) -> None:
        assert [i.id for i in trajectory.interactions] == session.calls
        own = {i.id: i.reward for i in trajectory.interactions if i.reward is not None}
        assert own == session.own_rewards()
        assert trajectory.final_reward == session.final_reward

    @precondition(lambda self: self.model.sessions)
    @rule(at=picks)
    def replay(self, at: int) -> None:
        """As a trainer that resumes from before the step which took it."""
        self.service.steps += 1
        session = self.pick_done(at)
        expected = self.model.replay(session, self.owner)
        body = {"owner": self.owner, "session_ids": [session.id], "replay": True}
        answer = self.http.post(f"{RL}/lease", json=body)
        self.judge(answer, expected, "replay")
        if expected == OK:
            (trajectory,) = unpack_trajectories(answer.content)
            assert trajectory.session_id == session.id
            self.check_handed_out(trajectory, session)

    @precondition(lambda self: self.model.sessions)
    @rule(at=picks)
    def export(self, at: int) -> None:
        self.service.steps += 1
        session = self.pick_done(at)
        expected = self.model.export(session)
        body = {"session_ids": [session.id]}
        answer = self.http.post(f"{RL}/export_trajectories", json=body)
        self.judge(answer, expected, "export")
        if expected == OK:
            assert set(answer.json()["trajectories"][session.id]) == set(session.calls)

    @precondition(lambda self: self.model.sessions)
    @rule(at=picks, holder=st.booleans(), trained=st.booleans(), keyed=st.booleans())
    def ack(self, at: int, holder: bool, trained: bool, keyed: bool) -> None:
        """Mostly of what is leased, by who has leased it."""
        leased = [s for s in self.model.sessions if s.state == "leased"]
        session = (leased or self.model.sessions)[at % len(leased or self.model.sessions)]
        owner = session.owner if holder and session.owner else self.owner
        step = None if owner == EXPORT else 1
        body: dict[str, Any] = {"owner": owner, "step": step}
        if trained:
            body["trained"] = [session.id]
        else:
            body["rejected"] = [{"session_id": session.id, "reason": "no variance"}]
        expected = self.model.ack(session, owner, "trained" if trained else "rejected", step)
        self.send(f"{RL}/ack", body, None, expected, keyed)

    @precondition(lambda self: self.kept)
    @rule(at=picks, other=st.booleans())
    def repeat(self, at: int, other: bool) -> None:
        """The same key again: the first answer, byte for byte, whatever has happened since."""
        self.service.steps += 1
        self.service.repeats += 1
        path, body, headers, first = self.kept[at % len(self.kept)]
        if other:
            different = {**body, "session_id": "ses-0-0000000000000000"}
            answer = self.http.post(path, json=different, headers=headers)
            self.judge(answer, (422, "idempotency_mismatch"), path)
        else:
            answer = self.http.post(path, json=body, headers=headers)
            assert (answer.status_code, answer.content) == (200, first)

    @rule(dice=st.integers(1, 10))
    def kill(self, dice: int) -> None:
        if dice > 1:
            return
        self.service.steps += 1
        self.service.kills += 1
        self.proxy.kill()
        self.proxy.start()
        # The trainer says again what it wants, as it does every second.
        self.capacity(self.model.limit - self.model.admitted)

    @precondition(lambda self: self.model.sessions)
    @rule(at=picks)
    def look(self, at: int) -> None:
        self.compare(self.pick(at))

    @invariant()
    def counts_agree(self) -> None:
        deadline = time.monotonic() + SETTLED_WITHIN
        while self.model.too_small:
            if self.info(self.model.too_small[-1])["reason"] in ("group_too_small", "deleted"):
                self.model.too_small.pop()
            else:
                assert time.monotonic() < deadline, "a group that is too small is not rejected"
                time.sleep(0.05)
        said = self.http.get(f"{RL}/capacity").json()
        wanted = self.model.counts()
        assert {name: said[name] for name in wanted} == wanted


@contextmanager
def shared(root: Path, model: Path) -> Iterator[Service]:
    with engine_in_thread(model) as engine:
        yield Service(root, model, engine.url, itertools.count())


@EITHER_JOURNAL
@pytest.mark.timeout(1800)
def test_the_api_does_what_its_model_does(
    tmp_path: Path, tiny_model_dir: Path, long: bool, figure: Figure
) -> None:
    examples, length = (70, 100) if long else (8, 60)
    with shared(tmp_path, tiny_model_dir) as service:
        machine = type("Machine", (Machine,), {"service": service})
        try:
            run_state_machine_as_test(  # type: ignore[no-untyped-call]
                machine,
                settings=settings(
                    max_examples=examples,
                    stateful_step_count=length,
                    deadline=None,
                    derandomize=True,
                    database=None,
                    phases=(Phase.generate, Phase.shrink) if long else (Phase.generate,),
                    suppress_health_check=list(HealthCheck),
                ),
            )
        finally:
            figure(
                f"{service.steps} steps in {next(service.numbers)} runs, {service.kills} kill -9 "
                f"among them, {service.repeats} repeated keys"
            )
