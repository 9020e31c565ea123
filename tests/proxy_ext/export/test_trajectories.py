"""`any-agent export` as other systems' trajectories: Harbor's ATIF and NeMo Gym's rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
from openai.types.responses import Response, ResponseInputItemParam, ToolParam
from pydantic import AwareDatetime, BaseModel, ConfigDict, TypeAdapter

from any_agent.types import SessionState
from proxy_ext.export.formats import FORMATS
from tests.support.archives import CALL, TOOLS, Rank, export_trial

CALLED: dict[str, Any] = {"content": None, "tool_calls": [CALL], "reasoning_content": "sum"}


class Schema(BaseModel):
    """ATIF-v1.7's objects allow no other fields than theirs."""

    model_config = ConfigDict(extra="forbid", strict=False)
    extra: dict[str, Any] | None = None


class ToolCall(Schema):
    tool_call_id: str
    function_name: str
    arguments: dict[str, Any]


class Result(Schema):
    source_call_id: str | None = None
    content: str | None = None


class Observation(BaseModel):
    model_config = ConfigDict(extra="forbid")
    results: list[Result]


class Metrics(Schema):
    prompt_tokens: int
    completion_tokens: int
    prompt_token_ids: list[int]
    completion_token_ids: list[int]
    logprobs: list[float]


class Step(Schema):
    step_id: int
    source: Literal["system", "user", "agent"]
    message: str
    timestamp: AwareDatetime | None = None
    model_name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    observation: Observation | None = None
    metrics: Metrics | None = None
    is_copied_context: bool | None = None
    llm_call_count: int | None = None


class Agent(Schema):
    name: str
    version: str
    model_name: str
    tool_definitions: list[dict[str, Any]] | None = None


class FinalMetrics(Schema):
    total_prompt_tokens: int
    total_completion_tokens: int
    total_steps: int


class Trajectory(Schema):
    schema_version: Literal["ATIF-v1.7"]
    session_id: str
    trajectory_id: str
    agent: Agent
    steps: list[Step]
    final_metrics: FinalMetrics


def checked(line: dict[str, Any]) -> Trajectory:
    """A line by ATIF's schema and its rules across fields."""
    found = Trajectory.model_validate(line)
    assert [step.step_id for step in found.steps] == [*range(1, len(found.steps) + 1)]
    for step in found.steps:
        calls = {call.tool_call_id for call in step.tool_calls or ()}
        results = step.observation.results if step.observation else []
        assert {result.source_call_id for result in results} <= {None, *calls}
        if step.source != "agent":
            of_agents = {"model_name", "reasoning_content", "tool_calls", "metrics"}
            assert not step.model_fields_set & of_agents
    return found


