"""Agents as they are shipped do a task of two files; what is recorded of them is exact."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.clients.connect.shell import reader_shell, run, script
from tests.clients.environment import node_with, python_with
from tests.clients.live import Live
from tests.clients.results import Results
from tests.clients.shipped.agents import AGENTS, ANSWER, QUESTION, Shipped
from tests.clients.shipped.record import compare_with_what_was_sampled, session_part

_FILES = {"js": "agent.mjs", "python": "agent.py"}


@pytest.mark.parametrize("shipped", AGENTS, ids=lambda shipped: shipped.name)
def test_a_task_with_two_files(
    shipped: Shipped, training: Live, found: Results, tmp_path: Path
) -> None:
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    (work / QUESTION).write_text("What is 17 + 25?\n")
    programs = _install(shipped, work)
    before = training.sessions()
    training.engine.hush()
    training.engine.requests.clear()
    said = [training.says(text) for text in shipped.says(work)]

    variables = reader_shell(training.url, home=home, programs=[programs])
    run(script(shipped.runs.code), variables, work)

    assert (work / ANSWER).read_text() == "42\n"
    (session,) = training.sessions() - before
    ended = session_part(training, session)
    assert (ended["state"], ended["mode"]) == ("finalized", "train")
    assert [entry["value"] for entry in ended["reward_history"]] == [1.0]
    calls = session_part(training, f"{session}/interactions")["interactions"]
    assert ended["interactions"] == len(calls) == len(said)
    assert ended["trainable_calls"] == len(calls) and not ended["untrainable_calls"]
    exact = compare_with_what_was_sampled(training, session, calls, said)
    ran = [c["function"]["name"] for i in calls for c in i["output_message"].get("tool_calls", ())]
    assert ran == [shipped.reads[0], shipped.writes[0]]
    found.agents[shipped.name] = {
        "title": shipped.title,
        "package": shipped.package,
        "registry": shipped.registry,
        "version": shipped.version,
        "api": shipped.api,
        "tools": ran,
        "calls": len(calls),
        "roots": sum(call["parent_id"] is None for call in calls),
        "exact": exact,
        "trained": ended["trainable_calls"],
    }


def _install(shipped: Shipped, work: Path) -> Path:
    """Write the agent's program, if it is one of a page; return the folder of its commands."""
    language = shipped.block.language
    if language in _FILES:
        (work / _FILES[language]).write_text(shipped.block.code, encoding="utf-8")
    if shipped.registry == "PyPI":
        return python_with(shipped.environment).parent
    packages = node_with(shipped.environment) / "node_modules"
    if language == "js":
        os.symlink(packages, work / "node_modules")
    return packages / ".bin"
