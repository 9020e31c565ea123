"""`any-agent regrade`: recorded sessions graded by another function, and both rewards compared."""

from __future__ import annotations

import asyncio
import io
import json
from contextlib import redirect_stderr, redirect_stdout
from typing import Any, NamedTuple

import pytest

from any_agent.config import load_config
from any_agent.rundir.layout import RunDir
from any_agent.types import SessionMode, SessionState
from proxy_ext.export.reader import RunSessions
from proxy_ext.export.regrade import Regraded, main, summary_of
from proxy_ext.export.regraded_sessions import RegradedSessions
from proxy_ext.journal import SetReward
from proxy_ext.journal.reader import ExportFilter
from tests.support.archives import Rank, settings_of

GRADERS = """
import os, time

def said(session):
    return session["interactions"][-1]["output_message"]["content"]

def counted(session):
    with open("graded.txt", "a") as file:
        file.write(session["session_id"] + "\\n")
    return float(len(said(session)))

def by_name(session):
    assert session["interactions"][0]["messages"] == [{"role": "user", "content": "How long?"}]
    return {"length": len(said(session)), "polite": 0.5}

def ill(session):
    match said(session):
        case "a": raise ValueError("no a")
        case "bb": return float("nan")
        case "ccc": os._exit(3)
        case "dddd": time.sleep(60)
    return 1.0

def by_users(session):
    return {one["text"]: one["value"] for one in session["feedback"]}[session["task_id"]]

def of_calls(session):
    first, second = session["interactions"]
    if second["output_message"]["content"] == "none":
        return {}
    said = [message["content"] for each in first["next_messages"] for message in each]
    return {first["id"]: {"asked": float(len(said[0])), "odd": 1.0}, second["id"]: {"odd": -1.0}}

not_a_function = 7
"""


async def recorded(rank: Rank, **sessions: tuple[str, float | None]) -> None:
    for id, (answer, reward) in sessions.items():
        await rank.add_turns(id, ("How long?", answer), reward=reward, task_id="t", group_id="g")


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


async def regrade(rank: Rank, grader: str, *arguments: str) -> Done:
    """Run the program beside a module of graders."""
    folder = rank.folder.parent
    (folder / "my_graders.py").write_text(GRADERS)
    root = next(p for p in rank.folder.parents if (p / "u").exists())
    command = [grader, *arguments, *settings_of(root)]
    with (
        pytest.MonkeyPatch.context() as patch,
        redirect_stdout(io.StringIO()) as out,
        redirect_stderr(io.StringIO()) as said,
    ):
        patch.chdir(folder)
        # Of the workers.
        patch.syspath_prepend(folder)
        code = await asyncio.to_thread(main, command)
    return Done(code, out.getvalue(), said.getvalue())


def lines_of(rank: Rank) -> dict[str, dict[str, Any]]:
    head, *lines = (rank.folder.parent / "regraded.jsonl").read_text().splitlines()
    assert "regraded_by" in json.loads(head)
    return {line["session_id"]: line for line in map(json.loads, lines)}


async def test_each_session_has_its_old_and_its_new_reward(rank: Rank) -> None:
    await recorded(rank, s1=("a", 3.0), s2=("bb", 2.0), s3=("ccc", 1.0), s4=("dddd", None))
    await rank.add("archived")
    await rank.archive.sweep()
    assert rank.files
    done = await regrade(rank, "my_graders:counted", "--json")
    assert done.returncode == 0, done.stderr
    found = lines_of(rank)
    assert found.pop("archived")["old"] == 2.0
    assert {id: (line["old"], line["new"]) for id, line in found.items()} == {
        **{"s1": (3.0, 1.0), "s2": (2.0, 2.0), "s3": (1.0, 3.0), "s4": (None, 4.0)}
    }
    figures = json.loads(done.stdout)
    assert (figures["sessions"], figures["with_both"], figures["problems"]) == (5, 4, 0)
    assert (figures["pairs"], figures["flipped_pairs"]) == (3, 3)


