"""`any-agent export --format`: tables of rows, the best sessions of each group, pairs of them."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
from pyarrow import parquet

from any_agent.chat import ChatFormat
from any_agent.cli.export import FORMATS as DESCRIPTIONS
from any_agent.types import Continuation, SessionState
from proxy_ext.export import tables
from proxy_ext.export.formats import FORMATS
from proxy_ext.journal import PutInteraction, PutSession
from tests.support.archives import CALL, TOOLS, ExportedHere, Rank, export_trial
from tests.support.journal import make_interaction, make_row
from trainer.sft import read_examples


def test_each_format_is_described_and_an_unknown_one_gets_the_list(tmp_path: Path) -> None:
    assert [*FORMATS] == [*DESCRIPTIONS]
    done = export_trial(tmp_path, "--format", "csv")
    assert done.code == 2 and ", ".join(FORMATS) in done.said


@pytest.mark.parametrize("style", ["individual", "concat", "messages"])
async def test_tables_hold_what_the_lines_hold(
    rank: Rank, tmp_path: Path, style: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "BATCH_BYTES", 100)
    turns = (("1", "2"), ("3", {"content": None, "tool_calls": [CALL]}))
    await rank.add_turns("a", *turns, task_id="é", state=SessionState.ABORTED)
    await rank.add_turns("b", reward=None, state=SessionState.OPEN, step=3, group_id="g")
    await rank.archive.sweep()
    await rank.add_turns("c", call={"tools": TOOLS})
    cache = str(tmp_path / "cache")
    for task in ((), ("--task", "none")):
        lines = export_trial(tmp_path, "--style", style, *task).lines
        file, folder = tmp_path / f"{len(lines)}.parquet", tmp_path / f"{len(lines)}"
        for name, out in (("parquet", file), ("hf", folder)):
            options = ("--format", name, "--style", style, "--out", str(out), *task)
            done = export_trial(tmp_path, *options)
            assert (done.code, done.lines) == (0, []), done.said
            assert task or "3 sessions (1 of them from archives)" in done.said
        assert list(datasets.load_from_disk(str(folder))) == lines
        if task:
            assert parquet.read_table(file).num_rows == 0
        else:
            assert parquet.ParquetFile(file).num_row_groups > 1, "it is written in batches"
            files = {"data_files": str(file), "cache_dir": cache}
            assert list(datasets.load_dataset("parquet", split="train", **files)) == lines
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


async def test_a_missing_extra_is_named(
    rank: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rank.add_turns("a")
    monkeypatch.setitem(sys.modules, "datasets", None)
    for name, out in (("parquet", "rows.parquet"), ("hf", "rows")):
        done = export_trial(tmp_path, "--format", name, "--out", str(tmp_path / out))
        assert done.code == 2 and 'pip install "any-agent-rl[data]"' in done.said
        assert not (tmp_path / out).exists()


async def test_a_folder_must_be_new(rank: Rank, tmp_path: Path) -> None:
    await rank.add_turns("a")
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine").write_text("x")
    for out in (full, full / "mine", tmp_path / "none" / "below"):
        done = export_trial(tmp_path, "--format", "hf", "--out", str(out))
        assert done.code == 2 and f"--out {out}" in done.said, done.said
    assert (full / "mine").read_text() == "x"
    (full / "mine").unlink()
    assert export_trial(tmp_path, "--format", "hf", "--out", str(full)).code == 0
    assert len(datasets.load_from_disk(str(full))) == 1


def ids(done: ExportedHere) -> list[str]:
    assert done.code == 0, done.said
    return done.ids


async def test_sft_takes_the_best_sessions_of_each_group(rank: Rank, tmp_path: Path) -> None:
    rewards = {"a0": 0.5, "b0": 0.0, "a1": 1.0, "a2": 1.0, "b1": 0.25}
    for id, reward in rewards.items():
        await rank.add_turns(id, group_id=id[0], reward=reward)
    await rank.add_turns("t0", task_id="t", reward=2.0)
    await rank.add_turns("t1", task_id="t", reward=3.0)
    await rank.add_turns("alone", reward=-1.0)
    done = export_trial(tmp_path, "--format", "sft")
    assert ids(done) == ["a1", "b1", "t1", "alone"]
    assert "4 sessions (0 of them from archives), 4 rows" in done.said
    two = ["a1", "b0", "a2", "b1", "t0", "t1", "alone"]
    assert sorted(ids(export_trial(tmp_path, "--format", "sft", "--best", "2"))) == sorted(two)
    least = ("--min-reward", "0.5", "--best", "3")
    assert ids(export_trial(tmp_path, "--format", "sft", *least)) == ["a0", "a1", "a2", "t0", "t1"]


async def test_sft_leaves_out_eval_open_aborted_vetoed_and_unrewarded_sessions(
    rank: Rank, tmp_path: Path
) -> None:
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
    best = export_trial(tmp_path, "--format", "sft", *chosen, "--best", "9")
    assert ids(best) == ["eval", "good"]


async def test_a_session_that_cannot_be_written_is_not_the_best(rank: Rank, tmp_path: Path) -> None:
    branch = {"continuation": Continuation.BRANCH, "branch_reason": "template_declines"}
    await rank.add_turns("a", reward=2, call=branch, group_id="g")
    await rank.add_turns("b", reward=1, group_id="g")
    done = export_trial(tmp_path, "--format", "sft")
    assert (done.code, done.ids) == (1, ["b"]) and "session a is left out" in done.said
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


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


async def test_preferences_pair_the_best_of_a_group_with_the_worst(
    rank: Rank, tmp_path: Path
) -> None:
    await rank.add_turns("worst", ("q", "no"), reward=0, group_id="g", task_id="t")
    await rank.add_turns("best", ("q", "yes"), reward=1, group_id="g", task_id="t")
    await rank.add_turns("good", ("q", "maybe"), reward=0.5, group_id="g", task_id="t")
    await rank.add_turns("bad", ("q", "never"), reward=0.25, group_id="g", task_id="t")
    for k in range(2):
        await rank.add_turns(f"same{k}", ("q", f"{k}"), reward=1, group_id="same")
    await rank.archive.sweep()
    done = export_trial(tmp_path, "--format", "preferences")
    assert done.code == 0, done.said
    (line,) = done.lines
    assert line == {
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
    assert "3 left out" in done.said and "1 left out: they had different tools" in done.said


async def test_sessions_without_kept_texts_give_no_pairs_and_are_reported(
    rank: Rank, tmp_path: Path
) -> None:
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
