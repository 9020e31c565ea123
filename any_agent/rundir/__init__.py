"""The folder of a run: its layout, its registry of live parts."""

from any_agent.rundir.layout import (
    FORMAT,
    RunDir,
    checkpoint_problem,
    locked,
    parse_secrets,
    read_json,
    weights_folder,
    write_json,
)

__all__ = [
    "FORMAT",
    "RunDir",
    "checkpoint_problem",
    "locked",
    "parse_secrets",
    "read_json",
    "weights_folder",
    "write_json",
]
