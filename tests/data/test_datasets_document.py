"""docs/how-to/datasets.md says what happens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from any_agent.launcher.training_progress import format_evaluation

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "how-to" / "datasets.md").read_text()


def test_the_documented_example_prints_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in (4, 400)]
    Path("gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code = TEXT.partition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {}
    exec(compile(code, "docs/how-to/datasets.md", "exec"), names)
    assert capsys.readouterr().out == "1 [{'role': 'user', 'content': '400 + 1?'}]\n"
    assert names["dataset"].column_names == ["answer", "messages"]


def test_the_documented_evaluation_prints_as_shown() -> None:
    block = TEXT.partition("A line of `metrics.jsonl`")[2].partition("```text\n")[2]
    line, _, printed = block.partition("```")[0].partition("\n\n")
    assert format_evaluation(json.loads(line.replace("...", "0"))) == printed.strip()
