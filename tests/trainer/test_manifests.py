"""Manifests, and the sampled sessions beside them, are read back as they were written."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from any_agent.errors import ConfigError, TrainingError
from any_agent.rollout import Consumed
from any_agent.types import Row, SampledSession
from tests.support.errors import fails_with
from trainer.manifests import (
    SETTINGS,
    ConsumedSessions,
    Manifest,
    ManifestStore,
    read_sessions,
    write_sessions,
)

ONE = Manifest(
    step=1,
    groups=[["b", "a"], ["c"]],
    trained=["b", "c"],
    rejected={"a": "stale"},
    tokens=[3, 1],
    versions={0: 0, 7: -(10**9)},
    eta=2,
    settings=dict.fromkeys(SETTINGS) | {"discount": 0.9, "normalize_std": "none"},
    pass_tokens={"cpu": 512},
    positions=[],
    frozen={},
    origin=None,
)


@pytest.fixture
def manifests(tmp_path: Path) -> ManifestStore:
    return ManifestStore(tmp_path)


def write(manifests: ManifestStore, *steps: int) -> None:
    for step in steps:
        manifests.write(replace(ONE, step=step))


def test_a_manifest_that_is_written_anew_removes_all_later_ones(manifests: ManifestStore) -> None:
    write(manifests, 1, 2, 3)
    write(manifests, 2)
    assert manifests.steps() == [1, 2]
    assert manifests.read(1) == ONE and ONE.sessions == ["b", "a", "c"]


def test_manifests_after_a_checkpoint_are_listed_and_a_gap_is_an_error(
    manifests: ManifestStore, tmp_path: Path
) -> None:
    assert manifests.after(0) == []
    write(manifests, 2, 3, 4, 5)
    manifests.prune(2)  # no resume needs it
    (tmp_path / "step-00000009.json.tmp").write_text("x")
    assert [manifests.after(step) for step in (2, 4, 5)] == [[3, 4, 5], [5], []]
    for oldest in (1, 0):
        with fails_with(TrainingError, "3, 4, 5"):
            manifests.after(oldest)
    manifests.remove(4)
    manifests.remove(9)
    with fails_with(TrainingError, "3, 5"):
        manifests.after(2)


WRONG: dict[str, Any] = {
    "groups": 5, "trained": [1], "tokens": "x", "versions": {"a": 1}, "more": 1, "step": 2,
    "settings": {"discount": 0.9}, "origin": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "{}", "null", "\0" * 600, "\x8e"),
        *(json.dumps({"format": 2, **asdict(ONE)}), json.dumps({"format": 3, "step": 1})),
        *(json.dumps({"format": 3, **asdict(ONE), name: value}) for name, value in WRONG.items()),
    ],
)
def test_a_file_that_is_no_manifest_ends_training_with_its_name(
    manifests: ManifestStore, tmp_path: Path, text: str
) -> None:
    """No try would read it, so training ends at once, and says what to do."""
    file = tmp_path / "step-00000001.json"
    file.write_bytes(text.encode("latin-1"))
    with fails_with(ConfigError, str(file)):
        manifests.read(1)
    with fails_with(TrainingError, "No such file"):
        manifests.read(2)


def consumed(steps: int) -> ConsumedSessions:
    """Steps of 64 sessions each, two of which are stale."""
    sessions = ConsumedSessions()
    for step in range(1, steps + 1):
        ids = [f"ses-{k % 2}-{step:08x}{k:08x}" for k in range(64)]
        sessions.add(ids[2:], dict.fromkeys(ids[:2], "stale"), step)
    return sessions


def test_a_checkpoints_sessions_are_read_back() -> None:
    sessions = consumed(3)
    sessions.add(["a"], {"b": "not_finite", "c": "stale"}, None)
    again = ConsumedSessions()
    again.load(json.loads(json.dumps(sessions.dump())))
    assert list(again.items()) == list(sessions.items())
    assert again["c"] == Consumed(None, "stale")


def test_only_the_newest_sessions_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = list(consumed(5))
    monkeypatch.setattr("trainer.manifests.MAX_REMEMBERED", 100)
    assert list(consumed(5)) == whole[-100:]


def test_a_session_takes_few_bytes_of_memory_and_of_a_checkpoint() -> None:
    """A trainer remembers tens of thousands, and writes them all into each checkpoint."""
    tracemalloc.start()
    try:
        sessions = consumed(200)
        taken, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        document = json.dumps(sessions.dump())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < 150 * len(sessions)
    assert len(document) < 32 * len(sessions)
    assert peak - taken < 200 * len(sessions)


def random_row(length: int, reward: float) -> Row:
    rng = np.random.default_rng(length)
    return {
        "input_ids": rng.integers(0, 99, length).astype(np.int32),
        "loss_mask": rng.integers(0, 2, length).astype(np.int32),
        "logprobs": rng.normal(size=length).astype(np.float32),
        "versions": rng.integers(-1, 9, length).astype(np.int32),
        "attention_mask": np.ones(length, np.bool_),
        "cut": rng.integers(0, 2, length).astype(np.bool_),
        "rewards": np.asarray(reward, np.float32),
    }


def strided(row: Row) -> Row:
    """The row as views whose values do not lie one after the other."""
    out = {k: np.stack([v, v], axis=-1)[..., 0] if v.ndim else v for k, v in row.items()}
    length = len(row["input_ids"])
    return out | {"versions": np.broadcast_to(np.int32(3), (length,))}


SESSIONS = [
    SampledSession(
        *("data-3-0", "data-3", [random_row(5, 0.1), random_row(9, 1 / 3)], [None, 0.7]),
        task_id="a b",
        roles=["plan", ""],
    ),
    SampledSession("data-3-1", "data-3", [random_row(2, -2.5)], [1.0]),
    # Views, as of columns of a larger array.
    SampledSession("data-4-0", "data-4", [strided(random_row(7, 0.5))], [1.0]),
    # One whose workflow returned nothing to train on.
    SampledSession("data-12-0", "data-12", [], []),
]


def test_sampled_sessions_are_read_back_to_the_last_bit(tmp_path: Path) -> None:
    assert read_sessions(tmp_path / "none") == {}
    write_sessions(tmp_path / "empty", SESSIONS[2:])
    assert read_sessions(tmp_path / "empty")["data-12-0"].rows == []
    path = tmp_path / "rows.safetensors"
    write_sessions(path, SESSIONS)
    found = read_sessions(path)
    assert list(found) == [session.session_id for session in SESSIONS]
    for session in SESSIONS:
        again = found[session.session_id]
        assert (again.group_id, again.task_id) == (session.group_id, session.task_id)
        assert (again.temperatures, again.roles) == (session.temperatures, session.roles)
        assert len(again.rows) == len(session.rows)
        for one, other in zip(session.rows, again.rows, strict=True):
            assert one.keys() == other.keys()
            for name in one.keys() - {"rewards"}:
                assert one[name].dtype == other[name].dtype
                assert np.array_equal(one[name], other[name])
            assert float(one["rewards"]) == float(other["rewards"])


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_a_torn_file_of_sessions_is_refused_by_name(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "step-00000004.safetensors"
    write_sessions(path, SESSIONS)
    path.write_bytes(path.read_bytes()[:kept])
    with fails_with(ConfigError, "step-00000004.safetensors"):
        read_sessions(path)
