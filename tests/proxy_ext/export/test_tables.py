"""`any-agent export --format parquet` and `hf`: the same rows as the lines, in bounded memory."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import datasets
import pytest
from pyarrow import parquet

from any_agent.types import SessionState
from proxy_ext.export import tables
from tests.support.archives import CALL, TOOLS, Rank, export_trial


@pytest.mark.parametrize("style", ["individual", "concat", "messages"])
async def test_tables_hold_what_the_lines_hold(rank: Rank, tmp_path: Path, style: str) -> None:
    turns = (("1", "2"), ("3", {"content": None, "tool_calls": [CALL]}))
    await rank.add_turns("a", *turns, task_id="é", state=SessionState.ABORTED)
    await rank.add_turns("b", reward=None, state=SessionState.OPEN, step=3, group_id="g")
    await rank.archive.sweep()
    await rank.add_turns("c", call={"tools": TOOLS})
    lines = export_trial(tmp_path, "--style", style).lines
    file, folder = tmp_path / "rows.parquet", tmp_path / "rows"
    for name, out in (("parquet", file), ("hf", folder)):
        done = export_trial(tmp_path, "--format", name, "--style", style, "--out", str(out))
        assert (done.code, done.lines) == (0, []), done.said
        assert f"3 sessions (1 of them from archives), {len(lines)} rows" in done.said
    cache = str(tmp_path / "cache")
    read = datasets.load_dataset("parquet", data_files=str(file), split="train", cache_dir=cache)
    assert list(read) == list(datasets.load_from_disk(str(folder))) == lines
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


async def test_tables_are_written_in_batches(
    rank: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for k in range(6):
        await rank.add_turns(f"s{k}")
    monkeypatch.setattr(tables, "BATCH_BYTES", 1000)
    out = tmp_path / "rows.parquet"
    assert export_trial(tmp_path, "--format", "parquet", "--out", str(out)).code == 0
    file = parquet.ParquetFile(out)
    assert file.num_row_groups > 1
    assert file.read().column("session_id").to_pylist() == [f"s{k}" for k in range(6)]


async def test_tables_without_a_row(rank: Rank, tmp_path: Path) -> None:
    await rank.add_turns("a")
    file, folder = tmp_path / "rows.parquet", tmp_path / "rows"
    for name, out in (("parquet", file), ("hf", folder)):
        done = export_trial(tmp_path, "--format", name, "--out", str(out), "--task", "none")
        assert done.code == 0, done.said
    assert parquet.read_table(file).num_rows == 0
    assert len(datasets.load_from_disk(str(folder))) == 0


async def test_a_missing_extra_is_named(
    rank: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rank.add_turns("a")
    monkeypatch.setitem(sys.modules, "datasets", None)
    for name, out in (("parquet", "rows.parquet"), ("hf", "rows")):
        done = export_trial(tmp_path, "--format", name, "--out", str(tmp_path / out))
        assert done.code == 2 and 'pip install "any-agent-rl[data]"' in done.said
        assert not (tmp_path / out).exists()


async def test_a_folder_must_be_new(rank: Rank, tmp_path: Path) -> None:
    await rank.add_turns("a")
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine").write_text("x")
    for out in (full, full / "mine", tmp_path / "none" / "below"):
        done = export_trial(tmp_path, "--format", "hf", "--out", str(out))
        assert done.code == 2 and f"--out {out}" in done.said, done.said
    assert (full / "mine").read_text() == "x"
    (full / "mine").unlink()
    assert export_trial(tmp_path, "--format", "hf", "--out", str(full)).code == 0
    assert len(datasets.load_from_disk(str(full))) == 1
