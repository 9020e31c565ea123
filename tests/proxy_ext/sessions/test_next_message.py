"""A grader that judges each answer by the user's message, or the tool's result, after it."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from any_agent.rewards.next_message import next_message
from proxy_ext.sessions.delivery import DeliveryTracker
from tests.support.proxy import HELLO, Proxy
from tests.support.proxy_fixtures import Restart, Start
from tests.support.sessions import finalize, over

GRADERS = "tests.support.graders"
PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "rewards.md"
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def grading(start: Start, grader: str, *settings: str) -> Proxy:
    named = f"sessions.grader={grader if '.' in grader else f'{GRADERS}.{grader}'}"
    return await start("sessions.late_reward=grade", named, *settings, admit=100)


class Talk:
    """A session whose conversation can be continued from any of its answers."""

    def __init__(self, proxy: Proxy, session: dict[str, Any]) -> None:
        self.proxy = proxy
        self.session = session
        self.after: dict[str, list[dict[str, Any]]] = {}
        """The conversation up to each answer, by the answer's id."""

    @classmethod
    async def begin(cls, proxy: Proxy, **fields: Any) -> tuple[Talk, str]:
        talk = cls(proxy, await proxy.open(**fields))
        return talk, await talk.say(HELLO)

    async def say(self, messages: list[dict[str, Any]], **fields: Any) -> str:
        answer = await self.proxy.complete(self.session["api_key"], messages, **fields)
        message = answer["choices"][0]["message"]
        self.after[answer["id"]] = [*messages, message]
        return str(answer["id"])

    async def reply(self, to: str, *said: dict[str, Any], **fields: Any) -> str:
        return await self.say([*self.after[to], *said], **fields)

    async def next_messages(self) -> dict[str, list[list[str]]]:
        """As graders get it, texts alone."""
        path = f"/rl/v1/sessions/{self.session['session_id']}/content"
        content = (await self.proxy.http.get(path)).json()
        return {
            call["id"]: [[m["content"] for m in each] for each in call["next_messages"]]
            for call in content["interactions"]
        }

    async def graded(self) -> dict[str, Any]:
        await finalize(self.proxy, self.session, await_reward=True, deadline=0.01)
        return await over(self.proxy, self.session)


async def test_graders_see_what_followed_each_answer_in_every_branch(proxy: Proxy) -> None:
    talk, first = await Talk.begin(proxy)
    second = await talk.reply(first, user("a"))
    branch = await talk.reply(
        first, user("b"), {"role": "system", "content": "Be kind."}, user("c")
    )
    last = await talk.reply(second, user("d"))
    apart = await talk.say([user("Another conversation.")])
    assert await talk.next_messages() == {
        first: [["a"], ["b", "c"]],
        second: [["d"]],
        **{branch: [], last: [], apart: []},
    }


async def test_one_request_with_several_answers_is_one_continuation(proxy: Proxy) -> None:
    talk, first = await Talk.begin(proxy)
    choices = await talk.reply(first, user("a"), n=2)
    again = await talk.reply(first, user("a"))
    assert await talk.next_messages() == {
        first: [["a"]],
        f"{choices}.0": [],
        f"{choices}.1": [],
        again: [],
    }


async def test_a_branch_with_other_tools_or_another_system_prompt_follows_its_answer(
    proxy: Proxy,
) -> None:
    talk, first = await Talk.begin(proxy)
    tools = await talk.reply(first, user("a"), tools=TOOLS)
    system = {"role": "system", "content": "Be kind."}
    kind = await talk.say([system, *talk.after[tools], user("b")])
    assert await talk.next_messages() == {first: [["a"]], tools: [["b"]], kind: []}
    said = await proxy.recorded(talk.session["session_id"])
    assert {i.branch_reason for i in said} == {None, "tools_changed", "system_changed"}


async def test_what_the_agent_put_in_place_of_an_answer_did_not_answer_it(proxy: Proxy) -> None:
    talk, first = await Talk.begin(proxy)
    made_up = {"role": "assistant", "content": "Made up."}
    later = await talk.reply(first, made_up, user("a"))
    rewritten = await talk.say([*HELLO, made_up, user("b")])
    assert await talk.next_messages() == {first: [], later: [], rewritten: []}


