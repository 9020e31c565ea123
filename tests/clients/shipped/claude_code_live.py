"""Claude Code as it is shipped: what only Anthropic's own models and servers could take."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from tests.clients.connect.shell import reader_shell, run, script
from tests.clients.environment import node_with
from tests.clients.live import Live
from tests.clients.shipped.agents import AGENTS, ANSWER, QUESTION, call_text
from tests.clients.shipped.record import compare_with_what_was_sampled, session_part

CLAUDE_CODE = next(agent for agent in AGENTS if agent.name == "claude-code")
PICTURE = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGNg+M/A8B8ABQACAaX2RUAAAAAASUVORK5CYII="
)


def test_a_tool_that_is_found_and_a_web_search_continue_the_conversation(
    training: Live, tmp_path: Path
) -> None:
    talk = [
        call_text("ToolSearch", {"query": "select:CronList,WebSearch"}),
        call_text("CronList", {}),
        call_text("WebSearch", {"query": "17 plus 25"}),
    ]
    session, calls, said = _run(training, tmp_path, talk, " --allowedTools WebSearch")
    # The call by which it searches the web is refused, and no part of the session.
    assert compare_with_what_was_sampled(training, session, calls, said) == len(said) == 5
    found, listed, searched, _ = (_results(call)[-1] for call in calls[1:])
    for name in ("CronList", "WebSearch"):
        assert f'"name":"{name}"' in found
    assert "<tool_use_error>" not in listed
    assert "web_search_20250305" in searched and "42" not in searched


def test_a_picture_that_it_reads_does_not_end_its_run(training: Live, tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    picture.write_bytes(PICTURE)
    talk = [call_text("Read", {"file_path": str(picture)})]
    _, calls, said = _run(training, tmp_path, talk, f" --add-dir {tmp_path}")
    assert len(calls) == len(said) == 3
    assert "API could not process this image" in _results(calls[1])[-1]


def _run(
    live: Live, folder: Path, talk: list[str], more: str
) -> tuple[str, list[dict[str, Any]], list[list[int]]]:
    """Run its documented block with further arguments; the model writes the answer after ``talk``.

    Return the session's id, its calls, and the tokens that the engine sampled for each.
    """
    home, work = folder / "home", folder / "work"
    home.mkdir()
    work.mkdir()
    (work / QUESTION).write_text("What is 17 + 25?\n")
    before = live.sessions()
    live.engine.hush()
    live.engine.requests.clear()
    write = call_text("Write", {"file_path": str(work / ANSWER), "content": "42\n"})
    said = [live.says(text) for text in (*talk, write, "Done.")]
    programs = node_with(CLAUDE_CODE.environment) / "node_modules" / ".bin"
    variables = reader_shell(live.url, home=home, programs=[programs])
    run(script(CLAUDE_CODE.runs.code.rstrip() + more), variables, work)
    assert (work / ANSWER).read_text() == "42\n"
    (session,) = live.sessions() - before
    return session, session_part(live, f"{session}/interactions")["interactions"], said


def _results(call: dict[str, Any]) -> list[str]:
    """Return what tools gave to the model since the call before."""
    return [str(m["content"]) for m in call["message_delta"] if m["role"] == "tool"]
