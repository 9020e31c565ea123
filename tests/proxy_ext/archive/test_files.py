"""Records as lines, lines in files: exact, readable with zcat, and damage costs one line."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
from dataclasses import asdict, fields, replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from any_agent.types import Interaction, id_array, logprob_array
from proxy_ext.archive.files import (
    ArchiveFolder,
    ArchiveWriter,
    head_of,
    list_archives,
    read_lines,
    remove_from,
    remove_partial,
)
from proxy_ext.archive.records import read_record, record_line
from proxy_ext.journal.base import RewardRow
from tests.support.journal import make_interaction, make_row

ODD = {"text": "lone \ud800, é, \u2028", "big": 2**80, "deep": [[[None]]]}


def line(number: int, text: str = "x") -> bytes:
    return record_line(number, make_row(f"s{number}", metadata={"text": text}), [], [])


def write(folder: Path, *numbers: int, text: str = "x", rank: int = 0) -> Path:
    return write_lines(folder, *((n, line(n, text)) for n in numbers), rank=rank)


def write_lines(folder: Path, *lines: tuple[int, bytes], rank: int = 0) -> Path:
    writer = ArchiveWriter(folder, rank, {"experiment": "e"})
    for number, record in lines:
        writer.add(number, record)
    size = writer.finish()
    path = folder / writer.name
    assert path.stat().st_size == size
    return path


def numbers(lines: list[bytes]) -> list[int | None]:
    heads = map(head_of, lines)
    return [None if head is None else head.number for head in heads]


def archives_of(folder: Path) -> ArchiveFolder:
    return ArchiveFolder(lambda: list_archives(folder, 0), pytest.fail)


def test_an_archived_record_reads_back_as_it_was() -> None:
    random = np.random.default_rng(0)
    interaction = replace(
        make_interaction("i", "s"),
        prompt_delta_ids=id_array([0, 2**31 - 1]),
        output_ids=id_array(range(1000)),
        output_logprobs=logprob_array(-np.exp(random.normal(size=1000) * 9)),
        output_versions=id_array([-1] * 1000),
        output_message={"role": "assistant", "content": None, "odd": ODD},
        request={"recorded": ODD},
        reward=0.1,
    )
    gconfig = interaction.gconfig.new(stop=("x",), logit_bias=((7, -1.5),), grammar="{}")
    interaction = replace(interaction, gconfig=gconfig)
    row = make_row("s", final_reward=0.3, tenant="acme", step=7, reason="\udfff", metadata=ODD)
    words = RewardRow(None, "feedback", None, "me", 6, "meh \u202e")
    rewards = [RewardRow("i", "format", 0.1, "session", 5.5), words]
    found = read_record(record_line(12, row, rewards, [interaction]))
    assert (found.number, found.session["id"], found.session["metadata"]) == (12, "s", ODD)
    assert (found.session["step"], found.session["tenant"]) == (7, "acme")
    assert found.rewards == [*map(asdict, rewards)]
    (again,) = found.interactions
    for field in fields(Interaction):
        mine, other = getattr(interaction, field.name), getattr(again, field.name)
        if isinstance(mine, np.ndarray):
            assert mine.dtype == other.dtype and np.array_equal(mine, other), field.name
        else:
            assert mine == other, field.name


def test_a_line_that_is_no_record_is_refused() -> None:
    odd = '{"number":1,"session":{"id":"x"},"rewards":[]}'
    for text in ("{}", "[]", "3", "null", "{", odd, "[" * 99999):
        with pytest.raises(ValueError):
            read_record(text.encode())


def test_any_tool_can_read_a_file(tmp_path: Path) -> None:
    path = write(tmp_path, 3, 5)
    shown = subprocess.run(["zcat", path], capture_output=True, check=True).stdout
    assert shown == gzip.decompress(path.read_bytes())
    first, *records = map(json.loads, shown.splitlines())
    assert first == {"archive": 1, "rank": 0, "experiment": "e"}
    assert [record["session"]["id"] for record in records] == ["s3", "s5"]
    assert re.fullmatch(r"rank-0-3-5-[0-9a-f]{8}\.jsonl\.gz", path.name)
    assert list_archives(tmp_path, 1) == list_archives(tmp_path / "none", 0) == []


def test_a_file_is_not_there_before_it_is_whole(tmp_path: Path) -> None:
    writer = ArchiveWriter(tmp_path, 0, {})
    writer.add(1, line(1))
    assert list_archives(tmp_path, 0) == []
    writer.abandon()
    assert list(tmp_path.iterdir()) == []
    left = ArchiveWriter(tmp_path, 0, {})
    other = ArchiveWriter(tmp_path, 1, {})
    remove_partial(tmp_path, 0)
    assert list(tmp_path.iterdir()) == [other.partial]
    left.abandon()
    other.abandon()


def test_damage_in_an_archive_costs_one_line(tmp_path: Path) -> None:
    texts = ["".join(Random(k).choices("abcdefghij", k=3000)) for k in range(5)]
    path = write_lines(tmp_path, *((k, line(k, text)) for k, text in enumerate(texts, 1)))
    whole = path.read_bytes()
    for at in range(200, len(whole), 997):
        for damaged in (whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :], whole[:at]):
            path.write_bytes(damaged)
            reports: list[str] = []
            found = numbers(list(read_lines(path, reports.append)))
            assert len(reports) <= 1 and all("damaged at byte" in r for r in reports)
            if len(damaged) == len(whole):
                # A flipped bit may also hit what gzip does not look at.
                assert len(found) == 6 - len(reports)
            assert found == sorted(found, key=lambda n: n or 0)
    path.write_bytes(b"")
    assert list(read_lines(path, pytest.fail)) == []
    path.write_bytes(b"nothing of ours")
    reports = []
    assert list(read_lines(path, reports.append)) == [] and len(reports) == 1


def test_archives_are_read_in_the_order_of_session_numbers(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 9)
    write(tmp_path, 3, 5, 7)
    write(tmp_path, 4)
    write(tmp_path, 10, 11)
    write(tmp_path, 6, rank=1)
    assert numbers(list(archives_of(tmp_path).all())) == [1, 2, 3, 4, 5, 7, 9, 10, 11]
    archives = archives_of(tmp_path)
    found = {n: archives.find(n, f"s{n}") for n in (2, 4, 6, 7, 8, 9)}
    assert [n for n, line in found.items() if line is not None] == [2, 4, 7, 9]
    assert all(line is None or head_of(line) == (n, f"s{n}") for n, line in found.items())
    # Written while the pass is under way.
    write(tmp_path, 8, 12)
    after = [archives.find(n, f"s{n}") is not None for n in (11, 12, 13)]
    assert after == [True, True, False]
    assert list(archives_of(tmp_path / "none").all()) == []


def test_a_session_is_taken_out_of_a_file(tmp_path: Path) -> None:
    path = write(tmp_path, 1, 2, 3, text="secret")
    (file,) = list_archives(tmp_path, 0)
    before = path.stat().st_size
    assert remove_from(file, {"s9"}, pytest.fail) == 0
    assert path.stat().st_size == before
    gone = remove_from(file, {"s2"}, pytest.fail)
    assert path.stat().st_size == before - gone
    assert numbers(list(read_lines(path, pytest.fail))) == [None, 1, 3]
    # What is damaged is kept.
    data = bytearray(path.read_bytes())
    data[-20] ^= 0x55
    path.write_bytes(data)
    reports: list[str] = []
    assert remove_from(file, {"s1"}, reports.append) > 0
    assert len(reports) == 1
    assert path.read_bytes().endswith(bytes(data[-40:]))
    other = write(tmp_path, 8, 9)
    for number in (8, 9):
        remove_from(list_archives(tmp_path, 0)[-1], {f"s{number}"}, pytest.fail)
    assert not other.exists()
