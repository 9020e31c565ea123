"""Claude Code as it is shipped searches for deferred tools, and a web search fails where it ran."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.clients.connect.shell import reader_shell, run, script
from tests.clients.environment import node_with
from tests.clients.live import Live
from tests.clients.shipped.agents import AGENTS, ANSWER, QUESTION, call_text
from tests.clients.shipped.record import compare_with_what_was_sampled, session_part

CLAUDE_CODE = next(agent for agent in AGENTS if agent.name == "claude-code")
ALLOWED = " --allowedTools WebSearch"


def test_tools_that_it_declares_only_once_it_has_found_them(training: Live, tmp_path: Path) -> None:
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    (work / QUESTION).write_text("What is 17 + 25?\n")
    packages = node_with(CLAUDE_CODE.environment) / "node_modules"
    before = training.sessions()
    training.engine.hush()
    training.engine.requests.clear()
    write = {"file_path": str(work / ANSWER), "content": "42\n"}
    talk = (
        call_text("ToolSearch", {"query": "select:CronList,WebSearch"}),
        call_text("CronList", {}),
        call_text("WebSearch", {"query": "17 plus 25"}),
        call_text("Write", write),
        "Done.",
    )
    said = [training.says(text) for text in talk]

    variables = reader_shell(training.url, home=home, programs=[packages / ".bin"])
    run(script(CLAUDE_CODE.runs.code.rstrip() + ALLOWED), variables, work)

    assert (work / ANSWER).read_text() == "42\n"
    (session,) = training.sessions() - before
    calls = session_part(training, f"{session}/interactions")["interactions"]
    # The call by which it searches the web is refused, and no part of the session.
    assert compare_with_what_was_sampled(training, session, calls, said) == len(talk)
    found, listed, searched, _ = (_result(call) for call in calls[1:])
    for name in ("CronList", "WebSearch"):
        assert f'"name":"{name}"' in found
    assert "<tool_use_error>" not in listed
    assert "web_search_20250305" in searched and "42" not in searched


def _result(call: dict[str, Any]) -> str:
    """What a tool gave to the model before this call."""
    results = [m["content"] for m in call["message_delta"] if m["role"] == "tool"]
    assert len(results) == 1, json.dumps(call["message_delta"])
    return str(results[0])
