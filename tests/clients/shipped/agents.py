"""The agents that are tried as they are shipped, each by its block of docs/how-to/connect."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tests.clients.connect.pages import Block, all_blocks
from tests.clients.environment import ENVIRONMENTS

QUESTION, ANSWER = "question.txt", "answer.txt"
_NPM = "shipped-npm"


@dataclass(frozen=True, slots=True)
class Shipped:
    """An agent, and how the model that plays calls its tools."""

    name: str
    """In the results, and its block's in a page."""
    title: str
    package: str
    api: str
    reads: tuple[str, str]
    """The tool that reads the question, and its argument for the path or the command."""
    writes: tuple[str, str, str | None]
    """The tool that writes the answer, its argument for the path or the command, and for the
    text."""
    environment: str = _NPM
    page: str = "coding-agents"

    @property
    def block(self) -> Block:
        """Its script, or its program."""
        return all_blocks()[f"{self.page}/{self.name}"]

    @property
    def runs(self) -> Block:
        """The script that runs it."""
        if self.block.language == "bash":
            return self.block
        return all_blocks()[f"{self.page}/run-{self.block.language}"]

    @property
    def places(self) -> set[str]:
        return {self.block.place, self.runs.place}

    @property
    def registry(self) -> str:
        return "npm" if ENVIRONMENTS[self.environment].of_npm else "PyPI"

    @property
    def version(self) -> str:
        return ENVIRONMENTS[self.environment].version_of(self.package)

    def says(self, folder: Path) -> list[str]:
        """Return what the model answers, where the agent works in ``folder``."""
        (reader, where), (writer, to, text) = self.reads, self.writes
        question, answer = str(folder / QUESTION), str(folder / ANSWER)
        if text is None:
            read, write = {where: f"cat {question}"}, {to: f"echo 42 > {answer}"}
        else:
            read, write = {where: question}, {to: answer, text: "42\n"}
        return [call_text(reader, read), f"It is 42. {call_text(writer, write)}", "Done."]


def call_text(name: str, arguments: dict[str, str]) -> str:
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


def _framework(name: str, title: str, package: str, api: str, environment: str = _NPM) -> Shipped:
    read, write = ("read_file", "path"), ("write_file", "path", "text")
    return Shipped(name, title, package, api, read, write, environment, "more-frameworks")


AGENTS = (
    Shipped(
        *("codex", "Codex", "@openai/codex", "responses"),
        ("exec_command", "cmd"),
        ("exec_command", "cmd", None),
    ),
    Shipped(
        *("claude-code", "Claude Code", "@anthropic-ai/claude-code", "messages"),
        ("Read", "file_path"),
        ("Write", "file_path", "content"),
    ),
    Shipped(
        *("opencode", "opencode", "opencode-ai", "chat"),
        ("read", "filePath"),
        ("write", "filePath", "content"),
    ),
    Shipped(
        *("qwen-code", "Qwen Code", "@qwen-code/qwen-code", "chat"),
        ("read_file", "file_path"),
        ("write_file", "file_path", "content"),
    ),
    Shipped(
        *("pi", "pi", "@mariozechner/pi-coding-agent", "chat"),
        ("read", "path"),
        ("write", "path", "content"),
    ),
    _framework("openai-agents-js", "OpenAI Agents JS", "@openai/agents", "responses"),
    _framework("ai-sdk", "AI SDK", "ai", "responses"),
    _framework("langchain-js", "LangChain.js", "langchain", "chat"),
    _framework("strands", "Strands Agents", "strands-agents", "chat", "strands"),
    _framework("agno", "Agno", "agno", "chat", "agno"),
)
