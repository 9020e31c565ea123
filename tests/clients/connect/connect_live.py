"""Every block of docs/how-to/connect, as its reader would run it, against a live service."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import httpx
import pytest

from tests.clients.connect.cases import CASES, HOW_A_CLASS_IS_RUN, PYTHON, Case
from tests.clients.connect.pages import Block, all_blocks
from tests.clients.connect.shell import reader_shell, run, script
from tests.clients.environment import component, node_with, python_with
from tests.clients.live import Live

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
BLOCKS = all_blocks()
RUNS = [
    pytest.param(block, where, id=f"{place}-{where}" if where else place)
    for place, block in BLOCKS.items()
    if place in CASES
    for where in (PYTHON.get(block.page, (None,)) if block.language == "python" else (None,))
]
FILES = {("agent", "python"): "sum_agent.py", ("program", "js"): "agent.mjs"}
"""What a page's other blocks call these blocks."""


@pytest.mark.parametrize(("block", "where"), RUNS)
def test_block(
    training: Live,
    block: Block,
    where: str | None,
    tmp_path: Path,
) -> None:
    case = CASES[block.place]
    training.engine.hush()
    for text in case.says:
        training.says(text)
    before, recorded = training.sessions(), training.continued()
    variables = reader_shell(training.url, home=tmp_path)
    if block.name == "program":
        # Its author runs it so before anything is trained: by the two variables alone.
        session = training.open()
        variables |= {"OPENAI_BASE_URL": f"{training.url}/v1"}
        variables |= {"OPENAI_API_KEY": session["api_key"]}
    printed = run(command(block, where, tmp_path), variables, tmp_path)
    assert case.prints in printed
    calls = len(case.says) // case.sessions
    turns = {"first": case.sessions, "exact": case.sessions * (calls - 1)}
    assert dict(training.continued() - recorded) == {k: n for k, n in turns.items() if n}
    if block.name != "program":
        rewarded(training, training.sessions() - before, case, calls)


def command(block: Block, where: str | None, folder: Path) -> list[str | Path]:
    """What runs it; writes what that needs into ``folder``."""
    for other in (b for b in BLOCKS.values() if b.page == block.page):
        file = FILES.get((other.name, other.language))
        if file is not None:
            (folder / file).write_text(other.code, encoding="utf-8")
    if block.language == "bash":
        _find_node(block, folder)
        return script(block.code)
    if block.language == "js":
        _find_node(block, folder)
        (folder / "block.mjs").write_text(block.code, encoding="utf-8")
        return [component("node"), "block.mjs"]
    assert block.language == "python", f"{block.place}: nothing runs {block.language} here"
    # A class is run as docs/how-to/connect/README.md says.
    program = BLOCKS[HOW_A_CLASS_IS_RUN].code if block.name == "agent" else block.code
    (folder / "block.py").write_text(program, encoding="utf-8")
    if where is None:
        return [sys.executable, folder / "block.py"]
    (sdk,) = python_with("sdk").parents[1].glob("lib/*/site-packages")
    python = python_with(where)
    return [python, "-I", HERE / "run_block.py", ROOT, sdk, folder / "block.py"]


def _find_node(block: Block, folder: Path) -> None:
    """npm's packages, where a page is of them."""
    if block.page == "openai-node":
        os.symlink(node_with("openai-npm") / "node_modules", folder / "node_modules")


def rewarded(live: Live, ids: set[str], case: Case, calls: int) -> None:
    """Each was finalized with the reward 1, or evaluated, and has recorded all of its calls."""
    assert len(ids) == case.sessions
    for id in ids:
        session = httpx.get(f"{live.url}/rl/v1/sessions/{id}", timeout=60).json()
        assert session["state"] == ("finalized" if session["mode"] == "train" else "evaluated")
        assert session["interactions"] == calls
        assert [entry["value"] for entry in session["reward_history"]] == [1.0]
