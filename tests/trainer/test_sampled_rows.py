"""Sampled sessions are read back as they were written, to the last bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from any_agent.errors import ConfigError
from any_agent.types import Row, SampledSession
from tests.support.errors import fails_with
from trainer.manifests import read_sessions, write_sessions


def row(length: int, reward: float) -> Row:
    rng = np.random.default_rng(length)
    return {
        "input_ids": rng.integers(0, 99, length).astype(np.int32),
        "loss_mask": rng.integers(0, 2, length).astype(np.int32),
        "logprobs": rng.normal(size=length).astype(np.float32),
        "versions": rng.integers(-1, 9, length).astype(np.int32),
        "attention_mask": np.ones(length, np.bool_),
        "rewards": np.asarray(reward, np.float32),
    }


SESSIONS = [
    SampledSession("data-3-0", "data-3", [row(5, 0.1), row(9, 1 / 3)], [None, 0.7], task_id="a b"),
    SampledSession("data-3-1", "data-3", [row(2, -2.5)], [1.0]),
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
        assert again.temperatures == session.temperatures
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
