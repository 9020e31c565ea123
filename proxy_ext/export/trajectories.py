"""Sessions as other systems' trajectories: Harbor's ATIF, and NeMo Gym's rollouts.

Both have, for each call of the model, the very ids of its prompt and its answer with their
log-probabilities, so that nothing has to be tokenised again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from any_agent import __version__
from any_agent.chat.template import convert_calls
from any_agent.types import Interaction, Message
from proxy_ext.export.choice import group_of, is_vetoed, reward_of, score_of
from proxy_ext.export.dialogues import Dialogue, Turn, dialogues
from proxy_ext.export.reader import Credited, about

ATIF = "ATIF-v1.7"
Row = dict[str, Any]


def atif(session: Mapping[str, Any], found: Credited) -> Iterator[Row]:
    """Yield each conversation of a session as a trajectory of Harbor's format ATIF."""
    for talk in dialogues(found):
        steps = _steps(talk.turns, found)
        calls = [turn.call for turn in talk.turns if turn.call is not None]
        prompts = sum(step["metrics"]["prompt_tokens"] for step in steps if "metrics" in step)
        rewards = {"final_reward": session["final_reward"], "score": score_of(found)}
        yield {
            "schema_version": ATIF,
            "session_id": session["id"],
            "trajectory_id": talk.last.id,
            "agent": {
                "name": "any-agent",
                "version": __version__,
                "model_name": talk.last.model,
                **({"tool_definitions": talk.tools} if talk.tools else {}),
            },
            "steps": [{"step_id": k, **step} for k, step in enumerate(steps, 1)],
            "final_metrics": {
                "total_prompt_tokens": prompts,
                "total_completion_tokens": sum(len(call.output_ids) for call in calls),
                "total_steps": len(steps),
            },
            "extra": about(session) | rewards,
        }


def _steps(turns: Iterable[Turn], found: Credited) -> list[Row]:
    """Return a step for each message but tools' results: these observe the step of their call."""
    steps: list[Row] = []
    calls: dict[Any, Row] = {}
    for turn in turns:
        role = turn.message["role"]
        if role == "tool":
            _observe(steps, calls, turn.message)
            continue
        source = "agent" if role == "assistant" else role
        step: Row = {"source": source, "message": turn.message["content"]}
        if source == "agent":
            step |= _answer(turn, found)
            calls |= {call["tool_call_id"]: step for call in step.get("tool_calls", ())}
        steps.append(step)
    return steps


def _answer(turn: Turn, found: Credited) -> Row:
    """Return what a step of the model has beside its text."""
    out: Row = {}
    if reasoning := turn.message.get("reasoning_content"):
        out["reasoning_content"] = reasoning
    if turn.message.get("tool_calls"):
        message = convert_calls(turn.message, objects=True, takes_broken=False)
        out["tool_calls"] = [
            {
                "tool_call_id": call.get("id", ""),
                "function_name": call["function"]["name"],
                "arguments": call["function"]["arguments"],
            }
            for call in message["tool_calls"]
        ]
    if turn.call is None or turn.repeated:
        out["is_copied_context"] = True
    if turn.call is not None:
        out |= _sampled(turn.call, found)
    return out


def _sampled(call: Interaction, found: Credited) -> Row:
    prompt = found.tree.prompt_ids(call.id)
    return {
        "timestamp": datetime.fromtimestamp(call.created_at, UTC).isoformat(),
        "model_name": call.model,
        "llm_call_count": 1,
        "metrics": {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(call.output_ids),
            "prompt_token_ids": prompt,
            "completion_token_ids": call.output_ids,
            "logprobs": call.output_logprobs,
            "extra": {"versions": call.output_versions, "loss_mask": call.loss_mask()},
        },
        "extra": {
            "interaction_id": call.id,
            "reward": found.rewards[call.id] if found.rewarded else None,
        },
    }


def _observe(steps: list[Row], calls: Mapping[Any, Row], message: Message) -> None:
    """Add a tool's result to the step that called it, else to a step of its own."""
    id = message.get("tool_call_id")
    result = {"content": message["content"]}
    step = calls.get(id)
    if step is None:
        step = {"source": "system", "message": ""}
        steps.append(step)
    else:
        result["source_call_id"] = id
    step.setdefault("observation", {"results": []})["results"].append(result)


class NemoGymRollouts:
    """Sessions with a reward as lines of NeMo Gym's rollouts; a group is a task there."""

    def __init__(self) -> None:
        self._tasks: dict[str, int] = {}
        self._rollouts: Counter[str] = Counter()

    def lines(self, session: Mapping[str, Any], found: Credited) -> Iterator[Row]:
        """Yield each conversation of a session; none without a reward, which a line must have."""
        reward = reward_of(session, found)
        if reward is None:
            return
        group = group_of(session, session["id"])
        for talk in dialogues(found):
            asked, answered = _items(talk, found)
            tools = [
                {"type": "function", "parameters": None, "strict": None, **tool["function"]}
                for tool in talk.tools or ()
            ]
            yield {
                "_ng_task_index": self._tasks.setdefault(group, len(self._tasks)),
                "_ng_rollout_index": self._rollouts[group],
                "agent_ref": {"type": "responses_api_agents", "name": "any-agent"},
                "responses_create_params": {"input": asked, "tools": tools},
                "response": {
                    "id": talk.last.id,
                    "object": "response",
                    "created_at": talk.last.created_at,
                    "model": talk.last.model,
                    "output": answered,
                    "parallel_tool_calls": True,
                    "tool_choice": "auto",
                    "tools": tools,
                },
                "reward": reward,
                "mask_sample": is_vetoed(session),
                "session_id": session["id"],
                **about(session),
            }
            self._rollouts[group] += 1


def _items(talk: Dialogue, found: Credited) -> tuple[list[Row], list[Row]]:
    """Return a conversation's items before and from the first sampled answer on."""
    out: list[Row] = []
    first = None
    for k, turn in enumerate(talk.turns):
        items = _items_of(turn.message, f"{talk.last.id}_{k}")
        if turn.call is not None:
            first = len(out) if first is None else first
            # A call that a grammar decided in part has no form here that trains on its other part.
            if turn.trained and turn.call.loss_mask().all():
                items[-1] |= {
                    "prompt_token_ids": found.tree.prompt_ids(turn.call.id),
                    "generation_token_ids": turn.call.output_ids,
                    "generation_log_probs": turn.call.output_logprobs,
                }
        out += items
    return out[:first], out[first:]


def _items_of(message: Message, id: str) -> list[Row]:
    """Return a message as items of the Responses API."""
    if message["role"] == "tool":
        result = {"call_id": message.get("tool_call_id", ""), "output": message["content"]}
        head = {"type": "function_call_output", "id": f"fco_{id}", "status": "completed"}
        return [{**head, **result}]
    if message["role"] != "assistant":
        return [{"type": "message", "role": message["role"], "content": message["content"]}]
    items: list[Row] = []
    calls = message.get("tool_calls") or ()
    if reasoning := message.get("reasoning_content"):
        summary = [{"type": "summary_text", "text": reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{id}", "summary": summary})
    if message["content"] or not calls:
        text = {"type": "output_text", "text": message["content"], "annotations": []}
        head = {"type": "message", "id": f"msg_{id}", "role": "assistant", "status": "completed"}
        items.append({**head, "content": [text]})
    if calls:
        calls = convert_calls(message, objects=False, takes_broken=True)["tool_calls"]
    for call in calls:
        called = {"call_id": call.get("id", ""), **call["function"]}
        items.append({"type": "function_call", "status": "completed", **called})
    return items
