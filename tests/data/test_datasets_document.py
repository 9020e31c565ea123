"""docs/how-to/datasets.md says what happens."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from any_agent.data import get_custom_dataset
from any_agent.errors import DatasetError
from any_agent.launcher.training_progress import format_evaluation

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "how-to" / "datasets.md").read_text()


def test_the_example(
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


def test_the_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    block = TEXT.partition("## Errors")[2].partition("```text\n")[2].partition("```")[0]
    shown = block.splitlines()
    bad = ['{"question": "aaaaaaaaaaaaaaaaaaaaa", "answer": "42" "x": 1}']
    bad += ["[1]", '{"question": 1, "solution": 2}']
    for line, message in zip(bad, shown, strict=False):
        Path("gsm8k.jsonl").write_text("\n" * 16 + line + "\n")
        with pytest.raises(DatasetError) as raised:
            get_custom_dataset(path="gsm8k.jsonl", fields=("answer",))
        assert re.sub(r"column \d+", "", str(raised.value)) == re.sub(r"column \d+", "", message)
    folder = Path("data/gsm8k")
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(DatasetError) as raised:
        get_custom_dataset(path=folder)
    assert str(raised.value) == shown[3]


def test_the_evaluations_line() -> None:
    block = TEXT.partition("A line of `metrics.jsonl`")[2].partition("```text\n")[2]
    line, _, printed = block.partition("```")[0].partition("\n\n")
    assert format_evaluation(json.loads(line.replace("...", "0"))) == printed.strip()
