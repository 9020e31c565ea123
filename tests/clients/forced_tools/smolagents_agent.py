"""smolagents' ToolCallingAgent, which requires a tool call of each of its steps."""

from __future__ import annotations

from typing import Any, ClassVar

from smolagents import LogLevel, OpenAIModel, Tool, ToolCallingAgent


class Sum(Tool):
    """The agent's only tool, in place of its own one of this name: its result is the answer."""

    name = "final_answer"
    description = "Adds two numbers."
    inputs: ClassVar = {
        "a": {"type": "integer", "description": "A number."},
        "b": {"type": "integer", "description": "Another one."},
    }
    output_type = "integer"

    def forward(self, a: int, b: int) -> int:
        return a + b


class Agent:
    def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        """It blocks, so it runs in a process whose environment names the session."""
        agent = ToolCallingAgent([Sum()], OpenAIModel("any"), max_steps=1, verbosity_level=-1)
        # Its own prompt is of 1,500 words.
        agent.prompt_templates["system_prompt"] = "Use your tools."
        agent.logger.level = LogLevel.OFF
        return float(agent.run(data["question"]) == data["answer"])
