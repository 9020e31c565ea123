"""What an agent does with OpenAI's Agents SDK, over either API of its models."""

from __future__ import annotations

from typing import Any

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI, BadRequestError
from pydantic import BaseModel

ASK = "What is 2 and 3?"
MODELS = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}
set_tracing_disabled(True)


@function_tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


class Sum(BaseModel):
    total: int


def agent(api: str, **more: Any) -> Agent:
    model = MODELS[api](model="gpt-4o", openai_client=AsyncOpenAI())
    return Agent(name="Adder", instructions="You add.", model=model, **more)


async def plain(api: str) -> dict[str, Any]:
    result = await Runner.run(agent(api), ASK)
    usage = result.context_wrapper.usage
    return {
        "content": result.final_output,
        "requests": usage.requests,
        "adds up": usage.total_tokens == usage.input_tokens + usage.output_tokens > 0,
    }


async def stream(api: str) -> dict[str, Any]:
    result = Runner.run_streamed(agent(api), ASK)
    text = ""
    async for event in result.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            text += event.data.delta
    return {"content": result.final_output, "streamed": text}


async def three_turns(api: str) -> dict[str, Any]:
    said, items = [], []
    for text in (ASK, "And 1?", "And 2?"):
        result = await Runner.run(agent(api), [*items, {"role": "user", "content": text}])
        said.append(result.final_output)
        items = result.to_input_list()
    return {"said": said}


async def tools(api: str) -> dict[str, Any]:
    result = await Runner.run(agent(api, tools=[add]), ASK)
    kinds = [item.type for item in result.new_items]
    outputs = [item.output for item in result.new_items if item.type == "tool_call_output_item"]
    return {"content": result.final_output, "kinds": kinds, "outputs": outputs}


async def tools_streamed(api: str) -> dict[str, Any]:
    result = Runner.run_streamed(agent(api, tools=[add]), ASK)
    kinds = [e.item.type async for e in result.stream_events() if e.type == "run_item_stream_event"]
    calls, outputs = (kinds.count(f"tool_call_{kind}") for kind in ("item", "output_item"))
    return {"content": result.final_output, "calls": calls, "outputs": outputs}


async def structured(api: str) -> dict[str, Any]:
    result = await Runner.run(agent(api, output_type=Sum), ASK)
    return {"total": result.final_output.total}


async def refused(api: str) -> dict[str, Any]:
    settings = ModelSettings(extra_body={"suffix": 1})
    try:
        await Runner.run(agent(api, model_settings=settings), ASK)
    except BadRequestError as error:
        return {"code": error.code}
    return {}


async def previous() -> dict[str, Any]:
    """Three turns, of which each sends only what is new."""
    said, last = [], None
    for text in (ASK, "And 1?", "And 2?"):
        result = await Runner.run(agent("responses"), text, previous_response_id=last)
        said.append(result.final_output)
        last = result.last_response_id
    return {"said": said}
