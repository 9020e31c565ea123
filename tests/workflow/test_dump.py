from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from any_agent.config import load_config
from any_agent.types import Row
from any_agent.workflow import rows_of
from any_agent.workflow.dump import TrajectoryDump, file_name
from any_agent.workflow.tensors import rows_in
from tests.support.workflow.tensors import tensors


def decode(ids: list[int]) -> str:
    return "".join(chr(ord("a") + i) for i in ids)


def made(**changes: Any) -> list[Row]:
    return [row for row, _ in rows_of(tensors([0, 1, 2, 3], [0, 1, 2], reward=0.5, **changes))]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


async def test_a_dump_has_the_documented_file_and_fields(tmp_path: Path) -> None:
    config = load_config(
        None,
        [f"root={tmp_path}", "experiment=e", "trial=t", "user=u", "rollout.dump_to_file=true"],
        environ={},
    )
    dump = TrajectoryDump.of(config, decode)
    assert dump is not None
    rows = made()
    rows[0]["versions"][3] = 5
    await dump.write(rows, task_id=42, is_eval=False)
    first = {
        "task_id": 42,
        "sample_idx": 0,
        "seqlen": 4,
        "prompt_len": 2,
        "head_version": 3,
        "tail_version": 5,
        "reward": 0.5,
        "prompt": "ab",
        "completion": "cd",
    }
    second = {"sample_idx": 1, "seqlen": 3, "tail_version": 3, "completion": "c"}
    written = lines(tmp_path / "u" / "e" / "t" / "rollout" / "5" / "42.jsonl")
    assert written == [first, first | second]


async def test_dumped_evaluations_lie_apart_and_a_repeated_task_is_appended(tmp_path: Path) -> None:
    dump = TrajectoryDump(tmp_path, decode)
    for _ in range(2):
        await dump.write(made()[:1], task_id="word", is_eval=True)
    assert len(lines(tmp_path / "eval-rollout" / "3" / "word.jsonl")) == 2
    assert not (tmp_path / "rollout").exists()
    given = tensors([0, 1, 2], loss_mask=None, logprobs=None, versions=None, rewards=None)
    path = dump.write_now(rows_in(given), task_id=1, is_eval=False)
    assert path == tmp_path / "rollout" / "-1" / "1.jsonl"
    (line,) = lines(path)
    assert (line["prompt"], line["completion"], line["reward"]) == ("abc", "", None)
    assert dump.write_now([], task_id=2, is_eval=False) is None, "there is nothing to write"


def test_dumps_are_written_to_the_folder_that_is_chosen(tmp_path: Path) -> None:
    given = [f"rollout.fileroot={tmp_path}", "experiment=e", "trial=t"]
    assert TrajectoryDump.of(load_config(None, given, environ={}), decode) is None
    on = load_config(None, [*given, "rollout.dump_to_file=true"], environ={})
    dump = TrajectoryDump.of(on, decode)
    assert dump is not None
    path = dump.write_now(made(), task_id=1, is_eval=False)
    assert path == tmp_path / "e" / "t" / "rollout" / "3" / "1.jsonl"


def test_what_was_sampled_and_is_not_trained_on_is_no_prompt(tmp_path: Path) -> None:
    (row, _) = made()
    row["loss_mask"][:] = 0
    # Half characters can be written, too.
    dump = TrajectoryDump(tmp_path, lambda ids: f"{decode(ids)}\ud83d \u2028")
    path = dump.write_now([row], task_id=1, is_eval=False)
    assert path is not None
    text = path.read_text(encoding="utf-8")
    assert len(text.split("\n")) == 2
    line = json.loads(text)
    assert (line["prompt_len"], line["completion"][:2], line["tail_version"]) == (2, "cd", 3)


async def test_dumps_that_fail_are_logged_once_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "rollout").write_text("a file in its place")
    dump = TrajectoryDump(tmp_path, decode)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            await dump.write(made(), task_id=1, is_eval=False)
    assert dump.failures == 3
    (record,) = caplog.records
    assert str(tmp_path) in record.message and "training goes on" in record.message

    def broken(ids: list[int]) -> str:
        raise KeyError(ids[0])

    await TrajectoryDump(tmp_path / "other", broken).write(made(), task_id=1, is_eval=False)


def test_no_task_id_leaves_the_folder() -> None:
    for task_id, name in (
        (42, "42.jsonl"),
        ("math-7", "math-7.jsonl"),
        ("../../etc/passwd", "%2E.%2F..%2Fetc%2Fpasswd.jsonl"),
        ("..", "%2E..jsonl"),
        ("a b/é", "a%20b%2F%C3%A9.jsonl"),
        ("x" * 500, "x" * 200 + ".jsonl"),
    ):
        assert file_name(task_id) == name
