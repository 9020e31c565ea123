"""`any-agent export` for TRL and OpenAI: completions, conversations, preferences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NotRequired

import datasets
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolUnionParam
from pydantic import ConfigDict, TypeAdapter
from typing_extensions import TypedDict

from tests.support.archives import CALL, TOOLS, Rank, export_trial

CALLED: dict[str, Any] = {"content": None, "tool_calls": [CALL]}
OBJECTS = {**CALL, "function": {"name": "add", "arguments": {"a": 1}}}


class Input(TypedDict):
    """The fields of both of OpenAI's formats: chat completions' own types, and no other keys."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    messages: list[ChatCompletionMessageParam]
    tools: NotRequired[list[ChatCompletionToolUnionParam]]


class Preference(TypedDict):
    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    input: Input
    preferred_output: list[ChatCompletionMessageParam]
    non_preferred_output: list[ChatCompletionMessageParam]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


async def test_a_completion_is_one_answer_with_all_that_was_before_it(
    rank: Rank, tmp_path: Path
) -> None:
    await rank.add_turns("a", ("q", CALLED), ("2", "right"), reward=1, call={"tools": TOOLS})
    await rank.add_turns("worse", reward=0, group_id="g")
    await rank.add_turns("better", reward=1, group_id="g")
    done = export_trial(tmp_path, "--format", "prompt-completion")
    assert done.code == 0 and "2 sessions (0 of them from archives), 3 rows" in done.said
    first, second, third = done.lines
    call = {"role": "assistant", "content": "", "tool_calls": [OBJECTS]}
    assert (first["prompt"], first["completion"]) == ([user("q")], [call])
    assert second["prompt"] == [user("q"), call, user("2")]
    assert second["completion"] == [assistant("right")]
    assert (second["tools"], second["reward"], second["interaction_id"]) == (TOOLS, 1.0, "a-1")
    assert third["completion"] == [assistant("ho better")] and third["group_id"] == "g"


async def test_an_answer_of_two_conversations_is_one_completion(rank: Rank, tmp_path: Path) -> None:
    await rank.add_turns("a", ("q", "one"), ("r", "two"), reward=1)
    await rank.add_call("a-2", "a", [user("s")], {"content": "three"}, "a-0")
    lines = export_trial(tmp_path, "--format", "prompt-completion").lines
    assert [line["completion"][0]["content"] for line in lines] == ["one", "two", "three"]
    chats = export_trial(tmp_path, "--format", "openai-chat").lines
    weights = [
        [m.get("weight") for m in chat["messages"] if m["role"] == "assistant"] for chat in chats
    ]
    assert weights == [[None, None], [0, None]]


async def test_openai_trains_only_on_what_the_model_said_and_may_be_trained_on(
    rank: Rank, tmp_path: Path
) -> None:
    await rank.add_turns("a", ("q", CALLED), reward=1, call={"tools": TOOLS})
    # The agent rewrote its history: the earlier answer is not the model's.
    asked = [user("q"), {**assistant("mine"), "reasoning_content": "why"}, user("r")]
    await rank.add_call("a-1", "a", asked, {"content": "new"})
    await rank.add_turns("b", ("q", "x"), reward=1, call={"untrainable_reason": "grammar"})
    done = export_trial(tmp_path, "--format", "openai-chat")
    assert done.code == 0, done.said
    first, second = done.lines
    assert first == {
        "messages": [user("q"), {**assistant(""), "tool_calls": [CALL]}],
        "tools": TOOLS,
    }
    assert second["messages"] == [
        user("q"),
        {**assistant("mine"), "weight": 0},
        user("r"),
        assistant("new"),
    ]
    for line in done.lines:
        for message in line["messages"]:
            message.pop("weight", None)
        TypeAdapter(Input).validate_python(line)


async def test_openai_prefers_what_trl_prefers(rank: Rank, tmp_path: Path) -> None:
    with_tools: dict[str, Any] = {"group_id": "g", "call": {"tools": TOOLS}}
    await rank.add_turns("a", ("q", CALLED), ("2", "right"), reward=1, **with_tools)
    await rank.add_turns("b", ("q", CALLED), ("2", "wrong"), reward=0, **with_tools)
    await rank.archive.sweep()
    done = export_trial(tmp_path, "--format", "openai-preferences")
    assert done.code == 0 and "1 pairs" in done.said
    called = {**assistant(""), "tool_calls": [CALL]}
    assert done.lines == [
        {
            "input": {"messages": [user("q"), called, user("2")], "tools": TOOLS},
            "preferred_output": [assistant("right")],
            "non_preferred_output": [assistant("wrong")],
        }
    ]
    TypeAdapter(Preference).validate_python(done.lines[0])


@pytest.mark.service
async def test_trl_trains_on_the_completions(
    rank: Rank, tmp_path: Path, tiny_model_dir: Path
) -> None:
    from trl import SFTConfig, SFTTrainer

    await rank.add_turns("a", ("q", "answer 1"), ("r", CALLED), reward=1, call={"tools": TOOLS})
    await rank.add_turns("b", ("q", "answer 2"), reward=1)
    out = tmp_path / "completions.jsonl"
    done = export_trial(tmp_path, "--format", "prompt-completion", "--out", str(out))
    assert done.code == 0, done.said
    cache = str(tmp_path / "cache")
    read = datasets.load_dataset("json", data_files=str(out), split="train", cache_dir=cache)
    assert len(read) == 3
    options = {"max_steps": 1, "per_device_train_batch_size": 3, "use_cpu": True, "bf16": False}
    arguments = SFTConfig(str(tmp_path / "sft"), report_to=[], **options)
    trainer = SFTTrainer(str(tiny_model_dir), args=arguments, train_dataset=read)
    first = trainer.train_dataset[0]
    text = trainer.processing_class.decode([id for id in first["labels"] if id >= 0])
    assert "answer 1" in text and "q" not in text
    assert json.loads(out.read_text().splitlines()[1])["completion"][0]["tool_calls"] == [OBJECTS]
    assert trainer.train().training_loss > 0
