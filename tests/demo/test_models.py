"""The conversations that the taught tiny models learn from."""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from any_agent.chat import load_chat_format
from any_agent.demo import model
from any_agent.demo.models import judge, sums
from any_agent.demo.models.teach import Author, Conversation, Row

END = "<|im_end|>"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made as a user's, but hardly taught."""
    threads = torch.get_num_threads()
    try:
        return sums.make_sums_model(tmp_path_factory.mktemp("sums") / "model", steps=1)
    finally:
        torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=[False, None], ids=["no thoughts", "as the template has it"])
def author(path: Path, request: pytest.FixtureRequest) -> Author:
    return Author(load_chat_format(str(path), enable_thinking=request.param))


def said(author: Author, row: Row) -> list[str]:
    """What the model learns to say in it, turn by turn."""
    text = author.chat.decode([label for label in row.labels if label >= 0])
    return text.removesuffix(END).split(END)


def asked(author: Author, row: Row) -> tuple[int, int]:
    """The two numbers of its question."""
    question = author.chat.decode(row.ids).rpartition("<|im_start|>user\n")
    while "<tool_response>" in question[2] or not re.search(r"\d\D+\d", question[2]):
        question = question[0].rpartition("<|im_start|>user\n")
    a, b = re.findall(r"\d+", question[2].partition(END)[0])
    return int(a), int(b)


@pytest.mark.service
def test_a_talk_is_what_the_service_would_render(author: Author) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is 3 + 4?"}]
    tools: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>'
    row = Conversation(author, messages, tools).says(call).hears("tool", "7").says("7").row
    function = {"name": "add", "arguments": json.dumps({"a": 3, "b": 4})}
    messages += [
        {
            "role": "assistant",
            "tool_calls": [{"id": "x", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "x", "content": "7"},
    ]
    rendered = author.chat.decode(author.chat.render(messages, tools)) + f"7{END}"
    # The template takes the empty block of thoughts out of earlier turns; the service does not.
    empty = "<think>\n\n</think>\n\n"
    before = rendered.count(empty)
    text = author.chat.decode(row.ids)
    assert text.count(empty) == 2 * before
    assert text.replace(empty, "", before) == rendered
    assert said(author, row) == [call, "7"]
    assert all(label in (-100, id) for label, id in zip(row.labels, row.ids, strict=True))


@pytest.mark.parametrize("kind", [sums.plain_talk, sums.tool_talk, sums.thinking_talk])
def test_without_noise_every_answer_is_right(author: Author, kind: Any) -> None:
    rng = Random(0)
    for _ in range(40):
        row = kind(author, rng, 0.0).row
        a, b = asked(author, row)
        answers = said(author, row)
        assert re.findall(r"\d+", answers[-1]) == [str(a + b)]
        if kind is sums.tool_talk:
            made = json.loads(answers[0].split("\n")[1])
            assert made["arguments"] == {"a": a, "b": b}
            assert f'"name": "{made["name"]}"' in author.chat.decode(row.ids).partition(END)[0]


def test_a_judge_is_taught_what_is_right(path: Path) -> None:
    author, rng = Author(load_chat_format(str(path))), Random(0)
    verdicts = []
    for _ in range(100):
        row = judge.verdict_row(author, rng)
        text = author.chat.decode(row.ids)
        answer, given = re.findall(r"(?:Right|Given) answer: (\d+)", text)
        verdicts.append(said(author, row) == ["yes"])
        assert verdicts[-1] == (answer == given)
    assert 30 < sum(verdicts) < 80


def test_the_command_tells_its_progress_and_all_may_read_its_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    assert model.main([str(folder), "--warmup-steps", "0"]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert "half a minute of one core" in first and last == f"made {folder}"
    report = model.now_and_then(iter((0.0, 1.0, 2.0, 7.0, 12.0)).__next__)
    for step in range(4):
        report(f"step {step} of 4")
    said = capsys.readouterr().out.splitlines()
    assert said == [f"step {k} of 4, after {s} s" for k, s in ((0, 1), (2, 7), (3, 12))]
    files = list(folder.iterdir())
    assert "model.safetensors" in {file.name for file in files}
    assert all(file.stat().st_mode & 0o444 == 0o444 for file in files)


def test_the_command_overwrites_nothing_unasked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    mine = [str(folder), "--warmup-steps", "0"]
    assert model.main(mine) == 0
    before = {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert model.main(mine) == 0, "the README's line may be pasted twice"
    assert model.main([*mine, "--seed", "1"]) == 2
    assert {file: file.stat().st_mtime_ns for file in folder.iterdir()} == before
    assert "--overwrite" in capsys.readouterr().err
    assert model.main([*mine, "--seed", "1", "--overwrite"]) == 0
    other = tmp_path / "other"
    other.write_text("mine")
    assert model.main([str(other), "--warmup-steps", "0"]) == 2
    assert other.read_text() == "mine"
