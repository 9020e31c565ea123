"""The blocks of docs/skill/SKILL.md work as they are written, one after another."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from tests.support.e2e.serving import environment, serve

PAGE = Path(__file__).resolve().parents[2] / "docs" / "skill" / "SKILL.md"
ORDER = ("before", "after")
BIN = Path(sys.executable).parent


def test_the_skill_leads_from_a_service_to_a_trained_model(tmp_path: Path) -> None:
    blocks = dict(re.findall(r"<!-- skill: (\S+) -->\n```\w+\n(.*?)```", PAGE.read_text(), re.S))
    make, start = blocks["serve"].replace("/tmp/tiny", str(tmp_path / "tiny")).split("\n", 1)
    assert bash(make, tmp_path).returncode == 0
    _, _, *arguments = shlex.split(start.replace("\\\n", ""))
    with serve(*arguments, "server.port=0", cwd=tmp_path) as service:
        for name, text in blocks.items():
            if name.endswith(".py"):
                (tmp_path / name).write_text(text)
            elif name != "serve":
                done = bash(text, tmp_path, ANY_AGENT_URL=service.url)
                assert done.returncode == 0, f"{name}: {done.stdout}{done.stderr}"
    before, after = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ORDER)
    assert after["reward"]["mean"] > before["reward"]["mean"]
    assert (tmp_path / "talks.jsonl").stat().st_size


def bash(script: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=cwd,
        env=environment(PATH=f"{BIN}:{os.environ['PATH']}", **more),
        capture_output=True,
        text=True,
        timeout=540,
    )
