"""What a rank leaves out at its start; all that it reads and writes is as with it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from any_agent.chat import load_chat_format
from any_agent.chat.format_probes import SYSTEM, TOOLS, USER
from tests.support.families import family, names

RANK = """
import json, sys
from proxy_ext.lean_imports import import_lean
import_lean()
import proxy_ext.app, proxy_ext.server, proxy_ext.service
from any_agent.chat import load_chat_format
from any_agent.chat.format_probes import SYSTEM, TOOLS, USER
read = {}
for path in sys.argv[1:]:
    chat = load_chat_format(path)
    ids = chat.render([SYSTEM, USER], TOOLS)
    read[path] = [chat.name, list(chat.stop_token_ids), list(ids), chat.decode(ids)]
loaded = sorted({"torch", "openai"} & sys.modules.keys())
import openai, torch
late = [hasattr(openai, "OpenAI"), torch.ones(2).sum().item()]
print(json.dumps([read, loaded, late]))
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )


@pytest.mark.service
def test_every_family_is_read_without_torch_as_with_it() -> None:
    folders = [str(family(name).model_dir) for name in names()]
    ended = run(RANK, *folders)
    read, loaded, late = json.loads(ended.stdout)
    assert loaded == []
    assert late == [True, 2.0], "whoever asks for them later gets them"
    assert "PyTorch" not in ended.stderr

    def here(path: str) -> list[Any]:
        chat = load_chat_format(path)
        ids = chat.render([SYSTEM, USER], TOOLS)
        return [chat.name, list(chat.stop_token_ids), list(ids), chat.decode(ids)]

    assert read == {path: here(path) for path in folders}
    assert "torch" in sys.modules


@pytest.mark.service
def test_modules_that_are_loaded_already_stay() -> None:
    code = """
import sys
import openai, torch
from proxy_ext.lean_imports import import_lean
import_lean()
from renderers.client import AsyncOpenAI
from transformers.utils import is_torch_available
assert AsyncOpenAI is openai.AsyncOpenAI and sys.modules["torch"] is torch
assert is_torch_available()
"""
    run(code)
