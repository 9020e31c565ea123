"""What sampled sessions hold, kept on disk for as long as a resume may train on them again.

Sessions of external agents are in their ranks' journals; those that a workflow of this process
returned are nowhere else. One file per step, `step-00000042.safetensors` beside the manifest: the
rows' tensors one behind the other, and what belongs to whom in its header.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from any_agent.errors import TrainingError
from any_agent.runtime.atomic_files import write_atomic
from any_agent.types import Row, SampledSession

FORMAT = 1
_TOKENS = {
    "input_ids": np.int32,
    "loss_mask": np.int32,
    "logprobs": np.float32,
    "versions": np.int32,
    "attention_mask": np.bool_,
}
"""Of each row [seq_len]."""


def write_sessions(path: Path, sessions: Sequence[SampledSession]) -> None:
    """On disk, whole, when it returns; an earlier file is replaced."""
    rows = [row for session in sessions for row in session.rows]
    tensors = {name: _joined([row[name] for row in rows], kind) for name, kind in _TOKENS.items()}
    tensors["lengths"] = np.array([len(row["input_ids"]) for row in rows], np.int64)
    # As they are: advantages come from them.
    tensors["rewards"] = np.array([float(row["rewards"]) for row in rows], np.float64)
    header = [
        {
            "session_id": session.session_id,
            "group_id": session.group_id,
            "task_id": session.task_id,
            "temperatures": session.temperatures,
        }
        for session in sessions
    ]
    metadata = {"format": str(FORMAT), "sessions": json.dumps(header)}
    write_atomic(path, save(tensors, metadata=metadata))


def read_sessions(path: Path) -> dict[str, SampledSession]:
    """By their ids, in the order of writing; none where there is no such file.

    Raises TrainingError for a file that is none of this version's.
    """
    if not path.exists():
        return {}
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != str(FORMAT):
                raise ValueError("it was written by another version of any-agent")
            header = json.loads(metadata["sessions"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        rows = iter(_rows(tensors))
        return {
            one["session_id"]: SampledSession(
                session_id=one["session_id"],
                group_id=one["group_id"],
                rows=[next(rows) for _ in one["temperatures"]],
                temperatures=one["temperatures"],
                task_id=one["task_id"],
            )
            for one in header
        }
    except (OSError, ValueError, KeyError, TypeError, StopIteration, SafetensorError) as error:
        raise TrainingError(f"{path} cannot be read: {error}") from error


def _joined(parts: list[np.ndarray], kind: type[np.generic]) -> np.ndarray:
    return np.concatenate([*parts, np.empty(0, kind)]).astype(kind)


def _rows(tensors: dict[str, np.ndarray]) -> list[Row]:
    ends = np.cumsum(tensors["lengths"])
    rows = []
    for start, end, reward in zip(ends - tensors["lengths"], ends, tensors["rewards"], strict=True):
        row = {name: tensors[name][start:end] for name in _TOKENS}
        rows.append(row | {"rewards": np.asarray(reward)})
    return rows
