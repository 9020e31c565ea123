"""The steps that each SDK is tried with: its script's, the model's answer, and the outcome."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.clients.client import Client

CLIENTS = Path(__file__).parents[1]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
"""The model's text that calls the tool that every agent has here."""
THOUGHTS = "<think>\nIt adds up.\n</think>\n\n"
TURNS = ("5.", "6, I say.", "7")
FIVE = "It is 5."
ONCE, TWICE, CHAIN = {"first": 1}, {"first": 1, "exact": 1}, {"first": 1, "exact": 2}
"""The records of a session, by how its prompts came about."""
Tokens = Callable[[str], int]


@dataclass(frozen=True, slots=True)
class Step:
    """One step, by its function's name; ``answer`` may need the tokens that a text comes to."""

    name: str
    fills: tuple[str, ...]
    """The features whose cells of compatibility.md it fills."""
    says: tuple[str, ...]
    answer: dict[str, Any] | Callable[[Tokens], dict[str, Any]]
    recorded: dict[str, int] | None = None
    apis: tuple[str, ...] = ()
    """If not all of the client's."""


@dataclass(frozen=True, slots=True)
class Tried:
    """Clients that have the same script, and the APIs that they speak."""

    clients: tuple[Client, ...]
    apis: tuple[str, ...]
    steps: tuple[Step, ...]
    told: bool = False
    """True if a step is told the API, for it has several."""


def turns(name: str = "three_turns") -> Step:
    return Step(name, ("three turns",), TURNS, {"said": [*TURNS]}, CHAIN)


def previous() -> Step:
    answer = {"said": [*TURNS]}
    return Step("previous", ("previous answer",), TURNS, answer, CHAIN, ("responses",))


def tools(
    answer: dict[str, Any], name: str = "tools", call: str = CALL, fills: str = "tools"
) -> Step:
    return Step(name, (fills,), (call, FIVE), answer, TWICE)


def streamed(answer: dict[str, Any], name: str = "tools_streamed", call: str = CALL) -> Step:
    return tools(answer, name, f"Well: {call}", "streamed tools")


def structured() -> Step:
    return Step("structured", ("structured output",), ('{"total": 5}',), {"total": 5})


def refused(answer: dict[str, Any]) -> Step:
    return Step("refused", ("errors",), (), answer, {})


def one(folder: str, name: str, title: str, package: str, script: str = "steps.py") -> Client:
    return Client(name, title, package, CLIENTS / folder / script)