@pytest.mark.parametrize(("grader", "name"), [("reply", "reply"), ("reply_later", "next_message")])
async def test_each_answer_is_rewarded_by_what_came_next(
    start: Start, grader: str, name: str
) -> None:
    proxy = await grading(start, grader, f"sessions.reward_weights={{{name}: 0.5}}")
    talk, first = await Talk.begin(proxy)
    second = await talk.reply(first, user("3"))
    await talk.reply(first, user("0"))
    third = await talk.reply(second, user("no opinion"))
    tool = {"role": "tool", "tool_call_id": "c", "content": "-1"}
    await talk.reply(third, tool)
    now = await talk.graded()
    assert (now["state"], now["reason"], now["final_reward"]) == ("finalized", None, None)
    # The mean of both branches, and the weight: (3 + 0) / 2 * 0.5.
    assert now["rewards"] == {first: 0.75, third: -0.5}
    assert {(one["name"], one["value"], one["by"]) for one in now["reward_history"]} == {
        (name, 1.5, f"grader {GRADERS}.{grader}"),
        (name, -1.0, f"grader {GRADERS}.{grader}"),
    }
    (trajectory,) = await proxy.lease()
    own = {i.id: i.reward for i in trajectory.interactions if i.reward is not None}
    assert (own, trajectory.final_reward) == ({first: 0.75, third: -0.5}, None)
    assert trajectory.named_rewards == {name: 0.5}
    # As the next process reads it.
    assert (await over(await start(), talk.session))["rewards"] == now["rewards"]


async def test_a_session_without_a_next_message_has_no_reward_rather_than_zero(
    start: Start,
) -> None:
    proxy = await grading(start, "reply")
    alone, _ = await Talk.begin(proxy)
    silent, first = await Talk.begin(proxy)
    await silent.reply(first, user("no opinion"))
    for talk in (alone, silent):
        now = await talk.graded()
        assert (now["state"], now["rewarded"]) == ("rejected", False)
        assert now["reason"] == "the grader gave it no reward"
    assert proxy.service.expiry.outcomes == {"rejected": 2}
    assert await proxy.lease(wait=0) == []


@pytest.mark.service
@pytest.mark.parametrize("said", ["raise", "nan", "text", "hang"])
async def test_a_judge_that_misbehaves_costs_its_session_alone(start: Start, said: str) -> None:
    proxy = await grading(start, "reply", "sessions.grader_timeout=4")
    bad, first = await Talk.begin(proxy)
    await bad.reply(await bad.reply(first, user("1")), user(said))
    now = await bad.graded()
    assert (now["state"], now["rewards_given"], now["rewards"]) == ("rejected", 0, {})
    assert now["reason"].startswith("grader failed: ")
    good, first = await Talk.begin(proxy)
    await good.reply(first, user("1"))
    assert (await good.graded())["rewards"] == {first: 1}


@pytest.mark.parametrize(
    "rewards",
    [
        {"chatcmpl-none": {"a": 1}},
        {"last": {}},
        {"last": {"a": 1}, "final": 2},
        {"last": {"a b": 1}},
        {"last": {"a": {"b": 1}}},
    ],
    ids=str,
)
async def test_rewards_of_calls_that_are_none_reject_the_session(
    start: Start, rewards: dict[str, Any]
) -> None:
    proxy = await grading(start, "of_calls")
    good, id = await Talk.begin(proxy, metadata={"rewards": {"last": {"a": 1, "b": 0.5}}})
    assert (await good.graded())["rewards"] == {id: 1.5}
    bad, _ = await Talk.begin(proxy, metadata={"rewards": rewards})
    now = await bad.graded()
    assert (now["state"], now["rewards_given"]) == ("rejected", 0)
    assert now["reason"].startswith("grader failed: "), now["reason"]


