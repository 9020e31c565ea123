"""Sessions as data for fine-tuning elsewhere: OpenAI's chat and preference formats, and TRL's
prompts with completions.

OpenAI's are those of its guides to supervised fine-tuning and to direct preference optimization;
Together and Fireworks read them, too. TRL's is its conversational prompt-completion type.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from any_agent.chat.template import convert_calls
from any_agent.types import Message, Tool
from proxy_ext.export.choice import Pair
from proxy_ext.export.dialogues import dialogues
from proxy_ext.export.preferences import Conversation, preference, with_objects
from proxy_ext.export.reader import Credited, about

Row = dict[str, Any]


def openai_chat(_: Mapping[str, Any], found: Credited) -> Iterator[Row]:
    """Yield each conversation with an answer to train on; the other answers have the weight 0."""
    for turns, tools in dialogues(found):
        if any(turn.trained for turn in turns):
            messages = [_openai(turn.message) for turn in turns]
            for message, turn in zip(messages, turns, strict=True):
                if message["role"] == "assistant" and not turn.trained:
                    message["weight"] = 0
            yield {"messages": messages, **_tools(tools)}


def prompt_completion(session: Mapping[str, Any], found: Credited) -> Iterator[Row]:
    """Yield each answer to train on, as a completion of the messages before it."""
    for turns, tools in dialogues(found):
        messages = [with_objects(turn.message) for turn in turns]
        for k, turn in enumerate(turns):
            if turn.trained and turn.call is not None:
                yield {
                    "prompt": messages[:k],
                    "completion": messages[k : k + 1],
                    "tools": tools,
                    "reward": found.rewards[turn.call.id],
                    "interaction_id": turn.call.id,
                    **about(session),
                }


def openai_preference(
    pair: Pair, chosen: Conversation, rejected: Conversation, session: Mapping[str, Any]
) -> Row:
    """Return a pair as OpenAI's preference example: input, preferred_output, non_preferred_output.

    Raises as :func:`proxy_ext.export.preferences.preference`.
    """
    row = preference(pair, chosen, rejected, session)
    return {
        "input": {"messages": [*map(_openai, row["prompt"])], **_tools(row["tools"])},
        # Each is one message.
        "preferred_output": [_openai(row["chosen"][0])],
        "non_preferred_output": [_openai(row["rejected"][0])],
    }


def _openai(message: Message) -> Message:
    """Return a message as OpenAI takes it: without reasoning, with arguments as texts."""
    out = {name: value for name, value in message.items() if name != "reasoning_content"}
    if out["role"] == "tool":
        out.pop("name", None)
    return convert_calls(out, objects=False, takes_broken=True) if out.get("tool_calls") else out


def _tools(tools: list[Tool] | None) -> Row:
    return {"tools": tools} if tools else {}
