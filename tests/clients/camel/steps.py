"""What an agent of CAMEL-AI does."""

from __future__ import annotations

import os
from typing import Any

from camel.agents import ChatAgent
from camel.models import ModelFactory
from camel.toolkits import FunctionTool
from camel.types import ModelPlatformType
from camel.utils import BaseTokenCounter

ASK = "What is 2 and 3?"


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a (int): One.
        b (int): The other.
    """
    return a + b


class Characters(BaseTokenCounter):
    """Counts enough to see whether a context is full; the usual one fetches a vocabulary first."""

    def count_tokens_from_messages(self, messages: list[Any]) -> int:
        return len(str(messages))

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, token_ids: list[int]) -> str:
        return "".join(map(chr, token_ids))


def agent(stream: bool = False, tools: bool = False, **more: Any) -> ChatAgent:
    config: dict[str, Any] = {**more}
    if stream:
        config |= {"stream": True, "stream_options": {"include_usage": True}}
    model = ModelFactory.create(
        model_platform=ModelPlatformType.OPENAI_COMPATIBLE_MODEL,
        model_type="gpt-4o",
        url=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        model_config_dict=config,
        token_counter=Characters(),
    )
    given = [FunctionTool(add)] if tools else None
    return ChatAgent("You add.", model=model, tools=given, stream_accumulate=False)


def plain() -> dict[str, Any]:
    answer = agent().step(ASK)
    usage = answer.info["usage"]
    return {
        "content": answer.msgs[0].content,
        "finish": answer.info["termination_reasons"],
        "adds up": usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] > 0,
    }


def stream() -> dict[str, Any]:
    parts = _parts(list(agent(stream=True).step(ASK)))
    return {"content": "".join(parts), "in parts": len(parts) > 3}


def three_turns() -> dict[str, Any]:
    adder = agent()
    return {"said": [adder.step(text).msgs[0].content for text in (ASK, "And 1?", "And 2?")]}


def tools() -> dict[str, Any]:
    return _called(agent(tools=True).step(ASK))


def tools_streamed() -> dict[str, Any]:
    answers = list(agent(tools=True, stream=True).step(ASK))
    return {**_called(answers[-1]), "content": "".join(_parts(answers))}


def _called(answer: Any) -> dict[str, Any]:
    (call,) = answer.info["tool_calls"]
    return {"name": call.tool_name, "result": call.result, "content": answer.msgs[0].content}


def _parts(answers: list[Any]) -> list[str]:
    return [answer.msgs[0].content for answer in answers if answer.msgs and answer.msgs[0].content]


def refused() -> dict[str, Any]:
    try:
        agent(extra_body={"suffix": 1}).step(ASK)
    except Exception as error:
        bad = "BadRequestError" in [kind.__name__ for kind in type(error).__mro__]
        return {"bad": bad, "named": "suffix" in str(error)}
    return {}
