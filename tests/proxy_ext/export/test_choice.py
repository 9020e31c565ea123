"""`any-agent export --format sft`: the best sessions of each group, for `any-agent sft`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from any_agent.chat import ChatFormat
from any_agent.types import Continuation, SessionState
from tests.support.archives import ExportedHere, Rank, export_trial
from trainer.sft import read_examples


async def fill_groups(rank: Rank) -> None:
    for id, group, reward in (
        ("a0", "a", 0.5),
        ("b0", "b", 0.0),
        ("a1", "a", 1.0),
        ("a2", "a", 1.0),
        ("b1", "b", 0.25),
    ):
        await rank.add_turns(id, group_id=group, reward=reward)
    await rank.add_turns("t0", task_id="t", reward=2.0)
    await rank.add_turns("t1", task_id="t", reward=3.0)
    await rank.add_turns("alone", reward=-1.0)


def ids(done: ExportedHere) -> list[str]:
    assert done.code == 0, done.said
    return [line["session_id"] for line in done.lines]


async def test_the_best_of_each_group(rank: Rank, tmp_path: Path) -> None:
    await fill_groups(rank)
    done = export_trial(tmp_path, "--format", "sft")
    assert ids(done) == ["a1", "b1", "t1", "alone"]
    assert "4 sessions (0 of them from archives), 4 rows" in done.said
    two = ["a1", "b0", "a2", "b1", "t0", "t1", "alone"]
    assert sorted(ids(export_trial(tmp_path, "--format", "sft", "--best", "2"))) == sorted(two)
    least = ("--min-reward", "0.5", "--best", "3")
    assert ids(export_trial(tmp_path, "--format", "sft", *least)) == ["a0", "a1", "a2", "t0", "t1"]


async def test_what_may_be_chosen(rank: Rank, tmp_path: Path) -> None:
    group: dict[str, Any] = {"group_id": "g"}
    await rank.add_turns("eval", reward=9, mode="eval", state=SessionState.EVALUATED, **group)
    await rank.add_turns("open", reward=9, state=SessionState.OPEN, **group)
    await rank.add_turns("aborted", reward=9, state=SessionState.ABORTED, **group)
    vetoed = {"state": SessionState.REJECTED, "reason": "vetoed: by the operator"}
    await rank.add_turns("vetoed", reward=9, **vetoed, **group)
    await rank.add_turns("unrewarded", reward=None, **group)
    await rank.add_turns("untrained", reward=9, call={"untrainable_reason": "grammar"}, **group)
    same = {"state": SessionState.REJECTED, "reason": "zero_variance"}
    await rank.add_turns("good", reward=1, **same, **group)
    assert ids(export_trial(tmp_path, "--format", "sft", "--best", "9")) == ["good"]
    chosen = ("--state", "evaluated", "--state", "rejected")
    assert ids(export_trial(tmp_path, "--format", "sft", *chosen, "--best", "9")) == [
        "eval",
        "good",
    ]


async def test_a_session_that_cannot_be_written_is_not_the_best(rank: Rank, tmp_path: Path) -> None:
    branch = {"continuation": Continuation.BRANCH, "branch_reason": "template_declines"}
    await rank.add_turns("a", reward=2, call=branch, group_id="g")
    await rank.add_turns("b", reward=1, group_id="g")
    done = export_trial(tmp_path, "--format", "sft")
    assert [line["session_id"] for line in done.lines] == ["b"]
    assert done.code == 1 and "session a is left out" in done.said
    assert "1 problems" in done.said
    assert ids(export_trial(tmp_path, "--format", "sft", "--style", "messages")) == ["a"]


@pytest.mark.parametrize("style", ["concat", "individual", "messages"])
async def test_sft_reads_what_is_written_for_it(
    rank: Rank, tmp_path: Path, chat: ChatFormat, style: str
) -> None:
    await rank.add_turns("a", ("1", "2"), ("3", "4"), reward=1.5, group_id="g")
    await rank.add_turns("b", reward=1, group_id="g")
    out = tmp_path / "best.jsonl"
    assert export_trial(tmp_path, "--format", "sft", "--style", style, "--out", str(out)).code == 0
    examples = read_examples(str(out), chat, chat.vocab_size)
    assert [e.task for e in examples] == ["g"] * len(examples)
    assert [e.reward for e in examples] == [1.5] * len(examples)
    assert len(examples) == (2 if style == "individual" else 1)
    trained = sum(int(row["loss_mask"].sum()) for e in examples for row in e.rows)
    # Two answers, each of two tokens; those of the messages are a digit and the turn's end.
    assert trained == 4


@pytest.mark.service
async def test_the_command_trains_on_them(rank: Rank, tmp_path: Path, tiny_model_dir: Path) -> None:
    await fill_groups(rank)
    out = tmp_path / "best.jsonl"
    assert export_trial(tmp_path, "--format", "sft", "--out", str(out)).code == 0
    tune(out, tiny_model_dir, tmp_path / "model")


def tune(data: Path, model: Path, out: Path) -> None:
    options = ("--data", str(data), "--model", str(model), "--out", str(out))
    command = [sys.executable, "-m", "any_agent.cli", "sft", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "data      4 examples, 8 tokens trained on" in done.stdout
