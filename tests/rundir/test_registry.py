"""Entries that parts of a run write for each other."""

from __future__ import annotations

from pathlib import Path

import pytest

import any_agent.rundir.registry as registry
from any_agent.rundir.registry import Registry, RegistryEntry, publish


def entry(**fields: object) -> RegistryEntry:
    known = {"name": "rank-0", "boot_id": "a", "url": "http://127.0.0.1:1", "pid": 7}
    return RegistryEntry.model_validate(known | fields)


def test_a_reader_sees_what_was_written(tmp_path: Path) -> None:
    for folder in (tmp_path / "none", tmp_path):
        reader = Registry(folder)
        reader.refresh()
        assert reader.get("rank-0") is None
        assert not reader.alive("rank-0")
    publish(tmp_path, entry(version=3))
    publish(tmp_path, entry(name="router"))
    reader.refresh()
    assert reader.get("rank-0") == entry(version=3)
    assert reader.alive("rank-0")
    publish(tmp_path, entry(boot_id="b", state="stopping"))
    reader.refresh()
    assert reader.get("rank-0") == entry(boot_id="b", state="stopping")
    assert not reader.alive("rank-0")
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["rank-0.json", "router.json"]


@pytest.mark.parametrize("text", ["", '{"name": "rank-0"', "{}", '{"name": "rank-1"}', "\x00"])
def test_a_damaged_entry_leaves_the_last_good_copy(tmp_path: Path, text: str) -> None:
    reader = Registry(tmp_path)
    publish(tmp_path, entry())
    reader.refresh()
    (tmp_path / "rank-0.json").write_text(text)
    reader.refresh()
    assert reader.get("rank-0") == entry()
    publish(tmp_path, entry(version=9))
    reader.refresh()
    assert reader.get("rank-0") == entry(version=9)


def test_an_entry_in_anothers_file_is_not_believed(tmp_path: Path) -> None:
    publish(tmp_path, entry(name="rank-1"))
    (tmp_path / "rank-1.json").rename(tmp_path / "rank-0.json")
    reader = Registry(tmp_path)
    reader.refresh()
    assert reader.get("rank-0") is None


def test_a_part_that_falls_silent_is_no_longer_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(registry.time, "monotonic", lambda: now)
    reader = Registry(tmp_path)
    assert reader.heard("rank-0") == 0.0
    publish(tmp_path, entry())
    # A temporary file of another writer, which may be gone at any moment, is no entry.
    (tmp_path / ".rank-1.77").symlink_to(tmp_path / "gone")
    reader.refresh()
    now += registry.SILENT_AFTER - 1
    reader.refresh()
    assert reader.alive("rank-0") and reader.heard("rank-0") == 100.0
    now += 2
    reader.refresh()
    assert not reader.alive("rank-0") and reader.heard("rank-0") == 100.0
    # Where it was last is still known.
    assert reader.get("rank-0") == entry()
    publish(tmp_path, entry())
    reader.refresh()
    assert reader.alive("rank-0") and reader.heard("rank-0") == now