@pytest.mark.parametrize("by", ["grader", "grader alone", "agent"])
async def test_a_grader_does_not_make_an_answer_count_as_delivered_and_its_agent_does(
    start: Start, restart: Restart, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """The process died before the mark, which looks like an answer that never arrived."""
    grader = f"sessions.grader={GRADERS}.of_calls"
    settings = ("sessions.late_reward=grade", grader, "sessions.rewards=agent")
    graded = {"last": {"a": 0.5}} | ({"first": {"a": 1}} if by == "grader" else {})
    with monkeypatch.context() as patch:
        patch.setattr(DeliveryTracker, "mark_delivered", lambda *_: None)
        proxy = await restart(*settings, admit=100)
        talk, first = await Talk.begin(proxy, metadata={"rewards": graded})
        lost = [await talk.reply(first, user("a")), await talk.say([user("Another one.")])]
        if by == "agent":
            body = {"reward": 0.25, "completion_id": lost.pop()}
            given = await proxy.post("/rl/v1/set_reward", body, talk.session["api_key"])
            assert given.status_code == 200, given.text
        await finalize(proxy, talk.session, await_reward=True, deadline=0.01)
    proxy = await restart(*settings, admit=100)
    now = await over(proxy, talk.session)
    stored = await proxy.recorded(talk.session["session_id"])
    reasons = {i.id: i.untrainable_reason for i in stored}
    assert reasons == dict.fromkeys(reasons) | dict.fromkeys(lost, "undelivered")
    if by == "grader alone":
        assert (now["state"], now["rewards_given"]) == ("rejected", 0)
        assert "only answers that are not known to have reached" in now["reason"]
        assert proxy.service.expiry.outcomes == {"rejected": 1}
        assert await proxy.lease(wait=0) == []
        return
    rewards = {first: 1} if by == "grader" else {stored[-1].id: 0.25}
    assert (now["state"], now["rewards"]) == ("finalized", rewards)
    # As the next process reads it.
    proxy = await restart(*settings)
    (trajectory,) = await proxy.lease()
    found = {i.id: (i.reward, i.trainable) for i in trajectory.interactions}
    assert found == {id: (rewards.get(id), id not in lost) for id in reasons}


async def test_eight_judgements_of_a_session_run_side_by_side() -> None:
    running = most = 0

    async def judge(*_: Any) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _turn in range(20):
            await asyncio.sleep(0)
        running -= 1
        return 1.0

    calls = [{"id": f"c{k}", "next_messages": [[user("a")]]} for k in range(10)]
    found = await next_message(judge)({"interactions": calls})
    assert found == {call["id"]: {"next_message": 1.0} for call in calls}
    assert most == 8


async def test_rewards_of_more_calls_than_a_session_has_room_for_reject_it(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy_ext.sessions.rewards.MAX_GIVEN", 1)
    proxy = await grading(start, "of_calls")
    talk, _ = await Talk.begin(proxy, metadata={"rewards": {"last": {"a": 1, "b": 0.5}}})
    now = await talk.graded()
    assert (now["state"], now["rewards_given"], now["rewards"]) == ("rejected", 0, {})


async def test_two_agents_with_the_same_words_are_not_taken_for_each_other(proxy: Proxy) -> None:
    """A branch is found by its messages alone only if one answer of its own role has them."""
    talk = Talk(proxy, await proxy.open())

    def system(text: str) -> dict[str, str]:
        return {"role": "system", "content": text}

    one, other = [await talk.say([system(who), *HELLO]) for who in ("You sell.", "You buy.")]
    assert talk.after[one][1:] == talk.after[other][1:], "both said the same"
    lost = await talk.say([system("Be kind."), *talk.after[one][1:], user("a")])
    assert await talk.next_messages() == {one: [], other: [], lost: []}


async def test_the_documented_example_grades(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,) = re.findall(
        r"<!-- test: next-message -->\n```python\n(.*?)```", PAGE.read_text(), re.S
    )
    (tmp_path / "documented_graders.py").write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    proxy = await grading(
        start, "documented_graders.score", "sessions.reward_weights={reaction: 0.5}"
    )
    talk, first = await Talk.begin(proxy)
    second = await talk.reply(first, user("That is WRONG."))
    third = await talk.reply(second, user("Better. Thanks!"))
    await talk.reply(third, user("And now?"))
    assert (await talk.graded())["rewards"] == {first: -0.5, second: 0.5}
