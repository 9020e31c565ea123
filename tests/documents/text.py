"""The documents' code, cut out by line numbers, with the import names of this project."""

from __future__ import annotations

import os
import re
import textwrap
from pathlib import Path

FOLDER = Path(
    os.environ.get("ANY_AGENT_DOCUMENTS")
    or Path(__file__).resolve().parents[3] / "shared" / "documents"
)

MODULES = {
    "areal.api.cli_args": "any_agent",
    "areal.api.reward_api": "any_agent",
    "areal.api.workflow_api": "any_agent",
    "areal.core": "any_agent",
    "areal.core.types": "any_agent",
    "areal.dataset": "any_agent",
    "areal.engine.sglang_remote": "any_agent",
    "areal.experimental.camel.openai_model": "any_agent.camel.openai_model",
    "areal.experimental.openai": "any_agent",
    "areal.experimental.openai.types": "any_agent",
    "areal.experimental.trainer.rl": "trainer",
    "areal.infra": "any_agent",
    "areal.launcher.slurm": "any_agent.launcher.slurm",
    "areal.utils.hf_utils": "any_agent",
}
"""The documents' modules, and ours."""
CLASSES = {
    "ArealOpenAI": "EngineOpenAI",
    "AReaLOpenAICompatibleModel": "AnyAgentOpenAICompatibleModel",
}
"""The documents' names that differ from ours: they are imported ``as`` what the code calls them."""

_IMPORT = re.compile(r"^(from )(areal[\w.]*)( import )(\([^)]*\)|[^\n]*)", re.M)


def present() -> bool:
    """Return whether the documents lie beside the project."""
    return all(_file(number) is not None for number in range(5))


def document(number: int) -> str:
    """Return the whole text of a document, by the number that its file name begins with."""
    file = _file(number)
    assert file is not None, f"document {number:03d} is not in {FOLDER}"
    return file.read_text(encoding="utf-8")


def cut(number: int, first: int, last: int) -> str:
    """Return the lines ``first`` to ``last``, counted from 1, without common indentation."""
    lines = document(number).splitlines()[first - 1 : last]
    return textwrap.dedent("\n".join(lines)) + "\n"


def renamed(code: str) -> str:
    """Return Python code, or a command line, with import names of this project."""

    def ours(match: re.Match[str]) -> str:
        names = match[4]
        for theirs, name in CLASSES.items():
            names = re.sub(rf"\b{theirs}\b", f"{name} as {theirs}", names)
        return f"{match[1]}{MODULES[match[2]]}{match[3]}{names}"

    code = _IMPORT.sub(ours, code)
    return re.sub(r"-m (areal[\w.]*)", lambda match: f"-m {MODULES[match[1]]}", code)


def fences(number: int) -> list[tuple[int, int]]:
    """Return the first and last line inside each fenced block."""
    marks = [k for k, line in enumerate(document(number).splitlines(), 1) if line[:3] == "```"]
    return [(a + 1, b - 1) for a, b in zip(marks[::2], marks[1::2], strict=True)]


def _file(number: int) -> Path | None:
    return next(FOLDER.glob(f"{number:03d}_*.txt"), None)
