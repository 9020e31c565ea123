"""`TrajectoryDump`: writes episodes to files as text, so that people can read them.

::

    <fileroot>/<experiment>/<trial>/rollout/<version>/<task_id>.jsonl
    <fileroot>/<experiment>/<trial>/eval-rollout/<version>/<task_id>.jsonl

``version`` is the newest version that sampled one of the task's tokens. Each line is one row:

================  =======================================================================
``task_id``       the executor's id of the task
``sample_idx``    the number of the row in its task, from 0
``seqlen``        the number of tokens
``prompt_len``    the number of tokens before the first sampled one
``head_version``  the oldest version that sampled one of its tokens; -1 if none was sampled
``tail_version``  the newest such version
``reward``        the row's reward
``prompt``        text
``completion``    text of everything from the first sampled token on, special tokens included
================  =======================================================================
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import numpy as np

from any_agent.config import Config
from any_agent.runtime.atomic_files import append_line, make_folder
from any_agent.types import Row

log = logging.getLogger(__name__)

_MAX_NAME = 200


class TrajectoryDump:
    """Writes episodes below a trial's ``folder``; ``decode`` turns token ids into text."""

    def __init__(self, folder: Path, decode: Callable[[list[int]], str]) -> None:
        self._folder = folder
        self._decode = decode
        self.failures = 0
        """The number of tasks that could not be written; the first failure is logged."""

    @classmethod
    def of(cls, config: Config, decode: Callable[[list[int]], str]) -> Self | None:
        """Return the dump of a configuration; None without ``rollout.dump_to_file``."""
        if not config.rollout.dump_to_file:
            return None
        root = config.rollout.fileroot or config.root / config.user
        return cls(root.absolute() / config.experiment / config.trial, decode)

    async def write(self, rows: Sequence[Row], *, task_id: int | str, is_eval: bool) -> None:
        """Append a task's rows to its file in a thread.

        Errors are logged and counted, never raised: training goes on without the dump.
        """
        try:
            await asyncio.to_thread(self.write_now, rows, task_id=task_id, is_eval=is_eval)
        except Exception as error:
            self.failures += 1
            if self.failures == 1:
                log.warning(
                    "cannot write an episode to %s: %r; training goes on, and further failures are "
                    "only counted",
                    self._folder,
                    error,
                )

    def write_now(self, rows: Sequence[Row], *, task_id: int | str, is_eval: bool) -> Path | None:
        """Append the rows in this thread and return the file. Raises OSError and ``decode``'s
        errors."""
        lines = [self._line(row, task_id, k) for k, row in enumerate(rows)]
        if not lines:
            return None
        folder = self._folder / ("eval-rollout" if is_eval else "rollout")
        path = folder / str(max(line["tail_version"] for line in lines)) / file_name(task_id)
        make_folder(path.parent)
        text = "\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
        append_line(path, text.encode(errors="backslashreplace").decode())
        return path

    def _line(self, row: Row, task_id: int | str, sample_idx: int) -> dict[str, Any]:
        ids = row["input_ids"].tolist()
        # Tokens outside the loss may be sampled, too, but workflows may give prompts a version.
        trained = row["loss_mask"] == 1
        sampled = np.flatnonzero(trained if trained.any() else row["versions"] >= 0)
        prompt_len = int(sampled[0]) if sampled.size else len(ids)
        versions = row["versions"][sampled]
        reward = float(row["rewards"])
        return {
            "task_id": task_id,
            "sample_idx": sample_idx,
            "seqlen": len(ids),
            "prompt_len": prompt_len,
            "head_version": int(versions.min()) if sampled.size else -1,
            "tail_version": int(versions.max()) if sampled.size else -1,
            "reward": reward if math.isfinite(reward) else None,
            "prompt": self._decode(ids[:prompt_len]),
            "completion": self._decode(ids[prompt_len:]),
        }


def file_name(task_id: int | str) -> str:
    """Return the name of a task's file; characters that a path cannot hold are escaped as in a
    URL."""
    name = quote(str(task_id), safe="")
    # A leading dot would hide the file, and "." and ".." are folders.
    name = f"%2E{name[1:]}" if name.startswith(".") else name
    return f"{name[:_MAX_NAME]}.jsonl"
