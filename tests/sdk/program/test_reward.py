"""Where rewards of programs come from, and what is said of what is none."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from any_agent.errors import AgentFailed, ConfigError
from any_agent.protocol.rl import InteractionContent, SessionContent
from any_agent.sdk.program.process import Program
from any_agent.sdk.program.reward import Reward, RewardFile, RewardSource, last_line, reward_in
from tests.support.errors import fails_with

SAID = SessionContent(
    session_id="s-0-1",
    mode="train",
    task_id=None,
    metadata={"answer": "5"},
    interactions=[
        InteractionContent(
            id="a",
            parent_id=None,
            message_delta=[{"role": "user", "content": "2 + 3?"}],
            output_message={"role": "assistant", "content": "5."},
            finish_reason="stop",
        )
    ],
)


async def reward_from(source: RewardSource, folder: Path, printed: str = "") -> Reward:
    out = folder / "s-0-1.out"
    out.write_text(printed)
    program = Program([], {}, f"ANY_AGENT_SESSION_ID={folder}", out, folder / "s-0-1.err")
    return await source.reward(program, {"ANY_AGENT_RUN_INDEX": "3"}, SAID)


def test_the_last_line_of_the_output_is_the_reward(tmp_path: Path) -> None:
    file = tmp_path / "reward"
    rewards: dict[str, Reward] = {
        "1": 1.0,
        "checked\n  0.25 \n\n": 0.25,
        ".5": 0.5,
        "-1e-3\n": -0.001,
        '{"correct": 1, "format": 0.2}': {"correct": 1.0, "format": 0.2},
    }
    for text, reward in rewards.items():
        file.write_text(text)
        assert reward_in(file, "it") == reward


def test_output_that_is_no_reward_is_named_in_the_error(tmp_path: Path) -> None:
    file = tmp_path / "reward"
    for text, said in (
        ("", "it says nothing: its last line must be a number"),
        ("1\nvery good", "it says very good: that is no number"),
        ("nan", "it says nan: a reward must be a finite number"),
        ("-inf", "finite"),
        ("2e6", "must lie between"),
        ("true", "must be a number"),
        ("[1]", "must be a number"),
        ('{"a b": 1}', "is not a valid name"),
        ("[" * 100_000, "that is no number"),
    ):
        file.write_text(text)
        with fails_with(AgentFailed, said) as refused:
            reward_in(file, "it")
        assert len(refused.value.message) < 400


def test_only_the_end_of_a_long_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "long"
    file.write_bytes(b"\xff" * 300_000 + b"\n7\n")
    assert last_line(file) == "7"
    os.mkfifo(tmp_path / "pipe")
    assert last_line(tmp_path / "pipe") == last_line(tmp_path) == last_line(tmp_path / "no") == ""


def test_a_file_that_was_there_before_is_no_reward(tmp_path: Path) -> None:
    path = tmp_path / "reward"
    path.write_text("1")
    file = RewardFile(path)
    assert file.read() is None
    path.write_text("1")
    assert file.read() == 1.0
    new = RewardFile(tmp_path / "new")
    assert new.read() is None
    new.path.write_text("bad")
    with fails_with(AgentFailed, new.path, "bad"):
        new.read()


async def test_a_command_reads_what_was_printed(tmp_path: Path) -> None:
    source = RewardSource(command='wc -l; echo "$ANY_AGENT_RUN_INDEX$MINE"', env={"MINE": "9"})
    assert await reward_from(source, tmp_path, "one\ntwo\n") == 39.0
    source = RewardSource(command="echo said; grep -c two")
    assert await reward_from(source, tmp_path, "one\ntwo\n") == 1.0


GRADER = """
import os, time

def answered(session):
    print("graded", session["session_id"])
    talk = session["interactions"][-1]
    assert [m["role"] for m in talk["messages"]] == ["user"]
    return float(session["metadata"]["answer"] in talk["output_message"]["content"])

async def named(session):
    return {"correct": 1, "format": 0.5}

def raises(session):
    raise RuntimeError("no judge is there")

def dies(session):
    os._exit(0)

def hangs(session):
    time.sleep(600)

text = "no function"
"""


@pytest.fixture
def grader_env(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "my_graders.py").write_text(GRADER)
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    return {**os.environ, "PYTHONPATH": path}


@pytest.mark.parametrize(
    ("name", "reward"), [("answered", 1.0), ("named", {"correct": 1.0, "format": 0.5})]
)
async def test_a_grader_is_given_what_was_said(
    tmp_path: Path, grader_env: dict[str, str], name: str, reward: object
) -> None:
    source = RewardSource(grader=f"my_graders.{name}", env=grader_env)
    await source.check(tmp_path)
    assert await reward_from(source, tmp_path) == reward


async def test_a_command_or_grader_that_gives_none_is_said(
    tmp_path: Path, grader_env: dict[str, str]
) -> None:
    grader = "the grader my_graders."
    refused = (
        ({"command": "echo fine"}, "the reward command says fine: that is no number"),
        ({"command": ":"}, "the reward command says nothing"),
        ({"command": "echo 1; echo no judge >&2; exit 3"}, "ended with exit code 3: no judge"),
        ({"command": "sleep 600", "limit": 0.5}, "the reward command took more than 0.5 s"),
        ({"command": "kill -9 $$"}, "the reward command was killed by SIGKILL"),
        ({"grader": "my_graders.raises"}, f"{grader}raises ended with exit code 1: RuntimeError"),
        ({"grader": "my_graders.dies"}, f"{grader}dies says nothing"),
        ({"grader": "my_graders.hangs", "limit": 3}, f"{grader}hangs took more than 3 s"),
    )
    for k, (source, said) in enumerate(refused):
        options: Any = {"env": grader_env, "limit": 60} | source
        (folder := tmp_path / str(k)).mkdir()
        with fails_with(AgentFailed, said):
            await reward_from(RewardSource(**options), folder)


async def test_a_grader_that_is_not_there_is_refused_before_anything_runs(
    tmp_path: Path, grader_env: dict[str, str]
) -> None:
    for name, said in (
        ("grader", "write it as module.function"),
        ("my_graders.missing", "AttributeError: module 'my_graders' has no attribute 'missing'"),
        ("no_such_module.grade", "No module named 'no_such_module'"),
        ("my_graders.text", "my_graders.text cannot be called"),
    ):
        with fails_with(ConfigError, said):
            await RewardSource(grader=name, env=grader_env).check(tmp_path)