async def test_a_grader_reads_what_users_thought(rank: Rank) -> None:
    await recorded(rank, s1=("a", 3.0))
    for text, value in (("odd", None), ("t", -0.5)):
        given = SetReward("s1", None, "feedback", value, "user", 5.0, value, text)
        await rank.journal.commit(given, SetReward("s1", None, "style", 7.0, "me", 5.0, 7.0))
    assert (await regrade(rank, "my_graders.by_users")).returncode == 0
    assert lines_of(rank)["s1"]["new"] == -0.5


async def test_a_grader_of_calls_gives_the_score_that_training_would_have(rank: Rank) -> None:
    await rank.add_turns("s1", ("How long?", "a"), ("More", "bb"), reward=5.0)
    await rank.add_turns("s2", ("How long?", "a"), ("More", "none"), reward=5.0)
    done = await regrade(rank, "my_graders.of_calls")
    assert done.returncode == 1
    found = lines_of(rank)
    # r(second) = -1; r(first) = len("More") + 1 + discount * r(second); the score is their mean.
    assert found["s1"]["new"] == (-1.0 + (4 + 1 + 1.0 * -1.0)) / 2
    assert found["s1"]["rewards"] == {
        "s1-0": {"asked": 4.0, "odd": 1.0},
        "s1-1": {"odd": -1.0},
    }
    assert (found["s2"]["new"], found["s2"]["problem"]) == (None, "it gave no reward")


async def test_an_interrupted_run_goes_on_where_it_was(rank: Rank) -> None:
    await recorded(rank, s1=("a", 3.0), s2=("bb", 2.0), s3=("ccc", 1.0))
    assert (await regrade(rank, "my_graders.counted", "--workers", "1")).returncode == 0
    path, log = rank.folder.parent / "regraded.jsonl", rank.folder.parent / "graded.txt"
    whole = path.read_text()
    first = json.loads(whole.splitlines()[1])["session_id"]
    # As a kill leaves it: one line and a part of another.
    path.write_text("\n".join(whole.splitlines()[:2]) + '\n{"session_id": "s')
    log.unlink()
    done = await regrade(rank, "my_graders.counted")
    assert done.returncode == 0 and "1 of them by an earlier run" in done.stdout
    assert sorted(log.read_text().split()) == sorted({"s1", "s2", "s3"} - {first})
    assert sorted(path.read_text().splitlines()) == sorted(whole.splitlines())
    other = await regrade(rank, "my_graders.by_name")
    assert other.returncode == 2 and "--out" in other.stderr
    assert sorted(path.read_text().splitlines()) == sorted(whole.splitlines())


async def test_parts_by_name_add_up_and_all_is_told_of_what_fails(rank: Rank) -> None:
    await recorded(rank, s1=("a", 3.0), s2=("bb", 2.0), s3=("ccc", 1.0), s4=("dddd", 0.0))
    await recorded(rank, s5=("eeeee", 0.0))
    await rank.add_turns("s6", ("How long?", {"reasoning_content": "Hm."}), task_id="t")
    done = await regrade(rank, "my_graders.ill", "--timeout", "2", "--out", "ill.jsonl")
    assert done.returncode == 1
    path = rank.folder.parent / "ill.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    problems = {line["session_id"]: line["problem"] for line in lines}
    reasons = ("no a", "nan", "exit code 3", "more than 2 s")
    for number, reason in enumerate(reasons, 1):
        assert reason in problems[f"s{number}"], problems
    assert problems["s5"] is None and "store_content" in problems["s6"]
    # What failed is graded again, by the same function: here all but s6 had no reason to.
    named = await regrade(rank, "my_graders.by_name")
    assert named.returncode == 1, named.stderr
    found = lines_of(rank)
    assert found["s2"]["rewards"] == {"length": 2, "polite": 0.5} and found["s2"]["new"] == 2.5


