"""`any-agent export --format preferences`: pairs within a group, as TRL's DPOTrainer takes them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest

from any_agent.types import SessionState
from proxy_ext.journal import PutInteraction, PutSession
from tests.support.archives import CALL, TOOLS, Rank, export_trial
from tests.support.journal import make_interaction, make_row


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


async def test_pairs_of_a_group(rank: Rank, tmp_path: Path) -> None:
    await rank.add_turns("worst", ("q", "no"), reward=0, group_id="g", task_id="t")
    await rank.add_turns("best", ("q", "yes"), reward=1, group_id="g", task_id="t")
    await rank.add_turns("good", ("q", "maybe"), reward=0.5, group_id="g", task_id="t")
    await rank.add_turns("bad", ("q", "never"), reward=0.25, group_id="g", task_id="t")
    for k in range(2):
        await rank.add_turns(f"same{k}", ("q", f"{k}"), reward=1, group_id="same")
    await rank.archive.sweep()
    done = export_trial(tmp_path, "--format", "preferences")
    assert done.code == 0, done.said
    assert done.lines == [
        {
            "prompt": [user("q")],
            "chosen": [assistant("yes")],
            "rejected": [assistant("no")],
            "tools": None,
            "score_chosen": 1.0,
            "score_rejected": 0.0,
            "chosen_session_id": "best",
            "rejected_session_id": "worst",
            "group_id": "g",
            "task_id": "t",
        }
    ]
    assert "1 pairs" in done.said

    def pairs(*options: str) -> set[tuple[str, str]]:
        lines = export_trial(tmp_path, "--format", "preferences", *options).lines
        return {(line["chosen_session_id"], line["rejected_session_id"]) for line in lines}

    both = {("best", "worst"), ("good", "bad")}
    assert pairs("--best", "2") == pairs("--best", "9") == both
    assert pairs("--best", "9", "--margin", "0.25") == both
    assert pairs("--best", "9", "--margin", "0.5") == {("best", "worst")}


async def test_a_pair_begins_where_its_conversations_differ(rank: Rank, tmp_path: Path) -> None:
    called = {"content": None, "tool_calls": [CALL]}
    again = {"content": "", "tool_calls": [{**CALL, "id": "c2"}]}
    with_tools: dict[str, Any] = {"group_id": "g", "call": {"tools": TOOLS}}
    # The same call, spelled in another way.
    await rank.add_turns("a", ("q", called), ("2", "right"), ("more", "x"), reward=1, **with_tools)
    await rank.add_turns("b", ("q", again), ("2", "wrong"), reward=0, **with_tools)
    (line,) = export_trial(tmp_path, "--format", "preferences").lines
    call = {**CALL, "function": {"name": "add", "arguments": {"a": 1}}}
    first = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert line["prompt"] == [user("q"), first, user("2")]
    # What others say later is no answer.
    assert (line["chosen"], line["rejected"]) == ([assistant("right")], [assistant("wrong")])
    assert line["tools"] == TOOLS


async def test_pairs_that_prefer_nothing_of_the_model(rank: Rank, tmp_path: Path) -> None:
    # They differ first in what the user said; one is the beginning of the other; other tools.
    for group, one, other, tools in (
        ("user", [("q", "x"), ("r", "y")], [("q", "x"), ("s", "y")], None),
        ("end", [("q", "x"), ("r", "y")], [("q", "x")], None),
        ("start", [("q", "x")], [("p", "x")], None),
        ("tools", [("q", "x")], [("q", "y")], TOOLS),
    ):
        await rank.add_turns(f"{group}0", *one, reward=1, group_id=group)
        await rank.add_turns(f"{group}1", *other, reward=0, group_id=group, call={"tools": tools})
    done = export_trial(tmp_path, "--format", "preferences")
    assert (done.code, done.lines) == (0, [])
    assert "3 left out: no answer of the model is where they first differ" in done.said
    assert "1 left out: they had different tools" in done.said


async def test_texts_that_were_not_kept(rank: Rank, tmp_path: Path) -> None:
    wordless = {"message_delta": [], "output_message": {"role": "assistant"}}
    for k in range(2):
        row = make_row(f"w{k}", state=SessionState.TRAINED, final_reward=float(k), group_id="g")
        call = replace(make_interaction(f"w{k}-0", f"w{k}"), **wordless)
        await rank.journal.commit(PutSession(row), PutInteraction(call))
    done = export_trial(tmp_path, "--format", "preferences")
    assert (done.code, done.lines) == (1, [])
    assert "its texts were not kept" in done.said


@pytest.mark.service
async def test_trl_trains_on_the_pairs(rank: Rank, tmp_path: Path, tiny_model_dir: Path) -> None:
    from trl import DPOConfig, DPOTrainer

    called = {"content": None, "tool_calls": [CALL]}
    for k in range(2):
        await rank.add_turns(f"a{k}", ("q", f"answer {k}"), reward=k, group_id="a")
        await rank.add_turns(f"b{k}", ("q", called), ("2", f"{k}"), reward=k, group_id="b")
    out = tmp_path / "pairs.jsonl"
    assert export_trial(tmp_path, "--format", "preferences", "--out", str(out)).code == 0
    cache = str(tmp_path / "cache")
    read = datasets.load_dataset("json", data_files=str(out), split="train", cache_dir=cache)
    assert len(read) == 2
    arguments = DPOConfig(
        str(tmp_path / "dpo"),
        max_steps=1,
        per_device_train_batch_size=2,
        use_cpu=True,
        bf16=False,
        report_to=[],
    )
    trainer = DPOTrainer(str(tiny_model_dir), args=arguments, train_dataset=read)
    texts = [
        [trainer.processing_class.decode(row[name]) for name in ("chosen_ids", "rejected_ids")]
        for row in trainer.train_dataset
    ]
    assert ["answer 1" in texts[0][0], "answer 0" in texts[0][1]] == [True, True], texts
    assert json.loads(out.read_text().splitlines()[1])["prompt"][1]["tool_calls"]
    assert trainer.train().training_loss > 0