def says(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


async def add_session(rank: Rank, **fields: Any) -> None:
    """A call of a tool, its result, and an answer."""
    asked = [says("system", "be brief"), says("user", "1 + 1?")]
    result = [says("tool", "2", tool_call_id="c1"), says("user", "so?")]
    first = {"message_delta": asked, "tools": TOOLS}
    await rank.add_turns("a", ("", CALLED), call=first, **fields)
    await rank.add_call("a-1", "a", result, {"content": "It is 2."}, "a-0")


def check_answer(line: dict[str, Any]) -> None:
    """Compare a rollout's answer with OpenAI's model, which lacks what users say in between."""
    answer = line["response"]
    said = [item for item in answer["output"] if item.get("role") != "user"]
    Response.model_validate({**answer, "output": said})


async def test_a_trajectory_has_each_message_as_a_step_and_each_calls_tokens(
    rank: Rank, tmp_path: Path
) -> None:
    await add_session(rank, reward=1.0, task_id="t", state=SessionState.EVALUATED)
    await rank.archive.sweep()
    done = export_trial(tmp_path, "--format", "atif")
    assert done.code == 0 and "1 sessions (1 of them from archives), 1 rows" in done.said
    found = checked(done.lines[0])
    assert [step.source for step in found.steps] == ["system", "user", "agent", "user", "agent"]
    called, last = found.steps[2], found.steps[4]
    assert called.reasoning_content == "sum" and called.tool_calls and called.observation
    assert called.tool_calls[0].arguments == {"a": 1}
    assert called.observation.results == [Result(source_call_id="c1", content="2")]
    assert last.message == "It is 2." and last.metrics
    # The prompt is the earlier call's prompt and answer, and what came after it.
    assert last.metrics.prompt_token_ids == [1, 2, 3, 4, 5, 1, 2, 3]
    assert last.metrics.completion_token_ids == [4, 5] and last.metrics.logprobs == [-0.5, -0.25]
    assert last.metrics.extra == {"versions": [0, 1], "loss_mask": [1, 1]}
    assert last.extra == {"interaction_id": "a-1", "reward": 1.0}
    assert found.agent.tool_definitions == TOOLS
    totals = found.final_metrics
    assert (totals.total_prompt_tokens, totals.total_completion_tokens) == (11, 4)
    assert found.extra and (found.extra["final_reward"], found.extra["task_id"]) == (1.0, "t")


async def test_what_another_trajectory_has_already_is_copied_context(
    rank: Rank, tmp_path: Path
) -> None:
    await rank.add_turns("a", ("q", "one"), ("r", "two"), reward=None, state=SessionState.OPEN)
    await rank.add_call("a-2", "a", [says("user", "s")], {"content": "three"}, "a-0")
    await rank.add_call(
        "a-3", "a", [says("user", "q"), says("assistant", "x")], {"content": "four"}
    )
    done = export_trial(tmp_path, "--format", "atif")
    first, second, third = map(checked, done.lines)
    assert not any(step.is_copied_context for step in first.steps)
    copied = [[step.message for step in t.steps if step.is_copied_context] for t in (second, third)]
    assert copied == [["one"], ["x"]]
    assert {t.session_id for t in (first, second, third)} == {"a"}
    assert [t.trajectory_id for t in (first, second, third)] == ["a-1", "a-2", "a-3"]
    assert first.steps[1].extra == {"interaction_id": "a-0", "reward": None}


@pytest.mark.parametrize("arguments", ["no json", "[1]"])
async def test_odd_calls_and_results_keep_the_form(
    rank: Rank, tmp_path: Path, arguments: str
) -> None:
    odd = {**CALL, "function": {"name": "add", "arguments": arguments}}
    await rank.add_turns("a", ("q", {"content": None, "tool_calls": [odd]}))
    await rank.add_call(
        "a-1", "a", [says("tool", "lost", tool_call_id="c9")], {"content": "ok"}, "a-0"
    )
    (line,) = export_trial(tmp_path, "--format", "atif").lines
    steps = checked(line).steps
    assert steps[1].tool_calls and steps[1].tool_calls[0].arguments == {"arguments": arguments}
    assert steps[2].observation and steps[2].observation.results == [Result(content="lost")]
    (line,) = export_trial(tmp_path, "--format", "nemo-gym").lines
    assert line["response"]["output"][0]["arguments"] == arguments
    check_answer(line)


async def test_a_rollout_has_its_request_its_items_and_its_reward(
    rank: Rank, tmp_path: Path
) -> None:
    await add_session(rank, reward=0.5, group_id="g")
    await rank.add_turns("b", reward=0.0, group_id="g")
    await rank.add_turns("c", reward=None)
    await rank.add_turns("d", reward=1.0, state=SessionState.REJECTED, reason="vetoed: by me")
    done = export_trial(tmp_path, "--format", "nemo-gym")
    assert done.code == 0, done.said
    assert "3 sessions (0 of them from archives), 3 rows; 1 left out: without" in done.said
    places = [(line["_ng_task_index"], line["_ng_rollout_index"]) for line in done.lines]
    assert places == [(0, 0), (0, 1), (1, 0)]
    assert [line["reward"] for line in done.lines] == [0.5, 0.0, 1.0]
    assert [line["mask_sample"] for line in done.lines] == [False, False, True]
    for line in done.lines:
        check_answer(line)
        asked = line["responses_create_params"]
        TypeAdapter(list[ResponseInputItemParam]).validate_python(asked["input"])
        TypeAdapter(list[ToolParam]).validate_python(asked["tools"])
    line = done.lines[0]
    assert [item["role"] for item in line["responses_create_params"]["input"]] == ["system", "user"]
    output = line["response"]["output"]
    kinds = ["reasoning", "function_call", "function_call_output", "message", "message"]
    assert [item["type"] for item in output] == kinds
    # The tokens of a call are its last item's, and each prompt begins with what was before it.
    first, second = (item for item in output if "generation_token_ids" in item)
    assert (first, second) == (output[1], output[4])
    seen = first["prompt_token_ids"] + first["generation_token_ids"]
    assert second["prompt_token_ids"][: len(seen)] == seen
    assert second["generation_log_probs"] == [-0.5, -0.25]


@pytest.mark.parametrize("call", [{"untrainable_reason": "x"}, {"request": {"bound": [[0, 1]]}}])
async def test_a_rollouts_call_that_must_not_be_trained_on_has_no_tokens(
    rank: Rank, tmp_path: Path, call: dict[str, Any]
) -> None:
    await rank.add_turns("a", reward=1.0, call=call)
    (line,) = export_trial(tmp_path, "--format", "nemo-gym").lines
    assert "generation_token_ids" not in line["response"]["output"][0]


async def test_sessions_without_texts_are_reported(rank: Rank, tmp_path: Path) -> None:
    await rank.add_turns("a", call={"output_message": {"role": "assistant"}})
    await rank.add_turns("b")
    for name, one in FORMATS.items():
        if one.lines is not None:
            done = export_trial(tmp_path, "--format", name)
            assert (done.code, len(done.lines)) == (1, 1), name
            assert "session a is left out: its texts were not kept" in done.said