async def test_a_grader_or_a_file_that_is_none_is_refused_before_anything_is_read(
    rank: Rank,
) -> None:
    await recorded(rank, s1=("a", 3.0))
    for grader in ("my_graders.nothing", "nowhere.f", "my_graders.not_a_function"):
        done = await regrade(rank, grader)
        assert done.returncode == 2 and grader in done.stderr and "Traceback" not in done.stderr
    for out in (".", "nowhere/regraded.jsonl", "-", "/dev/null"):
        done = await regrade(rank, "my_graders.counted", "--out", out)
        assert done.returncode == 2 and "--out" in done.stderr, out
    assert not (rank.folder.parent / "regraded.jsonl").exists()


def test_the_summary_counts_ties_flips_and_groups_that_teach() -> None:
    given = [("a", "g", 0.0, 1.0), ("b", "g", 1.0, 1.0), ("c", "h", 0.5, 0.0), ("d", "h", 0.5, 1.0)]
    figures = summary_of([Regraded(*one) for one in (*given, ("e", "i", None, 1.0))])
    assert (figures["groups"], figures["groups_alike_before"], figures["groups_alike_after"]) == (
        *(2, 1, 1),
    )
    assert (figures["pairs"], figures["flipped_pairs"], figures["changed"]) == (1, 0, 3)
    assert (figures["old_mean"], figures["new_mean"]) == (0.5, 0.75)
    assert figures["most_changed"][0] == {"session_id": "a", "old": 0.0, "new": 1.0}
    assert summary_of([])["rank_correlation"] is None
    turned = summary_of([Regraded(str(k), "g", float(k), -float(k)) for k in range(4)])
    assert turned["rank_correlation"] == pytest.approx(-1.0)
    assert (turned["pairs"], turned["flipped_pairs"]) == (6, 6)


async def test_only_ended_training_sessions_are_trained_on_with_their_new_rewards(
    rank: Rank,
) -> None:
    await rank.add_turns("final", ("How long?", "bb"), reward=1.0)
    await rank.add_turns("by-call", ("How long?", "bb"), ("And now?", "c"), reward=1.0)
    await rank.add_turns("open", state=SessionState.OPEN)
    await rank.add_turns("later", reward=1.0)
    await rank.add_turns("eval", mode=SessionMode.EVAL)
    await rank.add_turns("vetoed", state=SessionState.REJECTED, reason="vetoed by a judge")
    await rank.add_turns("ungraded", reward=1.0)
    graded: dict[str, Any] = {"state": "trained", "new": 7.0, "rewards": {"a": 7.0, "b": 9.0}}
    lines = dict.fromkeys(("final", "open", "eval", "vetoed"), graded)
    lines["by-call"] = graded | {"rewards": {"by-call-1": {"a": 0.5, "b": 2.0}}}
    lines["later"] = graded | {"state": "open"}
    settings = load_config(None, ["sessions.reward_weights={a: 1, b: 10}"], environ={})
    run = RunSessions(RunDir(rank.folder), [0], ExportFilter(), settings)
    sessions = RegradedSessions(run, lines)
    found = {one.session_id: one for one in sessions}
    assert found.keys() == {"final", "by-call"}
    assert found["final"].final_reward == 7.0
    assert [call.reward for call in found["final"].interactions] == [None]
    assert found["by-call"].final_reward is None
    assert [call.reward for call in found["by-call"].interactions] == [None, 20.5]
    assert sum(sessions.left_out.values()) == 4


async def test_a_session_that_went_on_is_graded_again(rank: Rank) -> None:
    await rank.add_turns("s1", ("How long?", "a"), state=SessionState.OPEN)
    assert (await regrade(rank, "my_graders.counted")).returncode == 0
    assert lines_of(rank)["s1"]["new"] == 1.0
    await rank.add_call("s1-1", "s1", [], {"content": "bbb"}, parent="s1-0")
    assert (await regrade(rank, "my_graders.counted")).returncode == 0
    assert lines_of(rank)["s1"]["new"] == 3.0


async def test_a_name_without_a_weight_is_no_reward(rank: Rank) -> None:
    await recorded(rank, s1=("a", 3.0))
    done = await regrade(rank, "my_graders.by_name", "sessions.reward_weights={polite: 1}")
    assert done.returncode == 1
    assert "no weight of 'length'" in lines_of(rank)["s1"]["problem"]
