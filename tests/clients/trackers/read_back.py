"""Reads back what a tracker has: ``-m tests.clients.trackers.read_back NAME FOLDER``.

It prints ``{"runs": [{"project", "name", "points": {name: [[step, value], ...]}, "config"}]}``.
"""

from __future__ import annotations

import json
import struct
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK = 32768


def tensorboard(folder: Path) -> list[dict[str, Any]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # A dashboard shows what this reads: with it, what was purged is gone.
    found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    points = {
        tag: [[event.step, event.value] for event in found.Scalars(tag)]
        for tag in found.Tags()["scalars"]
    }
    text = found.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    config = json.loads(text.removeprefix("```json\n").removesuffix("\n```"))
    return [{"points": points, "config": config}]


def trackio(folder: Path) -> list[dict[str, Any]]:
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    out = []
    for project in SQLiteStorage.get_projects():
        for run in trackio.Api().runs(project):
            points = defaultdict(list)
            for row in SQLiteStorage.get_logs(project, run.name):
                for name, value in row.items():
                    if name not in ("step", "timestamp"):
                        points[name].append([row["step"], value])
            out.append(
                {"project": project, "name": run.name, "points": points, "config": run.config}
            )
    return out


def wandb(folder: Path) -> list[dict[str, Any]]:
    """Merge the offline files of one run by wandb's steps, as `wandb sync` does."""
    runs: dict[str, dict[str, Any]] = {}
    for path in sorted((folder / "wandb").glob("offline-run-*/run-*.wandb")):
        for record in wandb_records(path):
            if record.HasField("run"):
                run = runs.setdefault(
                    record.run.run_id,
                    {"project": record.run.project, "name": record.run.display_name, "rows": {}},
                )
                run["config"] = {c.key: json.loads(c.value_json) for c in record.run.config.update}
            elif record.HasField("history"):
                row = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }
                run["rows"].setdefault(row["_step"], row)
    for run in runs.values():
        run["points"] = points = defaultdict(list)
        for _, row in sorted(run.pop("rows").items()):
            for name, value in row.items():
                points[name].append([row["step"], value])
    return list(runs.values())


def wandb_records(path: Path) -> Iterator[Any]:
    """Yield the records of a file: LevelDB's log of protocol buffers, behind a header."""
    from wandb.proto import wandb_internal_pb2

    data = path.read_bytes()
    assert data[:4] == b":W&B"
    at, whole = 7, b""
    while at + 7 <= len(data):
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        if _BLOCK - at % _BLOCK < 7 or kind == 0:
            at += _BLOCK - at % _BLOCK
            continue
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


if __name__ == "__main__":
    print(json.dumps({"runs": globals()[sys.argv[1]](Path(sys.argv[2]))}))