_ADDED = {"name": "add", "result": "5", "content": FIVE}
_CALLED = [["add", '{"a": 2, "b": 3}']]
_USED = {"long": "context_length_exceeded", "image": "invalid_request"}
_UNKNOWN = "unsupported_parameter"
_OPENAI = (one("openai", f"openai-{major}", "openai", "openai") for major in (2, 3))
_RESPONSES = (
    one("openai", f"openai-{major}", "openai", "openai", "responses_steps.py") for major in (2, 3)
)
_CLAUDE = Client(
    *("claude-agent", "Claude Agent SDK", "claude-agent-sdk"),
    CLIENTS / "claude_agent" / "steps.py",
    (("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1"), ("DISABLE_AUTOUPDATER", "1")),
)
_SUMS = CALL.replace('"add"', '"mcp__sums__add"')
TABLE = (
    Tried(
        tuple(_OPENAI),
        ("chat",),
        (
            Step(
                *("plain", ("plain",), ("5.",)),
                {"content": "5.", "finish": "stop", "same id": True, "adds up": True},
                ONCE,
            ),
            Step(
                *("stream", ("streaming",), (FIVE,)),
                lambda n: {"content": FIVE, "finish": "stop", "completion_tokens": n(FIVE)},
            ),
            Step(
                *("helper", ("accumulation",), (f"So: {CALL}",)),
                {"content": "So:", "finish": "tool_calls", "calls": _CALLED, "in parts": True},
            ),
            turns(),
            tools({"finish": "tool_calls", **_ADDED}),
            Step(
                *("tools_streamed", ("streamed tools",), (CALL,)),
                {"finish": "tool_calls", "in parts": True, "calls": _CALLED, "ids": True},
            ),
            Step(
                *("choices", ("choices",), ("5.", FIVE)),
                {"indices": [0, 1], "said": ["5.", FIVE], "adds up": True, "top": [2, 2]},
                {"first": 2},
            ),
            Step(
                *("legacy", ("plain", "streaming"), (" 5.", " 5!")),
                lambda n: {"text": " 5.", "streamed": " 5!", "tokens": n(" 5.")},
                apis=("completions",),
            ),
            refused(_USED | {"unknown": _UNKNOWN}),
        ),
    ),
    Tried(
        tuple(_RESPONSES),
        ("responses",),
        (
            Step(
                *("plain", ("plain",), ("5.",)),
                lambda n: (
                    {"content": "5.", "status": "completed", "output_tokens": n("5.")}
                    | {"adds up": True, "same id": True}
                ),
                ONCE,
            ),
            Step(
                *("stream", ("streaming",), (FIVE,)),
                lambda n: (
                    {"content": FIVE, "in order": True, "output_tokens": n(FIVE)}
                    | {
                        "kinds": [
                            *("response.created", "response.in_progress"),
                            *("response.output_item.added", "response.content_part.added"),
                            *("response.output_text.delta", "response.output_text.done"),
                            *("response.content_part.done", "response.output_item.done"),
                            "response.completed",
                        ]
                    }
                ),
                ONCE,
            ),
            Step(
                *("helper", ("accumulation",), (f"So: {CALL}",)),
                {"streamed": "So:", "content": "So:", "status": "completed"}
                | {"calls": _CALLED, "as kept": True},
            ),
            turns(),
            previous(),
            tools({"name": "add", "arguments": '{"a": 2, "b": 3}', "content": FIVE}),
            streamed(
                {"name": "add", "arguments": '{"a": 2, "b": 3}', "content": FIVE, "in parts": True}
            ),
            Step(
                *("thinking", ("reasoning",), (THOUGHTS + CALL, f"{THOUGHTS}{FIVE}")),
                {"kinds": ["reasoning", "function_call"], "thoughts": "It adds up."}
                | {"content": FIVE},
                TWICE,
            ),
            structured(),
            Step(
                *("stopped", ("stops",), ("so " * 30,)),
                {"status": "incomplete", "reason": "max_output_tokens"},
            ),
            refused(
                _USED
                | {"tool": _UNKNOWN, "unknown": _UNKNOWN, "previous": "previous_response_not_found"}
            ),
        ),
    ),
    Tried(
        (one("openai_npm", "openai-npm", "openai", "openai", "steps.mjs"),),
        ("chat", "responses"),
        (
            Step(
                *("plain", ("plain",), ("5.",)),
                lambda n: {"content": "5.", "ended": True, "tokens": n("5.")},
                ONCE,
            ),
            Step(
                *("stream", ("streaming",), (FIVE,)),
                lambda n: {"content": FIVE, "tokens": n(FIVE), "in parts": True},
                ONCE,
            ),
            Step(
                *("helper", ("accumulation",), (f"So: {CALL}",)),
                {"content": "So:", "ended": True, "calls": _CALLED},
            ),
            turns("threeTurns"),
            tools(_ADDED),
            streamed(_ADDED, "toolsStreamed"),
            previous(),
            Step(
                *("legacy", ("plain", "streaming"), (" 5.", " 5!")),
                {"text": " 5.", "streamed": " 5!"},
                apis=("completions",),
            ),
            refused({"bad": True, "code": _UNKNOWN}),
        ),
        told=True,
    ),
    Tried(
        (one("agents", "openai-agents", "OpenAI Agents SDK", "openai-agents"),),
        ("chat", "responses"),
        (
            Step(
                *("plain", ("plain",), ("5.",)),
                {"content": "5.", "requests": 1, "adds up": True},
                ONCE,
            ),
            Step(
                *("stream", ("streaming",), (FIVE,)),
                {"content": FIVE, "streamed": FIVE},
            ),
            turns(),
            tools(
                {
                    "content": FIVE,
                    "kinds": ["tool_call_item", "tool_call_output_item", "message_output_item"],
                    "outputs": [5],
                }
            ),
            streamed({"content": FIVE, "calls": 1, "outputs": 1}),
            structured(),
            previous(),
            refused({"code": _UNKNOWN}),
        ),
        told=True,
    ),
    Tried(
        (one("langchain", "langchain", "LangChain", "langchain-core"),),
        ("chat", "responses", "messages"),
        (
            Step(*("plain", ("plain",), ("5.",)), {"content": "5.", "adds up": True}, ONCE),
            Step(
                *("stream", ("streaming", "accumulation"), (FIVE,)),
                lambda n: {"content": FIVE, "streamed": FIVE, "output_tokens": n(FIVE)},
            ),
            turns(),
            tools(_ADDED),
            streamed(_ADDED),
            structured(),
            previous(),
            refused({"bad": True, "named": True}),
        ),
        told=True,
    ),
    Tried(
        (one("anthropic", "anthropic", "anthropic", "anthropic"),),
        ("messages",),
        (
            Step(
                *("plain", ("plain",), ("5.",)),
                lambda n: {
                    "content": [{"type": "text", "text": "5."}],
                    "stop": "end_turn",
                    "output_tokens": n("5."),
                    "same id": True,
                },
                ONCE,
            ),
            Step(
                *("stream", ("streaming",), (FIVE,)),
                lambda n: (
                    {"content": FIVE, "stop": "end_turn", "output_tokens": n(FIVE)}
                    | {
                        "kinds": [
                            *("message_start", "content_block_start", "content_block_delta"),
                            *("content_block_stop", "message_delta", "message_stop"),
                        ]
                    }
                ),
                ONCE,
            ),
            Step(
                *("helper", ("accumulation",), (f"So: {CALL}",)),
                {
                    "streamed": "So:",
                    "content": [
                        {"type": "text", "text": "So:"},
                        {"type": "tool_use", "name": "add", "input": {"a": 2, "b": 3}},
                    ],
                    "stop": "tool_use",
                },
            ),
            turns(),
            tools(
                {"stop": "tool_use", "name": "add", "input": {"a": 2, "b": 3}, "content": FIVE},
            ),
            tools(
                {"turns": [["text", "tool_use"], ["text"]], "last": FIVE},
                "runner",
                f"Well: {CALL}",
            ),
            streamed(
                {"stop": "tool_use", "name": "add", "input": {"a": 2, "b": 3}, "content": FIVE}
            ),
            Step(
                *("thinking", ("reasoning",), (THOUGHTS + CALL, f"{THOUGHTS}{FIVE}")),
                {"kinds": ["thinking", "tool_use"], "thoughts": "It adds up.", "content": FIVE},
                TWICE,
            ),
            Step(*("counted", ("token counts",), ("5.",)), {"equal": True}, ONCE),
            Step(
                *("stopped", ("stops",), ("It is so.", "It is so.")),
                {"stop": ["stop_sequence", "so"], "content": "It is ", "short": "max_tokens"},
            ),
            structured(),
            refused(
                {name: ["invalid_request_error", code] for name, code in _USED.items()}
                | {"unknown": ["invalid_request_error", _UNKNOWN]}
            ),
        ),
    ),
    Tried(
        (_CLAUDE,),
        ("messages",),
        (
            Step(
                *("plain", ("plain",), ("5.",)),
                lambda n: {"result": "5.", "blocks": ["text"], "output_tokens": n("5.")},
                ONCE,
            ),
            Step(*("stream", ("streaming",), (FIVE,)), {"result": FIVE, "streamed": FIVE}),
            turns(),
            tools(
                {"calls": [["mcp__sums__add", {"a": 2, "b": 3}]], "result": FIVE, "turns": 2},
                call=_SUMS,
            ),
            streamed(
                {"blocks": ["text", "tool_use", "text"], "result": FIVE}
                | {"streamed": f"Well:{FIVE}"},
                call=_SUMS,
            ),
            Step(
                *("thinking", ("reasoning",), (THOUGHTS + _SUMS, f"{THOUGHTS}{FIVE}")),
                {"blocks": ["thinking", "tool_use", "thinking", "text"], "result": FIVE},
                TWICE,
            ),
            Step(*("whole_preset", ("whole preset",), ("5.",)), {"result": "5."}, ONCE),
            refused({"failed": True, "result": "Prompt is too long"}),
        ),
    ),
    Tried(
        (one("camel", "camel", "CAMEL-AI", "camel-ai"),),
        ("chat",),
        (
            Step(
                *("plain", ("plain",), ("5.",)),
                {"content": "5.", "finish": ["stop"], "adds up": True},
                ONCE,
            ),
            Step(*("stream", ("streaming",), (FIVE,)), {"content": FIVE, "in parts": True}),
            turns(),
            tools({"name": "add", "result": 5, "content": FIVE}),
            tools(
                {"name": "add", "result": 5, "content": FIVE},
                "tools_streamed",
                fills="streamed tools",
            ),
            refused({"bad": True, "named": True}),
        ),
    ),
)
"""Every client, with each API that it speaks."""
